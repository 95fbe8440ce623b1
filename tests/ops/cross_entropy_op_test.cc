// The fused cross-entropy against log-sum-exp in float64, its gradient against autograd's, and rows
// that must not pass.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "ops/cross_entropy/cross_entropy.h"

namespace assay::ops {
namespace {

struct Case {
  int64_t rows, classes;
  double spread = 3;
};

// The largest ‖a_i − b_i‖ / ‖b_i‖ over rows.
double worst_row(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = a.to(at::kCPU, at::kDouble), y = b.to(at::kCPU, at::kDouble);
  return ((x - y).norm(2, -1) / y.norm(2, -1).clamp_min(1e-300)).max().item<double>();
}

void expect_right(const Case& c, at::ScalarType dtype, at::Device device, double tolerance) {
  SCOPED_TRACE(c10::str("N ", c.rows, " V ", c.classes, " ", dtype, " on ", device));
  torch::manual_seed(c.rows * 1000 + c.classes);
  at::Tensor logits = (torch::randn({c.rows, c.classes}, at::kDouble) * c.spread).to(dtype);
  const at::Tensor targets = torch::randint(c.classes, {c.rows}, at::kLong);
  const at::Tensor exact = logits.to(at::kDouble).detach().requires_grad_();
  const at::Tensor expected = torch::nn::functional::cross_entropy(
      exact, targets, torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kNone));
  (expected.sum() * 0.25).backward();
  logits = logits.to(device);
  const at::Tensor on_device = targets.to(device), alone = cross_entropy(logits, on_device);
  const at::Tensor losses = cross_entropy_(logits, on_device, 0.25);
  EXPECT_TRUE(at::equal(alone, losses));
  EXPECT_LE(worst_row(losses.unsqueeze(0), expected.unsqueeze(0)),
            dtype == at::kDouble ? 1e-13 : 1e-6);
  if (c.classes > 1) EXPECT_LE(worst_row(logits, exact.grad()), tolerance);
}

void expect_right_on(at::Device device) {
  for (const Case& c :
       {Case{1, 1}, {3, 2}, {5, 7}, {4, 1000}, {3, 32000}, {2, 32001}, {7, 1029}, {5, 515, 80}}) {
    expect_right(c, at::kDouble, device, 1e-12);
    expect_right(c, at::kFloat, device, 1e-5);
    expect_right(c, at::kBFloat16, device, 1e-2);
  }
}

TEST(CrossEntropyOp, EqualsItsDefinition) { expect_right_on(at::kCPU); }
TEST(CrossEntropyOp, OnCudaEqualsItsDefinition) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  expect_right_on(at::kCUDA);
}

TEST(CrossEntropyOp, ANumberThatIsNoneStaysInItsRow) {
  const at::Tensor clean = torch::randn({4, 100}), targets = torch::tensor({1, 2, 3, 99});
  const at::Tensor expected = cross_entropy(clean, targets);
  at::Tensor logits = clean.clone();
  logits[2][50] = NAN;
  const at::Tensor losses = cross_entropy_(logits, targets, 1);
  EXPECT_TRUE(losses[2].isnan().item<bool>() && logits[2].isnan().any().item<bool>());
  EXPECT_FALSE(at::cat({logits.slice(0, 0, 2), logits.slice(0, 3)}).isnan().any().item<bool>());
  EXPECT_TRUE(at::equal(losses[3], expected[3]));
}

TEST(CrossEntropyOp, ATargetOutsideMakesItsRowNan) {
  at::Tensor logits = torch::randn({3, 10});
  const at::Tensor losses = cross_entropy_(logits, torch::tensor({10, -1, 9}), 1);
  EXPECT_TRUE(losses[0].isnan().item<bool>() && losses[1].isnan().item<bool>() &&
              losses[2].isfinite().item<bool>());
}

TEST(CrossEntropyOp, BadArgumentsAreNamed) {
  const at::Tensor logits = torch::randn({3, 10}), targets = torch::zeros({3}, at::kLong);
  EXPECT_THROW(cross_entropy(logits[0], targets), c10::ValueError);
  EXPECT_THROW(cross_entropy(logits, targets.slice(0, 1)), c10::ValueError);
  EXPECT_THROW(cross_entropy(logits, targets.to(at::kInt)), c10::ValueError);
  EXPECT_THROW(cross_entropy(logits.t().contiguous().t(), targets), c10::ValueError);
}

}  // namespace
}  // namespace assay::ops
