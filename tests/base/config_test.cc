// Configuration: what is read, and what is refused with place and nearest name.
#include "base/config.h"

#include "base/config_differences.h"
#include "data/folder.h"

namespace assay {
namespace {

using data::message_of;

struct Sample {
  bool flag = false;
  int64_t count = 3;
  double rate = 1e-3;
  std::string name = "a";
  std::vector<std::string> words;
  std::vector<int64_t> sizes;
  std::vector<double> weights;
  void fields(auto&& field) {
    field("flag", flag);
    field("count", count, "how many");
    field("rate", rate);
    field("name", name);
    field("words", words);
    field("sizes", sizes);
    field("weights", weights);
  }
};

Sample read(const std::string& text) {
  Sample sample;
  ConfigNode::parse(text, "plan.toml").read(sample);
  return sample;
}

TEST(Config, ReadsEveryType) {
  const Sample s = read(
      "flag = true\ncount = -7\nrate = 2\nname = 'é'\nwords = ['x', 'y']\nsizes = [1, 2]\n"
      "weights = [1, 0.5]\n");
  EXPECT_TRUE(s.flag);
  EXPECT_EQ(s.count, -7);
  EXPECT_EQ(s.rate, 2.0);
  EXPECT_EQ(s.name, "é");
  EXPECT_EQ(s.words, (std::vector<std::string>{"x", "y"}));
  EXPECT_EQ(s.sizes, (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(s.weights, (std::vector<double>{1, 0.5}));
}

TEST(Config, WhatIsWrittenReadsBackTheSame) {
  Sample s = read(
      "rate = 0.1\nname = \"tab\\t quote\\\" back\\\\ line\\n\"\nwords = ['a\"b', '']\n"
      "weights = [3.0000000000000004e-5, 1e300]\n");
  const std::string text = to_toml(fields_of(s));
  Sample again = read(text);
  EXPECT_EQ(to_toml(fields_of(again)), text);
  EXPECT_EQ(again.name, s.name);
  EXPECT_EQ(again.words, s.words);
  EXPECT_EQ(again.weights, s.weights);
}

TEST(Config, UnknownKeyGivesPlaceAndNearestName) {
  const std::string message = message_of([] { read("flag = true\n  cuont = 3\n"); });
  EXPECT_NE(message.find("plan.toml:2:"), std::string::npos) << message;
  EXPECT_NE(message.find("unknown key 'cuont'"), std::string::npos) << message;
  EXPECT_NE(message.find("did you mean 'count'?"), std::string::npos) << message;
  EXPECT_EQ(message_of([] { read("zzzzzzzzz = 3\n"); }).find("did you mean"), std::string::npos);
}

TEST(Config, WrongTypesAreRefusedWithThePlace) {
  for (const char* text :
       {"count = 1.5", "count = '1'", "count = true", "rate = 'fast'", "rate = true", "flag = 1",
        "name = 3", "words = 'x'", "words = ['x', 1]", "sizes = [1.5]", "weights = ['x']",
        "count = [1]", "[count]", "count = nan"}) {
    const std::string message = message_of([&] { read(text); });
    EXPECT_NE(message.find("plan.toml:1:"), std::string::npos) << text << ": " << message;
    EXPECT_NE(message.find("must be a"), std::string::npos) << text << ": " << message;
  }
}

TEST(Config, BrokenTextGivesThePlace) {
  EXPECT_MESSAGE(ConfigNode::parse("a = 1\nb = [1,\n", "x.toml"), "x.toml:");
  EXPECT_MESSAGE(ConfigNode::parse("a = 1\na = 2\n", "x.toml"), "x.toml:2:");
  EXPECT_MESSAGE(ConfigNode::parse("\xff\xfe\x80", "x.toml"), "x.toml:1:1");
  for (const char* text : {"[[[", "[", "=", ".=", "a=", "a.=1", "[a", "a={", "\"", "[[", "[a]]"})
    EXPECT_MESSAGE(ConfigNode::parse(text, "x.toml"), "x.toml:1:");
  EXPECT_MESSAGE(ConfigNode::parse("a=" + std::string(100000, '['), "x.toml"), "x.toml:1:");
  EXPECT_MESSAGE(ConfigNode::read_file("/nowhere.toml"), "no such file");
  EXPECT_MESSAGE(ConfigNode::read_file(fs::temp_directory_path()), "cannot be read");
}

TEST(Config, DeepDottedKeyIsRefusedWithThePlace) {
  std::string deep = "a";
  for (int i = 0; i < 100'000; ++i) deep += ".a";
  for (const std::string& text : {deep + " = 1\n", "[" + deep + "]\n", "x = {" + deep + " = 1}\n"})
    EXPECT_NE(message_of([&] { read("count = 1\n" + text); }).find("plan.toml:2:"),
              std::string::npos);
  ConfigNode node = ConfigNode::parse("", "plan.toml");
  EXPECT_NE(message_of([&] { node.set(deep + "=1"); }).find("a key has more than 16 parts"),
            std::string::npos);
  node.set("name=" + deep);
  Sample sample;
  node.read(sample);
  EXPECT_EQ(sample.name, deep) << "a value that is no TOML is a string";
}

TEST(Config, CharacterOutsideAsciiIsRefusedInKeysOnly) {
  EXPECT_NE(
      message_of([] { read("\xc2\xa7 = 1\n"); }).find("plan.toml:1:1: a character outside ASCII"),
      std::string::npos);
  EXPECT_EQ(read("name = '\xc2\xa7'  # \xc2\xa7\n").name, "\xc2\xa7");
  EXPECT_EQ(read("\xef\xbb\xbfname = \"\"\"\n\xc2\xa7 \\\"\"\"\"\n").name, "\xc2\xa7 \"");
  ConfigNode node = ConfigNode::parse("", "plan.toml");
  node.set("name=\xc2\xa7");
  node.set("words=['\xc2\xa7']");
  Sample sample;
  node.read(sample);
  EXPECT_EQ(sample.name, "\xc2\xa7");
  EXPECT_EQ(sample.words, std::vector<std::string>{"\xc2\xa7"});
}

TEST(Config, AssignmentsOverrideAndErrorsNameThem) {
  ConfigNode root = ConfigNode::parse("[train]\ncount = 1\nname = 'a'\n", "m.toml");
  root.set("train.count=5");
  root.set("train.name=two words");
  root.set("train.words=['p']");
  Sample s;
  root.child("train").read(s);
  EXPECT_EQ(s.count, 5);
  EXPECT_EQ(s.name, "two words");
  EXPECT_EQ(s.words, std::vector<std::string>{"p"});
  root.set("train.cuont=6");
  EXPECT_MESSAGE(root.child("train").read(s), "--set train.cuont=6: unknown key 'cuont'");
  for (const char* value : {"[1", "{a = 1", "'a", "\"a"})
    EXPECT_MESSAGE(root.set(std::string("seeds=") + value), "the value is not TOML: ");
  for (const char* assignment : {"train.steps", "=3", "", "a b = 3", "a..b=3"})
    EXPECT_MESSAGE(root.set(assignment), std::string("--set ") + assignment);
}

TEST(Config, MergedLaysTablesOverEachOther) {
  const ConfigNode base = ConfigNode::parse("a = 1\n[t]\nx = 1\ny = 2\n");
  const ConfigNode over = ConfigNode::parse("b = 2\n[t]\ny = 3\n");
  const ConfigNode merged = ConfigNode::merged({base, over});
  EXPECT_EQ(merged.value("a") + merged.value("b") + merged.child("t").value("x") +
                merged.child("t").value("y"),
            "1213");
  EXPECT_EQ(base.child("t").value("y"), "2");
  EXPECT_MESSAGE(base.child("a"), "a");
}

TEST(Config, MergedValuesKnowWhereTheyWereWritten) {
  const ConfigNode base = ConfigNode::parse("a = 1\n[t]\nx = 1\ny = 2\n", "base.toml");
  const ConfigNode over = ConfigNode::parse("[t]\n\ny = 3\n", "over.toml");
  ConfigNode merged = ConfigNode::merged({base, over});
  EXPECT_EQ(merged.where("a"), "base.toml:1:5");
  EXPECT_EQ(merged.where("t.x"), "base.toml:3:5");
  EXPECT_EQ(merged.child("t").where("y"), "over.toml:3:5");
  merged.rename("a", "b");
  EXPECT_EQ(merged.where("b"), "base.toml:1:5");
  EXPECT_EQ(merged.toml("m"), "[m]\nb = 1\n[m.t]\nx = 1\ny = 3\n");
}

TEST(Config, ValuesThatArePutKnowWhereTheyWereWritten) {
  ConfigNode root = ConfigNode::parse("[t]\nx = 1\n", "a.toml");
  root.put("t.u.y", "[1, 2]", "b.json: 'y'");
  root.put("t.x", "3", "b.json: 'x'");
  EXPECT_EQ(root.toml("m"), "[m]\n[m.t]\nx = 3\n[m.t.u]\ny = [1, 2]\n");
  EXPECT_EQ(root.where("t.x"), "b.json: 'x'");
  EXPECT_EQ(root.child("t").child("u").where("y"), "b.json: 'y'");
  EXPECT_EQ(root.child("t").where("u"), "b.json: 'y'");
}

TEST(Config, ArraysOfTablesAreWrittenAsTheyWereRead) {
  const ConfigNode root = ConfigNode::parse("[[c]]\nx = 1\n[[c]]\nx = 2.5\ny = \"a\"\n", "a.toml");
  const ConfigNode again = ConfigNode::parse(root.toml("m"), "b.toml").child("m");
  EXPECT_EQ(again.toml("m"), root.toml("m"));
  EXPECT_EQ(again.value("c"), root.value("c"));
}

TEST(Config, DifferencesNameKeyAndBothValues) {
  const ConfigNode before =
      ConfigNode::parse("a = 1\n[t]\nx = [1, 2]\ny = 'same'\n[gone]\nz = true\n");
  const ConfigNode now = ConfigNode::parse("a = 2\n[t]\ny = 'same'\nx = [1, 3]\nw = 0.5\n");
  EXPECT_EQ(differences(before, now),
            (std::vector<std::string>{"a is 2 instead of 1", "gone.z is absent instead of true",
                                      "t.x is [1, 3] instead of [1, 2]",
                                      "t.w is 0.5 instead of absent"}));
  EXPECT_TRUE(differences(before, before).empty());
}

TEST(Config, ErrorsKeepTheirParts) {
  const ConfigNode root = ConfigNode::parse("[train]\ncuont = 1\n", "m.toml");
  Sample sample;
  try {
    root.child("train").read(sample);
    FAIL() << "nothing was thrown";
  } catch (const ConfigError& error) {
    EXPECT_EQ(error.table, "train");
    EXPECT_EQ(error.key, "cuont");
    EXPECT_TRUE(error.problem.starts_with("unknown key 'cuont' in {table}; did you mean 'count'?"));
    EXPECT_EQ(std::string(error.what()).substr(0, 45),
              "m.toml:2:9: unknown key 'cuont' in train; did");
  }
}

}  // namespace
}  // namespace assay
