// Parts of a tensor whose gradients share one tensor: gradients written in place, copied ones, and
// both, against split_with_sizes().
#include "ops/core/split.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>

#include "ops/attention/top1_chunk/top1_chunk.h"
#include "ops/attention/top1_element/top1_element.h"
#include "ops/attention/window_attention/window_attention.h"
#include "ops/recurrence/causal_conv1d/causal_conv1d.h"
#include "ops/rowwise/gated_norm/gated_norm.h"
#include "ops/rowwise/unit_length/unit_length.h"

namespace assay::ops {
namespace {

using Parts = std::vector<at::Tensor>;
using Use = std::function<at::Tensor(const Parts&)>;

// more: columns after those that are split, as a padded product has them.
at::Tensor gradient(const at::Tensor& values, bool packed, const Use& use, int64_t more = 0) {
  const at::Tensor x = values.detach().requires_grad_();
  // as the output of a layer, so that x is not a leaf
  const at::Tensor wide = at::constant_pad_nd(x * 2, {0, more});
  const at::Tensor y = wide.narrow(-1, 0, x.size(-1));
  const Parts parts = packed ? ops::split(y, {16, 24, 8}) : y.split_with_sizes({16, 24, 8}, -1);
  const at::Tensor out = use(parts);
  const at::Tensor first = torch::autograd::grad({out.sum()}, {x}, {}, /*retain_graph=*/true)[0];
  const at::Tensor second = torch::autograd::grad({out.sum()}, {x})[0];
  EXPECT_TRUE(first.equal(second));
  return first;
}

void expect_same(at::Device device) {
  torch::manual_seed(5);
  const at::Tensor values = torch::randn({2, 7, 48}).to(device);
  const at::Tensor z = torch::randn({2, 7, 16});
  const at::Tensor w = torch::randn({24, 3}).to(device);
  const at::Tensor one = torch::ones({16}).to(device);
  const at::Tensor gate = z.to(device);
  const Use in_place = [&](const Parts& p) {
    const at::Tensor conv = std::get<0>(causal_conv1d(p[1], w, {}, "silu"));
    return at::cat({gated_rms_norm(gate, p[0], one, 1e-5, true), conv, unit_length(p[2], 1e-6)}, -1)
        .square();
  };
  const Use copied = [&](const Parts& p) {
    return at::cat({p[0].sin(), unit_length(p[1], 1e-6), p[2].exp()}, -1).square();
  };
  const Use used_twice = [&](const Parts& p) {
    return unit_length(p[1], 1e-6).square() * unit_length(p[1], 1e-3) + p[0].sum() + p[2].sum();
  };
  const Use unused_part = [&](const Parts& p) { return unit_length(p[2], 1e-6).exp(); };
  const Use of_a_slice = [&](const Parts& p) {
    return unit_length(p[1].slice(-1, 0, 8), 1e-6) +
           unit_length(p[1].slice(-1, 16, 24), 1e-6).exp();
  };
  const Use by_heads = [&](const Parts& p) {
    return unit_length(p[1].unflatten(-1, {3, 8}), 1e-6).exp();
  };
  int i = 0;
  for (const Use& use : {in_place, copied, used_twice, unused_part, of_a_slice, by_heads}) {
    SCOPED_TRACE(testing::Message() << "use " << i++ << " on " << device);
    const at::Tensor expected = gradient(values, false, use);
    for (const int64_t more : {0, 4})
      EXPECT_TRUE(gradient(values, true, use, more).equal(expected)) << more << " more columns";
  }
}

TEST(Split, GradientsEqualThoseOfViews) { expect_same(at::kCPU); }
TEST(Split, OnCudaGradientsEqualThoseOfViews) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  expect_same(at::kCUDA);
}

// Attention writes the gradients of q, k and v, parts of a projection, as those of tensors of their
// own.
void expect_same_of_attention(at::Device device, at::ScalarType dtype) {
  torch::manual_seed(6);
  const at::Tensor values = torch::randn({2, 70, 4 * 64}).to(device, dtype);
  const at::Tensor dy = torch::randn({2, 70, 2, 64}).to(device, dtype);
  const auto gradient = [&](bool packed, const Use& attention, int64_t more = 0) {
    const at::Tensor x = values.detach().requires_grad_();
    const at::Tensor y = at::constant_pad_nd(x * 1, {0, more}).narrow(-1, 0, x.size(-1));
    const std::vector<int64_t> sizes = {128, 64, 64};
    Parts parts = packed ? ops::split(y, sizes) : y.split_with_sizes(sizes, -1);
    for (at::Tensor& part : parts) part = part.unflatten(-1, {-1, 64});
    return torch::autograd::grad({attention(parts)}, {x}, {dy})[0];
  };
  const Use uses[] = {
      [](const Parts& p) { return window_attention(p[0], p[1], p[2], -1, 0.125, {}); },
      [](const Parts& p) {
        return std::get<0>(top1_chunk(p[0], p[1], p[2], 16, 0.125, "exact", 1));
      },
      [](const Parts& p) { return std::get<0>(top1_element(p[0], p[1], p[2], 0.125)); }};
  for (int i = 0; i < 3; ++i) {
    SCOPED_TRACE(testing::Message() << "use " << i << " on " << device << " in " << dtype);
    for (const int64_t more : {0, 8})
      EXPECT_TRUE(gradient(true, uses[i], more).equal(gradient(false, uses[i]))) << more;
  }
}
TEST(Split, GradientsOfAttentionEqualThoseOfViews) {
  for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16})
    expect_same_of_attention(at::kCPU, dtype);
}
TEST(Split, OnCudaGradientsOfAttentionEqualThoseOfViews) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  for (const auto dtype : {at::kFloat, at::kBFloat16}) expect_same_of_attention(at::kCUDA, dtype);
}

// A kernel finds its part aligned only if the gradient of the part is too.
TEST(Split, TensorAtAMisalignedAddressHasNoSharedGradient) {
  const at::Tensor x = torch::randn({25}).slice(0, 1).view({3, 8}).requires_grad_();
  const Parts parts = ops::split(x, {4, 4});
  EXPECT_EQ(gradient_memory(parts[1]).strides(), at::IntArrayRef({4, 1}));
}

TEST(Split, TheFirstOperatorWritesInPlace) {
  const at::Tensor x = torch::randn({3, 10}).requires_grad_();
  const at::Tensor y = x * 2;
  const Parts parts = ops::split(y, {4, 6});
  const at::Tensor first = gradient_memory(parts[1]);
  const at::Tensor second = gradient_memory(parts[1]);
  EXPECT_EQ(first.strides(), at::IntArrayRef({10, 1}));
  EXPECT_EQ(first.storage_offset(), 4);
  EXPECT_EQ(second.strides(), at::IntArrayRef({6, 1}));
  EXPECT_EQ(gradient_memory(parts[0]).data_ptr(), first.storage().data());
  EXPECT_EQ(gradient_memory(x).strides(), x.strides());
}

}  // namespace
}  // namespace assay::ops
