// Parts of layers that only a GPU calls, on the CPU.
#include "nn/layers.h"

#include <torch/torch.h>

#include "testing.h"

namespace assay::nn {
namespace {

TEST(SumsByProducts, EqualCumulativeSumsAndTheirGradients) {
  for (const int64_t time : {1, 2, 63, 64, 65, 129, 4097}) {
    SCOPED_TRACE(testing::Message() << "T " << time);
    const at::Tensor x = at::randn({2, time, 3}, at::kDouble).requires_grad_();
    const at::Tensor weights = at::randn_like(x);
    const at::Tensor sums = sums_by_products(x);
    const at::Tensor expected = x.cumsum(1);
    EXPECT_LE((sums - expected).abs().max().item<double>(), 1e-10);
    const auto gradient = [&](const at::Tensor& y) {
      return torch::autograd::grad({(y * weights).sum()}, {x})[0];
    };
    EXPECT_LE((gradient(sums) - gradient(expected)).abs().max().item<double>(), 1e-10);
  }
}

}  // namespace
}  // namespace assay::nn
