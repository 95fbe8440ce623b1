// The token shift on CUDA: 16 bytes of columns per thread. The backward walks a run of positions
// towards its begin, so that each gradient is read once: position t + 1 hands down what it owes t.
// The gradient of the mixes stays in registers meanwhile.
#include "ops/cuda/launch.cuh"
#include "ops/cuda/types.cuh"
#include "ops/recurrence/token_shift/kernel.h"

namespace assay::ops::cuda {
namespace {

constexpr int kThreads = 128;

template <class T, int kWidth>
struct Columns {
  using R = Real<T>;
  R at[kWidth] = {};
  __device__ static Columns load(const void* row) {
    Columns out;
    const auto pack = *static_cast<const Vec<T, kWidth>*>(row);
    for (int k = 0; k < kWidth; ++k) out.at[k] = to_compute(pack.at[k]);
    return out;
  }
  __device__ void store(void* row) const {
    Vec<T, kWidth> pack;
    for (int k = 0; k < kWidth; ++k) pack.at[k] = from_compute<T>(at[k]);
    *static_cast<Vec<T, kWidth>*>(row) = pack;
  }
};

// The columns of one thread, in any of the tensors.
template <class T, int kWidth>
struct Place {
  using Part = Columns<T, kWidth>;
  using R = Real<T>;
  const TokenShift& args;
  int64_t sequence;
  int64_t column;

  __device__ int64_t offset(int64_t t) const {
    return (sequence * args.time + t) * args.width + column;
  }
  __device__ Part read(const void* tensor, int64_t t) const {
    return Part::load(static_cast<const T*>(tensor) + offset(t));
  }
  __device__ Part x(int64_t t) const {  // from t = −1
    if (t >= 0) return read(args.x, t);
    return args.before
               ? Part::load(static_cast<const T*>(args.before) + sequence * args.width + column)
               : Part{};
  }
  __device__ Part weight(const Columns<R, kWidth>& mix, int i, int64_t t) const {
    Part m;
    for (int k = 0; k < kWidth; ++k) m.at[k] = mix.at[k];
    if (!args.own[i]) return m;
    const Part own = read(args.own[i], t);
    for (int k = 0; k < kWidth; ++k) m.at[k] += own.at[k];
    return m;
  }
  __device__ Columns<R, kWidth> mix(int i) const {
    Columns<R, kWidth> out;
    const R* row = static_cast<const R*>(args.mix) + i * args.width + column;
    for (int k = 0; k < kWidth; ++k) out.at[k] = row[k];
    return out;
  }
};

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads) forward_kernel(TokenShift args) {
  using Part = Columns<T, kWidth>;
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  const int64_t packs = args.width / kWidth;
  const int64_t position = i / packs;
  if (position >= args.batch * args.time) return;
  const Place<T, kWidth> place{args, position / args.time, i % packs * kWidth};
  const int64_t t = position % args.time;
  const Part now = place.x(t);
  const Part before = place.x(t - 1);
  for (int j = 0; j < args.count; ++j) {
    Part y = place.weight(place.mix(j), j, t);
    for (int k = 0; k < kWidth; ++k) y.at[k] = now.at[k] + (before.at[k] - now.at[k]) * y.at[k];
    y.store(static_cast<T*>(args.y[j]) + place.offset(t));
  }
}

// kCount: the mixes, or more; all are loaded without a branch, so that the loads are in flight
// together, and those that are none count as 0.
template <class T, int kWidth, int kCount, bool kOwn>
__global__ void __launch_bounds__(kThreads) backward_kernel(TokenShiftBackward bwd, int64_t runs) {
  using Part = Columns<T, kWidth>;
  using R = Real<T>;
  const TokenShift& args = bwd.forward;
  const int64_t thread = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  const int64_t packs = args.width / kWidth;
  const int64_t run = thread / packs;
  if (run >= args.batch * runs) return;
  const Place<T, kWidth> place{args, run / runs, thread % packs * kWidth};
  const int64_t begin = run % runs * kShiftRun;
  const int64_t end = min(begin + kShiftRun, args.time);
  Columns<R, kWidth> mix[kCount];
  Columns<R, kWidth> dmix[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    if (i < args.count) mix[i] = place.mix(i);
  // dy, weight: of a position; owed: its gradient from the position after
  Part dy[kCount];
  Part weight[kCount];
  Part owed;
  const auto load = [&](int64_t t) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int from = i < args.count ? i : 0;
      dy[i] = place.read(bwd.dy[from], t);
      if (kOwn) weight[i] = place.read(args.own[from], t);
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      for (int k = 0; k < kWidth; ++k) {
        dy[i].at[k] = i < args.count ? dy[i].at[k] : R(0);
        weight[i].at[k] = mix[i].at[k] + (kOwn ? weight[i].at[k] : R(0));
      }
  };
  if (end < args.time) {
    load(end);
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      for (int k = 0; k < kWidth; ++k) owed.at[k] += dy[i].at[k] * weight[i].at[k];
  }
  Part now = place.x(end - 1);
  for (int64_t t = end - 1; t >= begin; --t) {
    const Part before = place.x(t - 1);
    load(t);
    Part dx = owed;
    owed = Part{};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      Part down;
      for (int k = 0; k < kWidth; ++k) {
        const R past = dy[i].at[k] * weight[i].at[k];
        dx.at[k] += dy[i].at[k] - past;
        owed.at[k] += past;
        down.at[k] = dy[i].at[k] * (before.at[k] - now.at[k]);
        dmix[i].at[k] += down.at[k];
      }
      if (kOwn && i < args.count) down.store(static_cast<T*>(bwd.down[i]) + place.offset(t));
    }
    dx.store(static_cast<T*>(bwd.dx) + place.offset(t));
    now = before;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    if (i < args.count) {
      auto* row = static_cast<R*>(bwd.dmix) + (run * args.count + i) * args.width + place.column;
      for (int k = 0; k < kWidth; ++k) row[k] = dmix[i].at[k];
    }
}

bool aligned(const TokenShift& args, const void* const* more) {
  bool all = is_aligned(args.x, 16) && is_aligned(args.before, 16);
  for (int i = 0; i < args.count; ++i)
    all = all && is_aligned(args.own[i], 16) && is_aligned(more[i], 16);
  return all;
}

}  // namespace

void token_shift(const TokenShift& args, Stream stream) {
  with_vectors(args.dtype, args.width, aligned(args, args.y), [&]<class T>(T, auto width) {
    launch_threads(forward_kernel<T, width()>, args.batch * args.time * (args.width / width()),
                   kThreads, stream, args);
  });
}

void token_shift(const TokenShiftBackward& bwd, Stream stream) {
  const TokenShift& args = bwd.forward;
  with_vectors(args.dtype, args.width, aligned(args, bwd.dy), [&]<class T>(T, auto width) {
    const int64_t runs = runs_of_sequence(args);
    const int64_t threads = args.batch * runs * (args.width / width());
    const auto kernel = args.own[0]       ? backward_kernel<T, width(), kMaxShifts, true>
                        : args.count <= 2 ? backward_kernel<T, width(), 2, false>
                                          : backward_kernel<T, width(), kMaxShifts, false>;
    launch_threads(kernel, threads, kThreads, stream, bwd, runs);
  });
}

}  // namespace assay::ops::cuda
