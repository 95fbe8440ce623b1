// The forward pass: a block streams the keys that its queries see and keeps of each query the
// largest score, its position where that is wanted, the sum of the exponentials and the values that
// they weigh.
//
// The largest score of a query is shared by the quad of lanes that has its row; a part that holds
// none larger than those before, as nearly all do, leaves it and the scale of the sums as they are.
#include "ops/attention/passes/attention_stream.cuh"
#include "ops/cuda/attention.cuh"
#include "ops/cuda/reduce.cuh"
#include "ops/cuda/tensor_map.cuh"

namespace assay::ops::cuda {
namespace attention {
namespace {

struct ForwardParams {
  CUtensorMap q;
  CUtensorMap k;
  CUtensorMap v;
  Shape shape;
  View values;  // v
  AttentionOutputs to;
};

// The largest score so far of a lane's two rows, alike in the quad; the sum over the
// lane's own columns.
template <bool kIndex>
struct Best {
  float top[2] = {-INFINITY, -INFINITY};
  float base[2] = {};
  float sum[2] = {};
  float shrink[2];
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
    float even = s[0][2 * i];
    float odd = s[0][2 * i + 1];
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
    if constexpr (kIndex) {
      int column = column_of(s, i, high);
      column = butterfly<1, 4>(column, [](int x, int y) { return min(x, y); });
      if (high > top[i]) index[i] = first + column;
    }
    const float before = top[i];
    top[i] = max_nan(before, high);
    base[i] = top[i] == -INFINITY ? 0 : top[i] * scale;  // a row that has seen no key yet
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
  // Scores become their weights relative to the largest.
  template <int N>
  __device__ void weigh(float (&s)[N][4], float scale) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sums[2] = {sum[i], 0};
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[n][2 * i + e];
          x = ex2_approx(fmaf(x, scale, -base[i]));
          sums[e] += x;
        }
      sum[i] = sums[0] + sums[1];
    }
  }
  __device__ float total(int i) const { return quad_sum(sum[i]); }
};

// The value that a query chose, NaN where its scores hold one. By the quad.
template <int D>
__device__ void write_value(const ForwardParams& args, const RowRange& mine, int t, int index,
                            bool nan) {
  const uint4* from = reinterpret_cast<const uint4*>(
      head_row<D>(args.values, mine.b, index, mine.h / args.shape.group()));
  uint4* to = reinterpret_cast<uint4*>(head_row<D>(args.to.out, mine.b, t, mine.h));
#pragma unroll
  for (int i = threadIdx.x % 4; i < D / 8; i += 4)
    to[i] = nan ? make_uint4(~0u, ~0u, ~0u, ~0u) : from[i];
}

template <int D, bool kValues, bool kIndex>
__device__ void write(const ForwardParams& args, const RowRange& mine, const Best<kIndex>& best,
                      const float (&values)[D / 8][4]) {
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = mine.row(i);
    const int t = mine.first + row;
    const bool written = row < mine.count;
    const float total = kValues ? best.total(i) : 1;
    const float share = 1 / total;
    float logsumexp = kValues ? best.base[i] + __log2f(total) : best.top[i];
    if (written && args.shape.decay_sums)
      logsumexp +=
          args.shape
              .decay_sums[mine.head * args.shape.key_rows + args.shape.keys - args.shape.time + t];
    const int64_t at = mine.head * args.shape.time + t;
    if (kValues && written && lane == 0 && args.to.logsumexp)
      args.to.logsumexp[at] = logsumexp * kLn2;
    if constexpr (!kIndex) {
      bf16* to = written ? head_row<D>(args.to.out, mine.b, t, mine.h) : nullptr;
#pragma unroll
      for (int d = 0; d < D / 32; ++d)
        store_row32(to ? to + d * 32 : nullptr, columns32(values, d), i, share);
    } else if (written) {
      write_value<D>(args, mine, t, best.index[i], isnan(logsumexp));
      if (lane == 0) args.to.index[at] = best.index[i];
      if constexpr (!kValues) continue;
      float* to = args.to.soft + at * D + lane * 2;
#pragma unroll
      for (int n = 0; n < D / 8; ++n)
        *reinterpret_cast<float2*>(to + n * 8) =
            make_float2(values[n][2 * i] * share, values[n][2 * i + 1] * share);
    }
  }
}

