#include "data/word_encoder.h"

#include "data/model_proto.h"

namespace assay::data {
namespace {

constexpr std::string_view kSpace = "▁";  // U+2581, what SentencePiece makes of a space
constexpr size_t kLongestWord = 48;       // bytes; longer ones seldom come again
constexpr size_t kMostAtOnce = 2 << 20;   // bytes given to the library
constexpr size_t kSlots = 1 << 19;        // of the memory, at most half of them used; 24 bytes each

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
  if (tokenizer.is_byte_level()) return false;
  const ModelProto model = parse_model_proto(tokenizer.contents());
  if (!model.bpe || !model.byte_fallback || model.whitespace_as_suffix) return false;
  if (model.normalises || !model.dummy_prefix || model.removes_whitespace || !model.escapes)
    return false;
  bool has_space = false;
  for (const Piece& piece : model.pieces) {
    if (!keeps_words_apart(piece.text)) return false;
    has_space = has_space || piece.text == kSpace;
  }
  return has_space;
}

// Bytes of the space at text[i], 0 when there is none.
size_t space_at(std::string_view text, size_t i) {
  if (text[i] == ' ') return 1;
  return text[i] == kSpace[0] && text.substr(i, kSpace.size()) == kSpace ? kSpace.size() : 0;
}

}  // namespace

WordEncoder::WordEncoder(const Tokenizer& tokenizer)
    : tokenizer_(tokenizer),
      by_word_(exact_by_word(tokenizer)),
      space_id_(tokenizer.id_of(kSpace)) {}

bool WordEncoder::encode(std::string_view text, std::vector<int32_t>& ids) {
  ids.clear();
  if (text.empty()) return true;
  if (!by_word_) return text.size() <= kMostAtOnce && (ids = tokenizer_.encode(text), true);
  // A word here is what follows a ▁ (the first one follows the dummy prefix), or begins
  // with a newline.
  size_t begin = 0;
  // in_run: only spaces since `begin`
  bool in_run = true;
  bool good = true;
  for (size_t i = 0; i < text.size() && good;) {
    const size_t space = space_at(text, i);
    if (text[i] == '\n' || (space && !in_run)) {
      good = append_word(text.substr(begin, i - begin), ids);
      begin = i + space;
    }
    in_run = space;
    i += space ? space : 1;
  }
  good = good && append_word(text.substr(begin), ids);
  if (!good) ids.clear();
  return good;
}

bool WordEncoder::append_word(std::string_view word, std::vector<int32_t>& ids) {
  if (word.size() > kMostAtOnce) return false;
  if (word.empty()) {
    ids.push_back(space_id_);
    return true;
  }
  if (const auto known = memory_.find(word)) {
    ids.insert(ids.end(), known->begin(), known->end());
    return true;
  }
  const auto encoded = encode_word(word);
  ids.insert(ids.end(), encoded.begin(), encoded.end());
  if (word.size() <= kLongestWord) memory_.add(word, encoded);
  return true;
}

std::vector<int32_t> WordEncoder::encode_word(std::string_view word) const {
  auto ids = tokenizer_.encode(word);
  if (word[0] == '\n') ids.erase(ids.begin());
  return ids;
}

// Where the word is, or the free entry where it belongs.
size_t WordEncoder::Memory::slot(std::string_view word, size_t hash) const {
  size_t at = hash & (kSlots - 1);
  for (; entries_[at].word_size; at = (at + 1) & (kSlots - 1)) {
    const Entry& entry = entries_[at];
    if (entry.hash == hash && std::string_view(words_).substr(entry.word, entry.word_size) == word)
      break;
  }
  return at;
}

std::optional<std::span<const int32_t>> WordEncoder::Memory::find(std::string_view word) const {
  if (entries_.empty()) return std::nullopt;
  const Entry& entry = entries_[slot(word, std::hash<std::string_view>()(word))];
  if (!entry.word_size) return std::nullopt;
  return std::span(ids_).subspan(entry.ids, entry.ids_size);
}

void WordEncoder::Memory::add(std::string_view word, std::span<const int32_t> ids) {
  if (entries_.empty() || used_ >= kSlots / 2) {
    entries_.assign(kSlots, {});
    words_.clear();
    ids_.clear();
    used_ = 0;
  }
  const size_t hash = std::hash<std::string_view>()(word);
  entries_[slot(word, hash)] = {hash, uint32_t(words_.size()), uint32_t(word.size()),
                                uint32_t(ids_.size()), uint32_t(ids.size())};
  words_ += word;
  ids_.insert(ids_.end(), ids.begin(), ids.end());
  ++used_;
}

}  // namespace assay::data
