// Decode attention: from tensors to the kernel.
#include <torch/torch.h>

#include <bit>

#include "ops/attention/decode_attention/decode_attention.h"
#include "ops/attention/decode_attention/kernel.h"
#include "ops/core/called.h"
#include "ops/core/dispatch.h"

namespace assay::ops {
namespace {

constexpr const char* kOp = "decode_attention";

// [rows, S, Hkv, D]
void check_cache(const at::Tensor& cache, int64_t rows, const char* name, const at::Tensor& k) {
  TORCH_CHECK_VALUE(cache.dim() == 4 && cache.size(0) == rows && cache.size(1) > 0, kOp,
                    ": the cache ", name, " has shape ", cache.sizes(), ", expected [", rows,
                    ", S, Hkv, D]");
  TORCH_CHECK_VALUE(cache.size(2) == k.size(1) && cache.size(3) == k.size(2) &&
                        cache[0].is_contiguous() && cache.scalar_type() == k.scalar_type() &&
                        cache.device() == k.device(),
                    kOp, ": the cache ", name, " does not fit ", name, " of the new token, ",
                    k.sizes(), ", in shape, order, dtype or device");
  TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(cache.data_ptr()) % 16 == 0 &&
                        (rows == 1 || cache.stride(0) * cache.element_size() % 16 == 0),
                    kOp, ": a row of the cache ", name,
                    " does not begin at a multiple of 16 bytes");
}

// Heads and their numbers contiguous, rows at any multiple of 16 bytes.
at::Tensor rows_of(const at::Tensor& x) {
  const bool aligned = reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0 &&
                       x.stride(0) * x.element_size() % 16 == 0;
  const bool rows = x.stride(2) == 1 && x.stride(1) == x.size(2);
  return rows && aligned ? x : x.clone(at::MemoryFormat::Contiguous);
}

void check_tokens(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                  const DecodeOptions& options) {
  record_call(kOp);
  check_dims(kOp, "q", q, 3, "[B, H, D]");
  check_dims(kOp, "k", k, 3, "[B, Hkv, D]");
  check_shape(kOp, "k", k, {q.size(0), k.size(1), q.size(2)}, "[B, Hkv, D]");
  check_shape(kOp, "v", v, k.sizes(), "[B, Hkv, D]");
  TORCH_CHECK_VALUE(q.size(1) % k.size(1) == 0, kOp, ": ", k.size(1), " heads of k do not divide ",
                    q.size(1), " heads of q");
  TORCH_CHECK_VALUE(
      decode_attention_serves(q.options(), q.size(2)) && !at::GradMode::is_enabled(), kOp,
      ": q must be float32 or bfloat16 on CUDA without gradients, D a multiple of 8 up to 256");
  for (const at::Tensor& x : {k, v})
    TORCH_CHECK_VALUE(x.scalar_type() == q.scalar_type() && x.device() == q.device(), kOp,
                      ": q, k and v must have one dtype and device");
  for (const auto& [name, heads] :
       {std::pair("norm_scale", options.norm_scale), {"alibi_slopes", options.alibi_slopes}})
    if (heads) check_shape(kOp, name, *heads, {q.size(1)}, "[H]");
  if (!options.cos) return;
  check_dims(kOp, "cos", *options.cos, 2, "[positions, D/2]");
  check_shape(kOp, "cos", *options.cos, {options.cos->size(0), q.size(2) / 2}, "[positions, D/2]");
  check_shape(kOp, "sin", or_undefined(options.sin), options.cos->sizes(), "[positions, D/2]");
  TORCH_CHECK_VALUE(q.size(2) % 16 == 0, kOp, ": rotary positions need D = ", q.size(2),
                    " to be a multiple of 16");
}

// With the places of the caches in `args`.
at::Tensor launch([[maybe_unused]] DecodeAttention args, const at::Tensor& q,
                  [[maybe_unused]] const at::Tensor& k, [[maybe_unused]] const at::Tensor& v,
                  const DecodeOptions& options) {
  const auto floats = [](const OptionalTensor& x) { return parameter(x, at::kFloat); };
  const at::Tensor cos = floats(options.cos);
  const at::Tensor sin = floats(options.sin);
  const at::Tensor norm_scale = floats(options.norm_scale);
  const at::Tensor slopes = floats(options.alibi_slopes);
  const at::Tensor out = at::empty(q.sizes(), q.options());
  if constexpr (kCudaKernels) {
    const at::Tensor queries = rows_of(q);
    const at::Tensor keys = rows_of(k);
    const at::Tensor values = rows_of(v);
    const auto pointer = [](const at::Tensor& x) { return static_cast<const float*>(data(x)); };
    const c10::DeviceGuard guard(q.device());
    args.dtype = kernel_dtype(q.scalar_type());
    args.rows = q.size(0);
    args.heads = q.size(1);
    args.kv_heads = k.size(1);
    args.head_dim = q.size(2);
    args.scale = options.scale;
    args.q = data(queries);
    args.k = data(keys);
    args.v = data(values);
    args.q_stride = queries.stride(0);
    args.k_stride = keys.stride(0);
    args.v_stride = values.stride(0);
    args.cos = pointer(cos);
    args.sin = pointer(sin);
    args.norm_scale = pointer(norm_scale);
    args.alibi_slopes = pointer(slopes);
    args.out = data(out);
    const at::Tensor scratch = workspace(cuda::workspace_bytes(args), q.device());
    cuda::decode_attention(args, data(scratch), current_stream(q.device()));
  }
  return out;
}

}  // namespace

int64_t ring_size(int64_t window) { return int64_t(std::bit_ceil(uint64_t(window))); }

bool decode_attention_serves(const at::TensorOptions& options, int64_t head_dim) {
  const auto dtype = options.dtype().toScalarType();
  return on_gpu(options.device()) && (dtype == at::kBFloat16 || dtype == at::kFloat) &&
         head_dim % 8 == 0 && head_dim <= 256;
}

at::Tensor decode_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const at::Tensor& positions, const at::Tensor& caches,
                            const DecodeOptions& options) {
  check_tokens(q, k, v, options);
  check_shape(kOp, "positions", positions, {q.size(0)}, "[B]");
  check_shape(kOp, "caches", caches, {q.size(0), 2}, "[B, 2]");
  for (const at::Tensor& x : {positions, caches})
    TORCH_CHECK_VALUE(x.scalar_type() == at::kLong && x.device() == q.device() && x.is_contiguous(),
                      kOp, ": positions and caches must be contiguous int64 on the device of q");
  DecodeAttention args{};
  args.window = options.window;
  args.positions = static_cast<const int64_t*>(data(positions));
  args.row_caches = static_cast<void* const(*)[2]>(data(caches));
  return launch(args, q, k, v, options);
}

at::Tensor decode_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const at::Tensor& keys, const at::Tensor& values, int64_t position,
                            const DecodeOptions& options) {
  check_tokens(q, k, v, options);
  check_cache(keys, q.size(0), "k", k);
  check_cache(values, q.size(0), "v", k);
  TORCH_CHECK_VALUE(keys.size(1) == values.size(1), kOp, ": the caches have ", keys.size(1),
                    " keys and ", values.size(1), " values");
  TORCH_CHECK_VALUE(!options.cos || (position >= 0 && position < options.cos->size(0)), kOp,
                    ": position ", position, " is not in the rotary tables");
  DecodeAttention args{};
  args.keys = data(keys);
  args.values = data(values);
  args.keys_stride = keys.stride(0);
  args.values_stride = values.stride(0);
  args.length = keys.size(1);
  args.position = position;
  return launch(args, q, k, v, options);
}

}  // namespace assay::ops
