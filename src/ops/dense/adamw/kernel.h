#pragma once
// AdamW on many float32 tensors (the formula is in adamw.h).
#include "ops/core/kernel.h"

namespace assay::ops {

struct AdamWTensor {
  float* parameter;       // in and out, as the moments
  const float* gradient;  // in
  float* average;
  float* square;
  void* rounded;  // out, the parameter in bf16, or null
  int64_t size;
};

struct AdamW {
  const AdamWTensor* tensors;  // on the host; read before the function returns
  int64_t count;               // number of tensors
  float decay;                 // η λ
  float rate;                  // η / (1 − β₁ᵗ)
  float root;                  // √(1 − β₂ᵗ)
  float beta1;
  float beta2;
  float epsilon;
  // one number each, on the device
  const float* scale;
  const float* broken;
};

namespace cuda {
void adamw(const AdamW&, Stream);
}

}  // namespace assay::ops
