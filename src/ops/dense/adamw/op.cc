// AdamW: from tensors to the kernel, or torch's fused AdamW.
#include <torch/torch.h>

#include <algorithm>
#include <cmath>

#include "ops/core/called.h"
#include "ops/core/dispatch.h"
#include "ops/dense/adamw/adamw.h"
#include "ops/dense/adamw/kernel.h"

namespace assay::ops {
namespace {

bool has_kernel(const AdamWTensors& t) {
  const at::Device device = t.parameters.front().device();
  const auto takes = [&](const std::vector<at::Tensor>& tensors) {
    return std::ranges::all_of(tensors, [&](const at::Tensor& tensor) {
      return tensor.device() == device && tensor.scalar_type() == at::kFloat &&
             tensor.is_contiguous();
    });
  };
  return on_gpu(t.parameters.front().device()) && takes(t.parameters) && takes(t.gradients) &&
         takes(t.averages) && takes(t.squares);
}

AdamWTensor pointers(const AdamWTensors& t, size_t i) {
  const int64_t size = t.parameters[i].numel();
  for (const auto* tensors : {&t.gradients, &t.averages, &t.squares})
    TORCH_CHECK_VALUE((*tensors)[i].numel() == size, "adamw: tensor ", i, " has ",
                      (*tensors)[i].numel(), " numbers, its parameter has ", size);
  const at::Tensor rounded = t.rounded.empty() ? at::Tensor() : t.rounded[i];
  TORCH_CHECK_VALUE(!rounded.defined() || (rounded.is_contiguous() && rounded.numel() == size &&
                                           rounded.scalar_type() == at::kBFloat16),
                    "adamw: rounded numbers of tensor ", i, " must be ", size,
                    " contiguous ones in bfloat16");
  return {t.parameters[i].data_ptr<float>(),
          t.gradients[i].data_ptr<float>(),
          t.averages[i].data_ptr<float>(),
          t.squares[i].data_ptr<float>(),
          data(rounded),
          size};
}

// The corrections of the bias, 1 − βᵗ [Loshchilov & Hutter 2019, Alg. 2, lines 9 and 10], are
// computed in double, because 1 − β₂ᵗ cancels at the first steps.
void from_kernel(const AdamWTensors& t, const AdamWSettings& s, const at::Tensor& scale,
                 const at::Tensor& broken) {
  std::vector<AdamWTensor> tensors;
  for (size_t i = 0; i < t.parameters.size(); ++i) tensors.push_back(pointers(t, i));
  const double time = double(s.step);
  const AdamW work{.tensors = tensors.data(),
                   .count = int64_t(tensors.size()),
                   .decay = float(s.learning_rate * s.weight_decay),
                   .rate = float(s.learning_rate / (1 - std::pow(s.beta1, time))),
                   .root = float(std::sqrt(1 - std::pow(s.beta2, time))),
                   .beta1 = float(s.beta1),
                   .beta2 = float(s.beta2),
                   .epsilon = float(s.epsilon),
                   .scale = scale.data_ptr<float>(),
                   .broken = broken.data_ptr<float>()};
  dispatch(scale.device(), [](const auto&) {}, [&](auto stream) { cuda::adamw(work, stream); });
  // Autograd relies on the versions.
  for (const auto* written : {&t.parameters, &t.averages, &t.squares, &t.rounded})
    for (const at::Tensor& tensor : *written)
      if (tensor.defined()) tensor.unsafeGetTensorImpl()->bump_version();
}

const bool registered = register_paths(
    "adamw", "torch's fused AdamW",
    kCudaKernels ? "cuda kernel sm_90a or compute_80 for float32, else torch's fused AdamW"
                 : "torch's fused AdamW (built without CUDA)");

}  // namespace

void adamw_(const AdamWTensors& t, const AdamWSettings& s, const at::Tensor& scale,
            const at::Tensor& broken) {
  record_call("adamw");
  if (t.parameters.empty()) return;
  if (has_kernel(t)) return from_kernel(t, s, scale, broken);
  const std::vector<at::Tensor> steps(t.parameters.size(),
                                      at::full({}, double(s.step), scale.options()));
  at::_fused_adamw_(t.parameters, t.gradients, t.averages, t.squares, {}, steps, s.learning_rate,
                    s.beta1, s.beta2, s.weight_decay, s.epsilon, /*amsgrad=*/false,
                    /*maximize=*/false, scale, broken);
  for (size_t i = 0; i < t.rounded.size(); ++i)
    if (t.rounded[i].defined()) t.rounded[i].copy_(t.parameters[i]);
}

}  // namespace assay::ops
