// Functions of tensors that operators call.
#include "ops/core/tensors.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace assay::ops {
namespace {

TEST(PrefixSums, EqualCumulativeSumsAndTheirGradients) {
  for (const int64_t time : {1, 2, 63, 64, 65, 129, 4097}) {
    SCOPED_TRACE(testing::Message() << "T " << time);
    const at::Tensor x = at::randn({2, time, 3}, at::kDouble).requires_grad_();
    const at::Tensor weights = at::randn_like(x);
    const at::Tensor sums = prefix_sums(x);
    const at::Tensor expected = x.cumsum(1);
    EXPECT_LE((sums - expected).abs().max().item<double>(), 1e-10);
    const auto gradient = [&](const at::Tensor& y) {
      return torch::autograd::grad({(y * weights).sum()}, {x})[0];
    };
    EXPECT_LE((gradient(sums) - gradient(expected)).abs().max().item<double>(), 1e-10);
  }
}

}  // namespace
}  // namespace assay::ops
