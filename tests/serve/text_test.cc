// Text of tokens as they arrive.
#include "serve/text.h"

#include <torch/torch.h>

#include "base/random.h"
#include "tasks/tokenizer_of_test.h"

namespace assay::serve {
namespace {

const data::Tokenizer& tokenizer() { return tasks::small_tokenizer(); }
const TokenTexts& texts() {
  static const TokenTexts table(tokenizer());
  return table;
}

std::vector<int64_t> encode(const std::string& text) {
  const auto ids = tokenizer().encode(text);
  return {ids.begin(), ids.end()};
}

struct Streamed {
  std::string text;
  std::vector<std::string> pieces;
  bool stopped = false;
};
Streamed stream(const std::vector<int64_t>& tokens, const std::vector<std::string>& stop = {},
                bool after_text = false) {
  TextStream in(texts(), after_text, stop);
  Streamed out;
  for (const int64_t token : tokens) {
    out.pieces.push_back(in.add(token));
    out.text += out.pieces.back();
    if (in.stopped()) break;
  }
  out.stopped = in.stopped();
  if (!out.stopped) out.text += in.finish();
  return out;
}

TEST(TextStream, EqualsTheTokenizersDecoding) {
  for (const std::string text : {"Where is the blue house?", "  two spaces ", "", " ",
                                 "Größe 大きい 🙂 done", "a\nb\n\n c", "<s> x </s>"})
    EXPECT_EQ(stream(encode(text)).text, tokenizer().decode(tokenizer().encode(text))) << text;
  Random random(1, "tokens");
  for (int round = 0; round < 300; ++round) {  // many of them bytes that are no characters
    std::vector<int64_t> tokens;
    for (int i = 0; i < 12; ++i)
      tokens.push_back(int64_t(random.below(uint64_t(tokenizer().vocab_size()))));
    const std::vector<int32_t> ids(tokens.begin(), tokens.end());
    EXPECT_EQ(stream(tokens).text, tokenizer().decode(ids))
        << fmt::format("{}", fmt::join(tokens, " "));
  }
}

TEST(TextStream, KeepsTheSpaceAfterText) {
  const auto tokens = encode("house");
  EXPECT_EQ(stream(tokens).text, "house");
  EXPECT_EQ(stream(tokens, {}, /*after_text=*/true).text, " house");
}

// The emoji is four byte tokens: no piece shows a part of it.
TEST(TextStream, HoldsBackPartsOfCharacters) {
  const Streamed found = stream(encode("a 🙂 b"));
  EXPECT_EQ(found.text, "a 🙂 b");
  EXPECT_GE(found.pieces.size(), 6u);
  for (const std::string& piece : found.pieces) EXPECT_EQ(valid_utf8(piece), piece);
  TextStream cut(texts(), true, {});
  const auto smile = encode("🙂");
  std::string text;
  for (size_t i = 0; i + 1 < smile.size(); ++i) text += cut.add(smile[i]);
  EXPECT_EQ(text + cut.finish(), " \uFFFD\uFFFD\uFFFD");
}

// Wherever the stop string begins and ends between tokens, the text ends before it, and no piece
// has shown a part of it.
TEST(TextStream, StopStringsEndTheTextAcrossTokens) {
  const std::string text = "The answer to question 7 is number 58. Where is the blue house?";
  for (size_t begin = 0; begin < text.size(); ++begin)
    for (const size_t size : {1, 2, 5, 11}) {
      if (begin + size > text.size()) continue;
      const std::string stop = text.substr(begin, size);
      const Streamed found = stream(encode(text), {"never", stop});
      EXPECT_EQ(found.text, text.substr(0, text.find(stop))) << "'" << stop << "'";
      EXPECT_TRUE(found.stopped);
    }
}

TEST(TextStream, TheEarliestStopStringWins) {
  EXPECT_EQ(stream(encode("one two three four"), {"three", "two", "wo th"}).text, "one ");
  EXPECT_EQ(stream(encode("aab aac"), {"aac"}).text, "aab ");
}

TEST(TextStream, TextThatOnlyBeginsAStopStringIsGivenAtTheEnd) {
  const Streamed found = stream(encode("see the blue hou"), {"house"});
  EXPECT_EQ(found.text, "see the blue hou");
  EXPECT_FALSE(found.stopped);
}

// Where the characters of the text of `bytes` begin. A byte that is not valid is one U+FFFD.
std::vector<size_t> begins_of_characters(const std::string& bytes) {
  const std::string text = valid_utf8(bytes);
  std::vector<size_t> begins;
  size_t byte = 0;
  for (size_t at = 0, size = 0; at < text.size(); at += size) {
    begins.push_back(byte);
    size = 1;
    while (at + size < text.size() && (text[at + size] & 0xC0) == 0x80) ++size;
    byte += text.compare(at, size, "\uFFFD") == 0 ? 1 : size;
  }
  return begins;
}

TEST(TextStream, OffsetsAreThoseOfTheFinalText) {
  Random random(2, "offsets");
  std::vector<int64_t> parts;  // bytes, letters and a token without text
  for (const std::string text : {"🙂", "é", "house", "a", " "})
    for (const int64_t token : encode(text)) parts.push_back(token);
  parts.push_back(tokenizer().separator());
  for (int round = 0; round < 300; ++round) {
    std::vector<int64_t> tokens;
    std::string bytes;
    std::vector<size_t> begins;
    TextStream in(texts(), /*after_text=*/true, {});
    for (int i = 0; i < 10; ++i) {
      tokens.push_back(parts[random.below(parts.size())]);
      begins.push_back(bytes.size());
      bytes += texts().bytes(tokens.back());
      in.add(tokens.back());
      EXPECT_LE(in.offsets().size(), tokens.size());
    }
    in.finish();
    ASSERT_EQ(in.offsets().size(), tokens.size());
    const std::vector<size_t> characters = begins_of_characters(bytes);
    for (size_t i = 0; i < tokens.size(); ++i)
      EXPECT_EQ(in.offsets()[i],
                std::ranges::lower_bound(characters, begins[i]) - characters.begin())
          << fmt::format("{}: {}", fmt::join(tokens, " "), i);
  }
}

TEST(TokenTexts, NamesAreValidUtf8AndDistinguishBytes) {
  EXPECT_EQ(texts().name(encode("🙂").back()), "bytes:\\x82");
  EXPECT_EQ(texts().name(tokenizer().separator()), "");
  EXPECT_EQ(texts().name(99999), "");
}

}  // namespace
}  // namespace assay::serve
