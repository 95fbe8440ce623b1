// AdamW against the formula written out element by element.
#include "train/optimizer.h"

#include <torch/torch.h>

#include <cmath>

#include "nn/testing.h"
#include "ops/dense/adamw/adamw.h"

namespace assay::train {
namespace {

// [Loshchilov & Hutter 2019, Alg. 2]; g already clipped.
struct Element {
  double x;
  double m = 0;
  double v = 0;
  void step(double g, double rate, double decay, const TrainConfig& c, int64_t t) {
    m = c.beta1 * m + (1 - c.beta1) * g;
    v = c.beta2 * v + (1 - c.beta2) * g * g;
    const double m_hat = m / (1 - std::pow(c.beta1, double(t)));
    const double v_hat = v / (1 - std::pow(c.beta2, double(t)));
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
  return at::randn(like.sizes(), nn::generator(fmt::format("{} {}", name, step)), at::kDouble)
      .to(like.options());
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
    const double norm = norm_of(*model, step);
    const double scale = clip > 0 ? std::min(1.0, clip / norm) : 1;
    const double rate = 0.1 / double(step + 1);
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
    optimizer.read_moments(
        [&](const std::string&, const at::Tensor& moment) { before.push_back(moment.clone()); });
    for (const auto& parameter : model->parameters()) before.push_back(parameter.detach().clone());
    set_gradients(*model, 1);
    model->parameters()[3].mutable_grad().flatten()[1] = poison;
    EXPECT_FALSE(std::isfinite(optimizer.step(0.1, 1).item<double>()));
    std::vector<at::Tensor> after;
    optimizer.read_moments(
        [&](const std::string&, const at::Tensor& moment) { after.push_back(moment); });
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

// Sizes around those of vectors and of the parts that a block updates, and more tensors than one
// launch takes.
const std::vector<int64_t> kSizes = [] {
  std::vector<int64_t> sizes(520, 3);
  for (const int64_t size : {0, 1, 4, 5, 4097, 16384, 16385, 1 << 20}) sizes.push_back(size);
  return sizes;
}();

// Random float32 tensors on CUDA. Some begin 4 bytes past a multiple of 16.
std::vector<at::Tensor> tensors_on_cuda(const std::string& name, size_t misaligned_every) {
  std::vector<at::Tensor> out;
  for (size_t i = 0; i < kSizes.size(); ++i) {
    const int64_t skip = i % misaligned_every == 0 ? 1 : 0;
    const at::Generator noise = nn::generator(fmt::format("{} {}", name, i));
    out.push_back(at::randn({kSizes[i] + skip}, noise, at::kFloat).to(at::kCUDA).slice(0, skip));
  }
  return out;
}
std::vector<at::Tensor> zeros_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> out;
  for (const at::Tensor& tensor : tensors) out.push_back(at::zeros_like(tensor));
  return out;
}
// Rounded numbers of every other tensor, some of them 2 bytes past a multiple of 16.
std::vector<at::Tensor> nans_for(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> out;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int64_t skip = i % 4 == 1 ? 1 : 0;
    const auto options = tensors[i].options().dtype(at::kBFloat16);
    out.push_back(i % 2 ? at::full({tensors[i].numel() + skip}, NAN, options).slice(0, skip)
                        : at::Tensor());
  }
  return out;
}
ops::AdamWTensors adamw_tensors() {
  const auto parameters = tensors_on_cuda("parameters", 3);
  return {parameters, tensors_on_cuda("gradients", 4), zeros_of(parameters), zeros_of(parameters),
          nans_for(parameters)};
}
at::Tensor cuda_scalar(double value) { return at::full({}, value, at::device(at::kCUDA)); }

// The factors of the moments are numbers of float32, so that the kernel rounds results only.
ops::AdamWSettings adamw_settings(double weight_decay, int64_t step) {
  return {0.01 / double(step), 0.875, 0.9375, weight_decay, 1e-6, step};
}
void step_in_float64(at::Tensor& x, at::Tensor& m, at::Tensor& v, const at::Tensor& g,
                     const ops::AdamWSettings& s) {
  const double time = double(s.step);
  m = s.beta1 * m + (1 - s.beta1) * g;
  v = s.beta2 * v + (1 - s.beta2) * g * g;
  const at::Tensor m_hat = m / (1 - std::pow(s.beta1, time));
  const at::Tensor v_hat = v / (1 - std::pow(s.beta2, time));
  x = x - s.learning_rate * s.weight_decay * x -
      s.learning_rate * m_hat / (v_hat.sqrt() + s.epsilon);
}
void expect_within(const at::Tensor& found, const at::Tensor& expected, double error, size_t i) {
  if (expected.numel() == 0) return;
  EXPECT_LE((found - expected).abs().max().item<double>(), error) << "tensor " << i;
}

void expect_kernel_right(double weight_decay, double scale) {
  SCOPED_TRACE(fmt::format("weight decay {}, scale {}", weight_decay, scale));
  const ops::AdamWTensors t = adamw_tensors();
  const ops::AdamWTensors again = adamw_tensors();
  std::vector<at::Tensor> x;
  std::vector<at::Tensor> m;
  std::vector<at::Tensor> v;
  for (const at::Tensor& parameter : t.parameters) {
    x.push_back(parameter.to(at::kDouble));
    m.push_back(at::zeros_like(x.back()));
    v.push_back(at::zeros_like(x.back()));
  }
  for (int64_t step = 1; step <= 4; ++step) {
    const auto settings = adamw_settings(weight_decay, step);
    ops::adamw_(t, settings, cuda_scalar(scale), cuda_scalar(0));
    ops::adamw_(again, settings, cuda_scalar(scale), cuda_scalar(0));
    for (size_t i = 0; i < x.size(); ++i) {
      step_in_float64(x[i], m[i], v[i], t.gradients[i].to(at::kDouble) / scale, settings);
      t.gradients[i].mul_(-0.5);
      again.gradients[i].mul_(-0.5);
    }
  }
  for (size_t i = 0; i < x.size(); ++i) {
    expect_within(t.parameters[i], x[i], 4e-6, i);
    expect_within(t.averages[i], m[i], 2e-6, i);
    expect_within(t.squares[i], v[i], 1e-5, i);
    EXPECT_TRUE(at::equal(t.parameters[i], again.parameters[i])) << "tensor " << i;
    EXPECT_TRUE(at::equal(t.averages[i], again.averages[i])) << "tensor " << i;
    EXPECT_TRUE(at::equal(t.squares[i], again.squares[i])) << "tensor " << i;
    if (t.rounded[i].defined())
      EXPECT_TRUE(at::equal(t.rounded[i], t.parameters[i].to(at::kBFloat16))) << "tensor " << i;
  }
}

TEST(AdamW, OnCudaIsTheFormulaForAnySizeAndAddress) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  for (const double weight_decay : {0.0, 0.3})
    for (const double scale : {1.0, 3.7}) expect_kernel_right(weight_decay, scale);
}

TEST(AdamW, OnCudaEqualsTheOneOfTorch) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  const ops::AdamWTensors t = adamw_tensors();
  const ops::AdamWTensors torchs = adamw_tensors();
  const at::Tensor scale = cuda_scalar(1.5);
  const at::Tensor broken = cuda_scalar(0);
  for (int64_t step = 1; step <= 3; ++step) {
    const std::vector<at::Tensor> steps(kSizes.size(), cuda_scalar(double(step)));
    ops::adamw_(t, {0.01, 0.9, 0.95, 0.1, 1e-8, step}, scale, broken);
    at::_fused_adamw_(torchs.parameters, torchs.gradients, torchs.averages, torchs.squares, {},
                      steps, 0.01, 0.9, 0.95, 0.1, 1e-8, /*amsgrad=*/false, /*maximize=*/false,
                      scale, broken);
    for (const at::Tensor& gradient : torchs.gradients) gradient.mul_(1.5);  // it divides them
  }
  for (size_t i = 0; i < kSizes.size(); ++i) {
    expect_within(t.parameters[i], torchs.parameters[i], 2e-6, i);
    expect_within(t.averages[i], torchs.averages[i], 1e-6, i);
    expect_within(t.squares[i], torchs.squares[i], 1e-6, i);
  }
}

