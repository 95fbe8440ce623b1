// A few steps, one after another, as decoding takes them: the state is read once and written once. `kLanes` threads
// have a channel, each 4 of its states; a warp has as many channels as its threads take in kLoads loads. What belongs
// to a channel alone, one thread finds and hands round.
#include "ops/cuda_steps.cuh"
#include "ops/selective_scan/cuda_math.cuh"
#include "ops/token_scan/kernel.h"

namespace assay::ops::cuda::token {
namespace {

constexpr int kWarps = 4;

// Σ over a channel's kLanes threads of v[i], for i < kValues; it comes to thread i kLanes / kValues and those behind
// it.
template <int kValues, int kLanes>
__device__ inline float sum_over_channels(float (&v)[kValues]) {
  if constexpr (kValues == 1) {
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2) v[0] += __shfl_xor_sync(~0u, v[0], mask);
    return v[0];
  } else {
    constexpr int kHalf = kValues / 2, kMask = kLanes / 2;
    const bool upper = threadIdx.x & kMask;
    float sums[kHalf];
#pragma unroll
    for (int i = 0; i < kHalf; ++i)
      sums[i] = (upper ? v[i + kHalf] : v[i]) + __shfl_xor_sync(~0u, upper ? v[i] : v[i + kHalf], kMask);
    return sum_over_channels<kHalf, kMask>(sums);
  }
}

struct Four {
  float at[4] = {};
  __device__ float& operator[](int i) { return at[i]; }
};
// Numbers 0 to 3 of a row that ends behind `count`; in one load where `whole`.
__device__ inline Four four(const void* row, DType dtype, int64_t first, int64_t count, bool whole) {
  Four x;
  if (whole && dtype == DType::f32) load_pack<4>(x.at, static_cast<const float*>(row) + first);
  else if (whole) load_pack<4>(x.at, static_cast<const bf16*>(row) + first);
  else
#pragma unroll
    for (int n = 0; n < 4; ++n)
      if (n < count) x[n] = number(row, dtype, first + n);
  return x;
}

// The row of step t of sequence b; null where absent.
__device__ inline const void* row(const TypedView& x, int64_t b, int64_t t) {
  const int64_t at = b * x.batch_stride + t * x.time_stride;
  if (!x.data) return nullptr;
  return static_cast<const char*>(x.data) + at * (x.dtype == DType::bf16 ? 2 : 4);
}
__device__ inline float number_or_0(const TypedView& x, int64_t b, int64_t t, int64_t i) {
  return x.data ? number(row(x, b, t), x.dtype, i) : 0.f;
}

// Blocks on a multiprocessor, so that their states fit its registers.
constexpr int min_blocks(int lanes) { return lanes < 8 ? 6 : lanes == 8 ? 5 : lanes == 16 ? 3 : 4; }

template <int kLanes, int kLoads>
__global__ void __launch_bounds__(kWarps * 32, min_blocks(kLanes))
    few_steps_kernel(TokenSteps p, unsigned tiles, bool whole, bool whole_rates) {
  constexpr int kSide = 32 / kLanes, kChannels = kLoads * kSide, kOwners = kLanes / kLoads;  // side by side; of a warp
  const int lane = threadIdx.x % 32, side = lane / kLanes, n0 = lane % kLanes * 4;
  const unsigned b = blockIdx.x / tiles * kWarps + threadIdx.x / 32, first = blockIdx.x % tiles * kChannels + side;
  const int64_t N = p.state_size, states = (int64_t(b) * p.channels + blockIdx.x % tiles * kChannels) * N;
  const bool there = b < p.batch;
  let_the_next_start();
  if (p.initial_state && there && lane == 0)
    prefetch(p.initial_state + states,
             min(int64_t{kChannels}, p.channels - blockIdx.x % tiles * kChannels) * N * int64_t{sizeof(float)});
  wait_for_those_before();
  if (!there) return;

  Four S[kLoads];
  auto has = [&](int j) { return first + j * kSide < p.channels && n0 < N; };
  auto state = [&](int j) { return states + (side + j * kSide) * N + n0; };
#pragma unroll
  for (int j = 0; j < kLoads; ++j)
    if (p.initial_state && has(j)) S[j] = four(p.initial_state, DType::f32, state(j), N - n0, whole);

  // The channel that this thread owns; with others, where there are more threads than channels.
  const int own = lane % kLanes / kOwners;
  const unsigned d = first + own * kSide, head = d / unsigned(p.head_dim),
                 group = first / unsigned(p.channels / p.groups);
  const bool live = d < p.channels;
  const float bias = live ? number_or_0(p.delta_bias, 0, 0, head) : 0.f, D = live ? number_or_0(p.D, 0, 0, head) : 0.f;
  for (int64_t t = 0; t < p.time; ++t) {
    Four k, q;
    if (n0 < N) {
      k = four(row(p.k, b, t), p.k.dtype, group * N + n0, N - n0, false);
      q = four(row(p.q, b, t), p.q.dtype, group * N + n0, N - n0, false);
    }
    const float x = live ? number_or_0(p.x, b, t, d) : 0.f, z = live ? number_or_0(p.z, b, t, d) : 0.f;
    const float raw = live ? number_or_0(p.delta, b, t, head) + bias : 0.f;
    const void* rates = row(p.rate, b, t);
    float step = p.delta_softplus ? softplus<float>(raw) : raw, input = x, decay = 1.f;
    if (p.update == Update::decay) {
      if (p.rate_of_heads && live) decay = exp_fast(step * number(rates, p.rate.dtype, head));
    } else {
      float square[1] = {};
#pragma unroll
      for (int n = 0; n < 4; ++n) square[0] += k[n] * k[n];
      const float beta = sigmoid(raw);
      step = __fdividef(beta, 1 + beta * sum_over_channels<1, kLanes>(square));
    }
    float sums[kLoads] = {};
    if (p.update == Update::exact) {
#pragma unroll
      for (int j = 0; j < kLoads; ++j)
#pragma unroll
        for (int n = 0; n < 4; ++n) sums[j] += k[n] * S[j][n];
      input = x - sum_over_channels<kLoads, kLanes>(sums);
    }
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const float written = __shfl_sync(~0u, step * input, j * kOwners, kLanes);
      const float shared = __shfl_sync(~0u, p.rate_of_heads ? decay : step, j * kOwners, kLanes);
      Four rate;
      if (rates && !p.rate_of_heads && has(j))
        rate = four(rates, p.rate.dtype, (first + j * kSide) * p.rate_channel_stride + n0, N - n0, whole_rates);
      sums[j] = 0;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float keep = p.rate_of_heads                ? shared
                           : p.update == Update::decay    ? exp_fast(shared * rate[n])
                           : p.update == Update::diagonal ? 1 - shared * k[n] * k[n]
                                                          : 1.f;
        S[j][n] = keep * S[j][n] + written * k[n];
        sums[j] += S[j][n] * q[n];
      }
    }
    float y = sum_over_channels<kLoads, kLanes>(sums) + D * x;
    if (!live || lane % kOwners > 0) continue;
    if (p.z.data) y *= Gate(z).value;
    const int64_t at = b * p.y.batch_stride + t * p.y.time_stride + d;
    if (p.y.dtype == DType::bf16) static_cast<bf16*>(p.y.data)[at] = stored<bf16>(y);
    else static_cast<float*>(p.y.data)[at] = y;
  }
