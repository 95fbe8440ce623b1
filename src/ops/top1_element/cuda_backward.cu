// The gradients of queries and of keys, each by blocks that own their rows: no row has two writers
// and nothing is added across blocks. With X the own rows and Y those that stream past,
//   S = X₁ Y₁ᵀ     dP = X₂ Y₂ᵀ     dS = P (dP − delta)     sum = dS Y₁
// where X are q, dout and Y are k, v for dq, and the other way round for dk: then a column,
// not a row, has a logsumexp and a delta. dS comes out of the tensor cores as the left
// operand of its product.
#include "ops/cuda/attention.cuh"
#include "ops/cuda/pipeline.cuh"
#include "ops/cuda/wgmma.cuh"
#include "ops/top1_element/cuda_stream.cuh"

namespace assay::ops::cuda::element {
namespace {

constexpr int kPart = 64;
template <int D>
constexpr int kGroups = D == 64 ? 3 : 2;  // as registers allow

// What streams past a block: `per_head` parts from `first` on, of one head after the other.
struct Parts {
  int first, per_head, count;
};
__device__ Parts keys_of(const Top1ElementForward& p, const RowRange& queries) {
  const int count = (int(p.past) + queries.first + queries.count + kPart - 1) / kPart;
  return {0, count, count};
}
__device__ Parts queries_of(const Top1ElementForward& p, const RowRange& keys) {
  const int first = max(0, keys.first - int(p.past)) / kPart,
            per_head = (int(p.time) + kPart - 1) / kPart - first;
  return {first, per_head, per_head * int(p.heads / p.kv_heads)};
}

// What belongs to each query, of a lane's two rows or of its columns.
struct OfRows {
  float of[2];
  __device__ float at(int, int e) const { return of[e / 2]; }
};
struct OfColumns {
  float2 of[kPart / 8];
  __device__ float at(int n, int e) const { return e % 2 ? of[n].y : of[n].x; }
  __device__ void load(const float* stats) {
#pragma unroll
    for (int n = 0; n < kPart / 8; ++n)
      of[n] = *reinterpret_cast<const float2*>(stats + n * 8 + threadIdx.x % 4 * 2);
  }
};

// Scores become P.
template <int N, class Stats>
__device__ void weigh(float (&s)[N][4], float scale, const Stats& logsumexp) {
  each_element(
      s, [&](float& x, int n, int e) { x = ex2_approx(fmaf(x, scale, -logsumexp.at(n, e))); });
}
// P becomes dS.
template <int N, class Stats>
__device__ void differentiate(float (&s)[N][4], const float (&dp)[N][4], const Stats& delta) {
  each_element(s, [&](float& x, int n, int e) { x *= dp[n][e] - delta.at(n, e); });
}
// Nothing flows between a query and a key after it. A row sees the columns below its limit, or
// (kAbove) from it on.
template <bool kAbove, int N>
__device__ void hide(float (&s)[N][4], const int (&limit)[2]) {
  const int column = threadIdx.x % 4 * 2;
  each_element(s, [&](float& x, int n, int e) {
    x = (column + n * 8 + e % 2 < limit[e / 2]) != kAbove ? x : 0;
  });
}

template <int D>
__device__ void write_rows(const View& to, const RowRange& mine, const float (&sum)[D / 8][4],
                           float factor) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = mine.row(half);
    bf16* at = row < mine.count ? head_row<D>(to, mine.b, mine.first + row, mine.h) : nullptr;
#pragma unroll
    for (int d = 0; d < D / 32; ++d)
      store_row32(at ? at + d * 32 : nullptr, columns32(sum, d), half, factor);
  }
}

// The sums of a warpgroup's rows, which are keys or queries.
template <int D, bool kKeys, class Smem>
__device__ void sum_parts(float (&sum)[D / 8][4], const Smem& smem, const Top1ElementForward& p,
                          const Operands& m, const RowRange& mine, const Parts& parts,
                          float scale) {
  smem.own_ready().wait(0);
  const OperandA<D, false> own(smem.own(0)), own2(smem.own(1));
  const uint64_t rows = WgmmaTile<D, 64>{smem.streamed(0, 0)}.rows(),
                 rows2 = WgmmaTile<D, 64>{smem.streamed(0, 1)}.rows(),
                 columns = WgmmaTile<D, 64>{smem.streamed(0, 0)}.columns();
  auto stage_at = [](int stage) { return uint32_t(stage * (2 * kPart * D * 2 >> 4)); };
  std::conditional_t<kKeys, OfColumns, OfRows> logsumexp, delta;
  int limit[2];  // of a column's position, relative to the part
  if constexpr (!kKeys) {
    for (int i = 0; i < 2; ++i) {
      const int64_t at = mine.head * m.q.rows + mine.first + mine.row(i);
      logsumexp.of[i] = m.logsumexp[at];
      delta.of[i] = m.delta[at];
    }
  }
  const int past = int(p.past), begin = mine.first + mine.group_row();  // the warpgroup's first row
  float s[kPart / 8][4], dp[kPart / 8][4];
  uint32_t weights[kPart / 16][4];
  PipelineState<Smem::kStages> ring;
  int before = 0, part = parts.first;
  auto turn = [&](auto first) {
    smem.ring().consumer_wait(ring);
    wgmma_fence();
    scores<D, kPart>(s, own, advance_descriptor(rows, stage_at(ring.stage)));
    wgmma_commit_group();
    if constexpr (!decltype(first)::value)
      accumulate<D, kPart>(sum, weights, advance_descriptor(columns, stage_at(before)));
    scores<D, kPart>(dp, own2, advance_descriptor(rows2, stage_at(ring.stage)));
    wgmma_commit_group();
    // on their way while products are made
    if constexpr (kKeys) logsumexp.load(smem.stats(ring.stage, 0));
    wgmma_wait_group<1>(s);
    weigh(s, scale, logsumexp);
    if constexpr (kKeys) delta.load(smem.stats(ring.stage, 1));
#pragma unroll
    for (int i = 0; i < 2; ++i)
      limit[i] = mine.first + mine.row(i) + (kKeys ? -past : past + 1) - part * kPart;
    const bool hidden =
        kKeys ? past + part * kPart < begin + 63 : (part + 1) * kPart > past + begin + 1;
    // here a branch keeps the exponentials before the wait: README.md
    if (kKeys && hidden) hide<kKeys>(s, limit);
    wgmma_wait_group<0>(dp);
    if constexpr (!decltype(first)::value) {
      warpgroup_fence_operand(sum);
      smem.release(before);
    }
    differentiate(s, dp, delta);
    if (!kKeys && hidden) hide<kKeys>(s, limit);
    pack_operand(weights, s);
    before = ring.stage;
    ring.advance();
    ++part;
    if (kKeys && part == parts.first + parts.per_head) part = parts.first;
  };
  turn(std::true_type{});
  for (int i = 1; i < parts.count; ++i) turn(std::false_type{});
  wgmma_fence();
  accumulate<D, kPart>(sum, weights, advance_descriptor(columns, stage_at(before)));
  wgmma_commit_group();
  wgmma_wait_group<0>(sum);
}

