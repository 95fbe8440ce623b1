// The fused cross-entropy against log-sum-exp in float64, its gradient against autograd's, and rows
// that must not pass.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "ops/dense/cross_entropy/cross_entropy.h"
#include "ops/golden.h"

namespace assay::ops {
namespace {

struct Case {
  int64_t rows;
  int64_t classes;
  double spread = 3;
};

// The largest ‖a_i − b_i‖ / ‖b_i‖ over rows.
double worst_row(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = a.to(at::kCPU, at::kDouble);
  const at::Tensor y = b.to(at::kCPU, at::kDouble);
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
  const at::Tensor on_device = targets.to(device);
  const at::Tensor alone = cross_entropy(logits, on_device);
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

// Also a NaN that a thread of the GPU reads first, where its largest logit so far is −∞.
void expect_nan_in_its_row(at::Device device) {
  const at::Tensor targets = torch::tensor({1, 2, 3, 99}).to(device);
  for (const int64_t classes : {100, 101})
    for (const int64_t at : {0, 50, 99}) {
      SCOPED_TRACE(c10::str("NaN at ", at, " of ", classes));
      const at::Tensor clean = torch::randn({4, classes}, device);
      const at::Tensor expected = cross_entropy(clean, targets);
      at::Tensor logits = clean.clone();
      logits[2][at] = NAN;
      const at::Tensor losses = cross_entropy_(logits, targets, 1);
      EXPECT_TRUE(losses[2].isnan().item<bool>() && logits[2].isnan().any().item<bool>());
      EXPECT_FALSE(at::cat({logits.slice(0, 0, 2), logits.slice(0, 3)}).isnan().any().item<bool>());
      EXPECT_TRUE(at::equal(losses[3], expected[3]));
    }
}
TEST(CrossEntropyOp, NanStaysInItsRow) { expect_nan_in_its_row(at::kCPU); }
TEST(CrossEntropyOp, OnCudaNanStaysInItsRow) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  expect_nan_in_its_row(at::kCUDA);
}

// The last 64 logits are −∞, as of a padded vocabulary; and single ones.
void expect_masked_logits_right(at::Device device) {
  for (const int64_t classes : {32064, 32001})
    for (const auto& [dtype, tolerance] :
         {std::pair{at::kDouble, 1e-12}, {at::kFloat, 1e-5}, {at::kBFloat16, 1e-2}}) {
      SCOPED_TRACE(c10::str("V ", classes, " ", dtype, " on ", device));
      torch::manual_seed(classes);
      at::Tensor logits = torch::randn({3, classes}, at::kDouble).to(dtype);
      logits[0].slice(0, classes - 64).fill_(-INFINITY);
      logits[1].slice(0, 0, 600).fill_(-INFINITY);
      logits[2][5] = -INFINITY;
      const at::Tensor targets = torch::tensor({7, 700, 8});
      const at::Tensor exact = logits.to(at::kDouble);
      const at::Tensor log_p = exact.log_softmax(1);
      const at::Tensor index = targets.unsqueeze(1);
      const at::Tensor gradient =
          log_p.exp().scatter_add(1, index, -at::ones_like(index, log_p.options()));
      logits = logits.to(device);
      const at::Tensor losses = cross_entropy_(logits, targets.to(device), 1);
      EXPECT_LE(worst_row(losses.unsqueeze(0), -log_p.gather(1, index).t()),
                dtype == at::kDouble ? 1e-13 : 1e-6);
      EXPECT_LE(worst_row(logits, gradient), tolerance);
    }
}
TEST(CrossEntropyOp, InfiniteLogitsEqualTheDefinition) { expect_masked_logits_right(at::kCPU); }
TEST(CrossEntropyOp, OnCudaInfiniteLogitsEqualTheDefinition) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  expect_masked_logits_right(at::kCUDA);
}

TEST(CrossEntropyOp, OnCudaMisalignedLogitsEqualAlignedOnes) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  const at::Tensor targets =
      torch::randint(1024, {5}, torch::TensorOptions(at::kCUDA).dtype(at::kLong));
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    at::Tensor logits = torch::randn({5, 1024}, at::kCUDA).to(dtype);
    at::Tensor other = misaligned(logits);
    const at::Tensor losses = cross_entropy_(logits, targets, 1);
    EXPECT_LE(worst_row(cross_entropy_(other, targets, 1).unsqueeze(0), losses.unsqueeze(0)), 1e-6);
    EXPECT_LE(worst_row(other, logits), dtype == at::kFloat ? 1e-5 : 1e-2);
  }
}

void expect_nan_for_targets_outside(at::Device device) {
  at::Tensor logits = torch::randn({3, 10}, device);
  const at::Tensor losses = cross_entropy_(logits, torch::tensor({10, -1, 9}).to(device), 1);
  EXPECT_TRUE(losses[0].isnan().item<bool>() && losses[1].isnan().item<bool>() &&
              losses[2].isfinite().item<bool>());
}
TEST(CrossEntropyOp, ATargetOutsideMakesItsRowNan) { expect_nan_for_targets_outside(at::kCPU); }
TEST(CrossEntropyOp, OnCudaATargetOutsideMakesItsRowNan) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  expect_nan_for_targets_outside(at::kCUDA);
}

TEST(CrossEntropyOp, BadArgumentsAreNamed) {
  const at::Tensor logits = torch::randn({3, 10});
  const at::Tensor targets = torch::zeros({3}, at::kLong);
  EXPECT_THROW(cross_entropy(logits[0], targets), c10::ValueError);
  EXPECT_THROW(cross_entropy(logits, targets.slice(0, 1)), c10::ValueError);
  EXPECT_THROW(cross_entropy(logits, targets.to(at::kInt)), c10::ValueError);
  EXPECT_THROW(cross_entropy(logits.t().contiguous().t(), targets), c10::ValueError);
}

}  // namespace
}  // namespace assay::ops
