#pragma once
// Tokenizers, text to ids and back: SentencePiece models, and byte-level BPE in tokenizer.json
// (data/byte_level_bpe.h).
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/files.h"
#include "data/reader.h"

namespace assay::data {

class Tokenizer {
 public:
  explicit Tokenizer(const fs::path& model);  // BadInput when the file is neither of the two
  static Tokenizer from_contents(std::string contents, const std::string& name);
  ~Tokenizer();
  Tokenizer(Tokenizer&&) noexcept;

  // Ids without bos and eos. The text may hold U+0000; "<s>" in it is ordinary text. BadInput if
  // it is not UTF-8. Thread-safe.
  std::vector<int32_t> encode(std::string_view text) const;
  // BadInput for an id outside the vocabulary
  std::string decode(std::span<const int32_t> ids) const;
  int64_t vocab_size() const;
  bool is_byte_level() const;  // a tokenizer.json
  int64_t separator() const;   // eos; BadInput when the model has none
  int64_t bos() const;         // −1 when the model has none
  std::string piece(int32_t id) const;
  // The bytes that the token adds to a text that is not empty; they may end inside a character. A
  // control token adds none.
  std::string bytes(int32_t id) const;
  int32_t id_of(std::string_view piece) const;  // without such a piece, that of unk or −1
  const std::string& sha256() const;            // of the model file
  const std::string& contents() const;          // of the model file

 private:
  struct Model;
  explicit Tokenizer(std::unique_ptr<Model> model);
  std::unique_ptr<Model> model_;
};

// A message of SentencePiece without the position in its source, such as
// "src/trainer_interface.cc(678) [(a) == (b)] Vocabulary size too high (5000)".
std::string without_source_position(const std::string& message);

struct TokenizerTraining {
  std::vector<fs::path> inputs;       // files and folders, as data/reader.h reads them
  int64_t vocab_size = 0;             // with the 256 bytes and the 3 control pieces
  int64_t max_sentences = 1'000'000;  // lines of text in the sample, drawn evenly from all
  int64_t seed = 0;                   // of the sample
};
// The files of a training. Test text must not shape the tokenizer, so files found by searching a
// folder are left out when their split is valid or test (split_of in data/reader.h says so by
// the name). Files that are named one by one are used, whatever their split.
struct TrainingFiles {
  std::vector<fs::path> used;
  std::vector<fs::path> left_out;
  std::vector<fs::path> held_out_used;  // those of `used` whose split is valid or test
  // Filled by train_tokenizer: what was read of each file of `used`, and what was left out
  std::vector<ReadCounts> counts;
};
TrainingFiles training_files(const std::vector<fs::path>& inputs);

// Trains a BPE model (byte fallback, digits split, no normalisation, dummy prefix, white space
// kept; unk 0, bos 1, eos 2) and writes it atomically. Deterministic. Returns which files it
// learned from. BadInput when the model cannot be written there, the text is too small for the
// vocabulary, or every file is of split valid or test. While the library learns, it cannot be
// stopped; so Ctrl-C ends the process then, with exit code 130.
TrainingFiles train_tokenizer(const TokenizerTraining& training, const fs::path& model);

}  // namespace assay::data
