// The transition of each chunk of 16 steps, which is the same for any state, for all chunks at
// once: one warp per chunk and head, its lanes along K.
#include "ops/cuda/reduce.cuh"
#include "ops/recurrence/matrix_recurrence/cuda_inputs.cuh"

namespace assay::ops::cuda::chunks {
namespace {

constexpr int kWarps = 4;

// A warp's memory. Scores of row t and column j: [t][j], zero where j is later.
template <int kPerLane>
struct PrepareSmem {
  static constexpr int kRow = 32 * kPerLane + 8;
  bf16 rows[kSteps * kRow];
  bf16 columns[kSteps * kRow];
  bf16 T[kSteps * kSquare];
  bf16 G[kSteps * kSquare];
  float qk[kSteps][kSteps];
  float qb[kSteps][kSteps];
  float ak[kSteps][kSteps];
  float ab[kSteps][kSteps];
};

template <int kPerLane>
__device__ void put(bf16* tile, int row, const Vec<float, kPerLane>& x) {
  store_bf16(tile + row * PrepareSmem<kPerLane>::kRow + threadIdx.x % 32 * kPerLane, x);
}

// The steps whose bit kHalf is set, as rows, against those before them in the same 2 kHalf steps,
// as columns: both with the decays up to the border between them. Rows 0 … 7 are q, 8 … 15 a;
// columns k and b. Every factor is a product of decays, and each pair of steps meets in one of the
// levels 8, 4, 2, 1.
template <int kHalf, Rule kRule, int kPerLane, bool kBonus>
__device__ void level(const Steps<kRule, kPerLane>& s, PrepareSmem<kPerLane>& m,
                      float (&sums)[2][4]) {
  __syncwarp();
  s.template each_row<kHalf, kBonus>([&](int t, const auto& a, const auto& q) {
    const int row = t / (2 * kHalf) * kHalf + t % kHalf;
    if (!(t & kHalf)) return;
    if (kLow<kRule>) put(m.rows, 8 + row, a);
    put(m.rows, row, q);
  });
  s.template each_column<kHalf>([&](int t, const auto& k, const auto& b) {
    const int column = t / (2 * kHalf) * kHalf + t % kHalf;
    if (t & kHalf) return;
    put(m.columns, column, k);
    if (kLow<kRule>) put(m.columns, 8 + column, b);
  });
  __syncwarp();
#pragma unroll
  for (int k = 0; k < 2 * kPerLane; ++k) {
    uint32_t a[4];
    uint32_t b[4];
    load_a_mk(a, PaddedTile<PrepareSmem<kPerLane>::kRow>{m.rows + k * 16});
    load_b_nk(b, PaddedTile<PrepareSmem<kPerLane>::kRow>{m.columns + k * 16});
    mma_m16n8k16(sums[0], a, b[0], b[1]);
    if (kLow<kRule>) mma_m16n8k16(sums[1], a, b[2], b[3]);
  }
}
template <int kHalf, Rule kRule, int kPerLane>
__device__ void store_level(const float (&sums)[2][4], PrepareSmem<kPerLane>& m) {
  const int lane = threadIdx.x % 32;
  const int r = lane / 4;
  const int t = r / kHalf * 2 * kHalf + kHalf + r % kHalf;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int c = lane % 4 * 2 + e;
    const int j = c / kHalf * 2 * kHalf + c % kHalf;
    if (r / kHalf != c / kHalf) continue;
    m.qk[t][j] = sums[0][e];
    if (kLow<kRule>) {
      m.ak[t][j] = sums[0][2 + e];
      m.qb[t][j] = sums[1][e];
      m.ab[t][j] = sums[1][2 + e];
    }
  }
}

// A step against itself: q k in lanes 0 … 15, q b in lanes 16 … 31.
template <Rule kRule, int kK, int kPerLane, bool kBonus>
__device__ float own_scores(const Chunk<kRule, kK>& c, const Steps<kRule, kPerLane>& s, int n) {
  float v[32] = {};
#pragma unroll
  for (int t = 0; t < kSteps; ++t)
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      v[t] += s.q(t, i) * s.k(t, i) * (kBonus ? c.bonus(n + i) : 1);
      if (kLow<kRule>) v[kSteps + t] += s.q(t, i) * s.b(t, i);
    }
  return transposed_sum<32>(v);
}

