// The (gated) delta rule with one decay per step and head, or none: what the passes over chunks of
// 16 steps read, and the gradients of the inputs. Scores are products of rows of q and k as they
// are, and the decay between two steps is a power of a difference. Derivation: README.md.
#include "ops/cuda/reduce.cuh"
#include "ops/recurrence/matrix_recurrence/cuda_inputs.cuh"

namespace assay::ops::cuda::chunks {
namespace {

constexpr int kPrepareWarps = 4;
template <int kK>
using DeltaChunk = Chunk<Rule::delta, kK>;

// Gates of the steps of a chunk: log₂ of the decays up to each, itself included; β, 0 past the end.
struct alignas(16) DeltaGates {
  float decays[kSteps];
  float rates[kSteps];

  // By one warp.
  template <int kK>
  __device__ void load(const DeltaChunk<kK>& c) {
    const int lane = threadIdx.x % 32;
    float decay = 0;
    float rate = 0;
    const auto at = [&](const HeadView& x) {
      return row<float>(x, c.args.heads, c.batch, c.start + lane, c.head, 1)[0];
    };
    if (lane < c.steps) rate = at(c.args.beta);
    if (lane < c.steps && c.args.log_decay.rows.data) decay = at(c.args.log_decay) * kLog2e;
    if (decay < kLogDecayFloor) decay = kLogDecayFloor;  // NaN stays
    const float sum = warp_inclusive_scan(decay);
    if (lane >= kSteps) return;
    decays[lane] = sum;
    rates[lane] = rate;
  }
  // From the start of the chunk up to a step, from there to its end, and from step j to step t.
  __device__ float early(int t) const { return ex2_approx(decays[t]); }
  __device__ float late(int t) const { return ex2_approx(decays[kSteps - 1] - decays[t]); }
  __device__ float between(int t, int j) const { return ex2_approx(decays[t] - decays[j]); }
};

// Row lane / 4 + 8 half of a tile, from column n on: the part of the lane as in a C fragment.
template <int kStride>
__device__ float2 fragment_pair(const bf16* tile, int half, int n) {
  const int lane = threadIdx.x % 32;
  return load_bf16x2(tile + (lane / 4 + half * 8) * kStride + n + lane % 4 * 2);
}
// The step and the earlier one of element e of fragment n of their scores.
__device__ inline int late_step(int e) { return threadIdx.x % 32 / 4 + e / 2 * 8; }
__device__ inline int early_step(int n, int e) { return n * 8 + threadIdx.x % 4 * 2 + e % 2; }

// c [16, 16] += rows of a times rows of b.
template <int kK>
__device__ void add_scores(float (&c)[2][4], const bf16* a, const bf16* b) {
#pragma unroll
  for (int k = 0; k < kK; k += 16) {
    uint32_t rows[4];
    load_a_mk(rows, PaddedTile<kK + 8>{a}, 0, k / 8);
    multiply_nk(c, rows, PaddedTile<kK + 8>{b}, 0, k / 8);
  }
}

// The transition of a chunk, which is the same for any state: one warp per chunk and head.
template <int kK>
struct DeltaPrepare {
  static constexpr int kRow = kK + 8;
  struct Smem {
    bf16 q[kSteps * kRow];
    bf16 k[kSteps * kRow];
    bf16 T[kSteps * kSquare];
    bf16 Y[kSteps * kSquare];
    bf16 G[kSteps * kSquare];
    bf16 A[kSteps * kSquare];
    // A_qb and A_ab
    float qk[kSteps][kSteps];
    float kk[kSteps][kSteps];
    DeltaGates gates;
  };
  const DeltaChunk<kK> c;
  const Prepared& prepared;
  Smem& s;
  ChunkTiles<Rule::delta, kK>& to{prepared.at<Rule::delta, kK>(c.index)};
  int lane = threadIdx.x % 32;

