// A few steps, one after another, as decoding takes them: the state is read once and written once.
// `kLanes` threads have a channel, each 4 of its states; a warp has as many channels as its threads
// take in kLoads loads. One thread computes the values per channel and shuffles them to the rest.
// There is no branch around an absent argument: something else is loaded there.
#include "ops/cuda/math.cuh"
#include "ops/cuda/reduce.cuh"
#include "ops/recurrence/channel_scan/kernel.h"

namespace assay::ops::cuda::token {
namespace {

// warps of a block; rates of channels that are fetched at once
constexpr int kWarps = 4;
constexpr int kRates = 4;
enum class DecayKind { channels, heads, diagonal, exact };  // whose decay is exp(p rate)

// The row of step t of sequence b.
__device__ inline const void* row(const TypedView& x, int64_t b, int64_t t) {
  const int64_t at = b * x.batch_stride + t * x.time_stride;
  return static_cast<const char*>(x.data) + at * (x.dtype == DType::bf16 ? 2 : 4);
}
__device__ inline float load_element(const TypedView& x, int64_t b, int64_t t, unsigned i) {
  return load_scalar(row(x, b, t), x.dtype, i);
}
__device__ inline float or_0(const TypedView& x, const TypedView& otherwise, int64_t b, int64_t t,
                             unsigned i) {
  const float found = load_element(x.data ? x : otherwise, b, t, i);
  return x.data ? found : 0.f;
}
// Numbers 0 to 3 of the row after `first`, 0 from `count` on.
template <bool kFullTile>
__device__ inline Vec4 four(const void* row, DType dtype, int64_t first, int count) {
  Vec4 x;
  if constexpr (kFullTile) load_vec(x.at, row, dtype, count > 0 ? first : 0);
  else
#pragma unroll
    for (int n = 0; n < 4; ++n) x[n] = load_scalar(row, dtype, n < count ? first + n : 0);
#pragma unroll
  for (int n = 0; n < 4; ++n) x[n] = n < count ? x[n] : 0.f;
  return x;
}

// Resident blocks per SM, chosen so that a small state fits in one wave.
template <int kLanes, bool kFullTile>
constexpr int kBlocks = !kFullTile    ? 2
                        : kLanes < 8  ? 6
                        : kLanes == 8 ? 5
                                      : 4;

// kFullTile: 4 divides N, and four numbers lie where one load takes them.
template <DecayKind kDecayKind, int kLanes, bool kFullTile>
__global__ void __launch_bounds__(kWarps * 32, kBlocks<kLanes, kFullTile>)
    decode_kernel(TokenSteps args) {
  constexpr int kLoads = kLanes < 16 ? kLanes : 16;
  constexpr int kChannelsPerLoad = 32 / kLanes;
  constexpr int kChannels = kLoads * kChannelsPerLoad;
  constexpr int kOwners = kLanes / kLoads;
  const int lane = threadIdx.x % 32;
  const int side = lane / kLanes;
  const int n0 = lane % kLanes * 4;
  const int N = int(args.state_size);
  const int64_t b = int64_t{blockIdx.y} * kWarps + threadIdx.x / 32;
  const unsigned first = blockIdx.x * kChannels;
  const int here = int(min(int64_t{kChannels}, args.channels - first));
  const int count = N - n0;
  const int64_t states = (b * args.channels + first) * N;
  const float* before = args.initial_state ? args.initial_state + states : nullptr;
  griddep_launch_dependents();
  griddep_wait();
  if (b >= args.batch) return;

  Vec4 S[kLoads];
  auto has = [&](int j) { return side + j * kChannelsPerLoad < here && count > 0; };
  auto state = [&](int j) { return (side + j * kChannelsPerLoad) * N + n0; };
#pragma unroll
  for (int j = 0; j < kLoads; ++j)
    if (before && has(j)) {
      if constexpr (kFullTile) S[j] = load_float4(before + state(j));
      else S[j] = four<false>(before, DType::f32, state(j), count);
    }

  // The channel that this thread owns; with others, where there are more threads than channels.
  const int own = lane % kLanes / kOwners * kChannelsPerLoad + side;
  const unsigned d = first + min(own, here - 1);
  const unsigned head = kDecayKind == DecayKind::heads ? d / unsigned(args.head_dim) : d;
  const unsigned group = args.groups > 1 ? first / unsigned(args.channels / args.groups) : 0;
  const float D = or_0(args.D, args.x, 0, 0, head);
  const float bias = or_0(args.delta_bias, args.x, 0, 0, head);
  const float head_rate =
      kDecayKind == DecayKind::heads ? kLog2e * load_element(args.rate, 0, 0, head) : 0.f;
  for (int64_t t = 0; t < args.time; ++t) {
    const float x = load_element(args.x, b, t, d);
    const float z = or_0(args.z, args.x, b, t, d);
    const float raw = load_element(args.delta, b, t, head) + bias;
    const Vec4 k = four<kFullTile>(row(args.k, b, t), args.k.dtype, group * N + n0, count);
    const Vec4 q = four<kFullTile>(row(args.q, b, t), args.q.dtype, group * N + n0, count);
    Vec4 rates[kRates];
    auto fetch_rates = [&](int j) {
#pragma unroll
      for (int i = 0; i < kRates && i < kLoads; ++i) {
        const int channel = min(side + (j + i) * kChannelsPerLoad, here - 1);
        rates[i] = four<kFullTile>(row(args.rate, b, t), args.rate.dtype,
                                   (first + channel) * args.rate_channel_stride + n0, count);
      }
    };
    if constexpr (kDecayKind == DecayKind::channels) fetch_rates(0);

    // shared: the decay of all, or what it is found from
    float step;
    float input = x;
    float shared = 0;
    float sums[kLoads] = {};
    if constexpr (kDecayKind == DecayKind::channels || kDecayKind == DecayKind::heads) {
      step = args.delta_softplus ? softplus<float>(raw) : raw;
      shared = kDecayKind == DecayKind::heads ? ex2_approx(step * head_rate) : kLog2e * step;
    } else {
      float square[1] = {};
#pragma unroll
      for (int n = 0; n < 4; ++n) square[0] += k[n] * k[n];
      const float beta = sigmoid_approx(raw);
      shared = step = __fdividef(beta, 1 + beta * transposed_sum<kLanes>(square));
    }
    if constexpr (kDecayKind == DecayKind::exact) {
#pragma unroll
      for (int j = 0; j < kLoads; ++j)
#pragma unroll
        for (int n = 0; n < 4; ++n) sums[j] += k[n] * S[j][n];
      input = x - transposed_sum<kLanes>(sums);
    }
    const float write = step * input;
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      if constexpr (kDecayKind == DecayKind::channels)
        if (j > 0 && j % kRates == 0) fetch_rates(j);
      const float written = __shfl_sync(~0u, write, j * kOwners, kLanes);
      const float common =
          kDecayKind == DecayKind::exact ? 1.f : __shfl_sync(~0u, shared, j * kOwners, kLanes);
      sums[j] = 0;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float keep = kDecayKind == DecayKind::channels
                               ? ex2_approx(common * rates[j % kRates][n])
                           : kDecayKind == DecayKind::diagonal ? 1 - common * k[n] * k[n]
                                                               : common;
        S[j][n] = keep * S[j][n] + written * k[n];
        sums[j] += S[j][n] * q[n];
      }
    }
    float y = transposed_sum<kLanes>(sums) + D * x;
    if (own >= here || lane % kOwners > 0) continue;
    y = args.z.data ? y * SiluGate(z).value : y;
    const int64_t at = b * args.y.batch_stride + t * args.y.time_stride + d;
    if (args.y.dtype == DType::bf16) static_cast<bf16*>(args.y.data)[at] = from_compute<bf16>(y);
    else static_cast<float*>(args.y.data)[at] = y;
  }
#pragma unroll
  for (int j = 0; j < kLoads; ++j) {
    if (!has(j)) continue;
    float* to = args.final_state + states + state(j);
    if constexpr (kFullTile) store_streaming(to, S[j]);
    else
#pragma unroll
      for (int n = 0; n < 4; ++n)
        if (n < count) to[n] = S[j][n];
  }
}

