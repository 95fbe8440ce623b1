// The gradients of queries and of keys and values, each by blocks that own their rows: no row has
// two writers and nothing is added across blocks. With X the own rows and Y those that stream past,
//   S = X₁ Y₁ᵀ     dP = X₂ Y₂ᵀ     dS = P (dP − delta)     sum = dS Y₁     values = P Y₂
// where X are q, dout and Y are k, v for dq, and the other way round for dk and dv: then a column,
// not a row, has a logsumexp and a delta. P and dS come out of the tensor cores as the left
// operands of their products.
#include "ops/attention/passes/attention_stream.cuh"
#include "ops/cuda/attention.cuh"
#include "ops/cuda/reduce.cuh"
#include "ops/cuda/tensor_map.cuh"

namespace assay::ops::cuda {
namespace attention {
namespace {

constexpr int kPart = kPartRows;
// As registers allow.
template <int D, bool kValues>
constexpr int kGroups = D == 64 && !kValues ? 3 : 2;

struct BackwardParams {
  CUtensorMap q;
  CUtensorMap k;
  CUtensorMap v;
  CUtensorMap dout;
  Shape shape;
  // [B, H, rows], as AttentionWorkspace has them
  const float* logsumexp;
  const float* delta;
  int64_t rows;
  View dq;
  View dk;
  View dv;
  float* ddecay_sums;
};

// logsumexp and delta of each query, rows of a head padded. One quad of lanes per query.
template <int D>
__global__ void __launch_bounds__(256) delta_kernel(AttentionGradients g, AttentionWorkspace m,
                                                    int heads, int64_t time, int64_t keys) {
  const int64_t at = blockIdx.x * int64_t{64} + threadIdx.x / 4;
  const int64_t head = at / m.rows;
  const int64_t t = at % m.rows;
  const int lane = threadIdx.x % 4;
  float delta = 0;
  if (t < time) {
    const bf16* dout = head_row<D>(g.dout, head / heads, t, head % heads);
    const bf16* out = g.soft ? nullptr : head_row<D>(g.out, head / heads, t, head % heads);
#pragma unroll
    for (int i = lane * 4; i < D; i += 16) {
      float x[4];
      float y[4];
      if (g.soft) load_vec(x, g.soft + (head * time + t) * D, DType::f32, i);
      else load_vec(x, out, DType::bf16, i);
      load_vec(y, dout, DType::bf16, i);
      delta += x[0] * y[0] + x[1] * y[1] + x[2] * y[2] + x[3] * y[3];
    }
  }
  delta = quad_sum(delta);
  if (lane > 0) return;
  m.delta[at] = delta;
  float logsumexp = t < time ? g.logsumexp[head * time + t] * kLog2e : INFINITY;
  // scores of the backward pass are without c of the query
  if (t < time && m.decay_sums) logsumexp -= m.decay_sums[head * m.key_rows + keys - time + t];
  m.logsumexp[at] = logsumexp;
}

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
template <int D>
__device__ void store_gradient(const View& to, const RowRange& mine, const float (&sum)[D / 8][4],
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

// Sums of dS over the columns of the lane's two rows, of one head: the gradient of decay_sums of a
// query, which is 0 but for the rounding of delta, and −1 times that of a key. The kernel of
// queries runs first.
struct RowSums {
  float of[2] = {};
  template <int N>
  __device__ void add(const float (&ds)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) of[i] += ds[n][2 * i] + ds[n][2 * i + 1];
  }
  // By all lanes; starts again from zero. `head` is that of the queries.
  template <bool kKeys>
  __device__ void store(const BackwardParams& args, const RowRange& mine, int head) {
    const int past = args.shape.keys - args.shape.time;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float sum = quad_sum(of[i]);
      of[i] = 0;
      const int row = mine.row(i);
      if (row >= mine.count || threadIdx.x % 4 > 0) continue;
      const int position = mine.first + row + (kKeys ? 0 : past);
      float& to =
          args.ddecay_sums[(int64_t{mine.b} * args.shape.keys + position) * args.shape.heads +
                           head];
      to = kKeys ? (position < past ? 0 : to) - sum : sum;
    }
  }
};

// The sums of a warpgroup's rows, which are keys or queries. `all`: the parts that the block
// streams, once for each head of a group.
template <int D, bool kKeys, bool kValues, Bias kBias, class Smem>
__device__ void sum_parts(float (&sum)[D / 8][4], float (&values)[D / 8][4], const Smem& smem,
                          const BackwardParams& args, const RowRange& mine, const Band& band,
                          const Parts& all) {
  const int begin = mine.first + mine.group_row();
  const int row = mine.first + mine.row(0);
  const int heads = kKeys ? args.shape.group() : 1;
  const Parts seen = band.parts<kPart>(begin, mine.group_count());
  PipelineState<Smem::kStages> ring;
  smem.own_ready().wait(0);
  RowSums of_rows;
  auto store_rows = [&](int i) {
    if constexpr (kBias == Bias::decays)
      of_rows.template store<kKeys>(args, mine, kKeys ? mine.h * heads + i : mine.h);
  };
  if (seen.count() == 0) {
    for (int i = 0; i < heads; ++i) store_rows(i);
    return smem.skip(ring, heads * all.count());
  }
  const OperandA<D, false> own(smem.own(0));
  const OperandA<D, false> own2(own, Smem::kRows * D);
  const uint64_t rows = WgmmaTile<D, 64>{smem.streamed(0, 0)}.rows();
  const uint64_t columns = WgmmaTile<D, 64>{smem.streamed(0, 0)}.columns();
  constexpr int kSecond = kPart * D * 2 >> 4;  // from one operand of a part to the other
  auto stage_at = [](int stage) { return uint32_t(stage * 2 * kSecond); };
  std::conditional_t<kKeys, OfColumns<kPart>, OfRows> logsumexp;
  std::conditional_t<kKeys, OfColumns<kPart>, OfRows> delta;
  std::conditional_t<kKeys, OfRows, OfColumns<kPart>> sums;
  if constexpr (!kKeys) {
    for (int i = 0; i < 2; ++i) {
      // A row past the last query reads what another one has and is not written.
      const int64_t at = mine.head * args.rows + min(row + i * 8, args.shape.time - 1);
      logsumexp.of[i] = args.logsumexp[at];
      delta.of[i] = args.delta[at];
    }
  }
  const float scale = kBias == Bias::none ? args.shape.scale : 1;
  // Sums belong to query heads: this one, or the first of those that read the key head.
  const int64_t first_head = int64_t{mine.b} * args.shape.heads + (kKeys ? mine.h * heads : mine.h);
  auto load_sums = [&](int part, int head) {
    if constexpr (kBias != Bias::decays) return;
    const float* from = args.shape.decay_sums + (first_head + head) * args.shape.key_rows;
    if constexpr (kKeys)
      for (int i = 0; i < 2; ++i) sums.of[i] = from[min(row + i * 8, args.shape.keys - 1)];
    else sums.load(from + part * kPart);
  };
  float s[kPart / 8][4];
  float dp[kPart / 8][4];
  uint32_t weights[kPart / 16][4];
  uint32_t weights2[kPart / 16][4];
  int before = 0;
  int part = seen.begin;
  int head = 0;
  smem.skip(ring, seen.begin - all.begin);
  load_sums(part, 0);
  // dS Y₁ of a part is made with dP of the next one, or, where registers are few, in its own.
  constexpr bool kSamePart = kValues && D > 64;
  auto turn = [&](auto first) {
    constexpr bool kPending = !decltype(first)::value && !kSamePart;
    smem.ring().consumer_wait(ring);
    wgmma_fence();
    scores<D, kPart>(s, own, advance_descriptor(rows, stage_at(ring.stage)));
    wgmma_commit_group();
    if constexpr (kPending)
      accumulate<D, kPart>(sum, weights, advance_descriptor(columns, stage_at(before)));
    scores<D, kPart>(dp, own2, advance_descriptor(rows, stage_at(ring.stage) + kSecond));
    wgmma_commit_group();
    // on their way while products are made
    if constexpr (kKeys && !kSamePart) logsumexp.load(smem.stats(ring.stage, 0));
    wgmma_wait_group<1>(s);
    if constexpr (kSamePart) logsumexp.load(smem.stats(ring.stage, 0));
    if constexpr (kBias == Bias::decays) subtract_sums(s, args.shape.scale, sums);
    if constexpr (kBias == Bias::alibi) {
      const Alibi alibi =
          Alibi::of<kKeys>(args.shape, kKeys ? mine.h * heads + head : mine.h, row, part * kPart);
      each_element(
          s, [&](float& x, int n, int e) { x = fmaf(x, args.shape.scale, alibi.term(n, e)); });
    }
    weigh(s, scale, logsumexp);
    if constexpr (kKeys && !kValues) delta.load(smem.stats(ring.stage, 1));
    const bool cut = band.cuts<kPart>(begin, part);
    auto hide = [&] { band.each_hidden(s, row, part * kPart, [](float& x) { x = 0; }); };
    // here a branch keeps the exponentials before the wait: top1_element/README.md
    if (kKeys && cut) hide();
    if constexpr (kValues) {
      pack_operand(weights2, s);
      wgmma_fence();
      accumulate<D, kPart>(values, weights2,
                           advance_descriptor(columns, stage_at(ring.stage) + kSecond));
      wgmma_commit_group();
      delta.load(smem.stats(ring.stage, 1));
    }
    wgmma_wait_group<kValues>(dp);
    if constexpr (kPending) warpgroup_fence_operand(sum);
    if constexpr (kPending) smem.release(before);
    differentiate(s, dp, delta);
    if (!kKeys && cut) hide();
    if constexpr (kBias == Bias::decays) of_rows.add(s);
    pack_operand(weights, s);
    if constexpr (kSamePart) {
      wgmma_fence();
      accumulate<D, kPart>(sum, weights, advance_descriptor(columns, stage_at(ring.stage)));
      wgmma_commit_group();
      wgmma_wait_group<0>(sum, values);
      smem.release(ring.stage);
    }
    before = ring.stage;
    ring.advance();
    if (++part == seen.end) {
      store_rows(head);
      if (++head < heads) {
        part = seen.begin;
        smem.skip(ring, all.end - seen.end + seen.begin - all.begin);
        if (kKeys) load_sums(part, head);
      }
    }
    if (!kKeys && part < seen.end) load_sums(part, 0);
  };
  if constexpr (!kSamePart) turn(std::true_type{});
  for (int i = kSamePart ? 0 : 1; i < heads * seen.count(); ++i) turn(std::false_type{});
  if constexpr (!kSamePart) {
    wgmma_fence();
    accumulate<D, kPart>(sum, weights, advance_descriptor(columns, stage_at(before)));
    wgmma_commit_group();
    wgmma_wait_group<0>(sum, values);
    smem.release(before);
  }
  smem.skip(ring, all.end - seen.end);
}

template <int D, Bias kBias>
__global__ void __launch_bounds__(kGroups<D, false> * 128 + 128, 1)
    query_kernel(const __grid_constant__ BackwardParams args) {
  using Smem = StreamSmem<D, kPart, kGroups<D, false>, 2, 2>;
  const Smem smem;
  const RowRange mine(args.shape.heads, args.shape.time, Smem::kRows, true);
  const Band band = Band::of_queries(args.shape);
  const Parts parts = band.parts<kPart>(mine.first, mine.count);
  smem.init();
  if (smem.is_producer()) {
    smem.producer_registers();
    const int kv = mine.h / args.shape.group();
    smem.produce(
        parts.count(),
        [&](int which, bf16* to, Mbarrier full) {
          load_rows<D, Smem::kRows>(to, which ? args.dout : args.q, mine.b, mine.first, mine.h,
                                    full);
        },
        [&](int i, int which, bf16* to, Mbarrier full) {
          load_rows<D, kPart>(to, which ? args.v : args.k, mine.b, (parts.begin + i) * kPart, kv,
                              full);
        },
        [](int, int) { return nullptr; });
  } else {
    smem.consumer_registers();
    float sum[D / 8][4] = {};
    float values[D / 8][4];
    sum_parts<D, false, false, kBias>(sum, values, smem, args, mine, band, parts);
    store_gradient<D>(args.dq, mine, sum, args.shape.query_scale);
  }
}

template <int D, bool kValues, Bias kBias>
__global__ void __launch_bounds__(kGroups<D, kValues> * 128 + 128, 1)
    key_kernel(const __grid_constant__ BackwardParams args) {
  using Smem = StreamSmem<D, kPart, kGroups<D, kValues>, 2, 2, true>;
  const Smem smem;
  const RowRange mine(args.shape.kv_heads, args.shape.keys, Smem::kRows, false);
  const Band band = Band::of_keys(args.shape);
  const Parts parts = band.parts<kPart>(mine.first, mine.count);
  smem.init();
  if (smem.is_producer()) {
    smem.producer_registers();
    const int head = mine.h * args.shape.group();
    const int count = parts.count();
    auto row = [&](int i) { return (parts.begin + i % count) * kPart; };
    smem.produce(
        count * args.shape.group(),
        [&](int which, bf16* to, Mbarrier full) {
          load_rows<D, Smem::kRows>(to, which ? args.v : args.k, mine.b, mine.first, mine.h, full);
        },
        [&](int i, int which, bf16* to, Mbarrier full) {
          load_rows<D, kPart>(to, which ? args.dout : args.q, mine.b, row(i), head + i / count,
                              full);
        },
        [&](int i, int which) {
          const int64_t at = int64_t{mine.b} * args.shape.heads + head + i / count;
          return (which ? args.delta : args.logsumexp) + at * args.rows + row(i);
        });
  } else {
    smem.consumer_registers();
    float sum[D / 8][4] = {};
    float values[D / 8][4] = {};
    sum_parts<D, true, kValues, kBias>(sum, values, smem, args, mine, band, parts);
    store_gradient<D>(args.dk, mine, sum, fabsf(args.shape.query_scale));
    if constexpr (kValues) store_gradient<D>(args.dv, mine, values, 1);
  }
}

template <int D, Bias kBias>
void query_gradients(const BackwardParams& args, int64_t batch, Stream stream) {
  using Smem = StreamSmem<D, kPart, kGroups<D, false>, 2, 2>;
  launch_kernel(query_kernel<D, kBias>,
                unsigned(ceil_div(args.shape.time, Smem::kRows) * batch * args.shape.heads),
                Smem::kThreads, Smem::kBytes, stream, args);
}
template <int D, bool kValues, Bias kBias>
void key_gradients(const BackwardParams& args, int64_t batch, Stream stream) {
  using Smem = StreamSmem<D, kPart, kGroups<D, kValues>, 2, 2, true>;
  launch_kernel(key_kernel<D, kValues, kBias>,
                unsigned(ceil_div(args.shape.keys, Smem::kRows) * batch * args.shape.kv_heads),
                Smem::kThreads, Smem::kBytes, stream, args);
}

}  // namespace
}  // namespace attention

