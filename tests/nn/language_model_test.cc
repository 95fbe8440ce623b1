// The model around the mixers: loss, checkpointed activations, initialisation, sizes
// of the presets.
#include "nn/language_model.h"

#include <torch/torch.h>

#include <regex>

#include "nn/tensors.h"
#include "testing.h"

namespace assay::nn {
namespace {

const char* const kTied =
    "[model]\nvocab_size = 50\nd_model = 24\npattern = [\"attention\"]\n"
    "channel_mixer = \"geglu\"\n[model.attention]\nnum_heads = 3\n";
const char* const kUntied =
    "[model]\nvocab_size = 50\nd_model = 24\npattern = [\"attention\", \"mamba1\"]\n"
    "channel_mixer = \"gelu\"\nnorm = \"layernorm\"\n"
    "positions = \"learned\"\nmax_positions = 40\ntie_embeddings = false\n[model.attention]\n"
    "num_heads = 3\nwindow = 5\nbias = true\n[model.gelu]\nbias = true\n";

// Layers that hand on to later ones: the first and third are RWKV-7's.
const char* const kHanding =
    "[model]\nvocab_size = 50\nd_model = 24\nnum_layers = 3\npattern = [\"rwkv7\", \"gla\"]\n"
    "channel_mixer = \"rwkv7_channel_mix\"\nnorm = \"layernorm\"\nembedding_norm = true\n"
    "[model.rwkv7]\nnum_heads = 3\n[model.gla]\nnum_heads = 2\n";

struct LanguageModels : testing::TestWithParam<const char*> {
  const at::Tensor tokens = random_tokens(3, 34, 50, "tokens");
};

std::vector<at::Tensor> gradients_of(const at::Tensor& loss, LanguageModel& model) {
  return torch::autograd::grad({loss}, model.parameters());
}

void expect_equal_gradients(LanguageModel& model, const std::vector<at::Tensor>& found,
                            const std::vector<at::Tensor>& wanted, double tolerance) {
  const auto names = named_parameters_of(model);
  for (size_t i = 0; i < wanted.size(); ++i)
    EXPECT_LE(relative_error(found[i], wanted[i]), tolerance) << names[i].first;
}

TEST_P(LanguageModels, LossIsTheCrossEntropyOfTheLogits) {
  const auto model = random_model(GetParam());
  ModelState state;
  const at::Tensor logits = model->logits(tokens.slice(1, 0, -1), state).flatten(0, 1);
  const at::Tensor targets = tokens.slice(1, 1).flatten();
  const at::Tensor expected = at::cross_entropy_loss(logits, targets);
  const at::Tensor loss = model->loss(tokens);
  EXPECT_LE(relative_error(loss, expected), 1e-13);
  EXPECT_LE(relative_error(model->token_losses(tokens).flatten(),
                           at::cross_entropy_loss(logits, targets, {}, at::Reduction::None)),
            1e-13);
  expect_equal_gradients(*model, gradients_of(loss, *model), gradients_of(expected, *model), 1e-11);
}

TEST_P(LanguageModels, RecomputedActivationsChangeNothing) {
  const auto model = random_model(GetParam());
  const auto expected = gradients_of(model->loss(tokens), *model);
  model->recompute_activations = true;
  model->loss(tokens).backward();
  std::vector<at::Tensor> found;
  for (const at::Tensor& parameter : model->parameters()) found.push_back(parameter.grad());
  expect_equal_gradients(*model, found, expected, 1e-13);
}

TEST_P(LanguageModels, InitialiseIsAPureFunctionOfTheSeed) {
  const auto a = make_model(GetParam());
  const auto b = make_model(GetParam());
  b->initialise(7);  // leaves no trace
  a->initialise(3);
  b->initialise(3);
  for (const auto& item : a->named_parameters())
    EXPECT_TRUE(at::equal(item.value(), b->named_parameters()[item.key()])) << item.key();
  b->initialise(4);
  EXPECT_FALSE(at::equal(a->embedding, b->embedding));
  EXPECT_NEAR(a->embedding.std().item<double>(), 0.02, 0.002);
}

TEST_P(LanguageModels, ACutSequenceGivesTheSameLogits) {
  const auto model = random_model(GetParam());
  const at::NoGradGuard no_grad;
  ModelState whole_state;
  ModelState state;
  const at::Tensor whole = model->logits(tokens, whole_state);
  std::vector<at::Tensor> parts;
  for (const at::Tensor& part : tokens.split_with_sizes({9, 1, 1, 16, 7}, 1))
    parts.push_back(model->logits(part, state));
  EXPECT_LE(relative_error(at::cat(parts, 1), whole), 1e-12);
  EXPECT_EQ(state.position, tokens.size(1));
}

std::string kind(size_t index) {
  return std::vector<std::string>{"Tied", "Untied", "Handing"}.at(index);
}
INSTANTIATE_TEST_SUITE_P(Kinds, LanguageModels, testing::Values(kTied, kUntied, kHanding),
                         [](const auto& info) { return kind(info.index); });

std::shared_ptr<LanguageModel> deep_model(bool residual_in_fp32) {
  const auto spec = ModelSpec::read(ConfigNode::parse(fmt::format(
      "vocab_size = 50\nd_model = 32\nnum_layers = 48\nresidual_in_fp32 = {}\n"
      "pattern = [\"attention\", \"mamba2\"]\n[mamba2]\nhead_dim = 16\nstate_size = 16\n",
      residual_in_fp32)));
  auto model = std::make_shared<LanguageModel>(spec);
  model->initialise(3);
  return model;
}

// Sums of 96 branches in bf16 lose digits that sums in float32 keep.
TEST(ResidualStream, InFloat32IsCloserToFloat64) {
  const at::Tensor tokens = random_tokens(2, 40, 50, "tokens");
  const auto exact = deep_model(false);
  exact->to(at::kDouble);
  const auto wanted = gradients_of(exact->loss(tokens), *exact);
  const auto error = [&](bool residual_in_fp32) {
    const auto model = deep_model(residual_in_fp32);
    model->compute_dtype = at::kBFloat16;
    ModelState state;
    EXPECT_EQ(model->embed(tokens, state).scalar_type(),
              residual_in_fp32 ? at::kFloat : at::kBFloat16);
    EXPECT_EQ(model->hidden(tokens, state).scalar_type(), at::kBFloat16);
    const auto found = gradients_of(model->loss(tokens), *model);
    double sum = 0;
    for (size_t i = 0; i < wanted.size(); ++i) sum += relative_error(found[i], wanted[i]);
    return sum / double(wanted.size());
  };
  EXPECT_LT(error(true), 0.9 * error(false));
}

// Records of earlier runs keep their keys.
TEST(ResidualStream, IsNamedInTheIdentityOnlyInFloat32) {
  const auto named = [](bool residual_in_fp32) {
    const std::string identity = deep_model(residual_in_fp32)->spec.identity();
    return identity.find("residual_in_fp32") != std::string::npos;
  };
  EXPECT_FALSE(named(false));
  EXPECT_TRUE(named(true));
}

TEST(AttentionConstants, EndWithTheirTable) {
  const auto model = random_model(
      "[model]\nvocab_size = 50\nd_model = 24\n[model.attention]\nnum_heads = 3\n"
      "constants = \"keys\"\nmax_positions = 8\n");
  EXPECT_EQ(model->token_losses(random_tokens(1, 9, 50, "tokens")).size(1), 8);
  EXPECT_THROW(model->token_losses(random_tokens(1, 10, 50, "tokens")), BadInput);
  EXPECT_EQ(model->state_bytes(800), 100 * model->state_bytes(8) - 99 * 2 * 8)
      << "it grows as it did, but for `position`";
}

// state_bytes() of a long sequence equals the state that a run of that length leaves, for every
// mixer: caches, chunk means, windows.
TEST(StateBytes, AreThoseOfARun) {
  constexpr int64_t length = 3227;
  for (const std::string& mixer : mixers().names())
    for (const std::string& table : mixers().at(mixer).examples) {
      ModelSpec spec = ModelSpec::read(
          ConfigNode::parse("vocab_size = 10\nd_model = 48\nnum_layers = 1\npattern = ['" + mixer +
                            "']\n[" + mixer + "]\n" + table));
      LanguageModel model(spec);
      const int64_t time = std::min(length, model.layers[0]->mixer->max_time());
      model.compute_dtype = at::kBFloat16;
      const at::NoGradGuard no_grad;
      ModelState state;
      model.hidden(random_tokens(1, time, 10, "state bytes"), state);
      // A chunk that does not divide 1,024 may be counted a mean too many.
      const double chunk_mean = table.find("chunk_size = 10\n") == std::string::npos ? 0 : 1e-3;
      EXPECT_NEAR(double(model.state_bytes(time)) / double(state.bytes()), 1, chunk_mean)
          << mixer << "\n"
          << table;
    }
}

TEST(StateBytes, LongWindowsStopGrowing) {
  // a key and a value of 8 numbers
  constexpr int64_t position = 8;
  constexpr int64_t pair = 2 * 8 * 4;
  for (const int64_t window : {1000, 1024, 1500, 2048, 5000}) {
    LanguageModel model(ModelSpec::read(ConfigNode::parse(fmt::format(
        "vocab_size = 10\nd_model = 8\nnum_layers = 2\n[attention]\nnum_heads = 2\nwindow = {}\n",
        window))));
    for (const int64_t time : {1, 999, 1499, 2047, 2048, 2600, 4096, 6023, 10'000, 102'400})
      EXPECT_EQ(model.state_bytes(time), 2 * (std::min(time, window - 1) * pair + position))
          << "window " << window << ", time " << time;
  }
}

TEST(StateBytes, WindowPastTheLongestTextIsCounted) {
  LanguageModel model(ModelSpec::read(
      ConfigNode::parse("vocab_size = 10\nd_model = 8\nnum_layers = 1\n[attention]\nnum_heads = 2\n"
                        "window = 2000\nconstants = 'keys'\nmax_positions = 2047\n")));
  EXPECT_GT(model.state_bytes(102'400), model.state_bytes(1024));
}

// A preset's parameters with 32,000 tokens: small models tell what the layers hold.
double preset_size(const std::string& name) {
  const ConfigNode model =
      ConfigNode::read_file(fs::path(ASSAY_SOURCE_DIR) / "plans" / "models" / (name + ".toml"))
          .child("model");
  ModelSpec spec = ModelSpec::read(model);
  spec.config.vocab_size = 1;
  spec.config.max_positions = 2048;
  const std::vector<std::string> pattern = spec.config.pattern;
  const auto size = [&](const std::string& mixer, int64_t layers) {
    spec.config.pattern = {mixer};
    spec.config.num_layers = layers;
    return double(LanguageModel(spec).parameter_count());
  };
  std::map<std::string, double> of_layer;
  for (const std::string& mixer : pattern)
    if (!of_layer.contains(mixer)) of_layer[mixer] = size(mixer, 2) - size(mixer, 1);
  const double tokens =
      31999.0 * double(spec.config.d_model) * (spec.config.tie_embeddings ? 1 : 2);
  double total = tokens + size(pattern.front(), 1);
  for (int64_t i = 1; i < ModelSpec::read(model).config.num_layers; ++i)
    total += of_layer[pattern[size_t(i) % pattern.size()]];
  return total;
}

TEST(Presets, HaveThePapersSizes) {
  for (const char* name :
       {"transformer", "transformer++", "transformer++_qk_norm", "window", "mamba1", "mamba2",
        "top1_element", "top1_chunk_exact", "top1_chunk_approx"}) {
    EXPECT_NEAR(preset_size(name) / 110e6, 1, 0.05) << name;  // Mamba-1 and Mamba-2 have 115M
    EXPECT_NEAR(preset_size(std::string(name) + "_1.3b") / 1.3e9, 1, 0.06) << name << "_1.3b";
  }
}

// "[BC App. A, small: 110M with 32k tokens]" in the first line
TEST(Presets, HaveTheSizesThatTheirFirstLinesSay) {
  int presets = 0;
  for (const auto& entry : fs::directory_iterator(fs::path(ASSAY_SOURCE_DIR) / "plans/models")) {
    const std::string name = entry.path().stem();
    const std::string text = read_file(entry.path());
    const std::string line = text.substr(0, text.find('\n'));
    const std::regex size_of("([0-9.]+)([MB]) with 32k tokens\\]$");
    std::smatch found;
    ASSERT_TRUE(std::regex_search(line, found, size_of)) << name << ": " << line;
    // As many digits as the line has
    const std::string digits = found[1];
    const double unit = found[2] == "M" ? 1e6 : 1e9;
    const double rounding = digits.find('.') == std::string::npos ? 0.5 : 0.05;
    EXPECT_NEAR(preset_size(entry.path().stem()) / unit, std::stod(digits), rounding) << name;
    ++presets;
  }
  EXPECT_GT(presets, 30);
}

}  // namespace
}  // namespace assay::nn
