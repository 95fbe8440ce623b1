#include "base/json.h"

#include <gtest/gtest.h>

#include <ctime>
#include <nlohmann/json.hpp>

#include "base/error.h"

namespace assay {
namespace {

using nlohmann::json;

std::string message_of(const std::string& text) {
  try {
    parse_json(text, "a.json");
  } catch (const BadInput& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(Json, EveryKindOfValueIsRead) {
  const std::string text = R"({"null": null, "list": [true, -3, 18446744073709551615, 0.5, "汉"],
                               "empty": [[], {}], "twice": 1, "twice": {"last": [2]}})";
  EXPECT_EQ(parse_json(text, ""), json::parse(text));
  for (const char* scalar : {"null", "-1", "\"x\"", " [1,[2,[3]],{\"a\":[{}]}] "})
    EXPECT_EQ(parse_json(scalar, ""), json::parse(scalar)) << scalar;
}

TEST(Json, SixtyFourLevelsAreTheLimit) {
  auto nested = [](size_t levels) {
    return std::string(levels, '[') + "1" + std::string(levels, ']');
  };
  EXPECT_EQ(parse_json(nested(64), ""), json::parse(nested(64)));
  EXPECT_EQ(message_of(nested(65)), "a.json: JSON with more than 64 levels");
  EXPECT_EQ(message_of(std::string(100'000, '[')), "a.json: JSON with more than 64 levels");
}

TEST(Json, BrokenTextIsNamedWithItsPlace) {
  for (const char* text : {"", "{", "[1,]", "{\"a\" 1}", "[1] 2", "nul", "\"\xff\"", "1e999"}) {
    std::string expected;
    try {
      (void)json::parse(text);
    } catch (const json::exception& error) {
      expected = error.what();
      expected = "a.json: broken JSON: " + expected.substr(expected.find("] ") + 2);
    }
    EXPECT_EQ(message_of(text), expected) << text;
  }
}

TEST(Json, NanAndInfinityAreSaidNotToBeJson) {
  for (const char* text : {"{\"nats\": NaN}", "[-Infinity]", "[Infinity]"})
    EXPECT_TRUE(message_of(text).ends_with("; JSON has no NaN and no Infinity"))
        << message_of(text);
  for (const char* text : {"[\"NaN\" 1]", "[nul]", "[\"N"})
    EXPECT_EQ(message_of(text).find("Infinity"), std::string::npos) << message_of(text);
}

TEST(Json, PythonsJsonIsMadeStrict) {
  const std::pair<const char*, const char*> cases[] = {
      {R"({"a": NaN, "b": [-Infinity, Infinity, 1e400, -1e400]})",
       R"({"a": null, "b": [null, null, null, null]})"},
      {"[123456789012345678901234567890, -9223372036854775809, 123456789012345678]",
       "[123456789012345678901234567890e0, -9223372036854775809e0, 123456789012345678]"},
      {R"(["\ud83d", "x\ud83d\ude00y", "\ude00\ud83d!", "\\ud83d", "\ud83d\u0041", "\"NaN"])",
       R"(["\ufffd", "x\ud83d\ude00y", "\ufffd\ufffd!", "\\ud83d", "\ufffd\u0041", "\"NaN"])"},
      {R"({"text": "1e999 NaN", "nan": nan, "n": 1.5e3)",
       R"({"text": "1e999 NaN", "nan": nan, "n": 1.5e3)"},
      {R"("cut \ud8)", R"("cut \ud8)"},
      {R"("cut \)", R"("cut \)"}};
  for (const auto& [text, expected] : cases) EXPECT_EQ(strict_json(text), expected);
  EXPECT_EQ(parse_python_json(R"([1, NaN, "\ud83d"])", "a"), json::parse(R"([1, null, "\ufffd"])"));
  EXPECT_THROW(parse_python_json("[nan]", "a"), BadInput);
  EXPECT_THROW(parse_json("[NaN]", "a"), BadInput);
}

// A manifest has one object per input file. The time was quadratic in their number.
TEST(Json, LongListIsReadInLinearTime) {
  std::string text = "[";
  for (int i = 0; i < 50'000; ++i) text += R"({"file": "a", "size": 1, "split": "train"},)";
  text.back() = ']';
  const std::clock_t start = std::clock();
  EXPECT_EQ(parse_json(text, "").size(), 50'000u);
  EXPECT_LT(double(std::clock() - start) / CLOCKS_PER_SEC, 2);  // 0.1 s; quadratic: 5 s
}

TEST(Json, QuotationInAnErrorIsShort) {
  std::string message;
  try {
    parse_json("{\"losses\": \"" + std::string(5000, '0') + "é", "record.json");
  } catch (const BadInput& error) {
    message = error.what();
  }
  EXPECT_TRUE(message.starts_with("record.json: broken JSON: parse error at line 1")) << message;
  EXPECT_NE(message.find("last read: '…0"), std::string::npos) << message;
  EXPECT_LT(message.size(), 300u);
}

}  // namespace
}  // namespace assay
