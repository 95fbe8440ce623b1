#pragma once
// The inputs of a chunk of 16 steps of one head, as the passes read them. Steps past the end of a
// sequence keep the state as it is and read and write nothing.
#include "ops/cuda/launch.cuh"
#include "ops/cuda/types.cuh"
#include "ops/matrix_state/cuda_chunks.cuh"

namespace assay::ops::cuda::chunks {

template <Rule kRule, int kK>
struct Chunk {
  const ChunkedForward& p;
  int64_t index, batch, head, start;
  int steps;  // of the 16 that are there
  __device__ Chunk(const ChunkedForward& parameters, int64_t i) : p(parameters), index(i) {
    const unsigned heads = p.heads, chunks = ceil_div(p.time, kSteps), row = unsigned(i) / heads;
    head = unsigned(i) % heads;
    batch = row / chunks;
    start = int64_t(row % chunks) * kSteps;
    steps = int(p.time - start < kSteps ? p.time - start : kSteps);
  }
  // loads without a branch
  __device__ int64_t time(int t) const { return start + min(t, steps - 1); }

  template <int kPerLane>
  __device__ Vec<bf16, kPerLane> vector(const HeadView& x, int t, int n) const {
    const auto from = *reinterpret_cast<const Vec<bf16, kPerLane>*>(
        row<bf16>(x, p.heads, batch, time(t), head, kK) + n);
    return t < steps ? from : Vec<bf16, kPerLane>{};
  }
  // Decays of the 16 steps.
  template <int kPerLane>
  __device__ void decays(int n, float (&to)[kSteps][kPerLane]) const {
    auto fill = [&](auto&& log_decay) {
      float logs[kSteps][kPerLane];
#pragma unroll
      for (int t = 0; t < kSteps; ++t)
#pragma unroll
        for (int i = 0; i < kPerLane; ++i)
          logs[t][i] = log_decay(time(t), p.decay_dim == 1 ? 0 : n + i);
#pragma unroll
      for (int t = 0; t < kSteps; ++t)
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) to[t][i] = t < steps ? __expf(logs[t][i]) : 1;
    };
    auto at = [&]<class T>(T, int64_t t, int n) {
      return to_compute(row<T>(p.log_decay, p.heads, batch, t, head, p.decay_dim)[n]);
    };
    if (!p.log_decay.rows.data) fill([](int64_t, int) { return 0.f; });
    else if (p.decay_dtype == DType::f32) fill([&](int64_t t, int n) { return at(float{}, t, n); });
    else fill([&](int64_t t, int n) { return at(bf16{}, t, n); });
  }
  // The delta rule's β.
  __device__ float rate(int t) const {
    const float x = row<float>(p.beta, p.heads, batch, time(t), head, 1)[0];
    return t < steps ? x : 0;
  }
  __device__ float bonus(int n) const { return static_cast<const float*>(p.u)[head * kK + n]; }

  template <int kPerLane>
  __device__ void store(bf16* tiles, int t, int n, const float (&x)[kPerLane]) const {
    Vec<bf16, kPerLane> to;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) to.at[i] = __float2bfloat16(x[i]);
    *reinterpret_cast<Vec<bf16, kPerLane>*>(tiles + (index * kSteps + t) * kK + n) = to;
  }
};

// The 16 steps of kPerLane neighbouring channels. The delta rule's key is its b, and its a is −β
// decay k: it reads the state after the decay.
template <Rule kRule, int kPerLane>
struct Steps {
  Vec<bf16, kPerLane> raw_q[kSteps], raw_k[kSteps], raw_a[kSteps], raw_b[kSteps];
  float decay[kSteps][kPerLane], rate[kSteps], scale;

  template <int kK>
  __device__ void load(const Chunk<kRule, kK>& c, int n) {
    scale = c.p.scale;
#pragma unroll
    for (int t = 0; t < kSteps; ++t) {
      raw_q[t] = c.template vector<kPerLane>(c.p.q, t, n);
      if constexpr (kWrites<kRule>) raw_k[t] = c.template vector<kPerLane>(c.p.k, t, n);
      if constexpr (kRule == Rule::delta) {
        raw_b[t] = c.template vector<kPerLane>(c.p.k, t, n);
        rate[t] = c.rate(t);
      }
      if constexpr (kRule == Rule::dplr) {
        raw_a[t] = c.template vector<kPerLane>(c.p.a, t, n);
        raw_b[t] = c.template vector<kPerLane>(c.p.b, t, n);
      }
    }
    c.decays(n, decay);
  }
  __device__ float q(int t, int i) const { return to_compute(raw_q[t].at[i]) * scale; }
  __device__ float k(int t, int i) const { return kWrites<kRule> ? to_compute(raw_k[t].at[i]) : 0; }
  __device__ float b(int t, int i) const { return kLow<kRule> ? to_compute(raw_b[t].at[i]) : 0; }
  __device__ float a(int t, int i) const {
    if constexpr (kRule == Rule::gla) return 0;
    else if constexpr (kRule == Rule::dplr) return to_compute(raw_a[t].at[i]);
    else return -rate[t] * decay[t][i] * to_compute(raw_b[t].at[i]);
  }

  // f(t, a, q) for all rows, decayed from the start of their kBlock steps: q after its own decay, or
  // before it with a bonus. Afterwards `product` is the decay of the last block.
  template <int kBlock, bool kBonus, class F>
  __device__ void each_row(float (&product)[kPerLane], F&& f) const {
#pragma unroll
    for (int t = 0; t < kSteps; ++t) {
      float rows_a[kPerLane], rows_q[kPerLane];
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        if (t % kBlock == 0) product[i] = 1;
        rows_a[i] = a(t, i) * product[i];
        if (kBonus) rows_q[i] = q(t, i) * product[i];
        product[i] *= decay[t][i];
        if (!kBonus) rows_q[i] = q(t, i) * product[i];
      }
      f(t, rows_a, rows_q);
    }
  }
  // f(t, k, b) for all columns, the last one first, decayed to the end of their kBlock steps.
  template <int kBlock, class F>
  __device__ void each_column(F&& f) const {
    float product[kPerLane];
#pragma unroll
    for (int t = kSteps - 1; t >= 0; --t) {
      float columns_k[kPerLane], columns_b[kPerLane];
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        if (t % kBlock == kBlock - 1) product[i] = 1;
        columns_k[i] = k(t, i) * product[i];
        columns_b[i] = b(t, i) * product[i];
        product[i] *= decay[t][i];
      }
      f(t, columns_k, columns_b);
    }
  }
};

}  // namespace assay::ops::cuda::chunks
