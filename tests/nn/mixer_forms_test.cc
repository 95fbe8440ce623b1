// The law of every mixer: wherever a sequence is cut, the output is the same. One piece is the
// parallel form, pieces of C the chunked form, pieces of one token decoding. Causality follows: a
// piece never sees what comes later.
#include <torch/torch.h>

#include "mixer_examples.h"

namespace assay::nn {
namespace {

// 97 is prime: no chunk size divides it
constexpr int64_t kBatch = 2;
constexpr int64_t kModel = 48;
constexpr int64_t kTime = 97;

struct MixerForms : testing::TestWithParam<MixerExample> {
  MixerForms()
      : mixer(GetParam().make(kModel)),
        x(at::randn({kBatch, kTime, kModel}, generator("x"), at::kDouble)) {}
  at::Tensor run(int64_t piece) {
    State state;
    std::vector<at::Tensor> y;
    for (const at::Tensor& part : x.split(piece, /*dim=*/1)) {
      state.context.last = int64_t(y.size() + 1) * piece >= kTime;
      y.push_back(mixer->forward(part, state));
    }
    return at::cat(y, 1);
  }
  // The auxiliary loss, the mean over all tokens; zero if the mixer has none.
  at::Tensor auxiliary_loss(int64_t piece) {
    State state;
    at::Tensor sum = at::zeros({}, at::kDouble);
    if (!mixer->has_auxiliary_loss()) return sum;
    for (const at::Tensor& part : x.split(piece, /*dim=*/1)) {
      state.context.handed[Context::kAuxiliaryLoss] = at::zeros({}, at::kDouble);
      mixer->forward(part, state);
      sum = sum +
            state.context.handed[Context::kAuxiliaryLoss] * (double(part.size(1)) / double(kTime));
    }
    return sum;
  }
  // Gradients of Σ c ⊙ y and the auxiliary loss: by x, then by each parameter.
  std::vector<at::Tensor> gradients(int64_t piece) {
    std::vector<at::Tensor> inputs = {x.requires_grad_()};
    for (const at::Tensor& parameter : mixer->parameters()) inputs.push_back(parameter);
    const at::Tensor y = run(piece);
    const at::Tensor c = at::randn(y.sizes(), generator("cotangent"), y.options());
    return torch::autograd::grad({(c * y).sum() + auxiliary_loss(piece)}, inputs);
  }
  std::shared_ptr<Mixer> mixer;
  at::Tensor x;
};

// Advice for a failure in which the forms of a mixer differ.
constexpr const char* kAdvice =
    "\nDoes the mixer read later positions, "
    "or does its state lack something that later pieces need?";

TEST_P(MixerForms, AreOneFunction) {
  const at::NoGradGuard no_grad;
  const at::Tensor whole = run(kTime);
  ASSERT_EQ(whole.sizes(), x.sizes());
  for (const int64_t piece : {1, 16, 31})
    EXPECT_LE(relative_error(run(piece), whole), 1e-12)
        << "pieces of " << piece << "; " << GetParam().table << kAdvice;
}

TEST_P(MixerForms, HaveOneAuxiliaryLoss) {
  const at::NoGradGuard no_grad;
  const double whole = auxiliary_loss(kTime).item<double>();
  EXPECT_EQ(whole != 0, mixer->has_auxiliary_loss());
  for (const int64_t piece : {1, 16, 31})
    EXPECT_NEAR(auxiliary_loss(piece).item<double>(), whole, 1e-12)
        << "pieces of " << piece << "; " << GetParam().table;
}

TEST_P(MixerForms, HaveOneGradient) {
  const auto whole = gradients(kTime);
  std::vector<std::string> names = {"x"};
  for (const auto& item : mixer->named_parameters()) names.push_back(item.key());
  for (size_t i = 0; i < whole.size(); ++i)
    EXPECT_GT(whole[i].norm().item<double>(), 1e-6)
        << names[i] << " has no effect; " << GetParam().table;
  for (const int64_t piece : {1, 16, 31}) {
    const auto cut = gradients(piece);
    for (size_t i = 0; i < cut.size(); ++i)
      EXPECT_LE(relative_error(cut[i], whole[i]), 1e-12)
          << names[i] << ", pieces of " << piece << "; " << GetParam().table;
  }
}

// The gradient of the projection of queries, keys and values is that of the function: a difference
// quotient along a random direction. A step so small changes no choice.
TEST_P(MixerForms, GradientOfTheProjectionIsTheSlope) {
  const auto parameters = mixer->named_parameters();
  const at::Tensor* weight = parameters.find("qkv.weight");
  // Top-1 Element's gradient is that of a softmax, not of what it computes.
  if (!weight || GetParam().mixer == "top1_element") return;
  const at::Tensor c = at::randn(x.sizes(), generator("cotangent"), at::kDouble);
  const at::Tensor direction = at::randn(weight->sizes(), generator("direction"), at::kDouble);
  const auto loss = [&] { return (c * run(kTime)).sum(); };
  const double slope =
      (torch::autograd::grad({loss()}, {*weight})[0] * direction).sum().item<double>();
  const at::NoGradGuard no_grad;
  const auto moved = [&](double step) {
    weight->add_(direction, step);
    const double value = loss().item<double>();
    weight->sub_(direction, step);
    return value;
  };
  constexpr double kStep = 1e-6;
  const double quotient = (moved(kStep) - moved(-kStep)) / (2 * kStep);
  EXPECT_NEAR(quotient, slope, 1e-5 * std::abs(slope) + 1e-4) << GetParam().table;
}

// In bf16 the median position counts: where a mixer selects, rounding may change a choice.
TEST_P(MixerForms, ComputeInTheDtypeOfTheirInput) {
  const at::NoGradGuard no_grad;
  const at::Tensor expected = run(kTime);
  mixer->to(at::kFloat);
  for (const auto& [dtype, tolerance] : {std::pair(at::kFloat, 1e-5), {at::kBFloat16, 0.05}}) {
    State state;
    const at::Tensor y = mixer->forward(x.to(dtype), state);
    EXPECT_EQ(y.scalar_type(), dtype);
    const at::Tensor error = (y.to(at::kDouble) - expected).norm(2, -1) / expected.norm(2, -1);
    EXPECT_LE(error.median().item<double>(), tolerance)
        << c10::toString(dtype) << "; " << GetParam().table;
  }
}

// Where a mixer says what its weights are: a distribution over what came before, and none
// of what comes. A sink takes a part of it.
TEST_P(MixerForms, AttentionWeightsAreADistribution) {
  const at::Tensor weights = mixer->attention_weights(x);
  if (!weights.defined()) return;
  EXPECT_EQ(weights.dim(), 4);
  EXPECT_EQ(weights.size(-1), kTime);
  EXPECT_GE(weights.min().item<double>(), -1e-12);
  EXPECT_LE(weights.triu(1).abs().max().item<double>(), 1e-12);
  const at::Tensor sums = weights.sum(-1);
  EXPECT_LE(sums.max().item<double>(), 1 + 1e-12);
  if (GetParam().table.find("sinks = true") != std::string::npos)
    EXPECT_LT(sums.max().item<double>(), 1);
  else EXPECT_GE(sums.min().item<double>(), 1 - 1e-12);
}

INSTANTIATE_TEST_SUITE_P(Registry, MixerForms, testing::ValuesIn(mixer_examples()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace assay::nn