  __device__ void fetch(bf16* to, const HeadView& x) const {
    const bf16* from = row<bf16>(x, c.args.heads, c.batch, c.start, c.head, kK);
#pragma unroll
    for (int i = lane; i < kSteps * (kK / 8); i += 32) {
      const int t = i / (kK / 8);
      const int n = i % (kK / 8) * 8;
      const bool present = t < c.steps;
      cp_async_16(to + t * kRow + n, present ? from + t * x.rows.time_stride + n : from, present);
    }
  }
  __device__ void scores() const {
    float qk[2][4] = {};
    float kk[2][4] = {};
    add_scores<kK>(qk, s.q, s.k);
    add_scores<kK>(kk, s.k, s.k);
    each_element(qk, [&](float x, int n, int e) {
      const int t = late_step(e);
      const int j = early_step(n, e);
      const float between = s.gates.between(t, j);
      s.qk[t][j] = t >= j ? x * between * c.args.scale : 0;
      s.kk[t][j] = t > j ? -s.gates.rates[t] * kk[n][e] * between : 0;
    });
  }
  // A lane has a column of T; of G = A_qb T it has each second row. Y = T diag β, A = G diag β.
  __device__ void squares() const {
    const int column = lane % 16;
    const int odd = lane / 16;
    const float rate = s.gates.rates[column];
    float x[kSteps];
#pragma unroll
    for (int t = 0; t < kSteps; ++t) {
      x[t] = t == column;
#pragma unroll
      for (int j = 0; j < t; ++j) x[t] += s.kk[t][j] * x[j];
      (odd ? s.Y : s.T)[t * kSquare + column] = __float2bfloat16(odd ? x[t] * rate : x[t]);
    }
#pragma unroll
    for (int i = 0; i < kSteps; i += 2) {
      float z = 0;
#pragma unroll
      for (int j = 0; j < i + 2; ++j) z += s.qk[i + odd][j] * x[j];
      s.G[(i + odd) * kSquare + column] = __float2bfloat16(z);
      s.A[(i + odd) * kSquare + column] = __float2bfloat16(z * rate);
    }
  }
  __device__ void store_square(bf16* to, int stride, const bf16* from) const {
    *reinterpret_cast<uint4*>(to + lane / 2 * stride + lane % 2 * 8) =
        *reinterpret_cast<const uint4*>(from + lane / 2 * kSquare + lane % 2 * 8);
  }
  // A square as an operand whose columns are multiplied by −β and the decay up to their step.
  __device__ void load_scaled(uint32_t (&a)[4], const bf16* square) const {
    load_a_mk(a, PaddedTile<kSquare>{square});
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int j = lane % 4 * 2 + e / 2 * 8;
      const float2 x = unpack_bf16x2(a[e]);
      a[e] = pack_bf16x2(-x.x * s.gates.rates[j] * s.gates.early(j),
                         -x.y * s.gates.rates[j + 1] * s.gates.early(j + 1));
    }
  }
  // R = T ã, P = q̃ + G ã, b̂, and the decay of the chunk for every channel.
  __device__ void vectors() const {
    uint32_t T[4];
    uint32_t G[4];
    uint32_t b[4];
    load_scaled(T, s.T);
    load_scaled(G, s.G);
#pragma unroll 1
    for (int n = 0; n < kK; n += 32) {
      float P[4][4];
      float R[4][4] = {};
      float B[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float early = s.gates.early(late_step(half * 2)) * c.args.scale;
          const float2 q = fragment_pair<kRow>(s.q, half, n + i * 8);
          const float2 k = fragment_pair<kRow>(s.k, half, n + i * 8);
          P[i][2 * half] = q.x * early;
          P[i][2 * half + 1] = q.y * early;
          B[i][2 * half] = k.x;
          B[i][2 * half + 1] = k.y;
        }
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        load_b_kn(b, PaddedTile<kRow>{s.k}, 0, n / 8 + i);
        mma_m16n16k16(P[i], P[i + 1], G, b);
        mma_m16n16k16(R[i], R[i + 1], T, b);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int t = late_step(half * 2);
        const int at = t * kRow + n;
        store_row32(to.P + at, P, half, 1);
        store_row32(to.R + at, R, half, 1);
        store_row32(to.B + at, B, half, s.gates.late(t));
      }
    }
    const float total = s.gates.early(kSteps - 1);
    for (int n = lane * 4; n < kK; n += 128)
      *reinterpret_cast<float4*>(to.decay + n) = {total, total, total, total};
  }

