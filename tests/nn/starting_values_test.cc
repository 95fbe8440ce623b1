// Starting values: those of the architectures' training code, checked by their own properties.
#include <torch/torch.h>

#include <cmath>
#include <map>

#include "nn/initial_values.h"
#include "testing.h"

namespace assay::nn {
namespace {

TEST(StartingValues, OrthogonalMatricesKeepLengths) {
  for (const auto& [rows, columns] : {std::pair(40, 40), {24, 60}, {60, 24}}) {
    at::Tensor w = at::zeros({rows, columns}, at::kDouble);
    orthogonal(0.1)(w, generator("orthogonal"));
    const at::Tensor square = rows < columns ? at::matmul(w, w.t()) : at::matmul(w.t(), w);
    EXPECT_LE(relative_error(square, 0.01 * at::eye(std::min(rows, columns), at::kDouble)), 1e-12)
        << rows << " x " << columns;
  }
}

TEST(StartingValues, StepsAreLogUniform) {
  at::Tensor bias = at::zeros({20000});
  log_uniform_steps()(bias, generator("steps"));
  const at::Tensor step = at::softplus(bias);
  EXPECT_GE(step.min().item<double>(), 0.001 * (1 - 1e-4));
  EXPECT_LE(step.max().item<double>(), 0.1 * (1 + 1e-4));
  EXPECT_NEAR(step.log().mean().item<double>(), std::log(0.01), 0.03);  // σ/√n = 0.009
  EXPECT_NEAR(step.log().std().item<double>(), std::log(100) / std::sqrt(12), 0.03);
}

TEST(StartingValues, TheEmbeddingIsAsWideAsItIsTold) {
  const auto model = make_model(
      "[model]\nvocab_size = 500\nd_model = 64\nembedding_std = 6e-5\ntie_embeddings = false\n");
  model->initialise(1);
  EXPECT_NEAR(model->embedding.std().item<double>(), 6e-5, 1e-6);
  EXPECT_NEAR(model->head_weight().std().item<double>(), 0.02, 3e-4);
}

TEST(StartingValues, Rwkv7sAreThoseOfItsTrainingCode) {
  const auto model = make_model(
      "[model]\nvocab_size = 8\nd_model = 128\nnum_layers = 3\npattern = [\"rwkv7\"]\n"
      "channel_mixer = \"rwkv7_channel_mix\"\n");
  model->initialise(1);
  const auto all = model->named_parameters();
  const auto value = [&](const std::string& name, std::vector<int64_t> at) {
    at::Tensor x = all[name];
    for (const int64_t i : at) x = x[i];
    return x.item<double>();
  };
  // Layer 1 of 3: depth 1/2, height 2/3; channel 33 of 128 is number 33 of its head of 64.
  EXPECT_NEAR(value("layers_1.mixer.mix", {1, 33}), 1 - std::pow(33.0 / 128, 0.9 * 2 / 3), 1e-6)
      << "x_w";
  EXPECT_NEAR(value("layers_1.mixer.mix", {5, 33}), 1 - std::pow(33.0 / 128, 0.2 * 2 / 3), 1e-6)
      << "x_g";
  const double curve = (33 - 31.5) / 31.5;
  const double zigzag = curve * std::abs(curve);
  const double line = 33.0 / 127 - 0.5;
  EXPECT_NEAR(value("layers_1.mixer.decay.up_proj.bias", {33}),
              -6 + 6 * std::pow(33.0 / 127, 1 + std::pow(0.5, 0.3)) + 0.5 + 2.5 * zigzag, 1e-5);
  EXPECT_NEAR(value("layers_1.mixer.rate.up_proj.bias", {33}), -0.19 + 0.3 * zigzag + 0.4 * line,
              1e-6);
  EXPECT_NEAR(value("layers_1.mixer.value_mix.up_proj.bias", {33}), 0.73 - 0.4 * line, 1e-6);
  EXPECT_NEAR(value("layers_1.mixer.k_k", {33}), 0.71 - 0.1 * line, 1e-6);
  EXPECT_NEAR(value("layers_1.mixer.norm.weight", {5}), std::pow(2.0 / 3, 0.7), 1e-6);
  EXPECT_NEAR(value("layers_1.channel_mixer.mix", {0, 33}),
              1 - std::pow(33.0 / 128, std::pow(2.0 / 3, 4)), 1e-6);
  EXPECT_EQ(all["layers_1.mixer.out_proj.weight"].abs().max().item<double>(), 0);
  EXPECT_FALSE(all.contains("layers_0.mixer.value_mix.up_proj.bias"))
      << "the first layer has nothing to mix with";
}

TEST(StartingValues, Rwkv6sAndRwkv5sAreThoseOfTheirTrainingCode) {
  for (const std::string version : {"5", "6"}) {
    const auto model = make_model(fmt::format(
        "[model]\nvocab_size = 8\nd_model = 128\nnum_layers = 3\npattern = [\"rwkv{0}\"]\n"
        "channel_mixer = \"rwkv{0}_channel_mix\"\n",
        version));
    model->initialise(1);
    const auto all = model->named_parameters();
    const auto given = [&](double x) { return version == "5" ? x : 1 - x; };
    const at::Tensor mix = all["layers_1.mixer.mix"];
    const at::Tensor decay =
        all[version == "5" ? "layers_1.mixer.decay" : "layers_1.mixer.decay.up_proj.bias"];
    const int64_t v = version == "5" ? 1 : 2;
    EXPECT_NEAR(mix[v][33].item<double>(), given(std::pow(33.0 / 128, 2.0 / 3) + 0.3 * 0.5), 1e-6)
        << version;
    EXPECT_NEAR(decay.flatten()[33].item<double>(), -6 + 5 * std::pow(33.0 / 127, 0.7 + 1.3 * 0.5),
                1e-5)
        << version;
    EXPECT_NEAR(all["layers_1.mixer.bonus"].flatten()[33].item<double>(),
                0.5 * (1 - 33.0 / 127) + 0.1 * ((34 % 3) - 1), 1e-6)
        << version;
    EXPECT_NEAR(all["layers_1.channel_mixer.mix"][1][33].item<double>(),
                given(std::pow(33.0 / 128, 2.0 / 3)), 1e-6)
        << version;
  }
}

// A parameter of layer 1 of a model of `pattern`, d_model 64, four layers, started with seed 1.
at::Tensor started(const std::string& pattern, const std::string& name,
                   const std::string& table = "", const std::string& channel_mixer = "none") {
  const auto model = make_model(
      fmt::format("[model]\nvocab_size = 8\nd_model = 64\nnum_layers = 4\npattern = [\"{0}\"]\n"
                  "channel_mixer = \"{1}\"\n[model.{0}]\n{2}",
                  pattern, channel_mixer, table));
  model->initialise(1);
  return model->named_parameters()["layers_1.mixer." + name].detach();
}

// Uniform in ±bound: nothing beyond it, and the deviation of the uniform distribution.
void expect_uniform(const at::Tensor& x, double bound, const std::string& what) {
  EXPECT_LE(x.abs().max().item<double>(), bound * (1 + 1e-6)) << what;
  EXPECT_NEAR(x.std().item<double>() / (bound / std::sqrt(3)), 1, 0.08) << what;
}

// state-spaces/mamba and Longhorn: torch's Linear, and out_proj smaller by the root of
// the residual branches.
TEST(StartingValues, ProjectionsOfMambaAndLonghornAreUniform) {
  for (const std::string mixer : {"mamba1", "mamba2", "longhorn"}) {
    const std::string table = mixer == "mamba2" ? "head_dim = 32" : "";
    expect_uniform(started(mixer, "in_proj.weight", table), 1.0 / 8, mixer + " in_proj");
    const double out = 1 / std::sqrt(128);
    expect_uniform(started(mixer, "out_proj.weight", table), out / std::sqrt(4),
                   mixer + " out_proj, one residual");
    expect_uniform(started(mixer, "out_proj.weight", table, "swiglu"), out / std::sqrt(8),
                   mixer + " out_proj, two residuals");
    if (mixer != "mamba2") expect_uniform(started(mixer, "x_proj.weight"), out, mixer + " x_proj");
  }
}

TEST(StartingValues, ShortConvolutionFollowsConvStd) {
  for (const std::string mixer : {"delta_net", "gated_delta_net"}) {
    expect_uniform(started(mixer, "conv.weight"), 0.5, mixer);
    EXPECT_NEAR(started(mixer, "conv.weight", "conv_std = 0.02").std().item<double>(), 0.02, 2e-3)
        << mixer;
  }
}

TEST(StartingValues, ScaleOfUnitQueriesStartsWhereToldAndLearnsFaster) {
  for (const std::string mixer : {"attention", "top1_element", "top1_chunk"}) {
    const auto model = [&](const std::string& table) {
      return make_model(
          fmt::format("[model]\nvocab_size = 8\nd_model = 64\nnum_layers = 1\npattern = [\"{0}\"]\n"
                      "[model.{0}]\nqk_norm = true\n{1}",
                      mixer, table));
    };
    const std::string scale = "layers_0.mixer.scale";
    const std::string matrix = "layers_0.mixer.qkv.weight";
    const auto plain = model("");
    const auto told = model("initial_scale = 8.0\nscale_learning_rate = 1.0");
    plain->initialise(1);
    told->initialise(1);
    EXPECT_TRUE(plain->named_parameters()[scale].eq(20).all().item<bool>()) << mixer;
    EXPECT_TRUE(told->named_parameters()[scale].eq(8).all().item<bool>()) << mixer;
    EXPECT_EQ(plain->treatments().at(scale).learning_rate, 40) << mixer;
    EXPECT_EQ(told->treatments().at(scale).learning_rate, 1) << mixer;
    EXPECT_FALSE(plain->treatments().at(scale).weight_decay) << mixer;
    EXPECT_EQ(plain->treatments().at(matrix).learning_rate, 1) << mixer;
    EXPECT_TRUE(plain->treatments().at(matrix).weight_decay) << mixer;
  }
}

TEST(StartingValues, DecaysOfTheDeltaFamilyStartAsInTheirLayers) {
  for (const auto& [mixer, least] : {std::pair("kda", 1.0), {"gdn2", 1.0}, {"comba", 0.0}}) {
    const at::Tensor rate = started(mixer, "A_log", "num_heads = 16").exp();
    const at::Tensor step = at::softplus(started(mixer, "dt_bias", "num_heads = 16"));
    EXPECT_GE(rate.min().item<double>(), least * (1 - 1e-6)) << mixer;
    EXPECT_LE(rate.max().item<double>(), 16 * (1 + 1e-6)) << mixer;
    EXPECT_GT(rate.max().item<double>(), 8) << mixer;
    EXPECT_GE(step.min().item<double>(), 0.001 * (1 - 1e-4)) << mixer;
    EXPECT_LE(step.max().item<double>(), 0.1 * (1 + 1e-4)) << mixer;
  }
  EXPECT_EQ(started("kda", "A_log", "gate_bound = -5").abs().max().item<double>(), 0);
  const auto treatments =
      make_model("[model]\nvocab_size = 8\nd_model = 64\nnum_layers = 1\npattern = [\"kda\"]\n")
          ->treatments();
  for (const char* name : {"A_log", "dt_bias", "gate_proj.bias"})
    EXPECT_FALSE(treatments.at(std::string("layers_0.mixer.") + name).weight_decay) << name;
  EXPECT_TRUE(treatments.at("layers_0.mixer.in_proj.weight").weight_decay);
}

TEST(StartingValues, ParameterWithoutTreatmentIsRefused) {
  struct Forgetful : Module {
    Forgetful() { register_parameter("weight", torch::zeros({2})); }
  };
  struct Outer : Module {
    Outer() { register_module("inner", std::make_shared<Forgetful>()); }
  } outer;
  try {
    outer.initialise(1);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("'inner.weight'"), std::string::npos) << error.what();
  }
}

// The role of a projection decides, and not its name.
TEST(StartingValues, OutputsStartSmallerByTheRootOfTwiceTheLayers) {
  EXPECT_NEAR(started("gla", "qkvg_proj.weight").std().item<double>(), 0.02, 5e-4);
  EXPECT_NEAR(started("gla", "out_proj.weight").std().item<double>(), 0.02 / std::sqrt(8), 3e-4);
}

TEST(StartingValues, LowRankPathsOfRwkvDoNotDecayAndTheDecayLearnsFaster) {
  const auto treatments =
      make_model("[model]\nvocab_size = 8\nd_model = 64\nnum_layers = 1\npattern = [\"rwkv7\"]\n")
          ->treatments();
  const auto of = [&](const std::string& name) { return treatments.at("layers_0.mixer." + name); };
  EXPECT_FALSE(of("rate.down_proj.weight").weight_decay);
  EXPECT_FALSE(of("rate.up_proj.weight").weight_decay);
  EXPECT_TRUE(of("k_proj.weight").weight_decay);
  EXPECT_EQ(of("decay.up_proj.bias").learning_rate, 2);
  EXPECT_EQ(of("rate.up_proj.bias").learning_rate, 1);
}

TEST(StartingValues, ChangedStartingValuesEnterTheNumericsOfTheModel) {
  const auto numerics = [](const std::string& pattern) {
    const ConfigNode file = ConfigNode::parse(
        "[model]\nvocab_size = 8\nd_model = 64\nnum_layers = 2\npattern = [" + pattern + "]\n");
    return parts_of(ModelSpec::read(file.child("model"))).mixers;
  };
  EXPECT_EQ(numerics("\"mamba1\", \"attention\""),
            (std::map<std::string, int64_t>{{"mixer mamba1", 2}}));
  EXPECT_TRUE(numerics("\"attention\"").empty());
}

}  // namespace
}  // namespace assay::nn
