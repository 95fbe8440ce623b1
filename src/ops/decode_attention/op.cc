// Decode attention: from tensors to the kernel.
#include <torch/torch.h>

#include <algorithm>

#include "ops/decode_attention/decode_attention.h"
#include "ops/decode_attention/kernel.h"
#include "ops/dispatch.h"

namespace assay::ops {
namespace {

constexpr const char* kOp = "decode_attention";

// [rows, S, Hkv, D]
void check_cache(const at::Tensor& cache, int64_t rows, const char* name, const at::Tensor& k) {
  TORCH_CHECK_VALUE(cache.dim() == 4 && cache.size(0) == rows && cache.size(1) > 0, kOp,
                    ": a cache ", name, " has shape ", cache.sizes(), ", expected [", rows,
                    ", S, Hkv, D]");
  TORCH_CHECK_VALUE(cache.size(2) == k.size(1) && cache.size(3) == k.size(2) &&
                        cache[0].is_contiguous() && cache.scalar_type() == k.scalar_type() &&
                        cache.device() == k.device(),
                    kOp, ": a cache ", name, " does not fit ", name, " of the new token, ",
                    k.sizes(), ", in shape, order, dtype or device");
  TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(cache.data_ptr()) % 16 == 0 &&
                        (rows == 1 || cache.stride(0) * cache.element_size() % 16 == 0),
                    kOp, ": a cache ", name, " does not begin at a multiple of 16 bytes");
}

void check_caches(const at::Tensor& keys, const at::Tensor& values, int64_t rows,
                  const at::Tensor& k) {
  check_cache(keys, rows, "k", k);
  check_cache(values, rows, "v", k);
  TORCH_CHECK_VALUE(keys.size(1) == values.size(1), kOp, ": the caches have ", keys.size(1),
                    " keys and ", values.size(1), " values");
}

std::vector<DecodeCache> caches_of(std::span<const CacheOfRow> rows, const at::Tensor& k) {
  TORCH_CHECK_VALUE(int64_t(rows.size()) == k.size(0), kOp, ": ", rows.size(), " caches for ",
                    k.size(0), " rows of k");
  std::vector<DecodeCache> out(rows.size());
  for (size_t b = 0; b < rows.size(); ++b) {
    if (!rows[b].k.defined()) continue;
    check_caches(rows[b].k, rows[b].v, 1, k);
    out[b] = {data(rows[b].k), data(rows[b].v), rows[b].k.size(1)};
  }
  return out;
}

void* row(const at::Tensor& cache, int64_t b) {
  return static_cast<char*>(cache.data_ptr()) + b * cache.stride(0) * cache.element_size();
}
std::vector<DecodeCache> caches_of(const at::Tensor& keys, const at::Tensor& values,
                                   const at::Tensor& k) {
  check_caches(keys, values, k.size(0), k);
  std::vector<DecodeCache> out;
  for (int64_t b = 0; b < k.size(0); ++b)
    out.push_back({row(keys, b), row(values, b), keys.size(1)});
  return out;
}

// Heads and their numbers contiguous, rows at any multiple of 16 bytes.
at::Tensor rows_of(const at::Tensor& x) {
  const bool aligned = reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0 &&
                       x.stride(0) * x.element_size() % 16 == 0;
  const bool rows = x.stride(2) == 1 && x.stride(1) == x.size(2);
  return rows && aligned ? x : x.clone(at::MemoryFormat::Contiguous);
}

}  // namespace

bool decode_attention_serves(const at::Tensor& q) {
  const bool dtype = q.scalar_type() == at::kBFloat16 || q.scalar_type() == at::kFloat;
  return kCudaKernels && q.is_cuda() && dtype && q.size(-1) % 8 == 0 && q.size(-1) <= 256 &&
         !at::GradMode::is_enabled();
}

namespace {

void check_tokens(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                  const std::optional<at::Tensor>& alibi_slopes) {
  check_dims(kOp, "q", q, 3, "[B, H, D]");
  check_dims(kOp, "k", k, 3, "[B, Hkv, D]");
  check_shape(kOp, "k", k, {q.size(0), k.size(1), q.size(2)}, "[B, Hkv, D]");
  check_shape(kOp, "v", v, k.sizes(), "[B, Hkv, D]");
  TORCH_CHECK_VALUE(q.size(1) % k.size(1) == 0, kOp, ": ", k.size(1), " heads of k do not divide ",
                    q.size(1), " heads of q");
  TORCH_CHECK_VALUE(decode_attention_serves(q), kOp, ": q must be float32 or bfloat16 on a CUDA ",
                    "device, with D a multiple of 8 up to 256, and without gradients");
  for (const at::Tensor& x : {k, v})
    TORCH_CHECK_VALUE(x.scalar_type() == q.scalar_type() && x.device() == q.device(), kOp,
                      ": q, k and v must have one dtype and device");
  if (alibi_slopes) check_shape(kOp, "alibi_slopes", *alibi_slopes, {q.size(1)}, "[H]");
}

// `caches`: one per row of q.
at::Tensor launch([[maybe_unused]] const at::Tensor& q, [[maybe_unused]] const at::Tensor& k,
                  [[maybe_unused]] const at::Tensor& v,
                  [[maybe_unused]] const std::vector<DecodeCache>& caches,
                  [[maybe_unused]] double scale, const std::optional<at::Tensor>& alibi_slopes) {
  const at::Tensor slopes = parameter(alibi_slopes, at::kFloat);
  const at::Tensor out = at::empty(q.sizes(), q.options());
  if constexpr (kCudaKernels) {
    const at::Tensor queries = rows_of(q), keys = rows_of(k), values = rows_of(v);
    const c10::DeviceGuard guard(q.device());
    const DecodeAttention args{.dtype = kernel_dtype(q.scalar_type()),
                               .rows = q.size(0),
                               .heads = q.size(1),
                               .kv_heads = k.size(1),
                               .head_dim = q.size(2),
                               .scale = scale,
                               .q = data(queries),
                               .k = data(keys),
                               .v = data(values),
                               .q_stride = queries.stride(0),
                               .k_stride = keys.stride(0),
                               .v_stride = values.stride(0),
                               .alibi_slopes = static_cast<const float*>(data(slopes)),
                               .caches = caches.data(),
                               .out = data(out)};
    cuda::decode_attention(args, workspace(cuda::workspace_bytes(args), q.device()).data_ptr(),
                           current_stream(q.device()));
  }
  return out;
}

}  // namespace

at::Tensor decode_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            std::span<const CacheOfRow> caches, double scale,
                            const std::optional<at::Tensor>& alibi_slopes) {
  check_tokens(q, k, v, alibi_slopes);
  return launch(q, k, v, caches_of(caches, k), scale, alibi_slopes);
}

at::Tensor decode_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const at::Tensor& keys, const at::Tensor& values, double scale,
                            const std::optional<at::Tensor>& alibi_slopes) {
  check_tokens(q, k, v, alibi_slopes);
  return launch(q, k, v, caches_of(keys, values, k), scale, alibi_slopes);
}

}  // namespace assay::ops
