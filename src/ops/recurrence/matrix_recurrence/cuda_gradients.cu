// Gradients of the inputs of every chunk, for all chunks at once: from the state before it, the
// state's gradient after it, and what both passes left. One block per chunk and head, one thread
// per channel of K.
#include "ops/cuda/reduce.cuh"
#include "ops/recurrence/matrix_recurrence/cuda_inputs.cuh"

namespace assay::ops::cuda::chunks {
namespace {

// Gradients of the scores of step t against step j.
struct alignas(16) Score {
  float qk;
  float qb;
  float ak;
  float ab;
};

template <Rule kRule, int kK>
struct GradientSmem {
  static constexpr int kWarps = kK / 32;
  struct Slice {
    bf16 dout[kSteps * kColumnStride];
    bf16 values[kSteps * kColumnStride];
    Tile<kLow<kRule>, kSteps * kColumnStride> W;
    Tile<kLow<kRule>, kSteps * kColumnStride> dW;
    Tile<kLow<kRule>, kSteps * kColumnStride> dU;
  };
  union {
    Slice slice;
    float products[kLow<kRule> ? 4 : 2][kSteps][kK];  // gradients of q̃, k̂, ã, b̂
  };
  bf16 q[kSteps * kK];
  bf16 k[kSteps * kK];
  Tile<kLow<kRule>, kSteps * kK> a;
  Tile<kLow<kRule>, kSteps * kK> b;
  Tile<kLow<kRule>, kSteps * kSquare> T;
  Tile<kLow<kRule>, kSteps * kSquare> G;
  Score scores[kSteps][kSteps];
  // decays: Σ_v S ⊙ dS'
  float sums[kWarps][kSteps];
  float decays[kK];
  float weights[kSteps];
};

// A warp's sums over the slices of V: its share of the products' columns, and of the gradients
// of the scores.
template <Rule kRule, int kK>
struct Sums {
  using S = GradientSmem<kRule, kK>;
  static constexpr int kProducts = kLow<kRule> ? 4 : 2;
  static constexpr int kCombinations = kLow<kRule> ? 4 : 1;
  static constexpr int kMine = (kCombinations + S::kWarps - 1) / S::kWarps;
  float products[kProducts][4][4] = {};  // 32 columns of each
  float scores[kMine][2][4] = {};
  float decays[2][2] = {};  // [n][i]: column lane / 4 + 16 n + 8 i

  // dU = Tᵀ dW + Gᵀ dout: what a step's own value and its row of the low-rank part receive.
  __device__ static void solve(S& s, int columns) {
    uint32_t T[4];
    uint32_t G[4];
    load_a_km(T, PaddedTile<kSquare>{s.T});
    load_a_km(G, PaddedTile<kSquare>{s.G});
    for (int first = threadIdx.x / 32 * 16; first < columns; first += S::kWarps * 16) {
      float c[2][4] = {};
      multiply_kn(c, T, PaddedTile<kColumnStride>{s.slice.dW}, 0, first / 8);
      multiply_kn(c, G, PaddedTile<kColumnStride>{s.slice.dout}, 0, first / 8);
      store_fragment(s.slice.dU + first, kColumnStride, c[0]);
      store_fragment(s.slice.dU + first + 8, kColumnStride, c[1]);
    }
  }

  __device__ static void add_scores(float (&c)[2][4], const bf16* rows, const bf16* columns,
                                    int v) {
    uint32_t a[4];
    load_a_mk(a, PaddedTile<kColumnStride>{rows}, 0, v / 8);
    multiply_nk(c, a, PaddedTile<kColumnStride>{columns}, 0, v / 8);
  }

