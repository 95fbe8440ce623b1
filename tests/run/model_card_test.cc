// README.md of an exported model: the numbers of the run folder, and none where it has none.
#include "run/model_card.h"

#include "data/folder.h"

namespace assay::run {
namespace {

class ModelCard : public testing::Test {
 protected:
  ModelCard() {
    temporary_.write("config.toml",
                     "[model]\nd_model = 8\n[train]\nsteps = 20\nbatch_size = 4\n"
                     "sequence_length = 64\ndomains = [\"we\\\"b\", \"code\"]\n");
    run_.provenance().write({.parameters = 1234,
                             .commit = "c0ffee",
                             .train_tokens = 10'240,
                             .data_folder = "/home/me/store"});
    for (const int64_t step : {10, 20}) {
      make_folder(run_.checkpoint(step).path);
      run_.checkpoint(step).state().write({.step = step});
    }
    run_.end().write({.step = 20,
                      .sets = {{"we\"b.valid", {.loss = 3.06703, .bits_per_byte = 1.23456}},
                               {"code.test", {.loss = 2.5}},
                               {"broken.test", {.loss = NAN}}}});
    run_.tasks().write(
        {{{.name = "facts", .items = 3, .metrics = {{.name = "acc", .bits = "a"}}},
          {.name = "text",
           .items = 2,
           .metrics = {{.name = "perplexity", .sums = {{-2, -4}}, .weights = {{1, 2}}}}},
          {.name = "long", .problem = "the model reads 64 tokens"}}});
    temporary_.write("metrics.jsonl",
                     R"({"step": 10, "tokens": 2560, "evaluation": {"code.test": {"loss": 4.25}}})"
                     "\n");
  }
  std::string card(int64_t step, const std::string& library = "transformers") const {
    const CardModel model{.name = "out", .model_type = "llama", .library = library};
    return model_card(run_.checkpoint(step), model).value_or("none");
  }
  static bool has(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
  }

  data::Folder temporary_;
  Folder run_{temporary_.path()};
};

TEST_F(ModelCard, LastWeightsHaveLossesAndTasksOfTheEnd) {
  const std::string text = card(20);
  for (const char* part :
       {"---\nlibrary_name: transformers\npipeline_tag: text-generation\n", "  - name: \"out\"\n",
        "          name: \"we\\\"b\"\n          split: \"valid\"\n",
        "type: \"bits_per_byte\"\n            name: \"bits per byte\"\n            value: 1.2346\n",
        "value: 3.0670\n", "| code.test | – | 2.5000 |", "| parameters | 1234 |",
        "| training tokens | 5120 |", "| passes over the training text | 0.5 |",
        "| facts | acc | 0.6667 | 3 |", "| text | perplexity | 7.3891 | 2 |",
        "```toml\n[model]\nd_model = 8\n"})
    EXPECT_TRUE(has(text, part)) << part << "\nis not in\n" << text;
  for (const char* part : {"broken", "long", "/home/me", "nan", "license:"})
    EXPECT_FALSE(has(text, part)) << part << "\nis in\n" << text;
}

TEST_F(ModelCard, EarlierCheckpointHasTheLossesOfItsStep) {
  const std::string text = card(10);
  EXPECT_TRUE(has(text, "| optimizer steps | 10 of 20 |")) << text;
  EXPECT_TRUE(has(text, "| code.test | – | 4.2500 |")) << text;
  EXPECT_FALSE(has(text, "valid")) << text;
  EXPECT_FALSE(has(text, "facts")) << text;
}

TEST_F(ModelCard, LayoutWithoutLibraryNamesNone) {
  EXPECT_FALSE(has(card(20, ""), "library_name"));
}

TEST_F(ModelCard, RunWithoutMeasurementsHasNoResults) {
  fs::remove(run_.end().path);
  fs::remove(run_.metrics());
  const std::string text = card(20);
  EXPECT_TRUE(has(text, "| training tokens | 5120 |")) << text;
  EXPECT_FALSE(has(text, "model-index")) << text;
}

TEST_F(ModelCard, ModelOutsideARunHasNone) {
  EXPECT_EQ(model_card({temporary_.path()}, {}), std::nullopt);
}

}  // namespace
}  // namespace assay::run
