// AdamW against the formula written out element by element.
#include "train/optimizer.h"

#include <torch/torch.h>

#include <cmath>

#include "nn/testing.h"

namespace assay::train {
namespace {

// [Loshchilov & Hutter 2019, Alg. 2]; g already clipped.
struct Element {
  double x, m = 0, v = 0;
  void step(double g, double rate, double decay, const TrainConfig& c, int64_t t) {
    m = c.beta1 * m + (1 - c.beta1) * g;
    v = c.beta2 * v + (1 - c.beta2) * g * g;
    const double m_hat = m / (1 - std::pow(c.beta1, double(t))),
                 v_hat = v / (1 - std::pow(c.beta2, double(t)));
    x = x - rate * decay * x - rate * m_hat / (std::sqrt(v_hat) + c.epsilon);
  }
};

const char* kModel =
    "[model]\nvocab_size = 11\nd_model = 8\nnum_layers = 3\npattern = ['attention', 'mamba1', "
    "'rwkv6']\n"
    "[model.attention]\nnum_heads = 2\n[model.rwkv6]\nnum_heads = 2\n";
// RWKV's w₀ learns at twice the rate; the matrices of its low-rank paths do not decay.
bool is_start_of_decay(const std::string& name) {
  return name == "layers_2.mixer.decay.up_proj.bias";
}
bool is_low_rank(const std::string& name) {
  return name.starts_with("layers_2.mixer.mix_proj") || name.starts_with("layers_2.mixer.decay");
}

bool decays(const std::string& name, const at::Tensor& parameter) {
  if (is_low_rank(name) || parameter.dim() != 2) return false;
  return name.ends_with(".weight") || name == "embedding";
}

at::Tensor gradient(const at::Tensor& like, const std::string& name, int64_t step) {
  return at::randn(like.sizes(), nn::generator(fmt::format("{} {}", name, step)), like.options());
}
double norm_of(nn::LanguageModel& model, int64_t step) {
  double squares = 0;
  for (const auto& item : model.named_parameters())
    squares += gradient(item.value(), item.key(), step).square().sum().item<double>();
  return std::sqrt(squares);
}
void set_gradients(nn::LanguageModel& model, int64_t step) {
  for (auto& item : model.named_parameters())
    item.value().mutable_grad() = gradient(item.value(), item.key(), step);
}

void expect_formula(double clip, double tolerance) {
  SCOPED_TRACE(fmt::format("clip {}", clip));
  const auto model = nn::random_model(kModel);
  TrainConfig c;
  c.clip = clip;
  c.weight_decay = 0.3;
  c.beta1 = 0.8;
  c.beta2 = 0.9;
  std::map<std::string, std::vector<Element>> expected;
  for (const auto& item : model->named_parameters())
    for (int64_t i = 0; i < item.value().numel(); ++i)
      expected[item.key()].push_back({item.value().flatten()[i].item<double>()});
  AdamW optimizer(*model, c);
  for (int64_t step = 0; step < 4; ++step) {
    const double norm = norm_of(*model, step), scale = clip > 0 ? std::min(1.0, clip / norm) : 1,
                 rate = 0.1 / double(step + 1);
    set_gradients(*model, step);
    EXPECT_NEAR(optimizer.step(rate, step).item<double>(), norm, 1e-5 * norm) << "step " << step;
    for (const auto& item : model->named_parameters()) {
      const at::Tensor g = gradient(item.value(), item.key(), step).flatten();
      const double own_rate = is_start_of_decay(item.key()) ? 2 * rate : rate;
      for (size_t i = 0; i < expected[item.key()].size(); ++i)
        expected[item.key()][i].step(scale * g[int64_t(i)].item<double>(), own_rate,
                                     decays(item.key(), item.value()) ? c.weight_decay : 0, c,
                                     step + 1);
      EXPECT_FALSE(item.value().grad().defined()) << item.key();
    }
  }
  for (const auto& item : model->named_parameters())
    for (size_t i = 0; i < expected[item.key()].size(); ++i)
      ASSERT_NEAR(item.value().flatten()[int64_t(i)].item<double>(), expected[item.key()][i].x,
                  tolerance)
          << item.key() << "[" << i << "]";
}

TEST(AdamW, IsTheFormula) { expect_formula(0, 1e-12); }
// Torch takes the scale in float32
TEST(AdamW, IsTheFormulaOnClippedGradients) { expect_formula(0.5, 1e-6); }

TEST(AdamW, AGradientThatIsNotFiniteChangesNothing) {
  for (const double poison : {NAN, INFINITY}) {
    const auto model = nn::random_model(kModel);
    AdamW optimizer(*model, TrainConfig{});
    set_gradients(*model, 0);
    optimizer.step(0.1, 0);
    std::vector<at::Tensor> before;
    for (const auto& [name, moment] : optimizer.moments()) before.push_back(moment.clone());
    for (const auto& parameter : model->parameters()) before.push_back(parameter.detach().clone());
    set_gradients(*model, 1);
    model->parameters()[3].mutable_grad().flatten()[1] = poison;
    EXPECT_FALSE(std::isfinite(optimizer.step(0.1, 1).item<double>()));
    std::vector<at::Tensor> after;
    for (const auto& [name, moment] : optimizer.moments()) after.push_back(moment);
    for (const auto& parameter : model->parameters()) after.push_back(parameter.detach());
    for (size_t i = 0; i < after.size(); ++i)
      EXPECT_TRUE(at::equal(before[i], after[i])) << "tensor " << i << ", poison " << poison;
  }
}

TEST(AdamW, DecaysMatricesAndEmbeddingsOnly) {
  const auto model = nn::random_model(kModel);
  TrainConfig c;
  c.weight_decay = 0.5;
  AdamW optimizer(*model, c);
  std::map<std::string, at::Tensor> before;
  for (auto& item : model->named_parameters()) before[item.key()] = item.value().detach().clone();
  optimizer.step(0.1, 0);  // no gradients: only decay moves a weight
  for (const auto& item : model->named_parameters()) {
    EXPECT_LE(nn::relative_error(item.value(), before[item.key()] *
                                                   (decays(item.key(), item.value()) ? 0.95 : 1.0)),
              1e-14)
        << item.key();
  }
}

}  // namespace
}  // namespace assay::train