template <int D>
__global__ void __launch_bounds__(kGroups<D> * 128 + 128, 1)
    query_kernel(Top1ElementBackward bwd, Operands m, float scale) {
  using Smem = StreamSmem<D, kPart, kGroups<D>, 2, 2>;
  const Smem smem;
  const Top1ElementForward& p = bwd.forward;
  const RowRange mine(int(p.heads), int(p.time), Smem::kRows, true);
  const Parts parts = keys_of(p, mine);
  smem.init();
  if (smem.is_producer()) {
    smem.producer_registers();
    const int64_t kv = mine.b * p.kv_heads + mine.h / (p.heads / p.kv_heads);
    smem.produce(
        parts.count, [&](int which) { return (which ? m.dout : m.q).at<D>(mine.head, mine.first); },
        [&](int i, int which) { return (which ? m.v : m.k).at<D>(kv, int64_t{i} * kPart); },
        [](int, int) { return nullptr; });
  } else {
    smem.consumer_registers();
    float sum[D / 8][4] = {};
    sum_parts<D, false>(sum, smem, p, m, mine, parts, scale);
    write_rows<D>(bwd.dq, mine, sum, float(p.scale));
  }
}

template <int D>
__global__ void __launch_bounds__(kGroups<D> * 128 + 128, 1)
    key_kernel(Top1ElementBackward bwd, Operands m, float scale) {
  using Smem = StreamSmem<D, kPart, kGroups<D>, 2, 2, true>;
  const Smem smem;
  const Top1ElementForward& p = bwd.forward;
  const RowRange mine(int(p.kv_heads), int(p.past + p.time), Smem::kRows, false);
  const Parts parts = queries_of(p, mine);
  smem.init();
  if (smem.is_producer()) {
    smem.producer_registers();
    const int64_t head = mine.b * p.heads + mine.h * (p.heads / p.kv_heads);
    auto row = [&](int i) { return int64_t{parts.first + i % parts.per_head} * kPart; };
    smem.produce(
        parts.count, [&](int which) { return (which ? m.v : m.k).at<D>(mine.head, mine.first); },
        [&](int i, int which) {
          return (which ? m.dout : m.q).at<D>(head + i / parts.per_head, row(i));
        },
        [&](int i, int which) {
          return (which ? m.delta : m.logsumexp) + (head + i / parts.per_head) * m.q.rows + row(i);
        });
  } else {
    smem.consumer_registers();
    float sum[D / 8][4] = {};
    sum_parts<D, true>(sum, smem, p, m, mine, parts, scale);
    write_rows<D>(bwd.dk, mine, sum, fabsf(float(p.scale)));
  }
}

}  // namespace

void query_gradients(const Top1ElementBackward& bwd, const Operands& m, Stream stream) {
  const Top1ElementForward& p = bwd.forward;
  with_head_dim(p.head_dim, [&](auto d) {
    using Smem = StreamSmem<d(), kPart, kGroups<d()>, 2, 2>;
    const unsigned blocks = unsigned(ceil_div(p.time, Smem::kRows) * p.batch * p.heads);
    launch_kernel(query_kernel<d()>, blocks, Smem::kThreads, Smem::kBytes, stream, bwd, m,
                  exponent_scale(p));
  });
}
void key_gradients(const Top1ElementBackward& bwd, const Operands& m, Stream stream) {
  const Top1ElementForward& p = bwd.forward;
  with_head_dim(p.head_dim, [&](auto d) {
    using Smem = StreamSmem<d(), kPart, kGroups<d()>, 2, 2, true>;
    const unsigned blocks = unsigned(ceil_div(p.past + p.time, Smem::kRows) * p.batch * p.kv_heads);
    launch_kernel(key_kernel<d()>, blocks, Smem::kThreads, Smem::kBytes, stream, bwd, m,
                  exponent_scale(p));
  });
}

}  // namespace assay::ops::cuda::element