  __device__ void run() const {
    fetch(s.q, c.args.q);
    fetch(s.k, c.args.k);
    cp_async_commit_group();
    s.gates.load(c);
    cp_async_wait_group<0>();
    __syncwarp();
    scores();
    __syncwarp();
    squares();
    __syncwarp();
    const int64_t square = c.index * kSteps * kSteps;
    store_square(prepared.T + square, kSteps, s.T);
    store_square(prepared.G + square, kSteps, s.G);
    store_square(to.Y, kSquare, s.Y);
    store_square(to.A, kSquare, s.A);
    vectors();
  }
};
template <int kK>
__global__ void __launch_bounds__(32 * kPrepareWarps)
    delta_prepare_kernel(ChunkedForward args, Prepared tiles) {
  using Prepare = DeltaPrepare<kK>;
  extern __shared__ __align__(16) char memory[];
  const int warp = threadIdx.x / 32;
  const DeltaChunk<kK> c(args, blockIdx.x * int64_t{kPrepareWarps} + warp);
  if (c.batch < args.batch)
    Prepare{c, tiles, reinterpret_cast<typename Prepare::Smem*>(memory)[warp]}.run();
}

// Gradients of a chunk of one head. A warp has 32 columns of the rows of q and k. With X = dout Sᵀ,
// Z = dU Sᵀ, H the state's gradient, E_tj the decay between steps, and
// M_tj = s E_tj (dout Wᵀ)_tj, t ≥ j, and N_tj = −β_t E_tj (dU Wᵀ)_tj, t > j:
//   dq = diag(s early) X + M K      dk = −diag(β early) Z + diag(late) W Hᵀ + (N + Nᵀ) K + Mᵀ Q
template <int kK>
struct DeltaGradients {
  static constexpr int kWarps = kK / 32;
  static constexpr int kRow = kK + 8;
  static constexpr int kColumns = 128;
  static constexpr int kStride = kColumns + 8;
  struct Smem {
    bf16 q[kSteps * kRow];
    bf16 k[kSteps * kRow];
    bf16 T[kSteps * kSquare];
    bf16 G[kSteps * kSquare];
    bf16 M[kSteps * kSquare];
    bf16 N[kSteps * kSquare];
    // up to kColumns of V
    bf16 dout[kSteps * kStride];
    bf16 values[kSteps * kStride];
    bf16 W[kSteps * kStride];
    bf16 dW[kSteps * kStride];
    bf16 dU[kSteps * kStride];
    DeltaGates gates;
    // Σ over the columns of a warp: dU v of a step, and the rows of q, k, k times X, Z, W Hᵀ
    float direct[kWarps][kSteps];
    float dots[3][kWarps][kSteps];
    float whole[kWarps];
    // Σ_j and Σ_t of M_tj q_t k_j and N_tj k_t k_j, t > j; the rows of N without −β_t
    float rows[2][kSteps];
    float columns[2][kSteps];
  };
  const ChunkedBackward& bwd;
  const Pass& task;
  const DeltaChunk<kK> c;
  Smem& s;
  int lane = threadIdx.x % 32;
  int warp = threadIdx.x / 32;
  // X, Z, W Hᵀ
  float of_q[4][4] = {};
  float of_a[4][4] = {};
  float of_b[4][4] = {};
  // products: S Hᵀ
  float scores[2][4] = {};
  float products[2][4] = {};
  float direct[2] = {};

