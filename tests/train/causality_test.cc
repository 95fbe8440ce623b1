// A model that reads the tokens that it predicts is refused before its first step.
#include "train/causality.h"

#include <torch/torch.h>

#include "data/folder.h"
#include "data/synthetic.h"
#include "nn/mixer_examples.h"
#include "run/folder.h"
#include "train/trainer.h"

namespace assay::train {
namespace {

using data::Folder, data::message_of;
const std::string kNoError = "nothing was thrown";

// Mixers with mistakes that authors make. The first two read the next token.
struct Leaking : nn::Mixer {
  struct Config {
    std::string leak = "next";
    double scale = 1;
    void fields(auto&& field) {
      field("leak", leak, "next, behind_zero, chunk, random, nan or none");
      field("scale", scale, "of the output");
    }
  };
  Leaking(Config c, int64_t d_model) : config(c) {
    if (c.leak == "behind_zero") gate = add_parameter("gate", torch::zeros({d_model}), {});
  }
  at::Tensor forward(const at::Tensor& x, nn::State&) override {
    if (config.leak == "none") return x * config.scale;
    if (config.leak == "random") return x + at::rand_like(x);
    if (config.leak == "nan") return (x - x) / (x - x);
    if (config.leak == "chunk") {
      const int64_t whole = x.size(1) / 8 * 8;
      const at::Tensor mean =
          x.slice(1, 0, whole).unflatten(1, {-1, 8}).mean(2).repeat_interleave(8, 1);
      return at::cat({mean, x.slice(1, whole)}, 1) * config.scale;
    }
    const at::Tensor next = at::roll(x, -1, 1) * config.scale;
    return gate.defined() ? next * gate : next;
  }
  double mixing_flops(int64_t) const override { return 0; }
  Config config;
  at::Tensor gate;
};
const nn::RegisterMixer<Leaking> registered("leaking_for_tests", "y_t = x_{t+1}", {});
const nn::RegisterChannelMixer<Leaking> registered_channel("leaking_channel_for_tests",
                                                           "y_t = x_{t+1}", {});

std::shared_ptr<nn::LanguageModel> model_of(const std::string& text) {
  const ConfigNode file = ConfigNode::parse("[model]\nvocab_size = 64\n" + text, "m.toml");
  auto model = std::make_shared<nn::LanguageModel>(nn::ModelSpec::read(file.child("model")));
  model->initialise(1);
  return model;
}
std::string message_on(const std::string& text, int64_t sequence_length) {
  return message_of([&] { check_causality(*model_of(text), sequence_length); });
}
bool holds(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(Causality, MixerThatReadsLaterTokensIsNamedWithItsLayer) {
  const std::string pattern =
      "d_model = 16\nnum_layers = 4\npattern = ['attention', 'leaking_for_tests']\n"
      "[model.attention]\nnum_heads = 2\n[model.leaking_for_tests]\n";
  for (const char* leak : {"next", "behind_zero", "chunk"})
    for (const int64_t length : {20, 64, 2048}) {
      const std::string message = message_on(pattern + "leak = '" + leak + "'\n", length);
      EXPECT_TRUE(holds(message, "layer 1: leaking_for_tests reads later tokens"))
          << leak << ", " << length << ": " << message;
    }
  EXPECT_EQ(message_on(pattern + "leak = 'none'\n", 64), kNoError);
}

TEST(Causality, RandomAndNonFiniteOutputsAreToldFromALeak) {
  const std::string pattern =
      "d_model = 16\npattern = ['leaking_for_tests']\n[model.leaking_for_tests]\nleak = ";
  const std::string random = message_on(pattern + "'random'\n", 64);
  EXPECT_TRUE(holds(random, "layer 0: leaking_for_tests returns other values")) << random;
  EXPECT_FALSE(holds(random, "later tokens")) << random;
  const std::string nan = message_on(pattern + "'nan'\n", 64);
  EXPECT_TRUE(holds(nan, "layer 0: leaking_for_tests returns NaN or infinite values")) << nan;
}

TEST(Causality, LeakWithSmallOutputIsFound) {
  EXPECT_TRUE(holds(message_on("d_model = 16\npattern = ['leaking_for_tests']\n"
                               "[model.leaking_for_tests]\nscale = 1e-6\n",
                               64),
                    "layer 0"));
}

TEST(Causality, ChannelMixerThatReadsLaterTokensIsNamed) {
  EXPECT_TRUE(holds(message_on("d_model = 16\npattern = ['attention']\n"
                               "channel_mixer = 'leaking_channel_for_tests'\n"
                               "[model.attention]\nnum_heads = 2\n",
                               64),
                    "layer 0: leaking_channel_for_tests reads later tokens"));
}

TEST(Causality, EveryMixerIsAcceptedAndKeepsItsBits) {
  for (const nn::MixerExample& example : nn::mixer_examples())
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble})
      for (const int64_t length : {33, 512}) {
        const auto model = model_of(
            fmt::format("d_model = 48\npattern = ['{0}']\nchannel_mixer = '{1}'\n[model.{2}]\n{3}",
                        example.channel ? "mamba1" : example.mixer,
                        example.channel ? example.mixer : "none", example.mixer, example.table));
        model->to(dtype);
        std::vector<at::Tensor> before;
        for (const at::Tensor& parameter : model->parameters()) before.push_back(parameter.clone());
        EXPECT_EQ(message_of([&] { check_causality(*model, length); }), kNoError)
            << example.name << ", " << dtype << ", " << length;
        const auto after = model->parameters();
        for (size_t i = 0; i < before.size(); ++i)
          EXPECT_TRUE(at::equal(after[i], before[i])) << example.name;
      }
}

void synthesize(const fs::path& store) {
  data::SyntheticOptions options;
  options.documents = 20;
  options.held_out = 4;
  options.document_length = 64;
  options.vocabulary = 64;
  data::synthesize(store, options);
}
RunConfig config(const fs::path& store, const std::string& pattern) {
  return read_run_config(
      ConfigNode::parse("[model]\nd_model = 16\npattern = ['" + pattern +
                            "']\n[train]\nsteps = 2\nbatch_size = 6\nsequence_length = 24\n",
                        "m.toml"),
      store);
}

TEST(Causality, RunOfALeakingModelIsRefusedAndLeavesNothing) {
  const Folder folder;
  synthesize(folder / "store");
  try {
    train(config(folder / "store", "leaking_for_tests"),
          {.store = folder / "store", .run = folder / "run", .device = "cpu"});
    ADD_FAILURE() << "trained";
  } catch (const BadInput& error) {
    EXPECT_EQ(error.exit_code, kBadInput);
    EXPECT_TRUE(holds(error.what(), "layer 0: leaking_for_tests")) << error.what();
  }
  EXPECT_FALSE(fs::exists(folder / "run"));
}

// A study asks with --dry-run about each model before it trains the first one.
TEST(Causality, DryRunOfALeakingModelIsRefused) {
  const Folder folder;
  synthesize(folder / "store");
  const std::string message = message_of([&] {
    describe_run(config(folder / "store", "leaking_for_tests"),
                 {.store = folder / "store", .run = folder / "run", .device = "cpu"});
  });
  EXPECT_TRUE(holds(message, "layer 0: leaking_for_tests reads later tokens")) << message;
}

TEST(Causality, CheckUsesNoRandomState) {
  const auto model = model_of("d_model = 48\npattern = ['rwkv7']\n[model.rwkv7]\nnum_heads = 4\n");
  at::manual_seed(5);
  check_causality(*model, 64);
  const at::Tensor drawn = at::rand({4});
  at::manual_seed(5);
  EXPECT_TRUE(at::equal(drawn, at::rand({4})));
}

// The mistake is one that the check of the model does not see: the model reads ahead in the
// evaluation only. A manifest with a higher loss of the oracle has the same effect.
TEST(Causality, HeldOutLossBelowThatOfTheOracleIsAnError) {
  const Folder folder;
  synthesize(folder / "store");
  const fs::path manifest = folder / "store" / "manifest.json";
  auto json = nlohmann::json::parse(read_file(manifest));
  const auto run = [&](const char* name) {
    return message_of<Error>([&] {
      train(config(folder / "store", "mamba1"),
            {.store = folder / "store", .run = folder / name, .device = "cpu"});
    });
  };
  EXPECT_EQ(run("right"), kNoError);
  for (auto& [set, loss] : json["synthetic"]["oracle_loss"].items())
    if (!set.ends_with(".train")) loss = 100;
  write_file(manifest, json.dump());
  const std::string message = run("wrong");
  EXPECT_TRUE(holds(message, "No correct model goes below 100.000")) << message;
}

}  // namespace
}  // namespace assay::train
