#include "study/compact.h"

#include <gtest/gtest.h>

#include "base/error.h"

namespace assay::study {
namespace {

using Json = nlohmann::json;

const Json kShared = Json::parse(R"({
  "name": "a", "lines": ["[model]", "d = 1", "heads = 2", "end"], "none": null, "text": "=0AB",
  "sets": {"x": {"loss": 1.5, "sums": [10, 20, 30]}, "y": {"loss": 2.25, "sums": [7, 8]}},
  "training": [[50, 8.1234], [100, 7.5], [150, 7.25]], "gone": {"a": 1}})");

Json changed() {
  Json own = kShared;
  own["lines"] = {"[model]", "d = 1", "window = 4", "end"};
  own["sets"]["y"] = {{"loss", 2.5}, {"sums", {-700, 8}}};
  own["training"] = {{25, 8.0001}, {50, 7.5}, {75, 7.0}};
  own["text"] = "~3";
  own["name"] = nullptr;
  own["new"] = {{"deep", {1.5, 2, 1e300}}, {"mixed", {1, nullptr}}, {"one", {0.1}}};
  own.erase("gone");
  return own;
}

TEST(Compact, ValuesAreReadAsTheyWere) {
  for (const Json& own : {kShared, changed(), Json(3), Json::array(), Json::object()})
    for (const Json& shared : {kShared, changed(), Json()}) {
      const Json text = Json::parse(compact(own, shared).dump());
      EXPECT_EQ(expand(text, shared), own) << text;
    }
}

TEST(Compact, EqualValuesAreLeftOut) {
  EXPECT_EQ(compact(kShared, kShared), Json::object());
  Json own = kShared;
  own["sets"]["y"]["loss"] = 2.5;
  EXPECT_EQ(compact(own, kShared).dump(), R"({"sets":{"loss":"~1eU"}})");
}

TEST(Compact, ArithmeticProgressionsAreThreeNumbers) {
  Json steps = Json::array();
  for (int i = 1; i <= 200; ++i) steps.push_back(50 * i);
  const Json text = compact(steps, Json());
  EXPECT_EQ(text, "+0kDkDwM");
  EXPECT_EQ(expand(text, Json()), steps);
}

TEST(Compact, TextOfAnotherSharedValueIsRejected) {
  for (const char* text : {R"({"sets": {"loss": "=2YZaa"}})", R"({"sets": {"loss": "=2Yg"}})",
                           R"({"sets": {"loss": "=2Y?"}})", R"({"sets": {"loss": "=x"}})",
                           R"({"lines": [[3, 4]]})", R"({"sets": {"": ["x", "y", "z"]}})",
                           R"({"training": {"": 1e9, "columns": []}})", R"({"a": "+0AA////P"})"})
    EXPECT_THROW(expand(Json::parse(text), kShared), BadInput) << text;
}

}  // namespace
}  // namespace assay::study