  // c += rows of a times the state, of which this warp has 32 columns.
  __device__ static void add_product(float (&c)[4][4], int n, const bf16* rows, int v,
                                     const uint32_t (&state)[4]) {
    uint32_t a[4];
    load_a_mk(a, PaddedTile<kColumnStride>{rows}, 0, v / 8);
    mma_m16n16k16(c[2 * n], c[2 * n + 1], a, state);
  }
  // `columns` of V; `states` holds the first 16 of S and dS', which begin at row `state` of all.
  __device__ void add(S& s, const Pass& task, int64_t state, int columns, States& states) {
    auto& x = s.slice;
#pragma unroll 1
    for (int v = 0; v < columns; v += 16) {
      const States now = states;
      if (v + 16 < columns) states.load<S::kWarps * 32>(task, state + v + 16);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        uint32_t before[4];
        uint32_t dafter[4];
        transpose_square(before, now.before[n]);
        transpose_square(dafter, now.dafter[n]);
        add_product(products[0], n, x.dout, v, before);
        add_product(products[1], n, x.values, v, dafter);
        if constexpr (kLow<kRule>) {
          add_product(products[2], n, x.dU, v, before);
          add_product(products[3], n, x.W, v, dafter);
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float2 a = unpack_bf16x2(before[e]);
          const float2 b = unpack_bf16x2(dafter[e]);
          decays[n][e / 2] += a.x * b.x + a.y * b.y;
        }
      }
#pragma unroll
      for (int i = 0; i < kMine; ++i) {  // qk, qb, ak, ab
        const int which = threadIdx.x / 32 + i * S::kWarps;
        if (which < kCombinations)
          add_scores(scores[i], which < 2 ? x.dout : x.dU, which % 2 == 0 ? x.values : x.W, v);
      }
    }
  }

  __device__ void store(S& s) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float sum = quad_sum(decays[n][i]);
        if (lane % 4 == 0) s.decays[warp * 32 + n * 16 + i * 8 + lane / 4] = sum;
      }
#pragma unroll
    for (int which = 0; which < kProducts; ++which)
      each_element(products[which], [&](float x, int n, int e) {
        s.products[which][lane / 4 + e / 2 * 8][warp * 32 + n * 8 + lane % 4 * 2 + e % 2] = x;
      });
#pragma unroll
    for (int i = 0; i < kMine; ++i)
      each_element(scores[i], [&](float x, int n, int e) {
        Score& to = s.scores[lane / 4 + e / 2 * 8][n * 8 + lane % 4 * 2 + e % 2];
        const int which = warp + i * S::kWarps;
        if (which < kCombinations) reinterpret_cast<float*>(&to)[which] = x;
      });
  }
};

// One channel of a chunk: rows and columns, and their gradients.
template <Rule kRule, bool kBonus>
struct Channel {
  float q[kSteps];
  float a[kSteps];
  float decay[kSteps];
  // dlog: with respect to the log decay
  float dq[kSteps];
  float da[kSteps];
  float dlog[kSteps];

  // Through the rows that read the state before the chunk, and the state that goes through it.
  template <class S>
  __device__ void through_state(const S& s, int n, float state_times_gradient) {
    float product = 1;
#pragma unroll
    for (int t = 0; t < kSteps; ++t) {
      if constexpr (kLow<kRule>) da[t] = s.products[2][t][n] * product;
      if (kBonus) dq[t] = s.products[0][t][n] * product;
      product *= decay[t];
      if (!kBonus) dq[t] = s.products[0][t][n] * product;
    }
    float behind = product * state_times_gradient;
#pragma unroll
    for (int t = kSteps - 1; t >= 0; --t) {
      if (!kBonus) behind += q[t] * dq[t];
      dlog[t] = behind;
      if (kLow<kRule>) behind += a[t] * da[t];
      if (kBonus) behind += q[t] * dq[t];
    }
  }

  // Through the scores of all rows against column j. In: the gradients of k and b decayed to the
  // chunk's end; out: of k and b themselves.
  template <class S>
  __device__ void through_column(const S& s, int j, float k, float b, float bonus, float& dk,
                                 float& db) {
    float ks[kSteps];
    float bs[kSteps];
    ks[j] = k;
    bs[j] = b;
    const Score own = s.scores[j][j];
    dq[j] += own.qk * k * (kBonus ? bonus : 1);
    if (kLow<kRule>) dq[j] += own.qb * b;
#pragma unroll
    for (int t = j + 1; t < kSteps; ++t) {
      const Score x = s.scores[t][j];
      if (kLow<kRule>) {
        da[t] += x.ak * ks[t - 1];
        da[t] += x.ab * bs[t - 1];
        bs[t] = bs[t - 1] * decay[t];
        dq[t] += x.qb * bs[t];
      }
      ks[t] = ks[t - 1] * decay[t];
      dq[t] += x.qk * ks[kBonus ? t - 1 : t];
    }
#pragma unroll
    for (int t = kSteps - 1; t > j; --t) {
      const Score x = s.scores[t][j];
      if (!kBonus) dk += x.qk * q[t];
      dlog[t] += ks[t] * dk;
      dk *= decay[t];
      if (kBonus) dk += x.qk * q[t];
      if (kLow<kRule>) dk += x.ak * a[t];
      if (kLow<kRule>) {
        db += x.qb * q[t];
        dlog[t] += bs[t] * db;
        db = db * decay[t] + x.ab * a[t];
      }
    }
    dk += own.qk * q[j] * (kBonus ? bonus : 1);
    if (kLow<kRule>) db += own.qb * q[j];
  }
};

