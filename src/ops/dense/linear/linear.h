#pragma once
// Matrix products of layers, differentiable, through the library that is fastest where they run.
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <string_view>
#include <utility>

namespace assay::ops {

// x [..., K], weight [N, K], bias [N] or undefined, all of one dtype → x Wᵀ + b, [..., N],
// whose rows on a GPU may be up to 7 numbers further apart than N.
// ValueError when shapes do not fit. The path depends on device, dtype and the number of rows of x
// (README.md next to this file). Everything that these paths do not serve is at::linear.
// weight_at_rest: since a kernel wrote the weight, another one was launched without programmatic
// dependent launch, as the embedding of a model. CUDA then reads it before earlier kernels end.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                  bool weight_at_rest = false);
// Where the gradient of a weight is made, so that nobody has to copy it there.
struct GradientPlace : torch::CustomClassHolder {
  at::Tensor memory;  // of the shape of the weight, float32
  // Whether the next gradient is written there. That of a second product with the same weight is
  // not: autograd adds both.
  bool is_free = false;
};

// A weight rounded to bfloat16, which products keep until the weight changes.
struct RoundedWeight : torch::CustomClassHolder {
  at::Tensor value;      // of the shape of the weight; undefined before the first product
  int64_t version = -1;  // that of the weight, as autograd counts them
  bool is_of(const at::Tensor& weight) const { return version == int64_t(weight._version()); }
};

// linear() for x in bfloat16 with weight and bias in float32. Their gradients leave the products in
// float32, where a kernel of the device serves them. `place`: of the gradient of the weight, or
// null. `rounded`: of the weight, or null.
at::Tensor linear_of_master(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                            const c10::intrusive_ptr<GradientPlace>& place = {},
                            const c10::intrusive_ptr<RoundedWeight>& rounded = {});
// linear() followed by glu (ops/rowwise/glu/glu.h); one kernel where CUDA multiplies few rows.
at::Tensor linear_glu(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                      std::string_view activation, bool weight_at_rest = false);
// The residual stream x [..., K] and the output y of a part of a layer, or undefined → x + y, and
// the product of its root-mean-square norm: add_norm or rms_norm (norm.h), then linear, or
// linear_glu unless the activation is empty. One kernel with the same bits for some sizes on CUDA
// (README.md). weight_at_rest is said of both weights.
std::pair<at::Tensor, at::Tensor> norm_linear(const at::Tensor& x, const at::Tensor& y,
                                              const at::Tensor& norm_weight, double eps,
                                              const at::Tensor& weight, const at::Tensor& bias,
                                              std::string_view activation = {},
                                              bool weight_at_rest = false);
// a [..., K] bᵀ, b [N, K] → [..., N]; no gradient. ValueError when shapes do not fit.
at::Tensor product(const at::Tensor& a, const at::Tensor& b);
// dweight [N, K] ← dyᵀ x, or dweight + dyᵀ x with `add`; dy [M, N], x [M, K], of one dtype, which
// dweight has too, or float32. The path is that of the gradient of linear().
void weight_gradient(const at::Tensor& dy, const at::Tensor& x, at::Tensor& dweight, bool add);

}  // namespace assay::ops
