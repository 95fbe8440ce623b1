#include "base/record.h"

#include <gtest/gtest.h>

namespace assay {
namespace {

struct Inner {
  double loss = 0;
  std::vector<double> lines;
  ASSAY_FIELDS(loss, lines)
};
struct Outer {
  bool good = false;
  int64_t steps = 0;
  std::string name;
  std::map<std::string, Inner> sets;
  std::optional<double> rate;
  ASSAY_FIELDS(good, steps, name, sets, rate)
};

std::string error_of(const std::string& text) {
  try {
    parse_record<Outer>(text, "run.json");
    return "no error";
  } catch (const BadInput& error) {
    return error.what();
  }
}

// The JSON of a valid record with one part replaced.
std::string with(const std::string& from, const std::string& to) {
  std::string text =
      R"({"good": true, "steps": 3, "name": "a",
          "sets": {"x.test": {"loss": 1.5, "lines": [1, 2.5]}}})";
  return text.replace(text.find(from), from.size(), to);
}

TEST(Record, ReadsBackWhatItWrote) {
  const Outer first{.good = true,
                    .steps = 1'234'567'890'123,
                    .name = "\"quoted\"",
                    .sets = {{"x.test", {.loss = 0.1, .lines = {1e-300, 1.0 / 3}}}},
                    .rate = 2e-3};
  const std::string text = to_json(first).dump();
  const Outer second = parse_record<Outer>(text, "text");
  EXPECT_EQ(to_json(second).dump(), text);
  EXPECT_EQ(second.sets.at("x.test").lines, first.sets.at("x.test").lines) << "bit for bit";
}

TEST(Record, EmptyOptionalHasNoKey) {
  EXPECT_FALSE(to_json(Outer{}).contains("rate"));
  EXPECT_FALSE(parse_record<Outer>(with("", ""), "text").rate);
  EXPECT_EQ(parse_record<Outer>(with("true", "true, \"rate\": 2"), "text").rate, 2.0);
}

TEST(Record, NotANumberIsNull) {
  EXPECT_TRUE(to_json(Inner{.loss = NAN}).dump().find("\"loss\":null") != std::string::npos);
  EXPECT_TRUE(std::isnan(parse_record<Outer>(with("1.5", "null"), "text").sets.at("x.test").loss));
}

TEST(Record, UnknownKeysAreIgnored) {
  EXPECT_EQ(parse_record<Outer>(with("true", "true, \"later\": [{}]"), "text").steps, 3);
}

TEST(Record, IntegerMayBeWrittenWithAPoint) {
  EXPECT_EQ(parse_record<Outer>(with("3", "3.0"), "text").steps, 3);
}

TEST(Record, ErrorsNameFileAndKey) {
  EXPECT_EQ(error_of(with("\"steps\"", "\"stpes\"")), "run.json: the key 'steps' is missing");
  EXPECT_EQ(error_of(with("3", "\"3\"")), "run.json: the key 'steps' must be an integer");
  EXPECT_EQ(error_of(with("3", "3.5")), "run.json: the key 'steps' must be an integer");
  EXPECT_EQ(error_of(with("3", "1e300")), "run.json: the key 'steps' must be an integer");
  EXPECT_EQ(error_of(with("true", "1")), "run.json: the key 'good' must be true or false");
  EXPECT_EQ(error_of(with("1.5", "\"low\"")),
            "run.json: the key 'sets.x.test.loss' must be a number");
  EXPECT_EQ(error_of(with("[1, 2.5]", "[1, []]")),
            "run.json: the key 'sets.x.test.lines.1' must be a number");
  EXPECT_EQ(error_of("[]"), "run.json: must be an object");
  EXPECT_TRUE(error_of("{").starts_with("run.json: broken JSON: parse error at line 1"));
}

}  // namespace
}  // namespace assay
