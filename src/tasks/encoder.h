#pragma once
// Texts of requests as token ids, by the rules of lm-evaluation-harness.
#include <cstdint>
#include <string>
#include <vector>

#include "data/tokenizer.h"
#include "data/word_encoder.h"

namespace assay::tasks {

// Tokens of which the last `scored` are predicted from those before them.
struct Row {
  std::vector<int64_t> tokens;
  int64_t scored = 0;
};

class Encoder {
 public:
  enum class Prefix { bos, separator };
  // `bos`: every context begins with this token of the tokenizer. `prefix`: what an empty context
  // is replaced with; bos is the separator where the tokenizer has no bos.
  Encoder(const data::Tokenizer& tokenizer, bool bos, Prefix prefix);

  std::vector<int64_t> encode(const std::string& text);  // with bos where configured
  // White space at the end of the context moves to the continuation. Both the whole and the context
  // are encoded, and what follows the context's number of tokens in the whole is the continuation.
  // BadInput when nothing follows.
  Row pair(std::string context, std::string continuation);
  // Every token of the text is predicted once, in windows of at most `longest` tokens of input; a
  // later window has one token of the earlier as context, the last as many as fit.
  std::vector<Row> windows(const std::string& text, int64_t longest);
  std::string decode(const std::vector<int64_t>& tokens) const;  // control tokens are left out
  int64_t separator() const { return separator_; }

 private:
  std::vector<int64_t> plain(const std::string& text);
  const data::Tokenizer& tokenizer_;
  data::WordEncoder words_;
  bool bos_;
  int64_t prefix_;
  int64_t separator_;
  std::string last_context_;  // the choices of a document share it
  std::vector<int64_t> last_ids_;
};

// Keeps the last `longest` + 1 tokens, of which the last is not read. Returns how many were
// dropped. BadInput when more than `longest` are scored.
int64_t truncate(Row& row, int64_t longest);

}  // namespace assay::tasks