#pragma unroll
  for (int j = 0; j < kLoads; ++j) {
    if (!has(j)) continue;
    if (whole) *reinterpret_cast<Pack<float, 4>*>(p.final_state + state(j)) = {S[j][0], S[j][1], S[j][2], S[j][3]};
    else
#pragma unroll
      for (int n = 0; n < 4; ++n)
        if (n0 + n < N) p.final_state[state(j) + n] = S[j][n];
  }
}

bool aligned(const void* data, size_t bytes) { return reinterpret_cast<uintptr_t>(data) % bytes == 0; }

template <int kLanes>
void launch(const TokenSteps& p, Stream stream) {
  constexpr int kLoads = kLanes < 16 ? kLanes : 16, kChannels = kLoads * 32 / kLanes;
  const bool fours = p.state_size % 4 == 0;
  const bool strides = (p.rate.batch_stride | p.rate.time_stride | p.rate_channel_stride) % 4 == 0;
  const auto tiles = unsigned(ceil_div(p.channels, kChannels));
  launch_early(few_steps_kernel<kLanes, kLoads>, tiles * unsigned(ceil_div(p.batch, kWarps)), kWarps * 32, stream, p,
               tiles, fours && aligned(p.initial_state, 16),
               fours && strides && aligned(p.rate.data, p.rate.dtype == DType::bf16 ? 8 : 16));
}

}  // namespace
}  // namespace assay::ops::cuda::token

namespace assay::ops::cuda {
void few_steps(const TokenSteps& p, Stream stream) {
  const int64_t N = p.state_size;
  if (N <= 4) token::launch<1>(p, stream);
  else if (N <= 8) token::launch<2>(p, stream);
  else if (N <= 16) token::launch<4>(p, stream);
  else if (N <= 32) token::launch<8>(p, stream);
  else if (N <= 64) token::launch<16>(p, stream);
  else token::launch<32>(p, stream);
  check_launch("token_scan, a few steps");
}
}  // namespace assay::ops::cuda
