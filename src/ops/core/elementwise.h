#pragma once
// Element-wise operators y = f(x). An operator is a struct F with
//   static R forward(R x)              f(x)
//   static R backward(R x, R dy)       dy f'(x)
// for R float and double, both ASSAY_HOST_DEVICE. Its cpu.cc and cuda.cu instantiate the kernels
// below, and its op.cc calls elementwise() of elementwise_op.h, which adds checks and autograd.
#include "ops/core/kernel.h"

namespace assay::ops {

template <class F>
struct Elementwise {
  DType dtype;    // dtype of all tensors; computed in f64 when it is f64, else in f32
  int64_t size;   // any
  const void* x;  // in
  void* y;        // out; backward: not touched
};
template <class F>
struct ElementwiseBackward {
  Elementwise<F> forward;  // x as it was
  const void* dy;          // in
  void* dx;                // out
};

namespace cpu {
template <class F>
void elementwise(const Elementwise<F>&, const ParallelFor&);
template <class F>
void elementwise(const ElementwiseBackward<F>&, const ParallelFor&);
}  // namespace cpu
namespace cuda {
template <class F>
void elementwise(const Elementwise<F>&, Stream);
template <class F>
void elementwise(const ElementwiseBackward<F>&, Stream);
}  // namespace cuda

}  // namespace assay::ops
