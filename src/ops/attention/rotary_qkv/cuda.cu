// Rotary queries and keys on CUDA: a few lanes per head, 16 bytes of each half per lane. A thread
// has the same columns of several heads of one position, whose angles it reads once.
#include "ops/attention/rotary_qkv/kernel.h"
#include "ops/cuda/math.cuh"
#include "ops/cuda/rowwise.cuh"

namespace assay::ops::cuda {
namespace {

constexpr int kThreads = 128;
// Heads per thread, as registers allow.
template <bool kNorm>
constexpr int kHeadsPerThread = kNorm ? 2 : 4;

// With x a head, g its gradient turned back, n = √(Σ x² + ε) and s the scale: dx = s/n (g − x
// (x·g)/n²), ds = (x·g)/n. A head longer than its lanes hold is read again after these sums.
template <class T, int kWidth, bool kBackward, bool kNorm>
__global__ void __launch_bounds__(kThreads, 4)
    rotary_kernel(const __grid_constant__ RotaryQk args, int64_t tasks, int group) {
  griddep_launch_dependents();
  griddep_wait();
  using R = Real<T>;
  using Packed = Vec<T, kWidth>;
  constexpr int kHeads = kHeadsPerThread<kNorm>;
  const int lane = threadIdx.x % unsigned(group);
  const int all = int(args.heads + args.kv_heads);
  const int per_position = (all + kHeads - 1) / kHeads;
  const int64_t wanted =
      blockIdx.x * int64_t(kThreads / unsigned(group)) + threadIdx.x / unsigned(group);
  const int64_t task = min(wanted, tasks - 1);
  const int64_t position = quotient(task, per_position);
  const int64_t b = quotient(position, args.time);
  const int64_t t = position - b * args.time;
  const int64_t half = args.head_dim / 2;
  const int first = int(task - position * per_position) * kHeads;
  const auto row = [&](const View& view, int64_t head) {
    return static_cast<T*>(view.data) + b * view.batch_stride + t * view.time_stride +
           head * args.head_dim;
  };
  const auto alone = [&](int head) {
    return head < args.heads ? row(args.q, head) : row(args.k, head - args.heads);
  };
  // numbers of both halves of each head
  Packed x[kHeads][2];
  Packed normed[kHeads][2];
  Vec<R, kWidth> cos;
  Vec<R, kWidth> sin;
  const auto load = [&](int64_t i) {
#pragma unroll
    for (int n = 0; n < kHeads * 2; ++n) {
      const int head = min(first + n / 2, all - 1);  // a head that does not exist is not written
      const int64_t at = n % 2 * half + i;
      x[n / 2][n % 2] =
          *reinterpret_cast<const Packed*>((kBackward ? alone(head) : row(args.qk, head)) + at);
      if constexpr (kBackward && kNorm)
        normed[n / 2][n % 2] = *reinterpret_cast<const Packed*>(row(args.normed, head) + at);
    }
    cos = *reinterpret_cast<const Vec<R, kWidth>*>(static_cast<const R*>(args.cos) + t * half + i);
    sin = *reinterpret_cast<const Vec<R, kWidth>*>(static_cast<const R*>(args.sin) + t * half + i);
  };
  // column k of a head, turned by the angle of the position, or back
  const auto turn = [&](const Packed(&head)[2], int k, R(&out)[2]) {
    const R u = to_compute(head[0][k]);
    const R v = to_compute(head[1][k]);
    const R c = cos[k];
    const R s = kBackward ? -sin[k] : sin[k];
    out[0] = u * c - v * s;
    out[1] = v * c + u * s;
  };
  // out = scale (turned − along x)
  R scale[kHeads];
  R along[kHeads] = {};
  if constexpr (kNorm) {
    R squares[kHeads] = {};
    for (int64_t i = lane * kWidth; i < half; i += group * kWidth) {
      load(i);
#pragma unroll
      for (int n = 0; n < kHeads * kWidth; ++n) {
        const int j = n / kWidth;
        const int k = n % kWidth;
        const auto& before = kBackward ? normed[j] : x[j];
        const R u = to_compute(before[0][k]);
        const R v = to_compute(before[1][k]);
        squares[j] += u * u + v * v;
        R g[2];
        turn(x[j], k, g);
        if (kBackward) along[j] += u * g[0] + v * g[1];
      }
    }
    for (int step = group / 2; step > 0; step /= 2)
#pragma unroll
      for (int j = 0; j < kHeads; ++j) {
        squares[j] += __shfl_xor_sync(~0u, squares[j], step);
        if (kBackward) along[j] += __shfl_xor_sync(~0u, along[j], step);
      }
#pragma unroll
    for (int j = 0; j < kHeads; ++j) {
      const R inverse = rsqrt(squares[j] + R(kUnitLengthEps));
      const bool query = first + j < args.heads;
      scale[j] = inverse * (query ? static_cast<const R*>(args.scale)[first + j] : R(1));
      if (kBackward && query && lane == 0 && wanted < tasks)
        static_cast<R*>(args.dscale)[position * args.heads + first + j] = along[j] * inverse;
      along[j] = along[j] * inverse * inverse;
    }
  }
  if (wanted >= tasks) return;
  for (int64_t i = lane * kWidth; i < half; i += group * kWidth) {
    if (!kNorm || half > group * kWidth) load(i);
#pragma unroll
    for (int j = 0; j < kHeads; ++j) {
      if (first + j >= all) break;
      // by vectors, or the compiler stores the numbers of the second half one by one
      Packed* to =
          reinterpret_cast<Packed*>(kBackward ? row(args.qk, first + j) : alone(first + j));
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        R out[2];
        turn(x[j], k, out);
        for (int h = 0; h < 2; ++h) {
          if constexpr (kBackward && kNorm) out[h] -= along[j] * to_compute(normed[j][h][k]);
          x[j][h][k] = from_compute<T>(kNorm ? out[h] * scale[j] : out[h]);
        }
      }
      for (int h = 0; h < 2; ++h) to[(h * half + i) / kWidth] = x[j][h];
    }
  }
}

}  // namespace

void rotary_qk(const RotaryQk& args, Stream stream) {
  const int64_t half = args.head_dim / 2;
  const int64_t element = with_type(args.dtype, [](auto x) { return sizeof x; });
  const bool aligned = rows_aligned({args.qk, args.q, args.k, args.normed}, element) &&
                       is_aligned(args.cos, 16) && is_aligned(args.sin, 16);
  with_vectors(args.dtype, half, aligned, [&]<class T>(T, auto width) {
    int group = 1;
    while (group < half / width() && group < 32) group *= 2;
    with_constant<false, true>(args.backward, [&](auto backward) {
      with_constant<false, true>(args.scale != nullptr, [&](auto norm) {
        const int64_t tasks =
            args.batch * args.time * ceil_div(args.heads + args.kv_heads, kHeadsPerThread<norm()>);
        launch_pdl(rotary_kernel<T, width(), backward(), norm()>,
                   unsigned(ceil_div(tasks, kThreads / group)), kThreads, 0, stream, args, tasks,
                   group);
      });
    });
  });
}

}  // namespace assay::ops::cuda
