// A few steps, one after another, as decoding takes them: the state is read once and written once. A block has 32
// columns of a head's state; a thread 4 of them, of every 32nd row.
#include "ops/matrix_state/cuda_chunks.cuh"

namespace assay::ops::cuda::steps {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kColumns = 32, kGroups = kThreads / (kColumns / 4);

struct alignas(16) Four {
  float at[4] = {};
  __device__ float& operator[](int i) { return at[i]; }
};

__device__ inline float number(const void* row, DType dtype, int64_t i) {
  return dtype == DType::bf16 ? real(static_cast<const bf16*>(row)[i]) : static_cast<const float*>(row)[i];
}

// Of all threads with the same columns, in a fixed order. Whoever uses `parts` [warps, columns] again has met the block
// in between.
__device__ inline Four sum_over_rows(Four x, float (*parts)[kColumns]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = threadIdx.x % 8 * 4;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    x[n] += __shfl_xor_sync(~0u, x[n], 8);
    x[n] += __shfl_xor_sync(~0u, x[n], 16);
    if (lane < 8) parts[warp][column + n] = x[n];
  }
  __syncthreads();
  Four sum;
#pragma unroll
  for (int w = 0; w < kWarps; ++w)
#pragma unroll
    for (int n = 0; n < 4; ++n) sum[n] += parts[w][column + n];
  return sum;
}

template <int kRows>  // of a thread
__global__ void __launch_bounds__(kThreads) few_steps_kernel(ChunkedForward p) {
  __shared__ float parts[3][kWarps][kColumns];  // of r; of the outputs of even and odd steps
  const int64_t tiles = ceil_div(p.value_dim, kColumns), head = blockIdx.x / tiles, b = head / p.heads,
                h = head % p.heads;
  const int64_t K = p.key_dim, V = p.value_dim, column = blockIdx.x % tiles * kColumns + threadIdx.x % 8 * 4;
  const int group = threadIdx.x / 8;
  const bool there = column < V;
  Four S[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i)
    if (const int64_t row = group + i * kGroups; there && row < K && p.initial_state)
      S[i] = *reinterpret_cast<const Four*>(p.initial_state + (head * K + row) * V + column);

  for (int64_t t = 0; t < p.time; ++t) {
    auto keys = [&](const Heads& x) { return x.rows.data ? chunks::row<bf16>(x, p.heads, b, t, h, K) : nullptr; };
    const bf16 *q = keys(p.q), *k = keys(p.k), *a = keys(p.a), *low = p.rule == Rule::pair ? keys(p.b) : k;
    const float beta = p.beta.rows.data ? *chunks::row<float>(p.beta, p.heads, b, t, h, 1) : 1.f;
    const void* decays = !p.log_decay.rows.data ? nullptr
                         : p.decay_dtype == DType::bf16
                             ? static_cast<const void*>(chunks::row<bf16>(p.log_decay, p.heads, b, t, h, p.decay_dim))
                             : chunks::row<float>(p.log_decay, p.heads, b, t, h, p.decay_dim);
    Four v, r, out;
    if (there)
#pragma unroll
      for (int n = 0; n < 4; ++n) v[n] = real(chunks::row<bf16>(p.v, p.heads, b, t, h, V)[column + n]);
    float decay[kRows], key[kRows], query[kRows], back[kRows];  // `back` is multiplied by r
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int64_t row = group + i * kGroups;
      const bool exists = row < K;
      decay[i] = exists && decays ? expf(number(decays, p.decay_dtype, p.decay_dim > 1 ? row : 0)) : 1.f;
      key[i] = exists ? real(k[row]) : 0.f, query[i] = exists ? real(q[row]) : 0.f;
      back[i] = exists && p.rule != Rule::linear ? real(low[row]) : 0.f;
      const float read = p.rule == Rule::delta ? -beta * decay[i] * key[i] : exists && a ? real(a[row]) : 0.f;
      const float bonus = exists && p.u ? p.u[h * K + row] * key[i] * query[i] : 0.f;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        r[n] += read * S[i][n];
        if (p.u) out[n] += query[i] * S[i][n] + bonus * v[n];
      }
      key[i] *= p.rule == Rule::linear ? beta : 1.f;
    }
    if (p.rule != Rule::linear) r = sum_over_rows(r, parts[0]);
    if (p.rule == Rule::delta)
#pragma unroll
      for (int n = 0; n < 4; ++n) r[n] += beta * v[n];
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        S[i][n] = decay[i] * S[i][n] + back[i] * r[n];
        if (p.rule != Rule::delta) S[i][n] += key[i] * v[n];
        if (!p.u) out[n] += query[i] * S[i][n];
      }
    out = sum_over_rows(out, parts[1 + t % 2]);
    if (group > 0 || !there) continue;
    Pack<bf16, 4> y;
#pragma unroll
    for (int n = 0; n < 4; ++n) y.at[n] = __float2bfloat16(p.scale * out[n] + (p.skip ? p.skip[h] * v[n] : 0.f));
    *reinterpret_cast<Pack<bf16, 4>*>(static_cast<bf16*>(p.out) + ((b * p.time + t) * p.heads + h) * V + column) = y;
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i)
    if (const int64_t row = group + i * kGroups; there && row < K)
      *reinterpret_cast<Four*>(p.final_state + (head * K + row) * V + column) = S[i];
}

}  // namespace
}  // namespace assay::ops::cuda::steps

namespace assay::ops::cuda {
void few_steps(const ChunkedForward& p, Stream stream) {
  const auto blocks = unsigned(p.batch * p.heads * ceil_div(p.value_dim, steps::kColumns));
  auto run = [&](auto kernel) { kernel<<<blocks, steps::kThreads, 0, static_cast<cudaStream_t>(stream)>>>(p); };
  if (p.key_dim <= 64) run(steps::few_steps_kernel<2>);
  else if (p.key_dim <= 128) run(steps::few_steps_kernel<4>);
  else run(steps::few_steps_kernel<8>);
  check_launch("matrix_state, a few steps");
}
}  // namespace assay::ops::cuda
