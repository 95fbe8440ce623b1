// Tokens drawn from logits: the device draws what the CPU draws, and rows do not affect each other.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>

#include "ops/dense/sampling/sampling.h"

namespace assay::ops {
namespace {

// Rows with ties (bf16 has few values), peaks, a flat row and logits of −∞.
at::Tensor logits_of(int64_t rows, int64_t size, at::ScalarType dtype) {
  torch::manual_seed(rows * 100 + size);
  at::Tensor logits = torch::randn({rows, size}) * torch::linspace(0.2, 8, rows).unsqueeze(1);
  logits[0].fill_(0.5);
  if (rows > 2 && size > 3) logits[2].slice(0, 0, size - 2).fill_(-INFINITY);
  return logits.to(dtype);
}

std::vector<Draw> draws_of(int64_t rows, int round) {
  const double temperatures[] = {1, 0.7, 1.5, 0, 0.1};
  const double shares[] = {1, 0.95, 0.5, 1e-9};
  const int64_t counts[] = {0, 1, 2, 40, 1 << 30};
  std::vector<Draw> draws;
  for (int64_t b = 0; b < rows; ++b) {
    const int64_t i = b + 7 * round;
    draws.push_back({.temperature = temperatures[i % 5],
                     .top_p = shares[(i / 5) % 4],
                     .uniform = std::fmod(0.137 + 0.6180339887 * double(i), 1),
                     .top_k = counts[(i / 3) % 5]});
  }
  return draws;
}

TEST(SamplingOp, RowsAreDrawnAlone) {
  const at::Tensor logits = logits_of(40, 257, at::kFloat);
  const std::vector<Draw> draws = draws_of(40, 0);
  const at::Tensor all = sample(logits, draws);
  for (int64_t b = 0; b < 40; ++b)
    EXPECT_TRUE(at::equal(sample(logits.slice(0, b, b + 1), {&draws[size_t(b)], 1}),
                          all.slice(0, b, b + 1)));
}

TEST(SamplingOp, InvalidRowGivesMinusOneAndLeavesTheOthers) {
  at::Tensor logits = logits_of(4, 100, at::kFloat);
  const std::vector<Draw> draws(4);
  const at::Tensor clean = sample(logits, draws);
  logits[1][99] = NAN;
  logits[3].fill_(-INFINITY);
  const at::Tensor tokens = sample(logits, draws);
  EXPECT_EQ(tokens[1].item<int64_t>(), -1);
  EXPECT_EQ(tokens[3].item<int64_t>(), -1);
  EXPECT_TRUE(at::equal(tokens[0], clean[0]));
  EXPECT_TRUE(at::equal(tokens[2], clean[2]));
}

TEST(SamplingOp, WrongNumberOfDrawsIsRejected) {
  const std::vector<Draw> draws(3);
  EXPECT_THROW(sample(torch::zeros({2, 5}), draws), c10::ValueError);
  EXPECT_THROW(sample(torch::zeros({5}), draws), c10::ValueError);
}

class SamplingOpOfSize : public testing::TestWithParam<int64_t> {};
INSTANTIATE_TEST_SUITE_P(, SamplingOpOfSize, testing::Values(1, 5, 1000, 32000, 50257, 151936),
                         testing::PrintToStringParamName());

TEST_P(SamplingOpOfSize, OnCudaEqualsTheCpu) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16})
    for (int round = 0; round < 6; ++round) {
      const at::Tensor logits = logits_of(64, GetParam(), dtype);
      const std::vector<Draw> draws = draws_of(64, round);
      const at::Tensor expected = sample(logits, draws);
      const at::Tensor tokens = sample(logits.cuda(), draws);
      EXPECT_TRUE(at::equal(sample(logits.cuda(), draws), tokens)) << "not repeatable";
      const int64_t different = (tokens.cpu() != expected).sum().item<int64_t>();
      EXPECT_EQ(different, 0) << dtype << ", round " << round;
    }
}

// The weights of as many likeliest tokens as the kernel takes have a sum below 2^64.
TEST(SamplingOp, OnCudaFlatRowsOfAnySizeEqualTheCpu) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  for (const int64_t size : {(1 << 24) - 1, 1 << 24}) {
    const at::Tensor logits = at::zeros({2, size}, at::kBFloat16);
    const std::vector<Draw> draws = {{.uniform = 0.75}, {.top_p = 0.5, .uniform = 0.5}};
    EXPECT_TRUE(at::equal(sample(logits.cuda(), draws).cpu(), sample(logits, draws))) << size;
  }
}

TEST(SamplingOp, InvalidRowOnCudaGivesMinusOne) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  at::Tensor logits = logits_of(3, 32000, at::kFloat);
  logits[0][31999] = NAN;
  logits[1].fill_(INFINITY);
  const at::Tensor tokens = sample(logits.cuda(), draws_of(3, 1));
  EXPECT_EQ(tokens[0].item<int64_t>(), -1);
  EXPECT_EQ(tokens[1].item<int64_t>(), -1);
  EXPECT_GE(tokens[2].item<int64_t>(), 0);
}

}  // namespace
}  // namespace assay::ops
