#pragma once
// Byte-level BPE, as tokenizer.json of the library `tokenizers` describes it. [GPT-2, §2.2]
//   text → NFC, if the file asks for it → words, by regular expressions → bytes
//        → pairs of neighbours are merged, the earliest merge of the file first
// Added tokens that are not special are found in the text before it is cut into words.
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace assay::data {

class ByteLevelBpe {
 public:
  // The contents of tokenizer.json. BadInput that names the part which is not implemented.
  ByteLevelBpe(std::string_view contents, const std::string& name);
  ~ByteLevelBpe();

  // The ids of `tokenizers` without its post-processor. Special tokens in the text are ordinary
  // text. The text must be UTF-8. Thread-safe.
  std::vector<int32_t> encode(std::string_view text) const;
  // Special tokens are left out. Bytes that are not UTF-8 become U+FFFD.
  std::string decode(std::span<const int32_t> ids) const;
  int64_t vocab_size() const;                   // one more than the largest id
  const std::string& token(int32_t id) const;   // as the file writes it; empty for an unused id
  std::string bytes(int32_t id) const;          // empty for special tokens
  int32_t id_of(std::string_view token) const;  // −1 when there is no such token

 private:
  struct Model;
  std::unique_ptr<const Model> model_;
};

}  // namespace assay::data
