#include "serve/text.h"

#include <fmt/format.h>

#include <algorithm>

namespace assay::serve {
namespace {

constexpr std::string_view kReplacement = "\uFFFD";

// Bytes of the UTF-8 character that begins at text[i]; 0: not valid; -1: the text ends inside it.
int character_at(std::string_view text, size_t i) {
  const auto byte = [&](size_t at) { return static_cast<unsigned char>(text[at]); };
  const unsigned char first = byte(i);
  if (first < 0x80) return 1;
  int size = 0;
  if (first >= 0xC2 && first <= 0xDF) size = 2;
  if (first >= 0xE0 && first <= 0xEF) size = 3;
  if (first >= 0xF0 && first <= 0xF4) size = 4;
  for (int k = 1; k < size; ++k) {
    if (i + size_t(k) >= text.size()) return -1;
    const unsigned char next = byte(i + size_t(k));
    if ((next & 0xC0) != 0x80) return 0;
    if (k > 1) continue;
    const bool overlong = (first == 0xE0 && next < 0xA0) || (first == 0xF0 && next < 0x90);
    const bool outside = (first == 0xED && next > 0x9F) || (first == 0xF4 && next > 0x8F);
    if (overlong || outside) return 0;
  }
  return size;
}

// Bytes of the character of valid_utf8(text) that begins at text[i].
size_t character_size(std::string_view text, size_t i) {
  return size_t(std::max(1, character_at(text, i)));
}

// Bytes up to the last character, if that is not complete.
size_t complete_characters(std::string_view text) {
  for (size_t back = 1; back <= std::min<size_t>(3, text.size()); ++back)
    if (character_at(text, text.size() - back) == -1) return text.size() - back;
  return text.size();
}

// Bytes at the end of `text` that begin `word`, but are not all of it.
size_t overlap(std::string_view text, std::string_view word) {
  for (size_t size = std::min(text.size(), word.size() - 1); size > 0; --size)
    if (text.ends_with(word.substr(0, size))) return size;
  return 0;
}

}  // namespace

std::string valid_utf8(std::string_view bytes) {
  std::string out;
  for (size_t i = 0; i < bytes.size();) {
    const int size = character_at(bytes, i);
    out += size > 0 ? bytes.substr(i, size_t(size)) : kReplacement;
    i += size > 0 ? size_t(size) : 1;
  }
  return out;
}

size_t count_characters(std::string_view text) {
  return size_t(std::ranges::count_if(text, [](char c) { return (c & 0xC0) != 0x80; }));
}

TokenTexts::TokenTexts(const data::Tokenizer& tokenizer) {
  for (int64_t id = 0; id < tokenizer.vocab_size(); ++id)
    bytes_.push_back(tokenizer.bytes(int32_t(id)));
  for (size_t id = 0; id < bytes_.size(); ++id) {
    const bool is_word = bytes_[id].size() > 1 && bytes_[id][0] == ' ' && bytes_[id][1] != ' ';
    if (!is_word || int32_t(id) == tokenizer.id_of("")) continue;
    const int32_t first = int32_t(id);
    drops_first_space_ = !tokenizer.decode({&first, 1}).starts_with(' ');
    break;
  }
}

const std::string& TokenTexts::bytes(int64_t token) const {
  static const std::string none;
  return token >= 0 && size_t(token) < bytes_.size() ? bytes_[size_t(token)] : none;
}

std::string TokenTexts::name(int64_t token) const {
  const std::string& text = bytes(token);
  if (valid_utf8(text) == text) return text;
  std::string out = "bytes:";
  for (const char c : text) out += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
  return out;
}

std::string TextStream::release(size_t count) {
  const std::string_view bytes = std::string_view(held_).substr(0, count);
  for (size_t i = 0; i < count; ++characters_) {
    const size_t begin = released_ + i;
    const size_t end = begin + character_size(bytes, i);
    while (offsets_.size() < begins_.size() && begins_[offsets_.size()] < end)
      offsets_.push_back(characters_ + (begins_[offsets_.size()] > begin ? 1 : 0));
    i = end - released_;
  }
  std::string text = valid_utf8(bytes);
  held_.erase(0, count);
  released_ += count;
  return text;
}

std::string TextStream::add(int64_t token) {
  std::string_view bytes = texts_->bytes(token);
  if (!after_text_ && !bytes.empty()) {
    if (texts_->drops_first_space() && bytes[0] == ' ') bytes.remove_prefix(1);
    after_text_ = true;
  }
  begins_.push_back(released_ + held_.size());
  held_ += bytes;
  size_t end = std::string::npos;
  size_t certain = complete_characters(held_);
  for (const std::string& word : stop_) {
    end = std::min(end, held_.find(word));
    certain = std::min(certain, held_.size() - overlap(held_, word));
  }
  stopped_ = end != std::string::npos;
  if (!stopped_) return release(certain);
  std::string text = release(end);
  held_.clear();
  return text;
}

std::string TextStream::finish() {
  std::string text = release(held_.size());
  offsets_.resize(begins_.size(), characters_);
  return text;
}

}  // namespace assay::serve
