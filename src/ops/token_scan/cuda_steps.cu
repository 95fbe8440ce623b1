// A few steps, one after another, as decoding takes them: the state is read once and written once. A thread has 4
// states of a channel, neighbours the next.
#include "ops/cuda.cuh"
#include "ops/selective_scan/cuda_math.cuh"
#include "ops/token_scan/kernel.h"

namespace assay::ops::cuda::token {
namespace {

constexpr int kBlock = 256;

// Over the `lanes` threads of a channel, for each of them.
__device__ inline float over_channel(float x, int lanes) {
  for (int mask = lanes / 2; mask > 0; mask /= 2) x += __shfl_xor_sync(~0u, x, mask);
  return x;
}

__device__ inline void load4(float (&x)[4], const float* in) {
  const auto pack = *reinterpret_cast<const Pack<float, 4>*>(in);
#pragma unroll
  for (int n = 0; n < 4; ++n) x[n] = pack.at[n];
}

template <class T>
__global__ void __launch_bounds__(kBlock) few_steps_kernel(TokenScanForward p, int lanes, bool whole) {
  const int64_t i = blockIdx.x * int64_t{kBlock} + threadIdx.x, channel = i / lanes;
  const bool live = channel < p.batch * p.channels;
  const int64_t b = live ? channel / p.channels : 0, d = live ? channel % p.channels : 0;
  const int n0 = int(i % lanes) * 4;
  auto at = [&](const View& v, int64_t t) {
    return static_cast<const T*>(v.data) + b * v.batch_stride + t * v.time_stride;
  };
  const float bias = p.delta_bias ? p.delta_bias[d] : 0.f, D = p.D ? p.D[d] : 0.f;
  float S[4] = {};
  auto state = [&](int n) { return (b * p.channels + d) * p.state_size + n0 + n; };
  auto has = [&](int n) { return live && n0 + n < p.state_size; };
  if (p.initial_state && whole && has(0)) load4(S, p.initial_state + state(0));
#pragma unroll
  for (int n = 0; n < 4; ++n)
    if (p.initial_state && !whole && has(n)) S[n] = p.initial_state[state(n)];

  for (int64_t t = 0; t < p.time; ++t) {
    const float x = real(at(p.x, t)[d]), raw = real(at(p.delta, t)[d]) + bias;
    float k[4] = {}, q[4] = {}, rate[4] = {}, square = 0, held = 0, y = 0;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (!has(n)) continue;
      k[n] = real(at(p.k, t)[n0 + n]), q[n] = real(at(p.q, t)[n0 + n]);
      if (p.rate.data)
        rate[n] = static_cast<const float*>(
            p.rate.data)[b * p.rate.batch_stride + t * p.rate.time_stride + d * p.rate_channel_stride + n0 + n];
      square += k[n] * k[n], held += k[n] * S[n];
    }
    float step = raw, input = x;
    if (p.update == Update::decay) {
      if (p.delta_softplus) step = softplus<T>(raw);
    } else {
      const float beta = sigmoid(raw);
      step = __fdividef(beta, 1 + beta * over_channel(square, lanes));
      if (p.update == Update::exact) input = x - over_channel(held, lanes);
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float decay = p.update == Update::decay      ? exp_fast(step * rate[n])
                          : p.update == Update::diagonal ? 1 - step * k[n] * k[n]
                                                         : 1.f;
      S[n] = decay * S[n] + step * input * k[n];
      y += S[n] * q[n];
    }
    y = over_channel(y, lanes) + D * x;
    if (!live || n0 > 0) continue;
    if (p.z.data) y *= Gate(real(at(p.z, t)[d])).value;
    (static_cast<T*>(p.y.data) + b * p.y.batch_stride + t * p.y.time_stride)[d] = stored<T>(y);
  }
  if (whole && has(0)) *reinterpret_cast<Pack<float, 4>*>(p.final_state + state(0)) = {S[0], S[1], S[2], S[3]};
#pragma unroll
  for (int n = 0; n < 4; ++n)
    if (!whole && has(n)) p.final_state[state(n)] = S[n];
}

}  // namespace
}  // namespace assay::ops::cuda::token

namespace assay::ops::cuda {
void few_steps(const TokenScanForward& p, Stream raw_stream) {
  int lanes = 1;
  while (4 * lanes < p.state_size) lanes *= 2;
  const auto blocks = unsigned(ceil_div(p.batch * p.channels * lanes, token::kBlock));
  // Four states in one load.
  const bool whole = p.state_size % 4 == 0 && reinterpret_cast<uintptr_t>(p.initial_state) % 16 == 0;
  const auto stream = static_cast<cudaStream_t>(raw_stream);
  if (p.dtype == DType::bf16) token::few_steps_kernel<bf16><<<blocks, token::kBlock, 0, stream>>>(p, lanes, whole);
  else token::few_steps_kernel<float><<<blocks, token::kBlock, 0, stream>>>(p, lanes, whole);
  check_launch("token_scan, a few steps");
}
}  // namespace assay::ops::cuda
