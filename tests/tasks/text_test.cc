// Text, templates, preparations and random numbers, each against what Python gives.
#include "tasks/text.h"

#include <gtest/gtest.h>

#include "data/folder.h"
#include "tasks/documents.h"
#include "tasks/matching.h"
#include "tasks/python_random.h"
#include "tasks/template.h"

namespace assay::tasks {
namespace {

using data::Folder, data::message_of;

TEST(TaskText, StripsAndSplitsByCodePoints) {
  EXPECT_EQ(strip("\u00a0 a\u3000b \n\u2003"), "a\u3000b");
  EXPECT_EQ(strip_characters("..a.b..", "."), "a.b");
  EXPECT_EQ(split(" a  b c ", ""), (std::vector<std::string>{"a", "b", "c"}));
  EXPECT_EQ(split(" a  b c ", "", 1), (std::vector<std::string>{"a", "b c"}));
  EXPECT_EQ(split("a_b_c", "_", 1), (std::vector<std::string>{"a", "b_c"}));
  EXPECT_EQ(split("", "_"), (std::vector<std::string>{""}));
  EXPECT_EQ(length("añ√😀"), 4);
  EXPECT_EQ(utf8(code_points("añ√😀")), "añ√😀");
}

TEST(TaskText, ChangesCaseBeyondAscii) {
  EXPECT_EQ(capitalize("éCOLE Ñ"), "École ñ");
  EXPECT_EQ(lower("ÄΣЖ"), "äσж");
  EXPECT_EQ(upper("äж"), "ÄЖ");
}

TEST(TaskText, CaseIsThatOfPythonWhereItIsSeveralCharacters) {
  EXPECT_EQ(upper("Straße ﬁn ŉ ǰ և ﬗ"), "STRASSE FIN ʼN J̌ ԵՒ ՄԽ");
  EXPECT_EQ(capitalize("ßA"), "Ssa");
  EXPECT_EQ(capitalize("ﬁN"), "Fin");
  EXPECT_EQ(capitalize("ǆ"), "ǅ");
  EXPECT_EQ(capitalize("გა"), "გა");
  EXPECT_EQ(upper("გა"), "ᲒᲐ");
  EXPECT_EQ(capitalize("ᾳ"), "ᾼ");
  EXPECT_EQ(lower("ΣΑΣ ΌΔΟΣ. Σ AΣ'B AΣ' Σ"), "σας όδος. σ aσ'b aς' σ");
  EXPECT_EQ(lower("İ"), "i̇");
  EXPECT_THROW(upper("ᾳ"), BadInput);
  EXPECT_EQ(replace_all("aaa", "a", "b", 2), "bba");
}

TEST(TaskText, QuotesAsPythonDoes) {
  EXPECT_EQ(python_quoted("it's"), "\"it's\"");
  EXPECT_EQ(python_quoted("'\""), "'\\'\"'");
  EXPECT_EQ(python_quoted("a\n\t\r\\ \x7f é 😀 \u00a0\u200b"),
            "'a\\n\\t\\r\\\\ \\x7f é 😀 \\xa0\\u200b'");
}

const Json kDocument = Json::parse(
    R"({"q": "What_is it?", "choices": {"text": ["x", "y", "z"], "label": ["A", "B", "C"]},
    "key": "B", "n": 2, "kind": "cause", "list": ["one", "two"], "number": "3",
    "nothing": null})");

TEST(TaskTemplate, GivesWhatJinjaGives) {
  for (const auto& [source, expected] : std::vector<std::pair<std::string, std::string>>{
           {"Q: {{q}}\nA:", "Q: What_is it?\nA:"},
           {"{{nothing}} {{q ~ nothing}}", "None What_is it?None"},
           {"{{choices.label.index(key)}}", "1"},
           {"{{ choices['text'][-1] }}{{choices.text[0]}}", "zx"},
           {"{{q.split('_', 1)[0] + '!'}}", "What!"},
           {"{{q.split(' ')[:-1]|join(' ')}}", "What_is"},
           {"{{' because' if kind == 'cause' else ' therefore'}}", " because"},
           {"{{'b' if 'x' not in choices.text and n > 1 else 'c' ~ n}}", "c2"},
           {"{{(number|int) - 1}} {{ -n + 1}} {{n * 4}}", "2 -1 8"},
           {"{{q[:1].lower() + q[1:3] ~ q[-1]}}", "wha?"},
           {"{{list|length}}{{list|first}}{{list|last|upper}}", "2oneTWO"},
           {"{{'}}'}}{{\"\\n\"}}", "}}\n"},
           {"{{q.strip('?W').replace('_', ' ')}}", "hat is it"},
           {"{{not n == 2 or true}}", "True"}})
    EXPECT_EQ(Template(source, "test").render(kDocument), expected) << source;
  EXPECT_EQ(Template("{{[q, 'b']}}", "test").value(kDocument), Json({"What_is it?", "b"}));
}

// The expected texts are those of Jinja2 3.1.6.
TEST(TaskTemplate, PrintsAndComparesAsPythonDoes) {
  const Json document = Json::parse(
      R"({"l": ["red", "green's"], "n": 3, "t": true, "none": null, "d": {"k": "v"}, "ab": "aaa",
      "nums": [1, 2, 3], "u": "Straße ΣΑΣ", "f": [0.5, 2.0, 1e16, 1e-5, [null, true]]})");
  for (const auto& [source, expected] : std::vector<std::pair<std::string, std::string>>{
           {"{{l}}", R"(['red', "green's"])"},
           {"{{nums}}{{l[:1]}}", "[1, 2, 3]['red']"},
           {"{{d}}", "{'k': 'v'}"},
           {"{{f}}", "[0.5, 2.0, 1e+16, 1e-05, [None, True]]"},
           {"{{f|join(' ')}}", "0.5 2.0 1e+16 1e-05 [None, True]"},
           {"{{ab.replace('a','b',1)}}{{ab|replace('a','b',1)}}", "baabaa"},
           {"{{'x\\ry'}}{{'\\x41'}}{{'\\u00e9'}}{{'\\d'}}{{'\\101\\''}}", "x\ryAé\\dA'"},
           {"{{t == 1}}{{true in nums}}{{[true] == [1]}}{{t > 0}}", "TrueTrueTrueTrue"},
           {"{{3 > 2 > 1}}{{1 < 3 < 2}}{{1 in nums == true}}", "TrueFalseFalse"},
           {"{{u|upper}}{{u|lower}}", "STRASSE ΣΑΣstraße σας"},
           {"{{- n}}", "refused"},
           {"{{-n}}", "refused"},
           {"{{+n}}", "refused"},
           {"{{n -}}", "refused"},
           {"{# a note #}q", "refused"},
           {"{{n + 1 ~ ab}}", "refused"},
           {"{{n < ab}}", "refused"},
           {"{{3 in n}}", "refused"},
           {"{{ab.split('')}}", "refused"},
           {"{{ab.replace('', 'x')}}", "refused"},
           {"{{ab.startswith('a', 1)}}", "refused"},
           {"{{ab|lower(1)}}", "refused"},
           {"{{'3'|int(0)}}", "refused"},
           {"{{'\\ud83d'}}", "refused"},
           {"{{'\\x4'}}", "refused"},
           {"{{'\\N{DIGIT ONE}'}}", "refused"}}) {
    std::string found = "refused";
    try {
      found = Template(source, "test").render(document);
    } catch (const BadInput&) {  // as expected of some
    }
    EXPECT_EQ(found, expected) << source;
  }
  EXPECT_EQ(Template("{{ -d.n ~ -2 }}", "test").render({{"d", {{"n", 2}}}}), "-2-2");
  EXPECT_THROW(Template("{{d}}", "test").render({{"d", {{"a", 1}, {"b", 2}}}}), BadInput);
}

TEST(TaskTemplate, ErrorsNamePlaceAndNearestField) {
  const auto message = [](const std::string& source) {
    return message_of([&] { Template(source, "task.toml:3:1").render(kDocument); });
  };
  EXPECT_NE(message("{{choice}}")
                .find("task.toml:3:1: the document has no field 'choice'; did you mean 'choices'?"),
            std::string::npos);
  EXPECT_NE(message("{{q").find("no matching '}}'"), std::string::npos);
  EXPECT_NE(message("{% if q %}").find("statements"), std::string::npos);
  EXPECT_NE(message("{{list[2]}}").find("index 2 is outside"), std::string::npos);
  EXPECT_NE(message("{{n.strip()}}").find("needs a string"), std::string::npos);
  EXPECT_NE(message("{{q.swap()}}").find("no method 'swap'"), std::string::npos);
  EXPECT_NE(message("{{q | uper}}")
                .find("there is no filter 'uper'; did you mean 'upper'?; there are capitalize,"),
            std::string::npos);
  EXPECT_NE(message("{{q q}}").find("is not understood"), std::string::npos);
  EXPECT_NE(message("{{" + std::string(1000, '(') + "}}").find("nested"), std::string::npos);
}

TEST(TaskDocuments, HellaswagLosesItsTags) {
  Json document = {{"activity_label", "Cooking"},
                   {"ctx_a", "[header] How to [title] boil."},
                   {"ctx_b", "the WATER"},
                   {"endings", {"[step] Go  on.", " stop [substeps] here"}},
                   {"label", "0"}};
  preparation("hellaswag")(document);
  EXPECT_EQ(document["query"], "Cooking: How to. boil. The water");
  EXPECT_EQ(document["choices"], Json({" Go on.", "stop here"}));
}

TEST(TaskDocuments, RaceAnswersAllButTheLastProblem) {
  Json document = {
      {"article", "Text."},
      {"problems", R"([{'question': 'It is   _  .', 'answer': 'B', 'options': ['a', "b's"]},
                       {'question': 'Why?', 'answer': 'A', 'options': ['x\'y', 'z']},
                       {'question': 'Last?', 'answer': 'B', 'options': ['1', '2']}])"}};
  preparation("race")(document);
  EXPECT_EQ(document["query"], "Article: Text.\n\nIt is  b's\nQuestion: Why?\nAnswer: x'y\nLast?");
  EXPECT_EQ(document["choices"], Json({"1", "2"}));
  EXPECT_EQ(document["gold"], 1);
}

TEST(TaskDocuments, WinogradOptionsReplaceThePronoun) {
  Json document = {{"text", "Sam took Ann's hat because his was lost."},
                   {"pronoun", "his"},
                   {"pronoun_loc", 27},
                   {"options", {"Sam", "The man"}}};
  preparation("wsc273")(document);
  EXPECT_EQ(document["options"], Json({"Sam's", "the man's"}));
}

TEST(TaskDocuments, MissingAndBrokenFilesAreNamed) {
  const Folder folder;
  EXPECT_NE(message_of([&] {
              read_documents(folder.path(), "a.jsonl");
            }).find("neither is there a.jsonl.zst"),
            std::string::npos);
  folder.write("a.jsonl", "{\"x\": 1}\n\n[2]\n");
  EXPECT_NE(message_of([&] {
              read_documents(folder.path(), "a.jsonl");
            }).find("a.jsonl:3: not a JSON object"),
            std::string::npos);
  EXPECT_THROW(python_literal("[1, 2"), BadInput);
  EXPECT_THROW(python_literal("{'a' 1}"), BadInput);
  EXPECT_EQ(python_literal("{'a': [1, \"b\\u00e9\"]}"), Json({{"a", {1, "bé"}}}));
}

TEST(TaskPythonRandom, DrawsWhatPythonDraws) {
  PythonRandom bits(1234);
  for (const uint32_t expected : {4150886329u, 3342196574u, 1892932127u, 501869158u})
    EXPECT_EQ(bits.next(), expected);
  PythonRandom random(1234);
  EXPECT_EQ(random.sample(2251, 5), (std::vector<size_t>{1805, 478, 30, 371, 143}));
  EXPECT_EQ(random.sample(15, 4), (std::vector<size_t>{10, 11, 1, 12}));
  EXPECT_EQ(random.sample(100, 8), (std::vector<size_t>{98, 45, 30, 2, 3, 44, 82, 79}));
  EXPECT_EQ(random.sample(57, 6), (std::vector<size_t>{30, 39, 29, 9, 5, 11}));
  PythonRandom large((uint64_t{1} << 40) + 7);
  for (const uint64_t expected : {628, 765, 834, 960, 967}) EXPECT_EQ(large.below(1000), expected);
  EXPECT_THROW(random.sample(3, 4), BadInput);
}

TEST(TaskMatching, FollowsTheOrderOfTheRules) {
  const ExactMatch rule{{"The ", "the ", "A ", "a "}, true, true};
  EXPECT_TRUE(exact_match("The Beatles!", "beatles", rule));
  EXPECT_TRUE(exact_match("a b-c", "bc", rule));
  EXPECT_FALSE(exact_match("bathe dog", "badog", rule)) << "'the ' inside a word stays";
  EXPECT_FALSE(exact_match("The Beatles", "beatles", {}));
  EXPECT_TRUE(contains_text("It was É Dias.", "é dias"));
  EXPECT_EQ(cut_at("one. two\nthree", {"\n", "."}), "one");
  EXPECT_EQ(cut_at("one", {""}), "one");
}

}  // namespace
}  // namespace assay::tasks
