// Operators work on the current stream, and on the device of their arguments.
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "ops/attention/top1_chunk/top1_chunk.h"
#include "ops/attention/top1_element/top1_element.h"
#include "ops/attention_arguments.h"
#include "ops/dense/cross_entropy/cross_entropy.h"
#include "ops/dense/sampling/sampling.h"
#include "ops/recurrence/causal_conv1d/causal_conv1d.h"
#include "ops/recurrence/linear_attention/linear_attention.h"
#include "ops/recurrence/selective_scan/selective_scan.h"
#include "ops/rowwise/norm/norm.h"

namespace assay::ops {
namespace {

// Results, and gradients by q, of operators of every kind.
std::vector<at::Tensor> results(const Qkv& a) {
  const at::Tensor x = a.q.flatten(2);
  const at::Tensor weight = at::ones({x.size(2)}, x.options().dtype(at::kFloat));
  const at::Tensor rates = -at::ones({x.size(2), 16}, weight.options());
  const at::Tensor few = x.slice(2, 0, 16);
  std::vector<at::Tensor> out = {
      rms_norm(x, weight, 1e-5),
      std::get<0>(causal_conv1d(x, weight.view({-1, 1}).repeat({1, 4}), {}, "silu", {})),
      std::get<0>(linear_attention(a.q, a.k, a.v, 0.1)),
      std::get<0>(
          selective_scan(x, x, rates, few.unsqueeze(2), few.unsqueeze(2), {}, {}, {}, true, {})),
      std::get<0>(top1_chunk(a.q, a.k, a.v, 64, 8)),
      std::get<0>(top1_element(a.q, a.k, a.v, 8))};
  for (size_t i = 0, count = out.size(); i < count; ++i)
    out.push_back(torch::autograd::grad({out[i]}, {a.q}, {at::ones_like(out[i])}, true)[0]);
  const at::Tensor logits = x.detach().flatten(0, 1).contiguous();
  const at::Tensor targets = at::zeros({logits.size(0)}, logits.options().dtype(at::kLong));
  out.push_back(cross_entropy(logits, targets));
  out.push_back(sample(logits, std::vector<Draw>(size_t(logits.size(0)), Draw{.uniform = 0.6})));
  return out;
}

const Shape kShape{.time = 300, .kv_heads = 4, .head_dim = 64};

void expect_equal(const std::vector<at::Tensor>& found, const std::vector<at::Tensor>& expected) {
  for (size_t i = 0; i < expected.size(); ++i)
    EXPECT_TRUE(at::equal(found[i].cpu(), expected[i].cpu())) << "result " << i;
}

// torch's FlashAttention-2 and cuBLAS give the same bits twice only if they are told to.
struct CudaPlacement : testing::Test {
  CudaPlacement() {
    ::setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", 0);
    at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
  }
  ~CudaPlacement() override {
    at::globalContext().setDeterministicAlgorithms(false, /*warn_only=*/false);
  }
};

// The arguments are written late, so an operator on another stream would read the NaN before.
TEST_F(CudaPlacement, OperatorsWaitForTheirStream) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  const Qkv a = random_qkv(kShape).as(at::kBFloat16, at::kCUDA);
  const std::vector<at::Tensor> expected = results(a);
  const at::Tensor busy = at::ones({8192, 8192}, at::kCUDA);
  Qkv late{at::full_like(a.q, NAN), at::full_like(a.k, NAN), at::full_like(a.v, NAN)};
  torch::cuda::synchronize();
  const c10::impl::VirtualGuardImpl device(at::kCUDA);
  std::vector<at::Tensor> found;
  {
    const c10::StreamGuard guard(device.getStreamFromGlobalPool(a.q.device()));
    for (int i = 0; i < 20; ++i) busy.matmul(busy);
    late.q.copy_(a.q.detach());
    late.k.copy_(a.k.detach());
    late.v.copy_(a.v.detach());
    for (at::Tensor* x : {&late.q, &late.k, &late.v}) x->requires_grad_();
    found = results(late);
  }
  torch::cuda::synchronize();
  expect_equal(found, expected);
}

TEST_F(CudaPlacement, OperatorsWorkOnTheDeviceOfTheirArguments) {
  if (torch::cuda::device_count() < 2) GTEST_SKIP() << "no CUDA device found, or only one";
  const Qkv a = random_qkv(kShape);
  expect_equal(results(a.as(at::kBFloat16, at::Device(at::kCUDA, 1))),
               results(a.as(at::kBFloat16, at::kCUDA)));
}

}  // namespace
}  // namespace assay::ops
