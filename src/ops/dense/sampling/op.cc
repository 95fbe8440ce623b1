// Tokens drawn from logits: from tensors to the kernels.
#include <torch/torch.h>

#include "ops/core/asynchronous.h"
#include "ops/core/dispatch.h"
#include "ops/dense/sampling/sampling.h"

namespace assay::ops {
namespace {

constexpr const char* kOp = "sample";

at::Tensor on_cpu(const at::Tensor& logits, std::span<const Draw> draws) {
  const at::Tensor rows = logits.to(at::kCPU, at::kFloat).contiguous();
  const int64_t size = rows.size(1);
  at::Tensor tokens = at::empty({rows.size(0)}, at::kLong);
  int64_t* out = tokens.data_ptr<int64_t>();
  const float* in = rows.data_ptr<float>();
  at_parallel_for()(rows.size(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b)
      out[b] = cpu::sample_row({in + b * size, size_t(size)}, draws[size_t(b)]);
  });
  return tokens;
}

}  // namespace

at::Tensor tensor_of(std::span<const Draw> draws) {
  const std::array<int64_t, 2> sizes = {int64_t(draws.size()), sizeof(Draw)};
  return at::from_blob(const_cast<Draw*>(draws.data()), sizes, at::kByte).clone();
}

at::Tensor sample(const at::Tensor& logits, std::span<const Draw> draws) {
  return sample(logits, to_device(tensor_of(draws), logits.device()));
}

at::Tensor sample(const at::Tensor& logits, const at::Tensor& draws) {
  check_dims(kOp, "logits", logits, 2, "[B, V]");
  TORCH_CHECK_VALUE(draws.size(0) == logits.size(0), kOp, ": ", draws.size(0), " draws for ",
                    logits.size(0), " rows of logits");
  TORCH_CHECK_VALUE(draws.scalar_type() == at::kByte && draws.is_contiguous() &&
                        draws.nbytes() == size_t(draws.size(0)) * sizeof(Draw) &&
                        draws.device() == logits.device(),
                    kOp, ": draws must be the bytes of one Draw per row, on the device of logits");
  if constexpr (kCudaKernels) {
    if (on_gpu(logits.device()) && logits.size(1) <= cuda::kMaxTokens) {
      const bool half = logits.scalar_type() == at::kBFloat16;
      const at::Tensor rows = logits.to(half ? at::kBFloat16 : at::kFloat).contiguous();
      const at::Tensor tokens = at::empty({rows.size(0)}, rows.options().dtype(at::kLong));
      const c10::DeviceGuard guard(logits.device());
      cuda::sample({.dtype = half ? DType::bf16 : DType::f32,
                    .rows = rows.size(0),
                    .size = rows.size(1),
                    .logits = data(rows),
                    .draws = static_cast<const Draw*>(data(draws)),
                    .tokens = tokens.data_ptr<int64_t>()},
                   current_stream(logits.device()));
      return tokens;
    }
  }
  const at::Tensor on_host = draws.cpu();
  return on_cpu(logits, {static_cast<const Draw*>(data(on_host)), size_t(draws.size(0))})
      .to(logits.device());
}

// Training does not draw tokens: it is not part of the identity of a run.
const bool registered_path = register_kernels(kOp);

}  // namespace assay::ops
