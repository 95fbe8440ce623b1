// The choice: a block streams the keys that its queries see and keeps of each query the largest
// score, its position and, when a gradient is wanted, the sum of the exponentials and the values
// that they weigh.
//
// Scores of one part are used while those of the next are made. The largest score of a query is
// shared by the quad of lanes that has its row; a part that holds none larger than those before, as
// nearly all do, leaves it and the scale of the sums as they are.
#include "ops/cuda/attention.cuh"
#include "ops/cuda/pipeline.cuh"
#include "ops/cuda/reduce.cuh"
#include "ops/cuda/wgmma.cuh"
#include "ops/top1_element/cuda_stream.cuh"

namespace assay::ops::cuda::element {
namespace {

// The largest score so far of a lane's two rows, alike in the quad; the sum over the
// lane's own columns.
struct Best {
  float top[2] = {-INFINITY, -INFINITY}, base[2] = {}, sum[2] = {}, shrink[2];
  int index[2] = {};

  // Scores of keys from `first` on. True when a row of the warp has a new largest score: `shrink`
  // then tells by what sums relative to the one before are to be multiplied.
  template <int N>
  __device__ bool meet(const float (&s)[N][4], int first, float scale) {
    const float high[2] = {largest(s, 0), largest(s, 1)};
    const bool risen = __any_sync(~0u, !(high[0] <= top[0] && high[1] <= top[1]));
    if (risen) {
#pragma unroll
      for (int i = 0; i < 2; ++i) rise(s, first, scale, i, high[i]);
    }
    return risen;
  }
  template <int N>
  __device__ static float largest(const float (&s)[N][4], int i) {
    float even = s[0][2 * i], odd = s[0][2 * i + 1];
#pragma unroll
    for (int n = 1; n < N; ++n) {
      even = max_nan(even, s[n][2 * i]);
      odd = max_nan(odd, s[n][2 * i + 1]);
    }
    return max_nan(even, odd);
  }
  template <int N>
  __device__ void rise(const float (&s)[N][4], int first, float scale, int i, float high) {
    high = butterfly<1, 4>(high, [](float x, float y) { return max_nan(x, y); });
    int column = column_of(s, i, high);
    column = butterfly<1, 4>(column, [](int x, int y) { return min(x, y); });
    if (high > top[i]) index[i] = first + column;
    const float before = top[i];
    top[i] = max_nan(before, high);
    base[i] = top[i] * scale;
    shrink[i] = before == -INFINITY ? 0 : ex2_approx(before * scale - base[i]);
    sum[i] *= shrink[i];
  }
  // The first of the lane's columns that holds x; far after where none does.
  template <int N>
  __device__ static int column_of(const float (&s)[N][4], int i, float x) {
    int column = 1 << 30;
#pragma unroll
    for (int n = N - 1; n >= 0; --n)
#pragma unroll
      for (int e = 1; e >= 0; --e) column = s[n][2 * i + e] == x ? n * 8 + e : column;
    return column + threadIdx.x % 4 * 2;
  }
  // The scores' weights relative to the largest.
  template <int N>
  __device__ void weigh(uint32_t (&weights)[N / 2][4], const float (&s)[N][4], float scale) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sums[2] = {sum[i], 0};
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const float even = ex2_approx(fmaf(s[n][2 * i], scale, -base[i])),
                    odd = ex2_approx(fmaf(s[n][2 * i + 1], scale, -base[i]));
        sums[0] += even;
        sums[1] += odd;
        weights[n / 2][n % 2 * 2 + i] = pack_bf16x2(even, odd);
      }
      sum[i] = sums[0] + sums[1];
    }
  }
  __device__ float total(int i) const { return quad_sum(sum[i]); }
};

// Keys from the row's `limit` on are not seen.
template <int N>
__device__ void hide(float (&s)[N][4], int first, const int (&limit)[2]) {
  const int column = first + threadIdx.x % 4 * 2;
  each_element(s, [&](float& x, int n, int e) {
    x = column + n * 8 + e % 2 < limit[e / 2] ? x : -INFINITY;
  });
}

// The value that a query chose, NaN where its scores hold one. By the quad.
template <int D>
__device__ void write_value(const Top1ElementForward& p, const RowRange& mine, int t, int index,
                            bool nan) {
  const uint4* from = reinterpret_cast<const uint4*>(
      head_row<D>(p.v, mine.b, index, mine.h / int(p.heads / p.kv_heads)));
  uint4* to = reinterpret_cast<uint4*>(head_row<D>(p.out, mine.b, t, mine.h));
#pragma unroll
  for (int i = threadIdx.x % 4; i < D / 8; i += 4)
    to[i] = nan ? make_uint4(~0u, ~0u, ~0u, ~0u) : from[i];
}

template <int D, bool kSoft>
__device__ void write(const Top1ElementForward& p, const RowRange& mine, const Best& best,
                      const float (&soft)[D / 8][4]) {
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = mine.row(i), t = mine.first + row;
    const float total = kSoft ? best.total(i) : 1,
                logsumexp = kSoft ? best.base[i] + __log2f(total) : best.top[i];
    if (row >= mine.count) continue;
    const int64_t at = mine.head * p.time + t;
    write_value<D>(p, mine, t, best.index[i], isnan(logsumexp));
    if (lane == 0) p.index[at] = best.index[i];
    if constexpr (!kSoft) continue;
    if (lane == 0) static_cast<float*>(p.logsumexp)[at] = logsumexp * kLn2;
    const float share = 1 / total;
    float* to = static_cast<float*>(p.soft) + at * D + lane * 2;
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
      *reinterpret_cast<float2*>(to + n * 8) =
          make_float2(soft[n][2 * i] * share, soft[n][2 * i + 1] * share);
  }
}