TEST(AdamW, OnCudaABrokenStepChangesNothing) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  const ops::AdamWTensors t = adamw_tensors();
  const ops::AdamWTensors before = adamw_tensors();
  for (const at::Tensor& gradient : t.gradients) gradient.fill_(NAN);
  ops::adamw_(t, adamw_settings(0.3, 1), cuda_scalar(NAN), cuda_scalar(1));
  for (size_t i = 0; i < kSizes.size(); ++i) {
    EXPECT_TRUE(at::equal(t.parameters[i], before.parameters[i])) << "tensor " << i;
    EXPECT_TRUE(at::equal(t.averages[i], before.averages[i])) << "tensor " << i;
    EXPECT_TRUE(at::equal(t.squares[i], before.squares[i])) << "tensor " << i;
    if (t.rounded[i].defined()) EXPECT_TRUE(t.rounded[i].isnan().all().item<bool>());
  }
}

TEST(AdamW, OnCudaChangesTheVersionsOfWhatItWrites) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  const ops::AdamWTensors t = adamw_tensors();
  const auto version = t.parameters.back()._version();
  const auto moment = t.squares.back()._version();
  ops::adamw_(t, adamw_settings(0.3, 1), cuda_scalar(1), cuda_scalar(0));
  EXPECT_GT(t.parameters.back()._version(), version);
  EXPECT_GT(t.squares.back()._version(), moment);
}

