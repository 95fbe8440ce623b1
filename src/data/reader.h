#pragma once
// Corpora: JSON Lines (.jsonl, .json; one object a line with "text") and text files (a file a
// document), each plain, .zst or .gz. A file is read in blocks of whole lines by one thread; blocks
// are taken apart by many. A line may be what Python's json module writes (base/json.h).
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/files.h"
#include "data/bytes.h"

namespace assay::data {

struct InputFile {
  fs::path path;
  fs::path input;  // the path that was given: `path` itself, or the folder that was searched
  bool searched() const { return path != input; }
  bool operator==(const InputFile&) const = default;
};
// The files that the paths name; folders are searched (hidden files left out), their files in order
// of name. Links in a folder to another folder, or to nothing, are not followed. BadInput when a
// path does not exist, cannot be read or is neither a file nor a folder, when a folder holds no
// file, or when a file occurs twice (also through a link, symbolic or hard).
std::vector<InputFile> input_files(const std::vector<fs::path>& paths);

// The splits that a path names (train, valid, test; "validation" is valid). The first counts:
//   1. a part of the file name between two dots, as in NAME.SPLIT.EXT;
//   2. the folders between the input and the file, the outermost first. The input itself counts
//      if it is a folder; the folder of a file counts if the file itself was given.
// Folders above the input do not count, so the splits do not depend on where a corpus lies.
std::vector<std::string> splits_in(const InputFile& file);
std::string split_of(const InputFile& file);  // the first of splits_in; "train" without one
bool is_split_name(std::string_view word);
// By the extension, before .zst or .gz and in any case: .jsonl, .json and .ndjson, and a compressed
// file without another extension (data.zst, data.test.zst). The others are text.
bool is_json_lines(const fs::path& file);

struct Block {
  std::string text;  // whole lines, or one whole document; room for simdjson's padding is reserved
  int64_t first_line = 1;
  bool json = true;
};

// Counts of the documents that were read and of those that were left out, by reason. None is fatal.
struct ReadCounts {
  // bytes: UTF-8 bytes of text
  int64_t documents = 0;
  int64_t bytes = 0;
  int64_t broken_lines = 0;
  int64_t without_text = 0;
  int64_t invalid_utf8 = 0;
  int64_t empty = 0;
  int64_t too_long = 0;
  int64_t unknown_domain = 0;
  std::string first_broken_line;  // "line 7: " and what is wrong; "" without broken lines
  void fields(auto&& field) {
    field("documents", documents);
    field("bytes", bytes);
    field("broken_lines", broken_lines);
    field("without_text", without_text);
    field("invalid_utf8", invalid_utf8);
    field("empty", empty);
    field("too_long", too_long);
    field("unknown_domain", unknown_domain);
  }
  ReadCounts& operator+=(const ReadCounts& other);
  // "3 broken lines (the first: line 7: not a JSON object), 1 empty", "" when nothing was.
  // `by_word`: whether the tokenizer encodes word by word (data/word_encoder.h), which decides how
  // long a document may be.
  std::string left_out(bool by_word = true) const;
  int64_t all_left_out() const;
};

// Blocks of one file, in order. Lines and documents of more than 32 MiB are skipped and counted.
class BlockReader {
 public:
  explicit BlockReader(const fs::path& file);  // BadInput when it cannot be opened
  // False at the end. BadInput with file and line when the file is cut off or corrupt, and when its
  // first bytes are those of an archive, of another format or of JSON over several lines.
  bool next(Block& block);
  size_t consumed() const { return source_->consumed(); }
  // Counts that the parser does not see: too_long, and `empty` for a text file without a byte.
  const ReadCounts& counts() const { return counts_; }

 private:
  void fill();
  void check_first_bytes() const;
  size_t whole();
  void skip();
  fs::path file_;
  bool json_;
  std::unique_ptr<ByteSource> source_;
  std::string rest_;  // read and not yet given out
  ReadCounts counts_;
  int64_t line_ = 1;
  // any_: a block or the end was given out
  bool ended_ = false;
  bool any_ = false;
};

struct Document {
  std::string_view text;    // valid UTF-8, holds something other than white space
  std::string_view domain;  // what the field says, "" without it
  std::string_view source;  // what the field says, "" without it
  int64_t line;
};

// Takes blocks apart. One a thread; what a Document points to lives until the next call.
class DocumentParser {
 public:
  // Where a JSON document names its domain and its source (both strings), with dots between levels
  // ("meta.redpajama_set_name"). "": nowhere.
  explicit DocumentParser(const std::string& domain_field, const std::string& source_field = "");
  ~DocumentParser();
  // Calls use(document) for each good document of the block, counts the others. Does not count
  // documents and bytes.
  template <class Use>
  void parse(const Block& block, ReadCounts& counts, Use&& use) {
    Lines lines{block.text, block.first_line};
    while (auto document = next(block, lines, counts)) use(*document);
  }
  // The fields of the current JSON document that hold a short string, with dots between levels,
  // without "text". For messages; at most 20.
  std::vector<std::string> string_fields() const;
  // Those of the first JSON object without a string "text".
  const std::vector<std::string>& fields_without_text() const;

 private:
  struct Lines {
    std::string_view rest;
    int64_t line;
  };
  std::optional<Document> next(const Block& block, Lines& lines, ReadCounts& counts);
  std::optional<Document> parse_line(std::string_view line, size_t room, int64_t number,
                                     ReadCounts& counts);
  struct Parser;
  std::unique_ptr<Parser> parser_;
};

}  // namespace assay::data