// Without the position: exponentials of a part while the values of the part before are added.
// `all`: the parts that the block streams, of which the warpgroup reads some.
template <int D, int kPart, Bias kBias, bool kRegisters, class Smem>
__device__ void average_values(const Smem& smem, const ForwardParams& args, const RowRange& mine,
                               const Parts& all) {
  const Band band = Band::of_queries(args.shape);
  const int begin = mine.first + mine.group_row();
  const int row = mine.first + mine.row(0);
  const Parts seen = band.parts<kPart>(begin, mine.group_count());
  const float scale = kBias == Bias::none ? args.shape.scale : 1;
  PipelineState<Smem::kStages> ahead;
  smem.own_ready().wait(0);
  if (seen.count() == 0) return smem.skip(ahead, all.count());
  const OperandA<D, kRegisters> queries(smem.own(0));
  const uint64_t keys = WgmmaTile<D, 64>{smem.streamed(0, 0)}.rows();
  const uint64_t values = WgmmaTile<D, 64>{smem.streamed(0, 1)}.columns();
  auto stage_at = [](int stage) { return uint32_t(stage * (2 * kPart * D * 2 >> 4)); };
  Best<false> best;
  float s[kPart / 8][4];
  float sum[D / 8][4] = {};
  uint32_t weights[kPart / 16][4];
  smem.skip(ahead, seen.begin - all.begin);
  int before = 0;
  auto turn = [&](int i, auto first) {
    constexpr bool kPending = !decltype(first)::value;
    smem.ring().consumer_wait(ahead);
    wgmma_fence();
    scores<D, kPart>(s, queries, advance_descriptor(keys, stage_at(ahead.stage)));
    wgmma_commit_group();
    if constexpr (kPending) {
      accumulate<D, kPart>(sum, weights, advance_descriptor(values, stage_at(before)));
      wgmma_commit_group();
    }
    [[maybe_unused]] OfColumns<kPart> sums;
    if constexpr (kBias == Bias::decays)
      sums.load(args.shape.decay_sums + mine.head * args.shape.key_rows + i * kPart);
    wgmma_wait_group<kPending>(s);
    if constexpr (kBias == Bias::decays) subtract_sums(s, args.shape.scale, sums);
    if constexpr (kBias == Bias::alibi) {
      const Alibi alibi = Alibi::of<false>(args.shape, mine.h, row, i * kPart);
      each_element(
          s, [&](float& x, int n, int e) { x = fmaf(x, args.shape.scale, alibi.term(n, e)); });
    }
    if (band.cuts<kPart>(begin, i))
      band.each_hidden(s, row, i * kPart, [](float& x) { x = -INFINITY; });
    const bool risen = best.meet(s, i * kPart, scale);
    best.weigh(s, scale);
    if constexpr (kPending) {
      wgmma_wait_group<0>(sum);
      smem.release(before);
      if (risen) each_element(sum, [&](float& x, int, int e) { x *= best.shrink[e / 2]; });
    }
    pack_operand(weights, s);
    before = ahead.stage;
    ahead.advance();
  };
  turn(seen.begin, std::true_type{});
  for (int i = seen.begin + 1; i < seen.end; ++i) turn(i, std::false_type{});
  wgmma_fence();
  accumulate<D, kPart>(sum, weights, advance_descriptor(values, stage_at(before)));
  wgmma_commit_group();
  wgmma_wait_group<0>(sum);
  smem.release(before);
  smem.skip(ahead, all.end - seen.end);
  write<D, true>(args, mine, best, sum);
}

