#pragma once
// AdamW with decoupled weight decay in place [Loshchilov & Hutter 2019, Alg. 2].
#include <ATen/core/Tensor.h>

#include <vector>

namespace assay::ops {

struct AdamWTensors {
  // as many of each
  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> gradients;
  std::vector<at::Tensor> averages;
  std::vector<at::Tensor> squares;
  std::vector<at::Tensor> rounded = {};  // none, or as many: bfloat16, or undefined
};
struct AdamWSettings {
  double learning_rate;
  double beta1;
  double beta2;
  double weight_decay;
  double epsilon;
  int64_t step;  // from 1
};

// With g = gradient / scale:
//   m ← β₁ m + (1 − β₁) g        v ← β₂ v + (1 − β₂) g²
//   x ← x − η λ x − η (m / (1 − β₁ᵗ)) / (√(v / (1 − β₂ᵗ)) + ε)
// `rounded` gets the new parameters, rounded to the nearest numbers in bfloat16.
// `scale` and `broken` are float32 scalars on the device of the tensors. If `broken` is 1, no
// parameter and no moment changes. Gradients are undefined after the call.
// The tensors of an index have one shape, and all are on one device. Throws ValueError if their
// sizes differ. float32 tensors on CUDA take a kernel of this project, and others torch's.
void adamw_(const AdamWTensors& tensors, const AdamWSettings& settings, const at::Tensor& scale,
            const at::Tensor& broken);

}  // namespace assay::ops
