// Byte-level BPE from tokenizer.json, compared with the library `tokenizers` 0.23, which made the
// cases (byte_level_bpe_golden.py).
#include "data/byte_level_bpe.h"

#include <nlohmann/json.hpp>

#include "data/tokenizer.h"
#include "data/word_encoder.h"
#include "folder.h"

namespace assay::data {
namespace {

using nlohmann::json;

const json& golden() {
  static const json values =
      json::parse(read_file(ASSAY_SOURCE_DIR "/tests/data/byte_level_bpe.json"));
  return values;
}

struct ByteLevelBpeOf : testing::TestWithParam<std::string> {
  const json& values = golden().at(GetParam());
  Tokenizer tokenizer = Tokenizer::from_contents(values.at("tokenizer").dump(), "tokenizer.json");
};

TEST_P(ByteLevelBpeOf, IdsAndTextEqualThoseOfTokenizers) {
  WordEncoder encoder(tokenizer);
  for (size_t i = 0; i < golden().at("texts").size(); ++i) {
    const auto text = golden().at("texts")[i].get<std::string>();
    const auto ids = values.at("ids")[i].get<std::vector<int32_t>>();
    SCOPED_TRACE(json(text).dump());
    EXPECT_EQ(tokenizer.encode(text), ids);
    EXPECT_EQ(tokenizer.decode(ids), values.at("decoded")[i].get<std::string>());
    std::vector<int32_t> half;
    std::vector<int32_t> by_word;
    for (size_t k = 1; k < ids.size(); k += 2) half.push_back(ids[k]);
    EXPECT_EQ(tokenizer.decode(half), values.at("half_decoded")[i].get<std::string>());
    EXPECT_TRUE(encoder.encode(text, by_word));
    EXPECT_EQ(by_word, ids);
  }
}

INSTANTIATE_TEST_SUITE_P(Golden, ByteLevelBpeOf,
                         testing::Values("gpt2", "gpt2_prefix", "llama3", "qwen", "digits"),
                         [](const auto& info) { return info.param; });

TEST(ByteLevelBpe, SpecialTokensAreOrdinaryTextAndSeparateDocuments) {
  const Tokenizer tokenizer =
      Tokenizer::from_contents(golden().at("llama3").at("tokenizer").dump(), "tokenizer.json");
  EXPECT_EQ(tokenizer.piece(int32_t(tokenizer.separator())), "<|endoftext|>");
  EXPECT_EQ(tokenizer.bytes(int32_t(tokenizer.separator())), "");
  EXPECT_GT(tokenizer.encode("<|endoftext|>").size(), 1u);
}

TEST(ByteLevelBpe, LongWordIsEncodedInFarLessThanQuadraticTime) {
  const Tokenizer tokenizer =
      Tokenizer::from_contents(golden().at("gpt2").at("tokenizer").dump(), "tokenizer.json");
  const std::string text(300'000, 'a');
  EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
}

TEST(ByteLevelBpe, PartsThatAreNotImplementedAreRefusedByName) {
  struct Wrong {
    const char* place;  // a JSON pointer
    json value;
    std::string words;
  };
  const std::vector<Wrong> wrong = {
      {"/model/type", "WordPiece", "model.type"},
      {"/model/unk_token", "<unk>", "model.unk_token"},
      {"/model/byte_fallback", true, "model.byte_fallback"},
      {"/model/vocab", json::object(), "no token for byte 0"},
      {"/model/vocab/a", -1, "model.vocab.a"},
      {"/model/merges", json::array({"a b c d"}), "model.merges"},
      {"/normalizer", {{"type", "Lowercase"}}, "normalizer"},
      {"/pre_tokenizer", {{"type", "Metaspace"}}, "pre_tokenizer"},
      {"/pre_tokenizer/pretokenizers/0/behavior", "Removed", "pre_tokenizer"},
      {"/pre_tokenizer/pretokenizers/0/pattern/Regex", R"(\w+)", R"(\w)"},
      {"/pre_tokenizer/pretokenizers/0/pattern/Regex", R"(\s+$)", "$"},
      {"/pre_tokenizer/pretokenizers/0/pattern/Regex", R"((a)", "regular expression"},
      {"/added_tokens/1/lstrip", true, "added_tokens"},
      {"/decoder", {{"type", "Metaspace"}}, "decoder"}};
  for (const auto& [place, value, words] : wrong) {
    json changed = golden().at("qwen").at("tokenizer");
    changed[json::json_pointer(place)] = value;
    SCOPED_TRACE(place);
    try {
      Tokenizer::from_contents(changed.dump(), "tokenizer.json");
      ADD_FAILURE() << "was accepted; expected a message with: " << words;
    } catch (const BadInput& error) {
      EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
    }
  }
}

}  // namespace
}  // namespace assay::data
