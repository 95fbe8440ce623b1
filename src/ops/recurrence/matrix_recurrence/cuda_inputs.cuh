#pragma once
// The inputs of a chunk of 16 steps of one head, as the passes read them. Steps past the end of a
// sequence keep the state as it is and read and write nothing.
#include "ops/recurrence/matrix_recurrence/cuda_chunks.cuh"

namespace assay::ops::cuda::chunks {

// The vector of f(0), …, f(N − 1).
template <int N, class F>
__device__ auto vec_of(F&& f) {
  Vec<decltype(f(0)), N> x;
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = f(i);
  return x;
}
template <int N>
__device__ Vec<float, N> operator*(const Vec<float, N>& x, const Vec<float, N>& y) {
  return vec_of<N>([&](int i) { return x[i] * y[i]; });
}
template <int N>
__device__ void store_bf16(bf16* to, const Vec<float, N>& x) {
  *reinterpret_cast<Vec<bf16, N>*>(to) = vec_of<N>([&](int i) { return __float2bfloat16(x[i]); });
}

template <Rule kRule, int kK>
struct Chunk {
  const ChunkedForward& args;
  int64_t index;
  int64_t batch;
  int64_t head;
  int64_t start;
  int steps;  // steps of the chunk that exist, at most 16
  __device__ Chunk(const ChunkedForward& parameters, int64_t i) : args(parameters), index(i) {
    const unsigned heads = args.heads;
    const unsigned chunks = ceil_div(args.time, kSteps);
    const unsigned row = unsigned(i) / heads;
    head = unsigned(i) % heads;
    batch = row / chunks;
    start = int64_t(row % chunks) * kSteps;
    steps = int(args.time - start < kSteps ? args.time - start : kSteps);
  }
  // loads without a branch
  __device__ int64_t time(int t) const { return start + min(t, steps - 1); }

  template <int kPerLane>
  __device__ Vec<bf16, kPerLane> vector(const HeadView& x, int t, int n) const {
    const auto from = *reinterpret_cast<const Vec<bf16, kPerLane>*>(
        row<bf16>(x, args.heads, batch, time(t), head, kK) + n);
    return t < steps ? from : Vec<bf16, kPerLane>{};
  }
  // Decays of the 16 steps.
  template <int kPerLane>
  __device__ void decays(int n, Vec<float, kPerLane> (&to)[kSteps]) const {
    auto fill = [&](auto&& log_decay) {
#pragma unroll
      for (int t = 0; t < kSteps; ++t)
        to[t] = vec_of<kPerLane>(
            [&](int i) { return log_decay(time(t), args.decay_dim == 1 ? 0 : n + i); });
#pragma unroll
      for (int t = 0; t < kSteps; ++t)
        to[t] = vec_of<kPerLane>([&](int i) { return t < steps ? __expf(to[t][i]) : 1; });
    };
    auto at = [&]<class T>(T, int64_t t, int n) {
      return to_compute(row<T>(args.log_decay, args.heads, batch, t, head, args.decay_dim)[n]);
    };
    if (!args.log_decay.rows.data) fill([](int64_t, int) { return 0.f; });
    else if (args.decay_dtype == DType::f32)
      fill([&](int64_t t, int n) { return at(float{}, t, n); });
    else fill([&](int64_t t, int n) { return at(bf16{}, t, n); });
  }
  // Rule::gla writes weight · k vᵀ.
  __device__ float weight(int t) const {
    if (!args.beta.rows.data) return 1;
    return row<float>(args.beta, args.heads, batch, time(t), head, 1)[0];
  }
  __device__ float bonus(int n) const { return static_cast<const float*>(args.u)[head * kK + n]; }
};

// 16 rows of the transposed state before a chunk and of its gradient after it, of 32 columns: those
// of a warp. Both are kept as squares [V / 16, K / 16, 16 × 16], each as the operand A of a warp.
// A lane reads its part of a square at once, and nothing of it goes through shared memory.
struct States {
  uint4 before[2];
  uint4 dafter[2];