// The small matrices: lanes 0 … 15 the columns of Y and A, lanes 16 … 31 those of T and G.
template <Rule kRule, int kK, int kPerLane>
__device__ void squares(const Chunk<kRule, kK>& c, PrepareSmem<kPerLane>& m,
                        const Prepared& tiles) {
  const int column = threadIdx.x % 16;
  const bool right = threadIdx.x % 32 >= 16;
  auto& to = tiles.at<kRule, kK>(c.index);
  float x[kSteps];
#pragma unroll
  for (int t = 0; t < kSteps; ++t) {
    float z = 0;
    if (!right && t >= column) z = m.qk[t][column];
    if constexpr (kLow<kRule>) {
      if (right) x[t] = t == column;
      else x[t] = t > column ? m.ak[t][column] : 0;
#pragma unroll
      for (int j = 0; j < t; ++j) x[t] += m.ab[t][j] * x[j];
#pragma unroll
      for (int j = 0; j <= t; ++j) z += m.qb[t][j] * x[j];
      if (!right) to.Y[t * kSquare + column] = __float2bfloat16(x[t]);
      else {
        tiles.T[(c.index * kSteps + t) * kSteps + column] = __float2bfloat16(x[t]);
        tiles.G[(c.index * kSteps + t) * kSteps + column] = __float2bfloat16(z);
        m.T[t * kSquare + column] = __float2bfloat16(x[t]);
        m.G[t * kSquare + column] = __float2bfloat16(z);
      }
    }
    if (!right) to.A[t * kSquare + column] = __float2bfloat16(z);
  }
}

// R = T ã and P = q̃ + G ã, in place: `rows` holds ã, `columns` q̃.
template <int kPerLane>
__device__ void mix_rows(PrepareSmem<kPerLane>& m) {
  const int lane = threadIdx.x % 32;
  uint32_t T[4];
  uint32_t G[4];
  uint32_t b[4];
  load_a_mk(T, PaddedTile<kSquare>{m.T});
  load_a_mk(G, PaddedTile<kSquare>{m.G});
#pragma unroll
  for (int k = 0; k < 2 * kPerLane; ++k) {
    load_b_kn(b, PaddedTile<PrepareSmem<kPerLane>::kRow>{m.rows + k * 16});
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = lane / 4 * m.kRow + k * 16 + half * 8 + lane % 4 * 2;
      const int below = at + 8 * m.kRow;
      const float2 q = load_bf16x2(m.columns + at);
      const float2 r = load_bf16x2(m.columns + below);
      float P[4] = {q.x, q.y, r.x, r.y};
      float R[4] = {};
      mma_m16n8k16(P, G, b[2 * half], b[2 * half + 1]);
      mma_m16n8k16(R, T, b[2 * half], b[2 * half + 1]);
      store_fragment(m.columns + k * 16 + half * 8, m.kRow, P);
      store_fragment(m.rows + k * 16 + half * 8, m.kRow, R);
    }
  }
  __syncwarp();
}