bool in_fours(const TypedView& x, int64_t stride) {
  return (x.batch_stride | x.time_stride | stride) % 4 == 0 && is_aligned(x.data, 8);
}
bool whole(const TokenSteps& args) {
  return args.state_size % 4 == 0 && is_aligned(args.initial_state, 16) && in_fours(args.k, 0) &&
         in_fours(args.q, 0) &&
         (args.rate_of_heads || in_fours(args.rate, args.rate_channel_stride));
}

template <DecayKind kDecayKind, int kLanes, bool kFullTile = true>
void launch(const TokenSteps& args, Stream stream) {
  constexpr int kChannels = kLanes < 16 ? 32 : 512 / kLanes;
  const dim3 blocks(unsigned(ceil_div(args.channels, kChannels)),
                    unsigned(ceil_div(args.batch, kWarps)));
  launch_pdl(decode_kernel<kDecayKind, kLanes, kFullTile>, blocks, kWarps * 32, 0, stream, args);
}

template <DecayKind kDecayKind>
void launch(const TokenSteps& args, Stream stream) {
  if (!whole(args)) launch<kDecayKind, 32, false>(args, stream);
  else if (args.state_size <= 8) launch<kDecayKind, 2>(args, stream);
  else if (args.state_size <= 16) launch<kDecayKind, 4>(args, stream);
  else if (args.state_size <= 32) launch<kDecayKind, 8>(args, stream);
  else if (args.state_size <= 64) launch<kDecayKind, 16>(args, stream);
  else launch<kDecayKind, 32>(args, stream);
}

}  // namespace
}  // namespace assay::ops::cuda::token

namespace assay::ops::cuda {
void decode(const TokenSteps& args, Stream stream) {
  using token::DecayKind;
  if (args.update == Update::diagonal) token::launch<DecayKind::diagonal>(args, stream);
  else if (args.update == Update::exact) token::launch<DecayKind::exact>(args, stream);
  else if (args.rate_of_heads) token::launch<DecayKind::heads>(args, stream);
  else token::launch<DecayKind::channels>(args, stream);
}
}  // namespace assay::ops::cuda