// With the position: scores of a part are used while those of the next one are computed.
template <int D, int kPart, bool kValues, bool kRegisters, class Smem>
__device__ void choose(const Smem& smem, const ForwardParams& args, const RowRange& mine,
                       const Parts& all) {
  const Band band = Band::of_queries(args.shape);
  const int begin = mine.first + mine.group_row();
  const int row = mine.first + mine.row(0);
  const Parts seen = band.parts<kPart>(begin, mine.group_count());
  const float scale = args.shape.scale;
  PipelineState<Smem::kStages> ahead;
  smem.own_ready().wait(0);
  if (seen.count() == 0) return smem.skip(ahead, all.count());
  const OperandA<D, kRegisters> queries(smem.own(0));
  const uint64_t keys = WgmmaTile<D, 64>{smem.streamed(0, 0)}.rows();
  const uint64_t values = WgmmaTile<D, 64>{smem.streamed(0, kValues)}.columns();
  auto stage_at = [](int stage) {
    return uint32_t(stage * ((kValues ? 2 : 1) * kPart * D * 2 >> 4));
  };

  Best<true> best;
  float left[kPart / 8][4];
  float right[kPart / 8][4];
  float sum[D / 8][4] = {};
  // weights of the part before and of this one
  uint32_t even[kPart / 16][4];
  uint32_t odd[kPart / 16][4];
  smem.skip(ahead, seen.begin - all.begin);
  int before = 0;
  int here = ahead.stage;
  smem.ring().consumer_wait(ahead);
  wgmma_fence();
  scores<D, kPart>(left, queries, advance_descriptor(keys, stage_at(ahead.stage)));
  wgmma_commit_group();
  wgmma_wait_group<0>(left);
  // Part i, whose scores are in `now`; those of the next one are computed.
  auto turn = [&](float(&now)[kPart / 8][4], float(&next)[kPart / 8][4],
                  const uint32_t(&weights)[kPart / 16][4], uint32_t(&fresh)[kPart / 16][4], int i,
                  auto weighted) {
    if (i + 1 < seen.end) {
      ahead.advance();
      smem.ring().consumer_wait(ahead);
    }
    wgmma_fence();
    scores<D, kPart>(next, queries, advance_descriptor(keys, stage_at(ahead.stage)));
    if constexpr (decltype(weighted)::value)
      accumulate<D, kPart>(sum, weights, advance_descriptor(values, stage_at(before)));
    wgmma_commit_group();
    if (band.cuts<kPart>(begin, i))
      band.each_hidden(now, row, i * kPart, [](float& x) { x = -INFINITY; });
    const bool risen = best.meet(now, i * kPart, scale);
    if constexpr (kValues) {
      best.weigh(now, scale);
      pack_operand(fresh, now);
    }
    wgmma_wait_group<0>(next);
    if constexpr (decltype(weighted)::value) warpgroup_fence_operand(sum);
    if (i > seen.begin) smem.release(before);
    if constexpr (kValues) {
      if (risen) each_element(sum, [&](float& x, int, int e) { x *= best.shrink[e / 2]; });
    }
    before = here;
    here = ahead.stage;
  };
  using Weighted = std::bool_constant<kValues>;
  turn(left, right, odd, even, seen.begin, std::false_type{});
  int i = seen.begin + 1;
  for (; i + 1 < seen.end; i += 2) {
    turn(right, left, even, odd, i, Weighted{});
    turn(left, right, odd, even, i + 1, Weighted{});
  }
  auto finish = [&](const uint32_t(&weights)[kPart / 16][4]) {
    wgmma_fence();
    accumulate<D, kPart>(sum, weights, advance_descriptor(values, stage_at(before)));
    wgmma_commit_group();
    wgmma_wait_group<0>(sum);
  };
  if (i < seen.end) {
    turn(right, left, even, odd, i, Weighted{});
    if constexpr (kValues) finish(odd);
  } else if constexpr (kValues) {
    finish(even);
  }
  smem.release(before);
  ahead.advance();
  smem.skip(ahead, all.end - seen.end);
  write<D, kValues>(args, mine, best, sum);
}

template <int D, int kPart, int kGroups, bool kIndex, bool kValues, Bias kBias>
__global__ void __launch_bounds__(kGroups * 128 + 128, 1)
    forward_kernel(const __grid_constant__ ForwardParams args) {
  using Smem = StreamSmem<D, kPart, kGroups, 1, kValues ? 2 : 1>;
  const Smem smem;
  const RowRange mine(args.shape.heads, args.shape.time, Smem::kRows, true);
  const Parts parts = Band::of_queries(args.shape).parts<kPart>(mine.first, mine.count);
  smem.init();
  if (smem.is_producer()) {
    smem.producer_registers();
    const int kv = mine.h / args.shape.group();
    smem.produce(
        parts.count(),
        [&](int, bf16* to, Mbarrier full) {
          load_rows<D, Smem::kRows>(to, args.q, mine.b, mine.first, mine.h, full);
        },
        [&](int i, int which, bf16* to, Mbarrier full) {
          load_rows<D, kPart>(to, which ? args.v : args.k, mine.b, (parts.begin + i) * kPart, kv,
                              full);
        },
        [](int, int) { return nullptr; });
  } else {
    smem.consumer_registers();
    constexpr bool kRegisters = D > 64 && kValues;
    if constexpr (kIndex) choose<D, kPart, kValues, kRegisters>(smem, args, mine, parts);
    else average_values<D, kPart, kBias, kRegisters>(smem, args, mine, parts);
  }
}

template <int D, bool kIndex, bool kValues, Bias kBias, int kPart = 64>
void forward_blocks(const ForwardParams& args, int64_t heads, Stream stream) {
  constexpr int kGroups = D > 64 && kValues ? 2 : 3;  // as registers allow
  using Smem = StreamSmem<D, kPart, kGroups, 1, kValues ? 2 : 1>;
  launch_kernel(forward_kernel<D, kPart, kGroups, kIndex, kValues, kBias>,
                unsigned(ceil_div(args.shape.time, Smem::kRows) * heads), Smem::kThreads,
                Smem::kBytes, stream, args);
}
// Parts of 128 keys need fewer waits, but more hidden scores where the window is narrow.
template <int D>
constexpr int kWidePart = D == 64 ? 128 : 64;  // as registers allow
template <int D, Bias kBias>
void forward_attention(const ForwardParams& args, int64_t heads, Stream stream) {
  constexpr int kPart = kBias == Bias::none ? kWidePart<D> : 64;
  if (args.shape.window >= 1024) forward_blocks<D, false, true, kBias, kPart>(args, heads, stream);
  else forward_blocks<D, false, true, kBias>(args, heads, stream);
}

