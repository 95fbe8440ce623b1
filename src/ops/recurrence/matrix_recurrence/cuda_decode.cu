// A few steps, one after another, as decoding takes them: the state is read once and written once.
// A warp has 32 columns of a head's state in registers (16 of 256 rows) and meets no other: a
// thread has 4 of them, of a quarter (an eighth) of the rows.
#include "ops/cuda/reduce.cuh"
#include "ops/recurrence/matrix_recurrence/cuda_chunks.cuh"

namespace assay::ops::cuda {
namespace {

constexpr int kMaxWarps = 4;
template <int K>
constexpr int kColumns = K == 256 ? 16 : 32;  // columns of a warp

template <int kRows>
__device__ inline void load_decay(float (&decay)[kRows], const ChunkedForward& args,
                                  const void* row, int64_t first) {
  if (args.decay_dim > 1) {
    load_vec(decay, row, args.decay_dtype, first);
#pragma unroll
    for (float& x : decay) x = expf(x);
  } else {
    const float one = row ? expf(load_scalar(row, args.decay_dtype, 0)) : 1.f;
#pragma unroll
    for (float& x : decay) x = one;
  }
}

// Blocks per SM: as many as keep its loads in flight, and their registers.
constexpr int min_blocks(int K) { return K <= 96 ? 3 : 2; }

template <Rule kRule, bool kBonus, int K>
__global__ void __launch_bounds__(kMaxWarps * 32, min_blocks(K))
    decode_kernel(ChunkedForward args) {
  constexpr int kColumnThreads = kColumns<K> / 4;
  constexpr int kRows = K / (32 / kColumnThreads);
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int first = lane / kColumnThreads * kRows;
  const int64_t V = args.value_dim;
  const int64_t head = blockIdx.x;
  const int64_t tile = int64_t{blockIdx.y} * (blockDim.x / 32);
  const int64_t column = (tile + warp) * kColumns<K> + lane % kColumnThreads * 4;
  const int64_t at = (head * K + first) * V + column;
  const auto b = unsigned(blockIdx.x) / unsigned(args.heads);
  const auto h = unsigned(blockIdx.x) % unsigned(args.heads);
  griddep_launch_dependents();
  griddep_wait();
  const bool there = column < V;
  Vec4 S[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i)
    if (there && args.initial_state) S[i] = load_float4(args.initial_state + at + i * V);

  for (int64_t t = 0; t < args.time; ++t) {
    auto row = [&](const HeadView& x, int64_t width) {
      return chunks::row<bf16>(x, args.heads, b, t, h, width);
    };
    auto keys = [&](float(&x)[kRows], const HeadView& from) {
      load_vec(x, row(from, K), DType::bf16, first);
    };
    auto gate = [&](const HeadView& x, DType dtype, int64_t width) -> const void* {
      if (!x.rows.data) return nullptr;
      return dtype == DType::bf16 ? static_cast<const void*>(row(x, width))
                                  : chunks::row<float>(x, args.heads, b, t, h, width);
    };
    Vec4 v;
    Vec4 r;
    Vec4 out;
    float query[kRows];
    float key[kRows];
    float read[kRows];
    float low[kRows];
    float bonus[kRows];
    float decay[kRows];
    if (there) load_vec(v.at, row(args.v, V), DType::bf16, column);
    keys(query, args.q);
    keys(key, args.k);
    if constexpr (kRule == Rule::dplr) {
      keys(read, args.a);
      keys(low, args.b);
    }
    if constexpr (kBonus) load_vec(bonus, args.u, args.u_dtype, int64_t{h} * K + first);
    const float beta = kRule == Rule::delta
                           ? load_scalar(gate(args.beta, args.beta_dtype, 1), args.beta_dtype, 0)
                           : 1.f;
    load_decay(decay, args, gate(args.log_decay, args.decay_dtype, args.decay_dim), first);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if constexpr (kRule == Rule::delta) {
        read[i] = -beta * decay[i] * key[i];
        low[i] = key[i];
      }
      if constexpr (kBonus) bonus[i] *= key[i] * query[i];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        if constexpr (kRule != Rule::gla) r[n] += read[i] * S[i][n];
        if constexpr (kBonus) out[n] += query[i] * S[i][n] + bonus[i] * v[n];
      }
    }
    if constexpr (kRule != Rule::gla) butterfly_sum<kColumnThreads, 32>(r.at);
    if constexpr (kRule == Rule::delta)
#pragma unroll
      for (int n = 0; n < 4; ++n) r[n] += beta * v[n];
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        S[i][n] *= decay[i];
        if constexpr (kRule != Rule::gla) S[i][n] += low[i] * r[n];
        if constexpr (kRule != Rule::delta) S[i][n] += key[i] * v[n];
        if constexpr (!kBonus) out[n] += query[i] * S[i][n];
      }
    butterfly_sum<kColumnThreads, 32>(out.at);
    if (lane >= kColumnThreads || !there) continue;
    Vec<bf16, 4> y;
#pragma unroll
    for (int n = 0; n < 4; ++n) y.at[n] = __float2bfloat16(args.scale * out[n]);
    *reinterpret_cast<Vec<bf16, 4>*>(static_cast<bf16*>(args.out) +
                                     ((b * args.time + t) * args.heads + h) * V + column) = y;
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i)
    if (there) store_streaming(args.final_state + at + i * V, S[i]);
}

}  // namespace

void decode(const ChunkedForward& args, Stream stream) {
  chunks::with_rule(args, [&](auto which, auto size) {
    const int64_t tiles = ceil_div(args.value_dim, kColumns<size.value>);
    const int64_t parts = ceil_div(tiles, kMaxWarps);
    const dim3 blocks(unsigned(args.batch * args.heads), unsigned(parts));
    launch_pdl(decode_kernel<which.kRule, which.kBonus, size.value>, blocks,
               unsigned(ceil_div(tiles, parts)) * 32, 0, stream, args);
  });
}

}  // namespace assay::ops::cuda
