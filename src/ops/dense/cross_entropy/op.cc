// assay's cross-entropy: from tensors to the kernels.
#include <torch/torch.h>

#include "ops/core/called.h"
#include "ops/core/dispatch.h"
#include "ops/dense/cross_entropy/cross_entropy.h"
#include "ops/dense/cross_entropy/kernel.h"

namespace assay::ops {
namespace {

constexpr const char* kOp = "cross_entropy";

void check(const at::Tensor& logits, const at::Tensor& targets) {
  record_call(kOp);
  check_dims(kOp, "logits", logits, 2, "[N, V]");
  check_shape(kOp, "targets", targets, {logits.size(0)}, "[N]");
  TORCH_CHECK_VALUE(logits.is_contiguous(), kOp, ": logits must be contiguous");
  TORCH_CHECK_VALUE(targets.scalar_type() == at::kLong && targets.device() == logits.device(), kOp,
                    ": targets must be int64 on ", logits.device());
}

void launch(const CrossEntropy& p, const at::Device& device) {
  dispatch(
      device, [&](const auto& pool) { cpu::cross_entropy(p, pool); },
      [&](auto stream) { cuda::cross_entropy(p, stream); });
}

at::Tensor from_kernel(const at::Tensor& logits, const at::Tensor& targets, bool gradient,
                       double scale) {
  const at::Tensor dense = targets.contiguous();
  const at::Tensor losses =
      at::empty({logits.size(0)}, logits.options().dtype(real_dtype(logits.scalar_type())));
  launch({kernel_dtype(logits.scalar_type()), logits.size(0), logits.size(1), data(logits),
          dense.data_ptr<int64_t>(), data(losses), gradient, scale},
         logits.device());
  return losses;
}

bool has_kernel(const at::Tensor& logits) { return logits.is_cpu() || on_gpu(logits.device()); }

}  // namespace

at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets) {
  check(logits, targets);
  return has_kernel(logits) ? from_kernel(logits, targets, false, 0)
                            : cross_entropy_reference(logits, targets);
}

at::Tensor cross_entropy_(const at::Tensor& logits, const at::Tensor& targets, double scale) {
  check(logits, targets);
  if (has_kernel(logits)) return from_kernel(logits, targets, true, scale);
  const at::Tensor losses = cross_entropy_reference(logits, targets);
  at::Tensor p = logits.to(losses.scalar_type()).softmax(1);
  const at::Tensor index = targets.unsqueeze(1);
  logits.copy_(p.scatter_add_(1, index, at::full_like(index, -1, p.options())).mul_(scale));
  return losses;
}

const bool registered_path = register_kernels(kOp);

}  // namespace assay::ops
