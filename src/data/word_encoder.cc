#include "data/word_encoder.h"

#include "data/model_proto.h"

namespace assay::data {
namespace {

constexpr std::string_view kSpace = "▁";  // U+2581, what SentencePiece makes of a space
constexpr size_t kLongestWord = 48;       // bytes; longer ones seldom come again
constexpr size_t kMostAtOnce = 2 << 20;   // bytes given to the library
constexpr size_t kMostWords = 1 << 18;    // about 40 MB

bool keeps_words_apart(const std::string& piece) {
  bool other = false;  // a character other than ▁ was seen
  for (size_t i = 0; i < piece.size();) {
    const bool space = piece.compare(i, kSpace.size(), kSpace) == 0;
    if (space && other) return false;
    if (piece[i] == '\n' && piece.size() > 1) return false;
    other = other || !space;
    i += space ? kSpace.size() : 1;
  }
  return true;
}

bool exact_by_word(const Tokenizer& tokenizer) {
  const ModelProto model = parse_model_proto(tokenizer.contents());
  if (!model.bpe || !model.byte_fallback || model.whitespace_as_suffix) return false;
  if (model.normalises || !model.dummy_prefix || model.removes_whitespace || !model.escapes) return false;
  bool has_space = false;
  for (const std::string& piece : model.pieces) {
    if (!keeps_words_apart(piece)) return false;
    has_space = has_space || piece == kSpace;
  }
  return has_space;
}

// Bytes of the space at text[i], 0 when there is none.
size_t space_at(std::string_view text, size_t i) {
  if (text[i] == ' ') return 1;
  return text[i] == kSpace[0] && text.substr(i, kSpace.size()) == kSpace ? kSpace.size() : 0;
}

}  // namespace

WordEncoder::WordEncoder(const Tokenizer& tokenizer) : tokenizer_(tokenizer), by_word_(exact_by_word(tokenizer)) {}

bool WordEncoder::encode(std::string_view text, std::vector<int32_t>& ids) {
  ids.clear();
  if (text.empty()) return true;
  if (!by_word_) return text.size() <= kMostAtOnce && (ids = tokenizer_.encode(text), true);
  // A word here is what follows a ▁ (the first one follows the dummy prefix), or begins with a newline.
  size_t begin = 0;
  bool in_run = true, good = true;  // in_run: only spaces since `begin`
  for (size_t i = 0; i < text.size() && good;) {
    const size_t space = space_at(text, i);
    if (text[i] == '\n' || (space && !in_run))
      good = append_word(text.substr(begin, i - begin), ids), begin = i + space;
    in_run = space;
    i += space ? space : 1;
  }
  good = good && append_word(text.substr(begin), ids);
  if (!good) ids.clear();
  return good;
}

bool WordEncoder::append_word(std::string_view word, std::vector<int32_t>& ids) {
  if (word.size() > kMostAtOnce) return false;
  if (word.size() > kLongestWord) {
    const auto encoded = encode_word(word);
    ids.insert(ids.end(), encoded.begin(), encoded.end());
    return true;
  }
  auto found = words_.find(word);
  if (found == words_.end()) {
    if (words_.size() >= kMostWords) words_.clear();
    found = words_.emplace(std::string(word), encode_word(word)).first;
  }
  ids.insert(ids.end(), found->second.begin(), found->second.end());
  return true;
}

std::vector<int32_t> WordEncoder::encode_word(std::string_view word) const {
  if (word.empty()) return {tokenizer_.id_of(kSpace)};
  auto ids = tokenizer_.encode(word);
  if (word[0] == '\n') ids.erase(ids.begin());
  return ids;
}

}  // namespace assay::data
