#pragma once
// Tokens as text while they are made, one at a time.
#include <string>
#include <string_view>
#include <vector>

#include "data/tokenizer.h"

namespace assay::serve {

// The text of every token, from a table. SentencePiece drops the space before the first word of a
// text, so the tokens of a text are decoded one after the other in a TextStream.
class TokenTexts {
 public:
  explicit TokenTexts(const data::Tokenizer& tokenizer);
  const std::string& bytes(int64_t token) const;  // "" past the tokenizer's vocabulary
  // As a name in JSON: the text, or "bytes:\xNN" where it is only a part of a character.
  std::string name(int64_t token) const;
  bool drops_first_space() const { return drops_first_space_; }

 private:
  std::vector<std::string> bytes_;
  bool drops_first_space_ = false;
};

std::string valid_utf8(std::string_view bytes);  // with U+FFFD for each byte that is not valid
size_t count_characters(std::string_view text);  // of valid UTF-8

// Text of tokens as they arrive, up to the first stop string. Bytes are held back while they may
// become a part of a character or of a stop string.
class TextStream {
 public:
  // `after_text`: text precedes, so that the first space is kept.
  TextStream(const TokenTexts& texts, bool after_text, std::vector<std::string> stop)
      : texts_(&texts), stop_(std::move(stop)), after_text_(after_text) {}

  std::string add(int64_t token);  // text that has become certain
  std::string finish();            // the rest, when no token follows
  bool stopped() const { return stopped_; }
  bool after_text() const { return after_text_; }
  // Characters that begin in the text before each token. The list ends before the first token that
  // has no released byte yet; after finish() it has all tokens. Tokens past the end that a stop
  // string has made never come.
  const std::vector<size_t>& offsets() const { return offsets_; }

 private:
  std::string release(size_t count);
  const TokenTexts* texts_;
  std::vector<std::string> stop_;
  bool after_text_;
  bool stopped_ = false;
  std::string held_;
  // by token: bytes, characters before it
  std::vector<size_t> begins_;
  std::vector<size_t> offsets_;
  // bytes, characters
  size_t released_ = 0;
  size_t characters_ = 0;
};

}  // namespace assay::serve