  // The rows of q and k, T and G.
  __device__ void fetch_keys() const {
    const HeadView& q = c.args.q;
    const HeadView& k = c.args.k;
    const bf16* of_q = row<bf16>(q, c.args.heads, c.batch, c.start, c.head, kK);
    const bf16* of_k = row<bf16>(k, c.args.heads, c.batch, c.start, c.head, kK);
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // as many vectors as twice the threads
      const int at = threadIdx.x + i * kK;
      const int t = at / (kK / 8);
      const int x = at % (kK / 8) * 8;
      const int64_t there = t < c.steps ? t : 0;
      cp_async_16(s.q + t * kRow + x, of_q + there * q.rows.time_stride + x, t < c.steps);
      cp_async_16(s.k + t * kRow + x, of_k + there * k.rows.time_stride + x, t < c.steps);
    }
    const int64_t square = c.index * kSteps * kSteps + lane * 8;
    const int at = lane / 2 * kSquare + lane % 2 * 8;
    if (warp == 0) cp_async_16(s.T + at, task.tiles.T + square);
    if (warp == 1) cp_async_16(s.G + at, task.tiles.G + square);
  }
  // 16 neighbouring threads have a row of up to kColumns.
  __device__ void fetch(int first, int columns) const {
    const int x = threadIdx.x % (kColumns / 8) * 8;
    if (x >= columns) return;
    const int64_t V = c.args.value_dim;
    const int64_t low = c.index * kSteps * V + first + x;
    const bf16* dout = row<bf16>(bwd.dout, c.args.heads, c.batch, c.start, c.head, V) + first + x;
    const bf16* values = row<bf16>(c.args.v, c.args.heads, c.batch, c.start, c.head, V) + first + x;
    for (int t = threadIdx.x / (kColumns / 8); t < kSteps; t += kK / (kColumns / 8)) {
      const int to = t * kStride + x;
      const int64_t there = t < c.steps ? t : 0;
      cp_async_16(s.dout + to, dout + there * bwd.dout.rows.time_stride, t < c.steps);
      cp_async_16(s.values + to, values + there * c.args.v.rows.time_stride, t < c.steps);
      cp_async_16(s.W + to, task.tiles.W + low + t * V);
      cp_async_16(s.dW + to, task.W + low + t * V);
    }
  }
  // dU = Tᵀ dW + Gᵀ dout.
  __device__ void solve(int columns) {
    uint32_t T[4];
    uint32_t G[4];
    load_a_km(T, PaddedTile<kSquare>{s.T});
    load_a_km(G, PaddedTile<kSquare>{s.G});
    for (int first = warp * 16; first < columns; first += kWarps * 16) {
      float c[2][4] = {};
      multiply_kn(c, T, PaddedTile<kStride>{s.dW}, 0, first / 8);
      multiply_kn(c, G, PaddedTile<kStride>{s.dout}, 0, first / 8);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        add_dots(direct, c[n], s.values, first + n * 8);
        store_fragment(s.dU + first + n * 8, kStride, c[n]);
      }
    }
  }
  template <int kTileStride = kStride>
  __device__ static void add_dots(float (&sums)[2], const float (&x)[4], const bf16* tile, int n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 y = fragment_pair<kTileStride>(tile, half, n);
      sums[half] += x[2 * half] * y.x + x[2 * half + 1] * y.y;
    }
  }
  // `columns` of V; `states` holds the first 16 of S and H, which begin at row `state` of all.
  __device__ void add(int64_t state, int columns, States& states) {
#pragma unroll 1
    for (int v = 0; v < columns; v += 16) {
      const States now = states;
      if (v + 16 < columns) states.load<kK>(task, state + v + 16);
      uint32_t dout[4];
      uint32_t dU[4];
      uint32_t W[4];
      uint32_t S[4];
      uint32_t H[4];
      load_a_mk(dout, PaddedTile<kStride>{s.dout}, 0, v / 8);
      load_a_mk(dU, PaddedTile<kStride>{s.dU}, 0, v / 8);
      load_a_mk(W, PaddedTile<kStride>{s.W}, 0, v / 8);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        transpose_square(S, now.before[n]);
        transpose_square(H, now.dafter[n]);
        mma_m16n16k16(of_q[2 * n], of_q[2 * n + 1], dout, S);
        mma_m16n16k16(of_a[2 * n], of_a[2 * n + 1], dU, S);
        mma_m16n16k16(of_b[2 * n], of_b[2 * n + 1], W, H);
        if (!bwd.dlog_decay) continue;
        const uint4& x = now.before[n];
        const uint4& y = now.dafter[n];
        const uint32_t rows[4] = {x.x, x.y, x.z, x.w};
        mma_m16n8k16(products[0], rows, y.x, y.z);
        mma_m16n8k16(products[1], rows, y.y, y.w);
      }
      if (warp == 0) multiply_nk(scores, dout, PaddedTile<kStride>{s.W}, 0, v / 8);
      if (warp == 1) multiply_nk(scores, dU, PaddedTile<kStride>{s.W}, 0, v / 8);
    }
  }

  // M by warp 0 and N by warp 1, and what their pairs contribute to the gates.
  __device__ void mix() {
    float raw[2][4] = {};
    float by_row[2] = {};
    float by_column[2][2] = {};
    add_scores<kK>(raw, warp == 0 ? s.q : s.k, s.k);
    each_element(scores, [&](float& x, int n, int e) {
      const int t = late_step(e);
      const int j = early_step(n, e);
      const float y = x * s.gates.between(t, j);
      const float of_row = warp == 0 ? c.args.scale : -s.gates.rates[t];
      x = t > j || (warp == 0 && t == j) ? y * of_row : 0;
      if (t <= j) return;
      by_row[e / 2] += (warp == 0 ? x : y) * raw[n][e];
      by_column[n][e % 2] += x * raw[n][e];
    });
    bf16* to = warp == 0 ? s.M : s.N;
    store_fragment(to, kSquare, scores[0]);
    store_fragment(to + 8, kSquare, scores[1]);
    butterfly_sum<1, 4>(by_row);
    if (lane % 4 == 0)
      for (int half = 0; half < 2; ++half) s.rows[warp][lane / 4 + half * 8] = by_row[half];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      butterfly_sum<4, 32>(by_column[n]);
      if (lane < 4)
        for (int e = 0; e < 2; ++e) s.columns[warp][n * 8 + lane * 2 + e] = by_column[n][e];
    }
  }
  // Sums over the warp's columns, and the rows' own factors.
  __device__ void through_state() {
    float dots[4][2] = {{direct[0], direct[1]}};
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      add_dots<kRow>(dots[1], of_q[n], s.q, warp * 32 + n * 8);
      add_dots<kRow>(dots[2], of_a[n], s.k, warp * 32 + n * 8);
      add_dots<kRow>(dots[3], of_b[n], s.k, warp * 32 + n * 8);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      butterfly_sum<1, 4>(dots[i]);
      if (lane % 4 == 0)
        for (int half = 0; half < 2; ++half)
          (i == 0 ? s.direct : s.dots[i - 1])[warp][lane / 4 + half * 8] = dots[i][half];
    }
    float whole = 0;  // Σ S ⊙ H
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (lane / 4 == lane % 4 * 2 + e) whole += products[half][half * 2 + e];
    whole = butterfly<1, 32>(whole, Plus{});
    if (lane == 0) s.whole[warp] = whole;
    each_element(of_q, [&](float& x, int n, int e) {
      const int t = late_step(e);
      x *= s.gates.early(t) * c.args.scale;
      of_b[n][e] = of_b[n][e] * s.gates.late(t) - s.gates.rates[t] * s.gates.early(t) * of_a[n][e];
    });
  }
  __device__ void through_scores() {
    uint32_t M[4];
    uint32_t N[4];
    uint32_t across[4];
    uint32_t transposed[4];
    load_a_mk(M, PaddedTile<kSquare>{s.M});
    load_a_km(transposed, PaddedTile<kSquare>{s.M});
    load_a_mk(N, PaddedTile<kSquare>{s.N});
    load_a_km(across, PaddedTile<kSquare>{s.N});
#pragma unroll
    for (int n = 0; n < 4; n += 2) {
      uint32_t q[4];
      uint32_t k[4];
      load_b_kn(q, PaddedTile<kRow>{s.q}, 0, warp * 4 + n);
      load_b_kn(k, PaddedTile<kRow>{s.k}, 0, warp * 4 + n);
      mma_m16n16k16(of_q[n], of_q[n + 1], M, k);
      mma_m16n16k16(of_b[n], of_b[n + 1], transposed, q);
      mma_m16n16k16(of_b[n], of_b[n + 1], N, k);
      mma_m16n16k16(of_b[n], of_b[n + 1], across, k);
    }
  }
  // By one warp, a step per lane. The gradient of a log decay is the sum over all that goes from
  // before its step to it or after it: state to state, state to row, column to state, and column to
  // row within the chunk.
  __device__ void gates() const {
    const int t = lane % kSteps;
    float dots[3] = {};
    float own = 0;
    float through = 0;
    for (int i = 0; i < kWarps; ++i) {
      for (int x = 0; x < 3; ++x) dots[x] += s.dots[x][i][t];
      own += s.direct[i][t];
      through += s.whole[i];
    }
    const float early = s.gates.early(t);
    const float of_a = early * dots[1] + s.rows[1][t];
    float behind = c.args.scale * early * dots[0] - s.gates.rates[t] * of_a + s.rows[0][t] -
                   s.columns[0][t] - s.columns[1][t];
#pragma unroll
    for (int distance = 1; distance < kSteps; distance *= 2) {
      const float later = __shfl_down_sync(~0u, behind, distance);
      if (t + distance < kSteps) behind += later;
    }
    float before = __shfl_up_sync(~0u, warp_inclusive_scan(s.gates.late(t) * dots[2]), 1);
    if (t == 0) before = 0;
    if (lane >= c.steps) return;
    const float decay = s.gates.decays[t] - (t > 0 ? s.gates.decays[t - 1] : 0);
    const int64_t at = (c.batch * c.args.time + c.start + t) * c.args.heads + c.head;
    if (bwd.dbeta) bwd.dbeta[at] = own - of_a;
    if (bwd.dlog_decay)
      static_cast<float*>(bwd.dlog_decay)[at] =
          decay < kLogDecayFloor + 1 ? 0 : through * s.gates.early(kSteps - 1) + (behind + before);
  }
  __device__ void store(void* to, const float (&x)[4][4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int t = lane / 4 + half * 8;
      const int64_t at = (c.batch * c.args.time + c.start + t) * c.args.heads + c.head;
      store_row32(t < c.steps ? static_cast<bf16*>(to) + at * kK + warp * 32 : nullptr, x, half, 1);
    }
  }

  __device__ void run() {
    fetch_keys();
    if (warp == 0) s.gates.load(c);
    for (int first = 0; first < c.args.value_dim; first += kColumns) {
      const int columns = int(min(int64_t{kColumns}, c.args.value_dim - first));
      __syncthreads();
      fetch(first, columns);
      cp_async_commit_group();
      States states;
      const int64_t state = c.index * c.args.value_dim + first;
      states.load<kK>(task, state);
      cp_async_wait_group<0>();
      __syncthreads();
      solve(columns);
      __syncthreads();
      add(state, columns, states);
    }
    if (warp < 2) mix();
    through_state();
    __syncthreads();
    through_scores();
    store(bwd.dq, of_q);
    store(bwd.dk, of_b);
    if (warp == 0) gates();
  }
};
template <int kK>
__global__ void __launch_bounds__(kK, 512 / kK)
    delta_gradients_kernel(ChunkedBackward bwd, Pass task) {
  using Gradients = DeltaGradients<kK>;
  extern __shared__ __align__(16) char memory[];
  Gradients{bwd, task, DeltaChunk<kK>(bwd.forward, blockIdx.x),
            *reinterpret_cast<typename Gradients::Smem*>(memory)}
      .run();
}

}  // namespace

void delta_prepare(const ChunkedForward& args, const Prepared& tiles, Stream stream) {
  const unsigned blocks = unsigned(ceil_div(chunk_count(args) * args.heads, kPrepareWarps));
  with_key_dim(args.key_dim, [&](auto size) {
    constexpr size_t kBytes = kPrepareWarps * sizeof(typename DeltaPrepare<size.value>::Smem);
    static_assert(kBytes <= kPortableSharedBytes);
    launch_kernel(delta_prepare_kernel<size.value>, blocks, 32 * kPrepareWarps, kBytes, stream,
                  args, tiles);
  });
}
void delta_gradients(const ChunkedBackward& bwd, const Pass& task, Stream stream) {
  const ChunkedForward& args = bwd.forward;
  with_key_dim(args.key_dim, [&](auto size) {
    constexpr size_t kBytes = sizeof(typename DeltaGradients<size.value>::Smem);
    static_assert(kBytes <= kPortableSharedBytes);
    launch_kernel(delta_gradients_kernel<size.value>, unsigned(chunk_count(args) * args.heads),
                  size.value, kBytes, stream, bwd, task);
  });
}

}  // namespace assay::ops::cuda::chunks