using namespace attention;

void attention_backward(const Attention& a, const AttentionGradients& g,
                        const AttentionWorkspace& m, Stream stream) {
  const BackwardParams args{
      rows_map(signed_queries(a, m, stream), a.batch, a.time, a.heads, a.head_dim),
      rows_map(a.k, a.batch, a.keys, a.kv_heads, a.head_dim),
      rows_map(a.v, a.batch, a.keys, a.kv_heads, a.head_dim),
      rows_map(g.dout, a.batch, a.time, a.heads, a.head_dim),
      Shape(a, m),
      m.logsumexp,
      m.delta,
      m.rows,
      g.dq,
      g.dk,
      g.dv,
      g.ddecay_sums};
  prepare_sums(a, m, stream);
  with_head_dim(a.head_dim, [&](auto d) {
    launch_kernel(delta_kernel<d()>, unsigned(a.batch * a.heads * m.rows / 64), 256, 0, stream, g,
                  m, int(a.heads), a.time, a.keys);
    with_bias(a, [&](auto bias) {
      query_gradients<d(), bias()>(args, a.batch, stream);
      if (g.dv || bias() != Bias::none) key_gradients<d(), true, bias()>(args, a.batch, stream);
      else key_gradients<d(), false, Bias::none>(args, a.batch, stream);
    });
  });
}

}  // namespace assay::ops::cuda