// Sums [B, S, H] in base 2 to [B, H, rows]; zeros past the last.
__global__ void __launch_bounds__(256) sums_kernel(const float* sums, float* to, int64_t keys,
                                                   int64_t heads, int64_t rows, int64_t count) {
  const int64_t at = blockIdx.x * int64_t{256} + threadIdx.x;
  if (at >= count) return;
  const int64_t head = at / rows;
  const int64_t key = at % rows;
  const int64_t from = (head / heads * keys + key) * heads + head % heads;
  to[at] = key < keys ? sums[from] * kLog2e : 0;
}

// Rows times 1, −1 or 0, without gaps. One thread per eight numbers.
__global__ void __launch_bounds__(256)
    sign_kernel(View x, bf16* to, int64_t time, int64_t width, int64_t vectors, float sign) {
  const int64_t i = blockIdx.x * int64_t{256} + threadIdx.x;
  const int64_t row = i / (width / 8);
  if (i >= vectors) return;
  const bf16* from = static_cast<const bf16*>(x.data) + row / time * x.batch_stride +
                     row % time * x.time_stride + i % (width / 8) * 8;
  Vec<bf16, 8> numbers = *reinterpret_cast<const Vec<bf16, 8>*>(from);
  for (int e = 0; e < 8; ++e) numbers[e] = from_compute<bf16>(to_compute(numbers[e]) * sign);
  reinterpret_cast<Vec<bf16, 8>*>(to)[i] = numbers;
}

}  // namespace

View signed_queries(const Attention& a, const AttentionWorkspace& m, Stream stream) {
  if (!m.q) return a.q;
  const int64_t width = a.heads * a.head_dim;
  const int64_t vectors = a.batch * a.time * width / 8;
  launch_threads(sign_kernel, vectors, 256, stream, a.q, m.q, a.time, width, vectors,
                 a.scale < 0 ? -1.f : 0.f);
  return {m.q, a.time * width, width};
}

void prepare_sums(const Attention& a, const AttentionWorkspace& m, Stream stream) {
  if (!a.decay_sums) return;
  const int64_t count = a.batch * a.heads * m.key_rows;
  launch_threads(sums_kernel, count, 256, stream, a.decay_sums, m.decay_sums, a.keys, a.heads,
                 m.key_rows, count);
}

}  // namespace attention

using namespace attention;

AttentionWorkspace::AttentionWorkspace(const Attention& a, bool backward, WorkspaceArena& arena) {
  if (!(a.scale > 0)) q = arena.take<bf16>(a.batch * a.time * a.heads * a.head_dim);
  key_rows = ceil_div(a.keys, kPartRows) * kPartRows;
  if (a.decay_sums) decay_sums = arena.take<float>(a.batch * a.heads * key_rows);
  if (!backward) return;
  rows = ceil_div(a.time, kPartRows) * kPartRows;
  logsumexp = arena.take<float>(a.batch * a.heads * rows);
  delta = arena.take<float>(a.batch * a.heads * rows);
}

const char* why_unsupported(const Attention& a) {
  if (const char* why_not = why_not_head_dim(a.head_dim)) return why_not;
  if (a.batch * a.heads * a.keys >= int64_t{1} << 31)
    return "takes fewer than 2^31 rows of all heads";
  if (a.slopes && a.decay_sums) return "takes no slopes with decays";
  const auto overlap = [&](const View& x, int64_t rows) {
    return (a.batch > 1 && x.batch_stride == 0) || (rows > 1 && x.time_stride == 0);
  };
  if (overlap(a.q, a.time) || overlap(a.k, a.keys) || overlap(a.v, a.keys))
    return "takes no rows that share memory";
  return why_unaligned({a.q, a.k, a.v});
}

void attention_forward(const Attention& a, const AttentionOutputs& to, const AttentionWorkspace& m,
                       Stream stream) {
  const ForwardParams args{
      rows_map(signed_queries(a, m, stream), a.batch, a.time, a.heads, a.head_dim),
      rows_map(a.k, a.batch, a.keys, a.kv_heads, a.head_dim),
      rows_map(a.v, a.batch, a.keys, a.kv_heads, a.head_dim),
      Shape(a, m),
      a.v,
      to};
  const int64_t heads = a.batch * a.heads;
  prepare_sums(a, m, stream);
  with_head_dim(a.head_dim, [&](auto d) {
    if (!to.index)
      with_bias(a, [&](auto bias) { forward_attention<d(), bias()>(args, heads, stream); });
    else if (to.soft) forward_blocks<d(), true, true, Bias::none>(args, heads, stream);
    else forward_blocks<d(), true, false, Bias::none, kWidePart<d()>>(args, heads, stream);
  });
}

}  // namespace assay::ops::cuda