template <int D, int kPart, bool kSoft, bool kRegisters, class Smem>
__device__ void choose_rows(const Smem& smem, const Top1ElementForward& p, const RowRange& mine,
                            int parts, float scale) {
  const int past = int(p.past);
  smem.own_ready().wait(0);
  const OperandA<D, kRegisters> queries(smem.own(0));
  const uint64_t keys = WgmmaTile<D, 64>{smem.streamed(0, 0)}.rows();
  const uint64_t values = WgmmaTile<D, 64>{smem.streamed(0, kSoft)}.columns();
  auto stage_at = [](int stage) {
    return uint32_t(stage * ((kSoft ? 2 : 1) * kPart * D * 2 >> 4));
  };
  const int seen = past + mine.first + mine.group_row() + 1;  // by the warpgroup's first query
  const int limit[2] = {past + mine.first + mine.row(0) + 1, past + mine.first + mine.row(1) + 1};

  Best best;
  float left[kPart / 8][4], right[kPart / 8][4], soft[D / 8][4] = {};
  uint32_t even[kPart / 16][4], odd[kPart / 16][4];  // weights of the part before and of this one
  PipelineState<Smem::kStages> ahead;
  int before = 0, here = 0;
  smem.ring().consumer_wait(ahead);
  wgmma_fence();
  scores<D, kPart>(left, queries, keys);
  wgmma_commit_group();
  wgmma_wait_group<0>(left);
  // Part i, whose scores are in `now`; those of the next one are computed.
  auto turn = [&](float(&now)[kPart / 8][4], float(&next)[kPart / 8][4],
                  const uint32_t(&weights)[kPart / 16][4], uint32_t(&fresh)[kPart / 16][4], int i,
                  auto weighted) {
    if (i + 1 < parts) {
      ahead.advance();
      smem.ring().consumer_wait(ahead);
    }
    wgmma_fence();
    scores<D, kPart>(next, queries, advance_descriptor(keys, stage_at(ahead.stage)));
    if constexpr (decltype(weighted)::value)
      accumulate<D, kPart>(soft, weights, advance_descriptor(values, stage_at(before)));
    wgmma_commit_group();
    if ((i + 1) * kPart > seen) hide(now, i * kPart, limit);
    const bool risen = best.meet(now, i * kPart, scale);
    if constexpr (kSoft) best.weigh(fresh, now, scale);
    wgmma_wait_group<0>(next);
    if constexpr (decltype(weighted)::value) warpgroup_fence_operand(soft);
    if (i > 0) smem.release(before);
    if constexpr (kSoft) {
      if (risen) each_element(soft, [&](float& x, int, int e) { x *= best.shrink[e / 2]; });
    }
    before = here;
    here = ahead.stage;
  };
  using Weighted = std::bool_constant<kSoft>;
  turn(left, right, odd, even, 0, std::false_type{});
  int i = 1;
  for (; i + 1 < parts; i += 2) {
    turn(right, left, even, odd, i, Weighted{});
    turn(left, right, odd, even, i + 1, Weighted{});
  }
  auto finish = [&](const uint32_t(&weights)[kPart / 16][4]) {
    wgmma_fence();
    accumulate<D, kPart>(soft, weights, advance_descriptor(values, stage_at(before)));
    wgmma_commit_group();
    wgmma_wait_group<0>(soft);
  };
  if (i < parts) {
    turn(right, left, even, odd, i, Weighted{});
    if constexpr (kSoft) finish(odd);
  } else if constexpr (kSoft) {
    finish(even);
  }
  write<D, kSoft>(p, mine, best, soft);
}

template <int D, int kPart, int kGroups, bool kSoft, bool kRegisters>
__global__ void __launch_bounds__(kGroups * 128 + 128, 1)
    choose_kernel(Top1ElementForward p, Operands m, float scale) {
  using Smem = StreamSmem<D, kPart, kGroups, 1, kSoft ? 2 : 1>;
  const Smem smem;
  const RowRange mine(int(p.heads), int(p.time), Smem::kRows, true);
  const int parts = (int(p.past) + mine.first + mine.count + kPart - 1) / kPart;
  smem.init();
  if (smem.is_producer()) {
    smem.producer_registers();
    const int64_t kv = mine.b * p.kv_heads + mine.h / (p.heads / p.kv_heads);
    smem.produce(
        parts, [&](int) { return m.q.at<D>(mine.head, mine.first); },
        [&](int i, int which) { return (which ? m.v : m.k).at<D>(kv, int64_t{i} * kPart); },
        [](int, int) { return nullptr; });
  } else {
    smem.consumer_registers();
    choose_rows<D, kPart, kSoft, kRegisters>(smem, p, mine, parts, scale);
  }
}

template <int D, bool kSoft>
void choose_blocks(const Top1ElementForward& p, const Operands& m, Stream stream) {
  // as registers allow
  constexpr int kPart = D == 64 && !kSoft ? 128 : 64, kGroups = D > 64 && kSoft ? 2 : 3;
  using Smem = StreamSmem<D, kPart, kGroups, 1, kSoft ? 2 : 1>;
  const unsigned blocks = unsigned(ceil_div(p.time, Smem::kRows) * p.batch * p.heads);
  launch_kernel(choose_kernel<D, kPart, kGroups, kSoft, (D > 64 && kSoft)>, blocks, Smem::kThreads,
                Smem::kBytes, stream, p, m, exponent_scale(p));
}

}  // namespace

void choose(const Top1ElementForward& p, const Operands& m, Stream stream) {
  with_head_dim(p.head_dim, [&](auto d) {
    if (p.soft) choose_blocks<d(), true>(p, m, stream);
    else choose_blocks<d(), false>(p, m, stream);
  });
}

}  // namespace assay::ops::cuda::element