// Three steps in bfloat16 on CUDA, whose products keep rounded weights or round them each time.
std::vector<at::Tensor> weights_after_steps(bool keep_rounded) {
  const auto model = nn::random_model(kModel);
  model->to(at::kCUDA, at::kFloat);
  TrainConfig c;
  c.weight_decay = 0.3;
  AdamW optimizer(*model, c);
  const at::Tensor x = at::randn({16, 8}, nn::generator("x")).to(at::kCUDA, at::kBFloat16);
  const std::vector<nn::Linear*> linears = nn::linears_of(*model);
  EXPECT_GT(linears.size(), 5);
  for (int64_t step = 0; step < 3; ++step) {
    for (nn::Linear* linear : linears) {
      if (!keep_rounded) linear->rounded.reset();
      if (linear->weight.size(1) == x.size(1)) linear->forward(x).square().mean().backward();
    }
    optimizer.step(0.01, step);
  }
  if (keep_rounded) {
    const nn::Linear& first = *linears.front();
    EXPECT_TRUE(first.rounded->is_of(first.weight));
    EXPECT_TRUE(at::equal(first.rounded->value, first.weight.to(at::kBFloat16)));
  }
  return model->parameters();
}
TEST(AdamW, OnCudaWritesTheRoundedWeightsThatProductsKeep) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  const std::vector<at::Tensor> kept = weights_after_steps(true);
  const std::vector<at::Tensor> rounded_again = weights_after_steps(false);
  for (size_t i = 0; i < kept.size(); ++i) EXPECT_TRUE(at::equal(kept[i], rounded_again[i])) << i;
}

// The norm of the gradients, the clip and the groups with it.
TEST(AdamW, OnCudaEqualsTheCpu) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  const auto model = nn::random_model(kModel);
  const auto on_cuda = nn::random_model(kModel);
  on_cuda->to(at::kCUDA, at::kFloat);
  TrainConfig c;
  c.clip = 0.5;
  c.weight_decay = 0.3;
  AdamW optimizer(*model, c);
  AdamW other(*on_cuda, c);
  for (int64_t step = 0; step < 3; ++step) {
    set_gradients(*model, step);
    set_gradients(*on_cuda, step);
    if (step == 2) on_cuda->parameters()[3].mutable_grad().flatten()[1] = NAN;
    if (step < 2) optimizer.step(0.1, step);
    other.step(0.1, step);
  }
  const auto expected = model->named_parameters();
  for (const auto& item : on_cuda->named_parameters())
    EXPECT_LE(nn::relative_error(item.value().to(at::kCPU, at::kDouble), expected[item.key()]),
              1e-5)
        << item.key();
}

}  // namespace
}  // namespace assay::train
