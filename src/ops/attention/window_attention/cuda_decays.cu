// A warp has 16 queries with their dout in registers, or 16 keys with their values, and the block's
// four warps stream the other side, 64 rows at a time, through shared memory. Scores and their
// gradients are products of mma.sync, and a lane adds the latter along its rows.
#include <algorithm>

#include "ops/attention/window_attention/kernel.h"
#include "ops/cuda/attention.cuh"
#include "ops/cuda/fragment.cuh"
#include "ops/cuda/reduce.cuh"

namespace assay::ops::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kPart = 16 * kWarps;  // rows of a block, and of a part of the other side
constexpr int kTiles = 4;           // two parts of two tensors

// A row's addend to its scores in base 2, and a query's dout · out.
struct Stats {
  float bias;
  float delta;
};

// kKeys: subtracts the sums of columns, one per key; else writes those of rows, one per query.
template <int D, bool kKeys>
__global__ void __launch_bounds__(32 * kWarps)
    sums_kernel(const __grid_constant__ WindowAttentionBackward args, const float* delta) {
  using Rows = SwizzledTile<D>;
  extern __shared__ __align__(128) bf16 memory[];
  __shared__ Stats stats[2][kPart];
  const WindowAttentionForward& f = args.forward;
  const int64_t heads = f.batch * f.heads;
  const int64_t b = blockIdx.x % heads / f.heads;
  const int64_t h = blockIdx.x % heads % f.heads;
  const int64_t kv = h / (f.heads / f.kv_heads);
  const int time = int(f.time);
  const int keys = int(f.keys);
  const int past = keys - time;
  const int window = int(min(f.window, f.keys));
  const int rows = kKeys ? keys : time;
  // Earlier keys and later queries see more, so they begin first.
  const int index = int(blockIdx.x / heads);
  const int first = (kKeys ? index : int(ceil_div(rows, kPart)) - 1 - index) * kPart;
  const int count = min(rows - first, kPart);
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const float scale = float(f.scale) * kLog2e;
  const auto place = [&](int position) { return (b * keys + position) * f.heads + h; };

  const auto tile = [&](int stage, int i) { return Rows{memory + (stage * 2 + i) * kPart * D}; };
  const auto copy = [&](int stage, bool of_keys, int from, int n) {
    copy_rows(tile(stage, 0), of_keys ? f.k : f.q, b, from, of_keys ? kv : h, n, kPart);
    copy_rows(tile(stage, 1), of_keys ? f.v : args.dout, b, from, of_keys ? kv : h, n, kPart);
  };
  const auto stats_of = [&](bool of_key, int i) -> Stats {
    const auto* sums = static_cast<const float*>(f.decay_sums);
    if (of_key) return {-sums[place(i)] * kLog2e, 0};
    const int64_t at = (b * f.heads + h) * time + i;
    const float logsumexp = static_cast<const float*>(f.logsumexp)[at];
    return {(sums[place(past + i)] - logsumexp) * kLog2e, delta[at]};
  };
  constexpr Stats kAbsent{-INFINITY, 0};

  copy(0, kKeys, first, count);
  cp_async_wait_all();
  __syncthreads();
  uint32_t own[2][D / 16][4];
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int k = 0; k < D / 16; ++k) load_a_mk(own[i][k], tile(0, i), warp * 16, k * 2);
  __syncthreads();
  int position[2];
  Stats own_stats[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = warp * 16 + lane / 4 + r * 8;
    position[r] = first + row + (kKeys ? 0 : past);
    own_stats[r] = row < count ? stats_of(kKeys, first + row) : kAbsent;
  }

  // Rows of the other side that one of these sees, or is seen by.
  const int begin = max(kKeys ? first - past : past + first - window + 1, 0);
  const int end = kKeys ? min(first + count - 1 + window - past, time) : past + first + count;
  const int parts = int(ceil_div(max(end - begin, 0), kPart));
  const auto fetch = [&](int i) {
    const int from = begin + i * kPart;
    if (i < parts) {
      copy(i % 2, !kKeys, from, min(end - from, kPart));
      if (threadIdx.x < kPart)
        stats[i % 2][threadIdx.x] =
            from + int(threadIdx.x) < end ? stats_of(!kKeys, from + threadIdx.x) : kAbsent;
    }
    cp_async_commit_group();
  };
  float sums[2] = {};
  fetch(0);
  for (int i = 0; i < parts; ++i) {
    const int stage = i % 2;
    cp_async_wait_group<0>();
    __syncthreads();  // the part has arrived, and the one before it is no longer read
    fetch(i + 1);
    float scores[kPart / 8][4] = {};
    float gradients[kPart / 8][4] = {};  // dout · v
#pragma unroll
    for (int k = 0; k < D / 16; ++k)
#pragma unroll
      for (int n = 0; n < kPart / 8; n += 2) {
        uint32_t operand[4];
        load_b_nk(operand, tile(stage, 0), n * 8, k * 2);
        mma_m16n16k16(scores[n], scores[n + 1], own[0][k], operand);
        load_b_nk(operand, tile(stage, 1), n * 8, k * 2);
        mma_m16n16k16(gradients[n], gradients[n + 1], own[1][k], operand);
      }
    const int from = begin + i * kPart + (kKeys ? past : 0);
    each_element(scores, [&](float x, int n, int e) {
      const int r = e / 2;
      const int column = n * 8 + lane % 4 * 2 + e % 2;
      const Stats other = stats[stage][column];
      const int apart = kKeys ? from + column - position[r] : position[r] - from - column;
      const float weight = ex2_approx(fmaf(x, scale, own_stats[r].bias + other.bias));
      const float of_row = kKeys ? other.delta : own_stats[r].delta;
      if (apart >= 0 && apart < window) sums[r] += weight * (gradients[n][e] - of_row);
    });
  }
  auto* const out = static_cast<float*>(args.ddecay_sums);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = quad_sum(sums[r]);
    if (lane % 4 != 0 || warp * 16 + lane / 4 + r * 8 >= count) continue;
    float& to = out[place(position[r])];
    if (kKeys) to = (position[r] >= past ? to : 0) - sum;
    else to = sum;
  }
}

}  // namespace

const char* why_no_decay_gradients(const WindowAttentionForward& f) {
  if (const char* why_not = why_not_head_dim(f.head_dim)) return why_not;
  if (f.keys > 1 << 30) return "takes up to 2^30 positions";
  return why_unaligned({f.q, f.k, f.v});
}

void decay_gradients(const WindowAttentionBackward& args, const float* delta, Stream stream) {
  const WindowAttentionForward& f = args.forward;
  check("gradients of decays", why_no_decay_gradients(f));
  check("gradients of decays", why_unaligned({args.dout}));
  with_head_dim(f.head_dim, [&](auto d) {
    constexpr size_t kBytes = kTiles * kPart * d() * sizeof(bf16);
    static_assert(kBytes + 2 * kPart * sizeof(Stats) <= kPortableSharedBytes);
    const auto launch = [&](auto kernel, int64_t rows) {
      launch_kernel(kernel, unsigned(ceil_div(rows, kPart) * f.batch * f.heads), 32 * kWarps,
                    kBytes, stream, args, delta);
    };
    launch(sums_kernel<d(), false>, f.time);
    launch(sums_kernel<d(), true>, f.keys);
  });
}

}  // namespace assay::ops::cuda
