#pragma once
// From tensors to what a kernel takes, and the checks on the way. For the files
// that define operators.
#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <optional>

#include "ops/core/kernel.h"

namespace assay::ops {

using OptionalTensor = std::optional<at::Tensor>;

// ValueError naming op, argument, the shape found and the one wanted: "selective_scan: delta has
// shape [2, 64, 20], expected [B, T, Dm] = [2, 65, 20]". In check_dims only the number of
// dimensions counts, and none may be empty.
void check_dims(const char* op, const char* argument, const at::Tensor& tensor, int64_t dims,
                const char* meaning);
void check_shape(const char* op, const char* argument, const at::Tensor& tensor,
                 at::IntArrayRef shape, const char* meaning);
// Also: floating-point numbers on the device of the argument `like`. float64 is not mixed with
// other dtypes. The others may be mixed, because parameters, gates and states are often float32
// where sequences are bfloat16.
void check_like(const char* op, const char* argument, const at::Tensor& tensor,
                const char* like_name, const at::Tensor& like);
// Checks q [B, T, H, D] and k, v [B, S, Hk, D] of attention: S ≥ T, Hk divides H; float64, float32
// or bfloat16 on one device.
void check_attention(const char* op, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v);

// The dtype that a kernel computes sequences in: what the defined ones promote to;
// float16 becomes float32.
at::ScalarType sequence_dtype(std::initializer_list<at::Tensor> tensors);
at::ScalarType real_dtype(at::ScalarType sequence);  // float64 for float64, else float32
DType kernel_dtype(at::ScalarType sequence);

// The tensor in `dtype` as a kernel reads it, with gradients; undefined when absent. sequence():
// dimensions after T contiguous, batch and time strides as they are; parameter(): contiguous.
at::Tensor sequence(const OptionalTensor& tensor, at::ScalarType dtype);
at::Tensor parameter(const OptionalTensor& tensor, at::ScalarType dtype);

// For CUDA kernels that read 16 bytes at a time; undefined when absent. A tensor on CUDA is cloned
// unless its memory begins at a multiple of 16 bytes: contiguous() keeps the address of a part of a
// larger tensor. aligned_rows(): unless each row of [B, T, …] begins there and has its own memory.
at::Tensor aligned(const at::Tensor& tensor);
at::Tensor aligned_rows(const at::Tensor& tensor);

// Between the two ways to say "absent": autograd functions take the first, structs of this folder
// hold the second.
inline OptionalTensor optional(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : OptionalTensor();
}
inline at::Tensor or_undefined(const OptionalTensor& tensor) {
  return tensor.value_or(at::Tensor());
}

// The sums of x [B, T, D] along time, in the same shape, by products with triangles of ones: for
// GPUs, where at::cumsum is not deterministic.
at::Tensor prefix_sums(const at::Tensor& x);

// Whether a call with these tensors is recorded for a backward pass. Undefined ones do not count.
bool wants_gradient(std::initializer_list<at::Tensor> tensors);

View view(const at::Tensor& tensor);   // [B, T, …]; absent when undefined
void* data(const at::Tensor& tensor);  // null when undefined

// Scratch of a kernel, and the stream of the device that its caller works on (CUDA only).
Stream current_stream(const at::Device& device);
at::Tensor workspace(size_t bytes, const at::Device& device);

}  // namespace assay::ops
