#pragma once
// The token store: a folder with tokens of named domains and splits, memory-mapped for reading.
//
//   manifest.json               format, tokenizer, sizes and sha256 of every file, input files
//   tokenizer.model             the SentencePiece model, absent when the tokens are synthetic
//   <domain>.<split>.bin/.idx
//       Megatron's layout, little-endian. One sequence a document, a separator at its end.
//       .idx  "MMIDIDX\0\0", u64 1, u8 dtype (4 i32, 8 u16), u64 sequences, u64
//       documents, i32 lengths[sequences],
//             i64 byte offsets[sequences], i64 document indices[documents] (first 0,
//             last = sequences)
//       .bin  token ids back to back, u16 when the vocabulary is below 65,500, else i32
//   <domain>.<split>.bytes      i64 a document: UTF-8 bytes of its text (for bits per byte)
//   <domain>.<split>.sources    optional: i32 per document, the position of its source in the list
//                               of names, or -1 when the document names none
//   <domain>.<split>.sources.json
//                               the names: a JSON list of strings in the order of first occurrence
// The source of a document is what it was taken from, for example a repository. Documents of one
// source are not independent, so statistics cluster by it.
#include <cstdint>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/files.h"

namespace assay::data {

constexpr int64_t kAnyVocabulary = int64_t{1} << 31;  // ids are i32

// Token ids of u16 or i32 in mapped memory, as they are in the file. Documents::read() checks them.
class Tokens {
 public:
  Tokens(const std::byte* data, int64_t size, int width)
      : data_(data), size_(size), width_(width) {}
  int64_t size() const { return size_; }
  int64_t operator[](int64_t i) const;
  void copy(int64_t begin, int64_t count, int64_t* out) const;

 private:
  const std::byte* data_;
  int64_t size_;
  int width_;  // bytes a token
};

// The documents of one domain and split. Opening checks magic, version and that all sizes
// agree; BadInput otherwise.
class Documents {
 public:
  // `stem`: the path without .bin/.idx/.bytes/.sources. The .bytes file may be absent (files that
  // Megatron wrote), and so may .sources (no document names a source). read() accepts ids below
  // `vocabulary`.
  explicit Documents(const fs::path& stem, int64_t vocabulary = kAnyVocabulary);

  int64_t size() const { return documents_; }
  int64_t tokens() const { return stream().size(); }  // of all documents, separators included
  Tokens document(int64_t i) const;                   // its last token is the separator
  // Where document i begins in the stream; begin(size()) = tokens()
  int64_t begin(int64_t i) const;
  bool has_bytes() const { return bytes_.has_value(); }
  int64_t bytes(int64_t i) const;  // UTF-8 bytes of the text of document i
  int64_t bytes() const;           // of all documents
  bool has_sources() const { return sources_.has_value(); }
  // The position of the source of document i in source_names(), or -1 when it has none.
  int64_t source(int64_t i) const;
  const std::vector<std::string>& source_names() const { return source_names_; }
  Tokens stream() const;  // all documents back to back
  // Tokens offset … offset + count − 1 of the stream. BadInput with file and position for an id
  // outside the vocabulary, so that ids may be used as indices.
  void read(int64_t offset, int64_t count, int64_t* out) const;
  // Checks offsets, lengths, ids, sources; BadInput at the first wrong one. Empty documents pass.
  void verify(int64_t vocabulary) const;

 private:
  int64_t offset(int64_t sequence) const;  // in bytes; offset(sequences) = size of .bin
  int64_t index(int64_t document) const;   // its first sequence
  void open_bytes();
  void open_sources();
  void verify_sources() const;
  [[noreturn]] void fail_id(int64_t token, int64_t id, int64_t vocabulary) const;
  fs::path stem_;
  int64_t vocabulary_;
  MappedFile bin_;
  MappedFile idx_;
  std::optional<MappedFile> bytes_;
  std::optional<MappedFile> sources_;
  std::vector<std::string> source_names_;
  int width_ = 0;
  int64_t sequences_ = 0;
  int64_t documents_ = 0;
};

struct TokenizerInfo {
  std::string kind;    // "sentencepiece" or "none"
  std::string sha256;  // of the model file, "" for "none"
  int64_t vocab_size = 0;
  int64_t separator = 0;
  void fields(auto&& field) {
    field("kind", kind);
    field("sha256", sha256);
    field("vocab_size", vocab_size);
    field("separator", separator);
  }
};

class TokenStore {
 public:
  // BadInput when it is no store or a file is missing or truncated
  explicit TokenStore(const fs::path& folder);

  const fs::path& folder() const { return folder_; }
  const TokenizerInfo& tokenizer() const { return tokenizer_; }
  fs::path tokenizer_file() const {
    return folder_ / "tokenizer.model";
  }  // there unless the kind is "none"
  int64_t vocab_size() const { return tokenizer_.vocab_size; }
  int64_t separator() const { return tokenizer_.separator; }

  std::vector<std::string> domains() const;  // in alphabetical order
  std::vector<std::string> splits(const std::string& domain) const;
  bool has(const std::string& domain, const std::string& split) const;
  // BadInput with the nearest name. The reference lives as long as the store.
  const Documents& documents(const std::string& domain, const std::string& split) const;

  const nlohmann::json& manifest() const { return manifest_; }
  // sha256 of what identifies the data: tokenizer and contents, not paths or dates. `parts`
  // ("cc.train", "arxiv.test") restricts it to the files of these; empty: all of the store.
  std::string fingerprint(const std::set<std::string>& parts = {}) const;
  // Reads everything: checksums, offsets, ids; BadInput names the file
  void verify() const;

 private:
  struct File {
    int64_t size = 0;
    std::string sha256;
    void fields(auto&& field) {
      field("size", size);
      field("sha256", sha256);
    }
  };
  struct Part {
    std::string domain;
    std::string split;
    int64_t tokens = 0;
    int64_t documents = 0;
    std::map<std::string, File> files;  // by suffix
    std::string stem() const { return domain + "." + split; }
    void fields(auto&& field) {
      field("domain", domain);
      field("split", split);
      field("tokens", tokens);
      field("documents", documents);
      field("files", files);
    }
  };
  struct Manifest {
    TokenizerInfo tokenizer;
    std::vector<Part> parts;
    void fields(auto&& field) {
      field("tokenizer", tokenizer);
      field("parts", parts);
    }
  };
  void open(const Part& part);
  fs::path folder_;
  nlohmann::json manifest_;
  std::vector<Part> parts_;
  TokenizerInfo tokenizer_;
  std::map<std::string, std::map<std::string, std::unique_ptr<Documents>>> documents_;
};

}  // namespace assay::data
