// The model around the mixers: loss, checkpointed activations, initialisation, window attention, sizes of the presets.
#include <torch/torch.h>

#include "nn/language_model.h"

#include "nn/attention.h"
#include "nn/tensors.h"
#include "testing.h"

namespace assay::nn {
namespace {

const char* const kTied =
    "[model]\nvocab_size = 50\nd_model = 24\npattern = [\"attention\"]\nchannel_mixer = "
    "\"geglu\"\n[model.attention]\nnum_heads = 3\n";
const char* const kUntied =
    "[model]\nvocab_size = 50\nd_model = 24\npattern = [\"attention\", \"mamba1\"]\nchannel_mixer = \"gelu\"\nnorm = "
    "\"layernorm\"\n"
    "positions = \"learned\"\nmax_positions = 40\ntie_embeddings = false\n[model.attention]\nnum_heads = 3\nwindow = "
    "5\nbias = true\n[model.gelu]\nbias = true\n";

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
  const at::Tensor logits = model->logits(tokens.slice(1, 0, -1), state).flatten(0, 1),
                   targets = tokens.slice(1, 1).flatten();
  const at::Tensor expected = at::cross_entropy_loss(logits, targets), loss = model->loss(tokens);
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
  const auto a = make_model(GetParam()), b = make_model(GetParam());
  b->initialise(7);  // leaves no trace
  a->initialise(3), b->initialise(3);
  for (const auto& item : a->named_parameters())
    EXPECT_TRUE(at::equal(item.value(), b->named_parameters()[item.key()])) << item.key();
  b->initialise(4);
  EXPECT_FALSE(at::equal(a->embedding, b->embedding));
  EXPECT_NEAR(a->embedding.std().item<double>(), 0.02, 0.002);
}

TEST_P(LanguageModels, ACutSequenceGivesTheSameLogits) {
  const auto model = random_model(GetParam());
  const at::NoGradGuard no_grad;
  ModelState whole_state, state;
  const at::Tensor whole = model->logits(tokens, whole_state);
  std::vector<at::Tensor> parts;
  for (const at::Tensor& part : tokens.split_with_sizes({9, 1, 1, 16, 7}, 1))
    parts.push_back(model->logits(part, state));
  EXPECT_LE(relative_error(at::cat(parts, 1), whole), 1e-12);
  EXPECT_EQ(state.position, tokens.size(1));
}

INSTANTIATE_TEST_SUITE_P(Kinds, LanguageModels, testing::Values(kTied, kUntied),
                         [](const auto& info) { return info.index ? "Untied" : "Tied"; });

// Every score written out, those outside the window minus infinity.
at::Tensor masked(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t window, double scale) {
  const int64_t time = q.size(1), size = k.size(1), group = q.size(2) / k.size(2);
  const at::Tensor distance = at::arange(size - time, size).unsqueeze(1) - at::arange(size);
  const at::Tensor seen = (distance >= 0) & (distance < (window < 0 ? size : window));
  const at::Tensor scores = at::einsum("bthd,bshd->bhts", {q, k.repeat_interleave(group, 2)}) * scale;
  return at::einsum("bhts,bshd->bthd",
                    {scores.masked_fill(~seen, -INFINITY).softmax(-1), v.repeat_interleave(group, 2)});
}

TEST(Attention, EqualsTheMaskedDenseForm) {
  for (const int64_t size : {1, 2, 37, 96})
    for (const int64_t time : {int64_t{1}, std::min<int64_t>(size, 5), size})
      for (const int64_t window : {-1, 1, 3, 16, 50})
        for (const int64_t kv_heads : {1, 2, 4}) {
          const auto random = [&](const char* name, int64_t length, int64_t heads) {
            return at::randn({2, length, heads, 6}, generator(name), at::kDouble).requires_grad_();
          };
          const at::Tensor q = random("q", time, 4), k = random("k", size, kv_heads), v = random("v", size, kv_heads);
          const at::Tensor out = causal_attention(q, k, v, window, 0.7), expected = masked(q, k, v, window, 0.7);
          const at::Tensor c = at::randn(out.sizes(), generator("c"), at::kDouble);
          const auto found = torch::autograd::grad({(c * out).sum()}, {q, k, v});
          const auto wanted = torch::autograd::grad({(c * expected).sum()}, {q, k, v});
          const auto where = fmt::format("time {} of {}, window {}, {} kv heads", time, size, window, kv_heads);
          EXPECT_LE(relative_error(out, expected), 1e-12) << where;
          for (size_t i = 0; i < 3; ++i)  // the gradient of q and k is 0 where one key is seen
            EXPECT_LE((found[i] - wanted[i]).abs().max().item<double>(), 1e-12) << "qkv"[i] << ", " << where;
        }
}

// A preset's parameters with 32,000 tokens: two small models tell what a layer and what all else hold.
double preset_size(const std::string& name) {
  const ConfigNode model =
      ConfigNode::read_file(fs::path(ASSAY_SOURCE_DIR) / "plans" / "models" / (name + ".toml")).child("model");
  ModelSpec spec = ModelSpec::read(model);
  spec.config.vocab_size = 32000, spec.config.max_positions = 2048;
  const int64_t layers = spec.config.num_layers;
  const auto size = [&](int64_t count) {
    spec.config.num_layers = count;
    return double(LanguageModel(spec).parameter_count());
  };
  const double one = size(1), two = size(2);
  return one + double(layers - 1) * (two - one);
}

TEST(Presets, HaveThePapersSizes) {
  for (const char* name : {"transformer", "transformer++", "transformer++_qk_norm", "window", "mamba1"}) {
    EXPECT_NEAR(preset_size(name) / 110e6, 1, 0.05) << name;  // Mamba-1 has 115M
    EXPECT_NEAR(preset_size(std::string(name) + "_1.3b") / 1.3e9, 1, 0.06) << name << "_1.3b";
  }
}

}  // namespace
}  // namespace assay::nn