// Numbers of each step summed over the channels: to [B, T, H].
template <class S>
__device__ void sum_over_channels(S& s, float (&v)[kSteps], float* to, int steps, int64_t stride) {
  const float own = transposed_sum<32>(v);  // sum of step lane / 2
  if (threadIdx.x % 2 == 0) s.sums[threadIdx.x / 32][threadIdx.x % 32 / 2] = own;
  __syncthreads();
  if (int(threadIdx.x) >= steps) return;
  float sum = 0;
  for (int warp = 0; warp < S::kWarps; ++warp) sum += s.sums[warp][threadIdx.x];
  to[threadIdx.x * stride] = sum;
}

// With weights the compiler takes 168 registers unless it is told to use fewer.
template <Rule kRule, int kK, bool kBonus, bool kWeighted>
__global__ void __launch_bounds__(kK, (kWeighted ? 512 : 384) / kK)
    gradients_kernel(ChunkedBackward bwd, Pass task) {
  using S = GradientSmem<kRule, kK>;
  extern __shared__ __align__(16) char memory[];
  S& s = *reinterpret_cast<S*>(memory);
  const ChunkedForward& args = bwd.forward;
  const Chunk<kRule, kK> c(args, blockIdx.x);
  const int n = threadIdx.x;
  const int64_t V = args.value_dim;

  auto rows = [&](bf16* to, int stride, const HeadView& x, int64_t dim, int column, int width) {
    copy_tile(to, stride, row<bf16>(x, args.heads, c.batch, c.start, c.head, dim) + column,
              x.rows.time_stride, kSteps, width, c.steps);
  };
  rows(s.q, kK, args.q, kK, 0, kK);
  rows(s.k, kK, args.k, kK, 0, kK);
  if constexpr (kLow<kRule>) {
    rows(s.a, kK, args.a, kK, 0, kK);
    rows(s.b, kK, args.b, kK, 0, kK);
    const int64_t square = c.index * kSteps * kSteps;
    copy_tile(s.T, kSquare, task.tiles.T + square, kSteps, kSteps, kSteps);
    copy_tile(s.G, kSquare, task.tiles.G + square, kSteps, kSteps, kSteps);
  }
  if (kWeighted && n < kSteps) s.weights[n] = c.weight(n);
  Vec<float, 1> decay[kSteps];
  c.decays(n, decay);

  Sums<kRule, kK> sums;
  for (int first = 0; first < V; first += kMaxColumns) {
    const int columns = int(min(int64_t{kMaxColumns}, V - first));
    auto& x = s.slice;
    const int64_t state = c.index * V + first;
    const int64_t low = c.index * kSteps * V + first;
    __syncthreads();
    rows(x.dout, kColumnStride, bwd.dout, V, first, columns);
    rows(x.values, kColumnStride, args.v, V, first, columns);
    if constexpr (kLow<kRule>) {
      copy_tile(x.W, kColumnStride, task.tiles.W + low, V, kSteps, columns);
      copy_tile(x.dW, kColumnStride, task.W + low, V, kSteps, columns);
    }
    cp_async_commit_group();
    States states;
    states.load<kK>(task, state);
    cp_async_wait_group<0>();
    __syncthreads();
    if constexpr (kLow<kRule>) {
      sums.solve(s, columns);
      __syncthreads();
    }
    sums.add(s, task, state, columns, states);
  }
  __syncthreads();  // the products take the slices' place
  sums.store(s);
  __syncthreads();

  Channel<kRule, kBonus> channel;
#pragma unroll
  for (int t = 0; t < kSteps; ++t) {
    channel.q[t] = to_compute(s.q[t * kK + n]) * args.scale;
    channel.decay[t] = decay[t][0];
    if constexpr (kLow<kRule>) channel.a[t] = to_compute(s.a[t * kK + n]);
  }
  channel.through_state(s, n, s.decays[n]);
  const int64_t first =
      (c.batch * args.time + c.start) * args.heads + c.head;  // index in [B, T, H]
  auto put = [&](void* to, int t, float x, bool as_float = false) {
    const int64_t at = (first + t * args.heads) * kK + n;
    if (t >= c.steps) return;
    if (as_float) static_cast<float*>(to)[at] = x;
    else static_cast<bf16*>(to)[at] = __float2bfloat16(x);
  };
  const bool by_head = bwd.dlog_decay && args.decay_dim == 1;
  const bool by_key = bwd.dlog_decay && !by_head;
  const float bonus = kBonus ? c.bonus(n) : 0;
  float du = 0;
#pragma unroll
  for (int j = 0; j < kSteps; ++j) {
    const float weight = kWeighted ? s.weights[j] : 1;
    const float raw_k = to_compute(s.k[j * kK + n]);
    const float k = raw_k * weight;
    const float b = kLow<kRule> ? to_compute(s.b[j * kK + n]) : 0;
    float dk = s.products[1][j][n];
    float db = 0;
    if constexpr (kLow<kRule>) db = s.products[3][j][n];
    // Afterwards nothing more is added to the gradients of step j.
    channel.through_column(s, j, k, b, bonus, dk, db);
    if (kWeighted) s.products[1][j][n] = dk * raw_k;
    if constexpr (kBonus) du += s.scores[j][j].qk * channel.q[j] * k;
    put(bwd.dq, j, channel.dq[j] * args.scale);
    if constexpr (kLow<kRule>) {
      put(bwd.da, j, channel.da[j]);
      if (bwd.db) put(bwd.db, j, db);
      else dk += db;
    }
    put(bwd.dk, j, dk * weight);
    if (by_key) put(bwd.dlog_decay, j, channel.dlog[j], args.decay_dtype == DType::f32);
  }
  if constexpr (kBonus) bwd.du[c.index * kK + n] = du;
  if (by_head)
    sum_over_channels(s, channel.dlog, static_cast<float*>(bwd.dlog_decay) + first, c.steps,
                      args.heads);
  if constexpr (kWeighted) {
    if (bwd.dskip && n == 0) {
      float sum = 0;
      for (int t = 0; t < c.steps; ++t) sum += s.scores[t][t].qk;
      bwd.dskip[c.index] = sum;
    }
    if (!bwd.dbeta) return;
    __syncthreads();
    for (int t = n / 32; t < c.steps; t += S::kWarps) {
      float sum = 0;
      for (int i = n % 32; i < kK; i += 32) sum += s.products[1][t][i];
      sum = warp_sum(sum);
      if (n % 32 == 0) bwd.dbeta[first + t * args.heads] = sum;
    }
  }
}

// f(Case, Size, whether there is β or skip): these have kernels of their own, because the registers
// for them would slow down the others.
template <class F>
void with_weights(const ChunkedForward& args, F&& f) {
  with_case(args, [&](auto which, auto size) {
    if constexpr (which.kRule == Rule::gla && !which.kBonus)
      with_constant<false, true>(args.beta.rows.data || args.skip,
                                 [&](auto weighted) { f(which, size, weighted); });
    else f(which, size, std::false_type{});
  });
}

}  // namespace

void gradients(const ChunkedBackward& bwd, const Pass& task, Stream stream) {
  const ChunkedForward& args = bwd.forward;
  const unsigned blocks = unsigned(args.batch * ceil_div(args.time, kSteps) * args.heads);
  with_weights(args, [&](auto which, auto size, auto weighted) {
    constexpr size_t kBytes = sizeof(GradientSmem<which.kRule, size.value>);
    static_assert(kBytes <= kPortableSharedBytes);
    launch_kernel(gradients_kernel<which.kRule, size.value, which.kBonus, weighted.value>, blocks,
                  size.value, kBytes, stream, bwd, task);
  });
}

}  // namespace assay::ops::cuda::chunks
