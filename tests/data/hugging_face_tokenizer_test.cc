// tokenizer.json against the model that it is made from, by the library `tokenizers` itself.
#include "data/hugging_face_tokenizer.h"

#include <sentencepiece_trainer.h>
#include <sys/wait.h>

#include <cstdlib>
#include <nlohmann/json.hpp>

#include "awkward_text.h"
#include "folder.h"

namespace assay::data {
namespace {

using nlohmann::json;

// 0: the ids and texts of `texts` are equal; 77: Python has no tokenizers.
int compare_with_tokenizers(const Tokenizer& tokenizer, const std::vector<std::string>& texts) {
  const Folder folder;
  json cases = json::array();
  for (const std::string& text : texts) {
    const auto ids = tokenizer.encode(text);
    cases.push_back({{"text", text}, {"ids", ids}, {"decoded", tokenizer.decode(ids)}});
  }
  folder.write("cases.json", cases.dump());
  folder.write("tokenizer.json", tokenizer_json(tokenizer).dump());
  const std::string command = fmt::format("'{}' '{}/tests/data/tokenizers_check.py' '{}'",
                                          ASSAY_PYTHON, ASSAY_SOURCE_DIR, folder.path().string());
  return WEXITSTATUS(std::system(command.c_str()));
}

std::vector<std::string> texts_of_each_kind() {
  std::vector<std::string> texts = {"",         " ",         "\n",       "a",
                                    " leading", "trailing ", "<s>a</s>", "e\u0301\u200b"};
  for (uint64_t seed = 0; seed < 2000; ++seed) texts.push_back(awkward_text(seed));
  return texts;
}

const std::string kVerbatim =
    "--normalization_rule_name=identity --remove_extra_whitespaces=false ";

std::string model_of(const std::string& extra) {
  const Folder folder;
  std::string text;
  for (int i = 0; i < 300; ++i)
    text += fmt::format("the model of sequence {} learns état {}\n", i, i * i);
  folder.write("text", text);
  std::string contents;
  std::string settings =
      fmt::format("--input={} --vocab_size=320 --minloglevel=2 --model_prefix={} {}",
                  (folder / "text").string(), (folder / "m").string(), extra);
  const auto status = sentencepiece::SentencePieceTrainer::Train(settings);
  EXPECT_TRUE(status.ok()) << status.message();
  return read_file(folder / "m.model");
}

TEST(HuggingFaceTokenizer, TokenizersMakesTheSameIdsAndTexts) {
  std::vector<fs::path> models = {golden_folder() / "bpe2000.model"};
  if (fs::exists(mixtral())) models.push_back(mixtral());
  for (const fs::path& model : models) {
    SCOPED_TRACE(model);
    const int result = compare_with_tokenizers(Tokenizer(model), texts_of_each_kind());
    if (result == 77) GTEST_SKIP() << "Python has no tokenizers";
    EXPECT_EQ(result, 0);
  }
}

TEST(HuggingFaceTokenizer, ModelWithoutDummyPrefixIsExpressed) {
  const auto tokenizer = Tokenizer::from_contents(
      model_of("--model_type=bpe --byte_fallback --add_dummy_prefix=false " + kVerbatim), "m");
  const int result = compare_with_tokenizers(tokenizer, texts_of_each_kind());
  if (result == 77) GTEST_SKIP() << "Python has no tokenizers";
  EXPECT_EQ(result, 0);
}

TEST(HuggingFaceTokenizer, ConfigNamesTheSpecialTokens) {
  const json config = tokenizer_config_json(Tokenizer(golden_folder() / "bpe2000.model"));
  EXPECT_EQ(config.at("bos_token"), "<s>");
  EXPECT_EQ(config.at("eos_token"), "</s>");
  EXPECT_EQ(config.at("unk_token"), "<unk>");
  EXPECT_EQ(config.at("split_special_tokens"), true);
}

TEST(HuggingFaceTokenizer, InexpressibleModelIsRejectedWithTheReason) {
  const std::string plain = "--byte_fallback " + kVerbatim;
  const std::vector<std::pair<std::string, std::string>> models = {
      {"--model_type=unigram " + plain, "it is not BPE"},
      {"--model_type=bpe --vocab_size=60 " + kVerbatim, "it has no byte fallback"},
      {"--model_type=bpe --byte_fallback --remove_extra_whitespaces=false", "it normalises text"},
      {"--model_type=bpe --byte_fallback --normalization_rule_name=identity",
       "it removes white space"},
      {"--model_type=bpe --user_defined_symbols=<x> " + plain, "user-defined"}};
  for (const auto& [settings, reason] : models) {
    const auto tokenizer = Tokenizer::from_contents(model_of(settings), settings);
    EXPECT_MESSAGE(tokenizer_json(tokenizer), reason);
  }
}

}  // namespace
}  // namespace assay::data