  // From row `row` of all chunks' states on.
  template <int kK>
  __device__ void load(const Pass& task, int64_t row) {
    const int64_t at = row * kK + threadIdx.x / 32 * 512 + threadIdx.x % 32 * 8;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      before[n] = *reinterpret_cast<const uint4*>(task.tiles.before + at + n * 256);
      dafter[n] = *reinterpret_cast<const uint4*>(task.states + at + n * 256);
    }
  }
};
// A square transposed, the operand B of a product with rows of V.
__device__ inline void transpose_square(uint32_t (&b)[4], const uint4& square) {
  b[0] = square.x;
  b[1] = square.y;
  b[2] = square.z;
  b[3] = square.w;
#pragma unroll
  for (int e = 0; e < 4; ++e) movmatrix_trans(b[e]);
}

// The 16 steps of kPerLane neighbouring channels.
template <Rule kRule, int kPerLane>
struct Steps {
  Vec<bf16, kPerLane> raw_q[kSteps];
  Vec<bf16, kPerLane> raw_k[kSteps];
  Vec<bf16, kPerLane> raw_a[kSteps];
  Vec<bf16, kPerLane> raw_b[kSteps];
  using Numbers = Vec<float, kPerLane>;
  Numbers decay[kSteps];
  float scale;

  template <int kK>
  __device__ void load(const Chunk<kRule, kK>& c, int n) {
    scale = c.args.scale;
#pragma unroll
    for (int t = 0; t < kSteps; ++t) {
      raw_q[t] = c.template vector<kPerLane>(c.args.q, t, n);
      raw_k[t] = c.template vector<kPerLane>(c.args.k, t, n);
      if constexpr (kLow<kRule>) raw_a[t] = c.template vector<kPerLane>(c.args.a, t, n);
      if constexpr (kLow<kRule>) raw_b[t] = c.template vector<kPerLane>(c.args.b, t, n);
    }
    c.decays(n, decay);
  }
  __device__ float q(int t, int i) const { return to_compute(raw_q[t][i]) * scale; }
  __device__ float k(int t, int i) const { return to_compute(raw_k[t][i]); }
  __device__ float b(int t, int i) const { return kLow<kRule> ? to_compute(raw_b[t][i]) : 0; }
  __device__ float a(int t, int i) const { return kLow<kRule> ? to_compute(raw_a[t][i]) : 0; }

  // f(t, a, q) for all rows, decayed from the start of their kBlock steps: q after its own decay,
  // or before it with a bonus. Returns the decay of the last block.
  template <int kBlock, bool kBonus, class F>
  __device__ Numbers each_row(F&& f) const {
    Numbers before;
    Numbers after;
#pragma unroll
    for (int t = 0; t < kSteps; ++t) {
      before = t % kBlock > 0 ? after : vec_of<kPerLane>([](int) { return 1.f; });
      after = before * decay[t];
      const Numbers& of_q = kBonus ? before : after;
      f(t, vec_of<kPerLane>([&](int i) { return a(t, i) * before[i]; }),
        vec_of<kPerLane>([&](int i) { return q(t, i) * of_q[i]; }));
    }
    return after;
  }
  // f(t, k, b) for all columns, the last one first, decayed to the end of their kBlock steps.
  template <int kBlock, class F>
  __device__ void each_column(F&& f) const {
    Numbers product;
#pragma unroll
    for (int t = kSteps - 1; t >= 0; --t) {
      if (t % kBlock == kBlock - 1) product = vec_of<kPerLane>([](int) { return 1.f; });
      f(t, vec_of<kPerLane>([&](int i) { return k(t, i) * product[i]; }),
        vec_of<kPerLane>([&](int i) { return b(t, i) * product[i]; }));
      product = product * decay[t];
    }
  }
};

}  // namespace assay::ops::cuda::chunks