// Rows that read the state before the chunk, columns decayed to its end, and the whole decay.
template <Rule kRule, int kK, int kPerLane, bool kBonus>
__device__ void vectors(const Chunk<kRule, kK>& c, const Steps<kRule, kPerLane>& s, int n,
                        PrepareSmem<kPerLane>& m, const Prepared& tiles) {
  auto& to = tiles.at<kRule, kK>(c.index);
  __syncwarp();
  const auto total = s.template each_row<kSteps, kBonus>([&](int t, const auto& a, const auto& q) {
    if (kLow<kRule>) put(m.rows, t, a);
    if (kLow<kRule>) put(m.columns, t, q);
    else store_bf16(to.P + t * to.kRow + n, q);
  });
  *reinterpret_cast<Vec<float, kPerLane>*>(to.decay + n) = total;
  s.template each_column<kSteps>([&](int t, const auto& k, const auto& b) {
    store_bf16(to.K + t * to.kRow + n, k);
    if (kLow<kRule>) store_bf16(to.B + t * to.kRow + n, b);
  });
  if constexpr (kLow<kRule>) {
    __syncwarp();
    mix_rows(m);
#pragma unroll
    for (int t = 0; t < kSteps; ++t) {
      const int from = t * m.kRow + threadIdx.x % 32 * kPerLane;
      *reinterpret_cast<Vec<bf16, kPerLane>*>(to.P + t * to.kRow + n) =
          *reinterpret_cast<Vec<bf16, kPerLane>*>(m.columns + from);
      *reinterpret_cast<Vec<bf16, kPerLane>*>(to.R + t * to.kRow + n) =
          *reinterpret_cast<Vec<bf16, kPerLane>*>(m.rows + from);
    }
  }
}

template <Rule kRule, int kK, bool kBonus>
__global__ void __launch_bounds__(32 * kWarps, 3)
    prepare_kernel(ChunkedForward args, Prepared tiles) {
  constexpr int kPerLane = kK % 64 == 0 ? 2 : 1;
  constexpr int kBlock = 32 * kPerLane;
  __shared__ __align__(16) PrepareSmem<kPerLane> memory[kWarps];
  PrepareSmem<kPerLane>& m = memory[threadIdx.x / 32];
  const int lane = threadIdx.x % 32;
  const Chunk<kRule, kK> c(args, blockIdx.x * int64_t{kWarps} + threadIdx.x / 32);
  if (c.batch >= args.batch) return;
  Steps<kRule, kPerLane> s;
  float own = 0;
  float eight[2][4] = {};
  float four[2][4] = {};
  float two[2][4] = {};
  float one[2][4] = {};
#pragma unroll 1
  for (int n = lane * kPerLane; n < kK; n += kBlock) {
    s.load(c, n);
    level<8, kRule, kPerLane, kBonus>(s, m, eight);
    level<4, kRule, kPerLane, kBonus>(s, m, four);
    level<2, kRule, kPerLane, kBonus>(s, m, two);
    level<1, kRule, kPerLane, kBonus>(s, m, one);
    own += own_scores<kRule, kK, kPerLane, kBonus>(c, s, n);
  }
  store_level<8, kRule>(eight, m);
  store_level<4, kRule>(four, m);
  store_level<2, kRule>(two, m);
  store_level<1, kRule>(one, m);
  (lane < 16 ? m.qk : m.qb)[lane % 16][lane % 16] = own;
  __syncwarp();
  squares(c, m, tiles);
#pragma unroll 1
  for (int n = lane * kPerLane; n < kK; n += kBlock) {
    if (kK > kBlock) s.load(c, n);
    vectors<kRule, kK, kPerLane, kBonus>(c, s, n, m, tiles);
  }
}

// A warp's memory where steps have one decay per head, or none. A score is one product then.
template <int kK>
struct ScalarSmem {
  static constexpr int kRow = kK + 8;
  alignas(16) bf16 q[kSteps * kRow];
  alignas(16) bf16 k[kSteps * kRow];
  float decays[kSteps];  // log₂ of the decays up to each step, itself included
  float weights[kSteps];
};

