#include "ops/core/tensors.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#include "ops/core/called.h"

namespace assay::ops {
namespace {
thread_local CalledOps* recorder = nullptr;
}  // namespace

CalledOps::CalledOps() { recorder = this; }
CalledOps::~CalledOps() { recorder = nullptr; }

void record_call(const char* op) {
  if (recorder) recorder->names.insert(op);
}

void check_dims(const char* op, const char* argument, const at::Tensor& tensor, int64_t dims,
                const char* meaning) {
  TORCH_CHECK_VALUE(tensor.dim() == dims && tensor.numel() > 0, op, ": ", argument, " has shape ",
                    tensor.sizes(), ", expected ", meaning, ", none of them 0");
}

void check_shape(const char* op, const char* argument, const at::Tensor& tensor,
                 at::IntArrayRef shape, const char* meaning) {
  TORCH_CHECK_VALUE(tensor.sizes() == shape, op, ": ", argument, " has shape ", tensor.sizes(),
                    ", expected ", meaning, " = ", shape);
}

void check_like(const char* op, const char* argument, const at::Tensor& tensor,
                const char* like_name, const at::Tensor& like) {
  record_call(op);
  TORCH_CHECK_VALUE(at::isFloatingType(tensor.scalar_type()), op, ": ", argument, " holds ",
                    tensor.scalar_type(), ", expected floating-point numbers");
  TORCH_CHECK_VALUE(tensor.device() == like.device(), op, ": ", argument, " is on ",
                    tensor.device(), ", but ", like_name, " is on ", like.device());
  TORCH_CHECK_VALUE((tensor.scalar_type() == at::kDouble) == (like.scalar_type() == at::kDouble),
                    op, ": ", argument, " holds ", tensor.scalar_type(), ", but ", like_name,
                    " holds ", like.scalar_type(), "; float64 is not mixed with other dtypes");
}

void check_attention(const char* op, const at::Tensor& q, const at::Tensor& k,
                     const at::Tensor& v) {
  check_dims(op, "q", q, 4, "[B, T, H, D]");
  check_dims(op, "k", k, 4, "[B, S, Hk, D]");
  check_shape(op, "k", k, {q.size(0), k.size(1), k.size(2), q.size(3)}, "[B, S, Hk, D]");
  check_shape(op, "v", v, k.sizes(), "[B, S, Hk, D]");
  TORCH_CHECK_VALUE(k.size(1) >= q.size(1), op, ": k has ", k.size(1),
                    " positions (its size 1), fewer than the ", q.size(1), " queries of q");
  TORCH_CHECK_VALUE(q.size(2) % k.size(2) == 0, op, ": k has ", k.size(2),
                    " heads (its size 2), which do not divide the ", q.size(2), " heads of q");
  for (const auto& [name, tensor] : {std::pair{"q", &q}, {"k", &k}, {"v", &v}}) {
    check_like(op, name, *tensor, "q", q);
    TORCH_CHECK_VALUE(tensor->scalar_type() != at::kHalf, op, ": ", name, " holds ",
                      tensor->scalar_type(), ", expected float64, float32 or bfloat16");
  }
}

at::ScalarType sequence_dtype(std::initializer_list<at::Tensor> tensors) {
  at::ScalarType dtype = at::kBFloat16;
  for (const at::Tensor& tensor : tensors)
    // bfloat16 with float16 is float32
    if (tensor.defined()) dtype = at::promote_types(dtype, tensor.scalar_type());
  return dtype;
}
at::ScalarType real_dtype(at::ScalarType sequence) {
  return sequence == at::kDouble ? at::kDouble : at::kFloat;
}
DType kernel_dtype(at::ScalarType sequence) {
  return sequence == at::kDouble ? DType::f64 : sequence == at::kFloat ? DType::f32 : DType::bf16;
}

at::Tensor sequence(const OptionalTensor& tensor, at::ScalarType dtype) {
  if (!tensor || !tensor->defined()) return {};
  const at::Tensor cast = tensor->to(dtype);
  int64_t stride = 1;
  for (int64_t i = cast.dim() - 1; i >= 2; stride *= cast.size(i--))
    if (cast.size(i) > 1 && cast.stride(i) != stride) return cast.contiguous();
  return cast;
}
at::Tensor parameter(const OptionalTensor& tensor, at::ScalarType dtype) {
  if (!tensor || !tensor->defined()) return {};
  return tensor->to(dtype).contiguous();
}

at::Tensor aligned(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  return reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16
             ? tensor.clone(at::MemoryFormat::Contiguous)
             : tensor;
}
at::Tensor aligned_rows(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  for (const int64_t i : {0, 1})
    if (tensor.size(i) > 1 &&
        (tensor.stride(i) == 0 || tensor.stride(i) * tensor.element_size() % 16))
      return tensor.clone(at::MemoryFormat::Contiguous);
  return aligned(tensor);
}

bool wants_gradient(std::initializer_list<at::Tensor> tensors) {
  return at::GradMode::is_enabled() && std::ranges::any_of(tensors, [](const at::Tensor& tensor) {
           return tensor.defined() && tensor.requires_grad();
         });
}

View view(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {tensor.data_ptr(), tensor.stride(0), tensor.stride(1)};
}
void* data(const at::Tensor& tensor) { return tensor.defined() ? tensor.data_ptr() : nullptr; }

Stream current_stream(const at::Device& device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
}
at::Tensor workspace(size_t bytes, const at::Device& device) {
  return at::empty({int64_t(bytes)}, at::TensorOptions().dtype(at::kByte).device(device));
}

at::Tensor prefix_sums(const at::Tensor& x) {
  constexpr int64_t kChunk = 64;
  const int64_t time = x.size(1);
  const int64_t size = std::min(time, kChunk);
  if (size < 2) return x;
  const int64_t chunks = (time + size - 1) / size;
  const at::Tensor steps = at::constant_pad_nd(x, {0, 0, 0, chunks * size - time});
  const at::Tensor within =
      at::matmul(at::ones({size, size}, x.options()).tril_(), steps.unflatten(1, {chunks, size}));
  if (chunks == 1) return within.squeeze(1);
  const at::Tensor whole = prefix_sums(within.select(2, size - 1).slice(1, 0, chunks - 1));
  const at::Tensor before = at::constant_pad_nd(whole, {0, 0, 1, 0}).unsqueeze(2);
  return (within + before).flatten(1, 2).slice(1, 0, time);
}

}  // namespace assay::ops
