#include "data/tokenizer.h"

#include <nlohmann/json.hpp>

#include "awkward_text.h"
#include "base/random.h"
#include "data/model_proto.h"
#include "data/word_encoder.h"
#include "folder.h"

namespace assay::data {
namespace {

using nlohmann::json;
using namespace std::string_literals;

fs::path bpe2000() { return golden_folder() / "bpe2000.model"; }

void expect_golden(const fs::path& model, const char* cases_file) {
  const Tokenizer tokenizer(model);
  const json golden = json::parse(read_file(golden_folder() / cases_file));
  EXPECT_EQ(tokenizer.vocab_size(), golden.at("vocab_size"));
  EXPECT_EQ(tokenizer.separator(), golden.at("eos"));
  EXPECT_EQ(tokenizer.bos(), golden.at("bos"));
  WordEncoder by_word(tokenizer);
  EXPECT_TRUE(by_word.by_word());
  std::vector<int32_t> ids;
  ASSERT_GT(golden.at("cases").size(), 20u);
  for (const json& item : golden.at("cases")) {
    const auto text = item.at("text").get<std::string>();
    const auto expected = item.at("ids").get<std::vector<int32_t>>();
    EXPECT_EQ(tokenizer.encode(text), expected) << item;
    EXPECT_EQ(tokenizer.decode(expected), item.at("decoded").get<std::string>()) << item;
    by_word.encode(text, ids);
    EXPECT_EQ(ids, expected) << item;
  }
}

TEST(Tokenizer, Bpe2000EqualsSentencePiece) { expect_golden(bpe2000(), "bpe2000.cases.json"); }

TEST(Tokenizer, Mixtral32kEqualsSentencePiece) {
  ASSAY_NEEDS_FILE(golden_folder() / "mixtral32k.cases.json");
  ASSAY_NEEDS_FILE(mixtral());
  EXPECT_EQ(Tokenizer(mixtral()).sha256(),
            "dadfd56d766715c61d2ef780a525ab43b8e6da4de6865bda3d95fdef5e134055");
  expect_golden(mixtral(), "mixtral32k.cases.json");
}

void expect_words_equal_whole(const Tokenizer& tokenizer, int texts) {
  WordEncoder by_word(tokenizer);
  std::vector<int32_t> ids;
  for (int seed = 0; seed < texts; ++seed) {
    const std::string text = awkward_text(uint64_t(seed));
    by_word.encode(text, ids);
    ASSERT_EQ(ids, tokenizer.encode(text)) << "seed " << seed << ": " << json(text);
  }
}

TEST(WordEncoder, EqualsTheLibraryOnAwkwardText) {
  expect_words_equal_whole(Tokenizer(bpe2000()), 3000);
  if (fs::exists(mixtral())) expect_words_equal_whole(Tokenizer(mixtral()), 3000);
}

TEST(WordEncoder, RefusesWhatMemoryCannotHold) {
  const Tokenizer tokenizer(bpe2000());
  WordEncoder by_word(tokenizer);
  std::vector<int32_t> ids;
  const std::string word(1 << 20, 'x');
  EXPECT_TRUE(by_word.encode(word + " " + word + "\n" + word, ids));
  EXPECT_FALSE(by_word.encode("a " + word + word + "x", ids));
  EXPECT_TRUE(ids.empty());
}

// A training text with words, runs of spaces and digits that a small model can learn from.
std::string training_text() {
  const std::vector<std::string> words = {"sequence", "model",      "learning", "the",
                                          "of",       "capability", "domain",   "and",
                                          "2024",     "état",       "x = 1"};
  Random random(1, "training text");
  std::string text;
  for (int line = 0; line < 400; ++line) {
    for (int word = 0; word < 12; ++word)
      text += words[random.below(words.size())] + (random.below(9) ? " " : "   ");
    text += '\n';
  }
  return text;
}

TEST(Tokenizer, TrainsDeterministicallyAsAsked) {
  const Folder folder;
  const fs::path text = folder.write("a.txt", training_text());
  train_tokenizer({.inputs = {text}, .vocab_size = 350}, folder / "one.model");
  train_tokenizer({.inputs = {text}, .vocab_size = 350}, folder / "two.model");
  const Tokenizer tokenizer(folder / "one.model");
  EXPECT_EQ(tokenizer.sha256(), Tokenizer(folder / "two.model").sha256());
  EXPECT_EQ(tokenizer.vocab_size(), 350);
  EXPECT_EQ(tokenizer.piece(0), "<unk>");
  EXPECT_EQ(tokenizer.bos(), 1);
  EXPECT_EQ(tokenizer.separator(), 2);
  const ModelProto proto = parse_model_proto(tokenizer.contents());
  EXPECT_TRUE(proto.bpe && proto.byte_fallback && proto.dummy_prefix && proto.escapes);
  EXPECT_FALSE(proto.normalises || proto.removes_whitespace || proto.whitespace_as_suffix);
  EXPECT_LT(tokenizer.encode("the model of the domain").size(), 12u);
  EXPECT_EQ(tokenizer.encode("2024").size(), 5u);  // ▁ and four digits
  for (const std::string& kept : {"  two  spaces "s, "tab\tnew\nline"s, "ﬁ Ａ é 汉\0z"s})
    EXPECT_EQ(tokenizer.decode(tokenizer.encode(kept)), kept);
  expect_words_equal_whole(tokenizer, 1000);
}

TEST(Tokenizer, TrainsOnASample) {
  const Folder folder;
  const fs::path text = folder.write("a.txt", training_text());
  train_tokenizer({.inputs = {text}, .vocab_size = 300, .max_sentences = 50}, folder / "a.model");
  EXPECT_EQ(Tokenizer(folder / "a.model").vocab_size(), 300);
}

TEST(Tokenizer, LongLinesAreCut) {
  const Folder folder;
  std::string line;
  while (line.size() < 200'000) line += "sequence models learn ";
  const fs::path words = folder.write("words.txt", line);
  train_tokenizer({.inputs = {words}, .vocab_size = 280}, folder / "words.model");
  EXPECT_LT(Tokenizer(folder / "words.model").encode("sequence models learn").size(), 20u);
  std::string no_space;
  while (no_space.size() < 200'000) no_space += "x汉é";
  const fs::path text = folder.write("long.txt", no_space);
  train_tokenizer({.inputs = {text}, .vocab_size = 262}, folder / "long.model");
  EXPECT_LT(Tokenizer(folder / "long.model").encode("x汉éx汉é").size(), 10u);
}

TEST(Tokenizer, FilesWithoutTextAreCounted) {
  const Folder folder;
  const fs::path text = folder.write("a.txt", training_text());
  const fs::path other = folder.write("b.jsonl", "{\"content\": \"t\"}\n{\"text\": \"\xff\"}\n");
  const TrainingFiles files =
      train_tokenizer({.inputs = {text, other}, .vocab_size = 300}, folder / "m");
  ASSERT_EQ(files.counts.size(), 2u);
  EXPECT_EQ(files.counts[0].documents, 1);
  EXPECT_EQ(files.counts[1].documents, 0);
  EXPECT_EQ(files.counts[1].left_out(), "1 without a string 'text', 1 with invalid UTF-8");
  EXPECT_MESSAGE(train_tokenizer({.inputs = {other}, .vocab_size = 300}, folder / "m"),
                 "1 without a string 'text'");
  EXPECT_MESSAGE(training_files({text, text}), "the same file as");
}

TEST(Tokenizer, ModelThatCannotBeWrittenIsRefusedBeforeTheWork) {
  const Folder folder;
  const TokenizerTraining training{.inputs = {folder / "missing.txt"}, .vocab_size = 300};
  EXPECT_MESSAGE(train_tokenizer(training, folder / "no/folder/m"), "there is no folder");
  EXPECT_MESSAGE(train_tokenizer(training, folder.path()), "not a regular file");
}

TEST(Tokenizer, TestFilesOfAFolderAreLeftOut) {
  const Folder folder;
  const fs::path train = folder.write("in/a.train.txt", training_text());
  const fs::path test = folder.write("in/b.test.txt", "held out");
  const fs::path valid = folder.write("in/valid/c.txt", "held out");
  const TrainingFiles files =
      train_tokenizer({.inputs = {folder / "in"}, .vocab_size = 300}, folder / "folder.model");
  EXPECT_EQ(files.used, std::vector<fs::path>{train});
  EXPECT_EQ(files.left_out, (std::vector<fs::path>{test, valid}));
  EXPECT_TRUE(files.held_out_used.empty());
  train_tokenizer({.inputs = {train}, .vocab_size = 300}, folder / "file.model");
  EXPECT_EQ(sha256_of_file(folder / "folder.model"), sha256_of_file(folder / "file.model"));
}

TEST(Tokenizer, NamedTestFilesAreUsedAndReported) {
  const Folder folder;
  const fs::path test = folder.write("b.test.txt", training_text());
  const TrainingFiles files = training_files({test});
  EXPECT_EQ(files.used, std::vector<fs::path>{test});
  EXPECT_EQ(files.held_out_used, std::vector<fs::path>{test});
  EXPECT_MESSAGE(training_files({folder.path()}), "all 1 files are of split valid or test");
}

TEST(Tokenizer, MessageHoldsNoPlaceInTheLibrarysSource) {
  const Folder folder;
  const fs::path text = folder.write("a.txt", "a b c");
  const std::string message =
      message_of([&] { train_tokenizer({.inputs = {text}, .vocab_size = 5000}, folder / "m"); });
  for (const char* never : {".cc", "INTERNAL", "trainer_spec", "["})
    EXPECT_EQ(message.find(never), std::string::npos) << message;
  EXPECT_NE(message.find("the text gives at most 266 tokens"), std::string::npos) << message;
}

TEST(Tokenizer, SaysWhatIsWrong) {
  const Folder folder;
  EXPECT_MESSAGE(Tokenizer(folder / "missing"), "missing: cannot be read");
  EXPECT_MESSAGE(Tokenizer(folder.write("empty", "")), "not a SentencePiece model");
  EXPECT_MESSAGE(Tokenizer(folder.write("text", "hello, world")), "not a SentencePiece model");
  const fs::path text = folder.write("a.txt", "a b c");
  EXPECT_MESSAGE(train_tokenizer({.inputs = {text}, .vocab_size = 5000}, folder / "m"),
                 "cannot be learned");
  EXPECT_MESSAGE(train_tokenizer({.inputs = {text}, .vocab_size = 10}, folder / "m"),
                 "260 … 1000000 was expected");
  EXPECT_MESSAGE(
      train_tokenizer({.inputs = {folder.write("b.txt", " \n")}, .vocab_size = 300}, folder / "m"),
      "no text was found");
  EXPECT_FALSE(fs::exists(folder / "m"));
}

TEST(Tokenizer, MessagesOmitPositionsInTheLibrary) {
  EXPECT_EQ(without_source_position(
                "Internal: ./src/trainer_interface.cc(580) [(a) == (b)] Too high (5)."),
            "Too high (5).");
  EXPECT_EQ(without_source_position("src/sentencepiece_processor.cc(73) Model is not initialised."),
            "Model is not initialised.");
  EXPECT_EQ(without_source_position("src/a.cc(1) [(a) == (b)]"), "the library gives no reason");
  EXPECT_EQ(without_source_position("Vocabulary size too high"), "Vocabulary size too high");
}

TEST(Tokenizer, RefusesIdsOutsideTheVocabulary) {
  const Tokenizer tokenizer(bpe2000());
  EXPECT_MESSAGE(tokenizer.decode(std::vector<int32_t>{1999, 2000}),
                 "token 2000 is outside the vocabulary of 2000");
  EXPECT_THROW(tokenizer.decode(std::vector<int32_t>{-1}), BadInput);
}

}  // namespace
}  // namespace assay::data