template <int kK>
__global__ void __launch_bounds__(32 * kWarps)
    prepare_scalar_kernel(ChunkedForward args, Prepared tiles) {
  extern __shared__ __align__(16) char memory[];
  auto& m = reinterpret_cast<ScalarSmem<kK>*>(memory)[threadIdx.x / 32];
  const int lane = threadIdx.x % 32;
  const Chunk<Rule::gla, kK> c(args, blockIdx.x * int64_t{kWarps} + threadIdx.x / 32);
  if (c.batch >= args.batch) return;
  // f(row, column) of all vectors. The ends of rows, which nobody reads, are written too, because
  // writing a part of a sector takes longer.
  constexpr int kOfRow = ScalarSmem<kK>::kRow / 8;
  const auto each_vector = [&](auto&& f) {
#pragma unroll
    for (int i = lane; i < kSteps * kOfRow; i += 32) f(i / kOfRow, i % kOfRow * 8);
  };
  each_vector([&](int t, int n) {
    const auto copy = [&](bf16* to, const HeadView& from) {
      cp_async_16(to + t * m.kRow + n,
                  row<bf16>(from, args.heads, c.batch, c.time(t), c.head, kK) + n % kK,
                  t < c.steps && n < kK);
    };
    copy(m.q, args.q);
    copy(m.k, args.k);
  });
  float decay = 0;
  if (lane < c.steps && args.log_decay.rows.data)
    decay = row<float>(args.log_decay, args.heads, c.batch, c.time(lane), c.head, 1)[0] * kLog2e;
  if (decay < kLogDecayFloor) decay = kLogDecayFloor;  // NaN stays
  decay = warp_inclusive_scan(decay);
  if (lane < kSteps) {
    m.decays[lane] = decay;
    m.weights[lane] = c.weight(lane);
  }
  cp_async_wait_all();
  __syncwarp();
  auto& to = tiles.at<Rule::gla, kK>(c.index);
  float scores[2][4] = {};
#pragma unroll
  for (int k = 0; k < kK / 16; ++k) {
    uint32_t a[4];
    uint32_t b[4];
    load_a_mk(a, PaddedTile<ScalarSmem<kK>::kRow>{m.q + k * 16});
    load_b_nk(b, PaddedTile<ScalarSmem<kK>::kRow>{m.k + k * 16});
    mma_m16n16k16(scores[0], scores[1], a, b);
  }
  const float skip = args.skip ? args.skip[c.head] : 0;
  each_element(scores, [&](float& x, int n, int e) {
    const int t = lane / 4 + e / 2 * 8;
    const int j = n * 8 + lane % 4 * 2 + e % 2;
    const float factor = ex2_approx(m.decays[t] - m.decays[j]) * m.weights[j] * args.scale;
    x = t < j ? 0 : x * factor + (t == j ? skip : 0);
  });
#pragma unroll
  for (int n = 0; n < 2; ++n) store_fragment(to.A + n * 8, kSquare, scores[n]);
  const float whole = m.decays[kSteps - 1];
  each_vector([&](int t, int n) {
    const auto put = [&](bf16* out, const bf16* from, float factor) {
      const auto x = *reinterpret_cast<const Vec<bf16, 8>*>(from + t * m.kRow + n);
      store_bf16(out + t * to.kRow + n,
                 vec_of<8>([&](int i) { return to_compute(x[i]) * factor; }));
    };
    put(to.P, m.q, ex2_approx(m.decays[t]) * args.scale);
    put(to.K, m.k, ex2_approx(whole - m.decays[t]) * m.weights[t]);
  });
  for (int n = lane; n < kK; n += 32) to.decay[n] = ex2_approx(whole);
}

}  // namespace

void prepare(const ChunkedForward& args, const Prepared& tiles, Stream stream) {
  const unsigned blocks =
      unsigned(ceil_div(args.batch * ceil_div(args.time, kSteps) * args.heads, kWarps));
  if (args.rule == Rule::gla && args.decay_dim <= 1 && !args.u)
    return with_key_dim(args.key_dim, [&](auto size) {
      constexpr size_t kBytes = kWarps * sizeof(ScalarSmem<size.value>);
      static_assert(kBytes <= kPortableSharedBytes);
      launch_kernel(prepare_scalar_kernel<size.value>, blocks, 32 * kWarps, kBytes, stream, args,
                    tiles);
    });
  with_case(args, [&](auto which, auto size) {
    launch_kernel(prepare_kernel<which.kRule, size.value, which.kBonus>, blocks, 32 * kWarps, 0,
                  stream, args, tiles);
  });
}

}  // namespace assay::ops::cuda::chunks
