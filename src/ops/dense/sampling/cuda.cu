// Sampling on CUDA: one block per row. Prefixes of the order are found by a radix search over the
// bits of the logits, without sorting: three passes over the row, which lies in the L1 or L2 cache.
#include <cub/block/block_scan.cuh>

#include "ops/cuda/reduce.cuh"
#include "ops/dense/sampling/kernel.h"

namespace assay::ops::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kBins = 2 * kThreads;      // bins of one radix pass: 11 bits
constexpr float kOne = 1099511627776.f;  // 2^40: the weight of the likeliest token
using Mass = unsigned long long;

// How many tokens, and what they weigh.
struct Amount {
  Mass mass;
  Mass count;
  __device__ Amount operator+(const Amount& other) const {
    return {mass + other.mass, count + other.count};
  }
  __device__ Mass of(bool counts) const { return counts ? count : mass; }
};

using Scan = cub::BlockScan<Amount, kThreads, cub::BLOCK_SCAN_WARP_SCANS>;

// Unsigned integers in the order of the numbers; −0 counts as 0.
__device__ uint32_t key_of(float x) {
  const uint32_t bits = __float_as_uint(x + 0.f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

struct Shared {
  Mass mass[kBins];
  uint32_t count[kBins];
  Scan::TempStorage scan;
  float most[kWarps];
  Amount before;  // tokens before the bin that was found
  uint32_t bin;
  int token;
};

// A place in the order: the tokens with a larger key, and those with this key.
struct Place {
  uint32_t key;
  Amount above;  // all tokens with a larger key
  Mass weight;   // weight of each token with this key
};

template <class T>
struct Row {
  const T* logits;
  int size;
  // weights are exp((x − most) factor)
  float most;
  float factor;
  Shared& shared;

  __device__ float at(int i) const { return to_compute(logits[i]); }
  // f(a logit) of all of them, divided among the threads, 16 bytes at a time where it is possible.
  template <class F>
  __device__ void each(const F& f) const {
    constexpr int kWide = 16 / sizeof(T);
    if (size % kWide > 0 || reinterpret_cast<uintptr_t>(logits) % 16 > 0) {
      for (int i = threadIdx.x; i < size; i += kThreads) f(at(i));
      return;
    }
    const auto* vectors = reinterpret_cast<const Vec<T, kWide>*>(logits);
#pragma unroll 4
    for (int i = threadIdx.x; i < size / kWide; i += kThreads) {
      const Vec<T, kWide> some = vectors[i];
#pragma unroll
      for (int k = 0; k < kWide; ++k) f(to_compute(some.at[k]));
    }
  }
  __device__ Mass weight(float x) const { return __float2ull_rn(expf((x - most) * factor) * kOne); }

  // The key at which the running count or mass, by falling keys, first exceeds `target`. The total
  // must exceed it.
  __device__ Place reach(Mass target, bool counts) const {
    uint32_t prefix = 0;
    Amount above{};
    for (int pass = 0; pass < 3; ++pass) {
      const int shift = pass == 0 ? 21 : pass == 1 ? 10 : 0;
      const int known = pass == 1 ? 21 : 10;
      const uint32_t mask = pass == 2 ? 1023u : 2047u;
      for (int b = threadIdx.x; b < kBins; b += kThreads) {
        shared.mass[b] = 0;
        shared.count[b] = 0;
      }
      __syncthreads();
      each([&](float x) {
        const uint32_t key = key_of(x);
        if (pass > 0 && key >> known != prefix) return;
        const uint32_t bin = key >> shift & mask;
        atomicAdd(&shared.mass[bin], weight(x));
        atomicAdd(&shared.count[bin], 1u);
      });
      __syncthreads();
      // Thread t has the bins 2047 − 2t and 2046 − 2t, so that the scan is by falling keys.
      const int last = kBins - 1 - 2 * int(threadIdx.x);
      Amount bins[2];
      Amount before[2];
      for (int i = 0; i < 2; ++i) bins[i] = {shared.mass[last - i], shared.count[last - i]};
      Scan(shared.scan).ExclusiveScan(bins, before, above, Plus{});
      for (int i = 0; i < 2; ++i)
        if (before[i].of(counts) <= target && target < (before[i] + bins[i]).of(counts)) {
          shared.bin = last - i;
          shared.before = before[i];
        }
      __syncthreads();
      above = shared.before;
      prefix = pass == 0 ? shared.bin : prefix << (pass == 2 ? 10 : 11) | shared.bin;
      __syncthreads();
    }
    const uint32_t bits = prefix & 0x80000000u ? prefix & 0x7fffffffu : ~prefix;
    return {prefix, above, weight(__uint_as_float(bits))};
  }

  // The first token, by id, at which the running sum of amount(logit) exceeds `target`. Every warp
  // has a run of neighbouring ids, and every lane has a part of the run that holds the token.
  template <class F>
  __device__ int reach_by_id(Mass target, F amount) const {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int per_warp = (size + kWarps - 1) / kWarps;
    const int per_lane = (per_warp + 31) / 32;
    const int end = min((warp + 1) * per_warp, size);
    Mass mine = 0;
#pragma unroll 8
    for (int i = warp * per_warp + lane; i < end; i += 32) mine += amount(at(i));
    const Mass of_warp = warp_sum(mine);
    if (lane == 0) shared.mass[warp] = of_warp;
    __syncthreads();
    const Mass before = warp_sum(lane < warp ? shared.mass[lane] : Mass(0));
    if (before <= target && target < before + of_warp) {
      const int begin = warp * per_warp + lane * per_lane;
      const int stop = min(begin + per_lane, end);
      mine = 0;
#pragma unroll 8
      for (int i = begin; i < stop; ++i) mine += amount(at(i));
      Mass running = before + warp_inclusive_scan(mine) - mine;
      if (running <= target && target < running + mine)
        for (int i = begin; i < stop; ++i) {
          running += amount(at(i));
          if (running > target) {
            shared.token = i;
            break;
          }
        }
    }
    __syncthreads();
    return shared.token;
  }

  __device__ Mass total() const {
    Amount mine{};
    Amount before;
    Amount all;
    each([&](float x) { mine.mass += weight(x); });
    Scan(shared.scan).ExclusiveScan(mine, before, Amount{}, Plus{}, all);
    __syncthreads();
    return all.mass;
  }
};

// floor(share · total), below total.
__device__ Mass part(double share, Mass total) {
  const Mass target = Mass(share * double(total));
  return target < total ? target : total - 1;
}

template <class T>
__device__ int drawn(const Row<T>& row, const Draw& draw) {
  const auto with_key = [](uint32_t key) {
    return [key](float x) { return Mass(key_of(x) == key); };
  };
  if (draw.temperature == 0) return row.reach_by_id(0, with_key(key_of(row.most)));
  if (draw.top_k == 0 && draw.top_p == 1)
    return row.reach_by_id(part(draw.uniform, row.total()), [&](float x) { return row.weight(x); });
  Mass left;  // the weight of what may be drawn
  if (draw.top_k > 0 && draw.top_k < row.size) {
    const Place last = row.reach(Mass(draw.top_k) - 1, true);
    left = last.above.mass + (Mass(draw.top_k) - last.above.count) * last.weight;
  } else {
    left = row.total();
  }
  if (draw.top_p < 1) {
    const Mass target = part(draw.top_p, left);
    const Place last = row.reach(target, false);
    left = last.above.mass + ((target - last.above.mass) / last.weight + 1) * last.weight;
  }
  const Mass target = part(draw.uniform, left);
  const Place place = row.reach(target, false);
  return row.reach_by_id((target - place.above.mass) / place.weight, with_key(place.key));
}

template <class T>
__global__ void __launch_bounds__(kThreads) sample_kernel(Sampling args) {
  __shared__ Shared shared;
  const T* logits = static_cast<const T*>(args.logits) + blockIdx.x * args.size;
  const Draw draw = args.draws[blockIdx.x];
  float most = -INFINITY;
  bool is_nan = false;
  Row<T> row{logits, int(args.size), 0, 0, shared};
  row.each([&](float x) {
    is_nan = is_nan || isnan(x);
    most = fmaxf(most, x);
  });
  is_nan = __syncthreads_or(is_nan);
  most = group_reduce<32>(most, Max{});
  if (threadIdx.x % 32 == 0) shared.most[threadIdx.x / 32] = most;
  __syncthreads();
  most = group_reduce<32>(shared.most[threadIdx.x % kWarps], Max{});
  int token = -1;
  if (!is_nan && isfinite(most)) {
    // Bounded, so that a weight of the likeliest token is never exp(0 · ∞).
    row.factor = float(fmin(1 / draw.temperature, 1e30));
    row.most = most;
    token = drawn(row, draw);
  }
  if (threadIdx.x == 0) args.tokens[blockIdx.x] = token;
}

}  // namespace

void sample(const Sampling& args, Stream stream) {
  if (args.rows == 0) return;
  check("sample", args.size > kMaxTokens ? "takes fewer than 2^24 tokens" : nullptr);
  const auto kernel = args.dtype == DType::bf16 ? sample_kernel<bf16> : sample_kernel<float>;
  launch_kernel(kernel, unsigned(args.rows), kThreads, 0, stream, args);
}

}  // namespace assay::ops::cuda
