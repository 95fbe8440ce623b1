#pragma once
// Code shared by the passes over chunks. A block follows up to 64 columns of a head's state
// through a segment. A warp has 16 of them in registers, transposed, as the sums of one product
// and the operand of the next.
#include "ops/recurrence/matrix_recurrence/cuda_chunks.cuh"

namespace assay::ops::cuda::chunks {

struct Walk {
  const ChunkedForward& args;
  const Pass& task;
  // steps of a chunk; chunks of the sequence
  const int size;
  const int chunks;
  // the warp's first column
  const int own = threadIdx.x % 128 / 32 * 16;
  const int lane = threadIdx.x % 32;
  unsigned of_segment;
  unsigned of_head;
  unsigned segment;
  unsigned head;
  unsigned batch;
  int first;     // column of the block
  bool is_turn;  // follows the unit matrix, not the values

  // block: its place among all parts of all heads' segments.
  __device__ Walk(const ChunkedForward& parameters, const Pass& pass, int steps, bool turns,
                  unsigned block = blockIdx.x)
      : args(parameters), task(pass), size(steps), chunks(int(ceil_div(args.time, steps))) {
    const Segments& s = task.segments;
    const unsigned heads = args.heads;
    const unsigned parts = s.parts + (turns ? int(args.key_dim) / s.columns : 0);
    const int part = block % parts;
    of_segment = block / parts;
    of_head = of_segment / s.count;
    segment = of_segment % s.count;
    head = of_head % heads;
    batch = of_head / heads;
    is_turn = turns && part >= s.parts;
    first = (is_turn ? part - s.parts : part) * s.columns;
  }

  __device__ int place(int i) const { return task.backwards ? chunks - 1 - i : i; }
  __device__ int64_t index(int i) const {
    return (batch * int64_t{chunks} + place(i)) * args.heads + head;
  }
  __device__ int64_t start(int i) const { return int64_t{place(i)} * size; }
  __device__ int steps(int i) const { return int(min(int64_t{size}, args.time - start(i))); }
  __device__ int begin() const { return segment * task.segments.chunks; }
  __device__ int end() const { return min(chunks, begin() + task.segments.chunks); }

  // f(the state's numbers of this thread, their place in [K, width], whether it is the diagonal).
  template <int N, class F>
  __device__ void each(float (&state)[N][4], int64_t width, F&& f) const {
    each_element(state, [&](float& x, int k, int e) {
      const int n = k * 8 + lane % 4 * 2 + e % 2;
      const int v = first + own + lane / 4 + e / 2 * 8;
      f(x, n * width + v, n == v);
    });
  }
  template <int N>
  __device__ void load(float (&state)[N][4], const float* starts) const {
    const float* from = starts ? starts + of_segment * (N * 8 * args.value_dim) : nullptr;
    each(state, args.value_dim,
         [&](float& x, int64_t at, bool unit) { x = from ? from[at] : is_turn && unit; });
  }
  template <int N>
  __device__ void store(float (&state)[N][4]) const {
    if (!task.last || (!task.alone && int(segment) + 1 < task.segments.count)) return;
    const int64_t width = is_turn ? N * 8 : args.value_dim;
    float* to =
        (is_turn ? task.turn : task.last) + (task.alone ? of_segment : of_head) * (N * 8 * width);
    each(state, width, [&](float x, int64_t at, bool) { to[at] = x; });
  }
  // [16 columns, 8 N steps] to the warp's columns of rows `stride` apart, of which `present`
  // are there. Lanes of a quad have 32 neighbouring bytes of a row.
  template <int N>
  __device__ void store_rows(bf16* to, int64_t stride, int present, const float (&c)[N][4]) const {
    const bool odd = lane % 2;
    to += first + own + odd * 8 + (lane & 2) * 2;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      uint32_t low = pack_bf16x2(c[n][0], c[n][1]);
      uint32_t high = pack_bf16x2(c[n][2], c[n][3]);
      movmatrix_trans(low);
      movmatrix_trans(high);
      const uint32_t other = __shfl_xor_sync(~0u, odd ? low : high, 1);
      const int t = n * 8 + lane / 4;
      if (t < present)
        *reinterpret_cast<uint2*>(to + t * stride) = odd ? uint2{other, high} : uint2{low, other};
    }
  }
  template <int N>
  __device__ void store_out(int i, const float (&c)[N][4]) const {
    store_rows(task.out + ((batch * args.time + start(i)) * args.heads + head) * args.value_dim,
               args.heads * args.value_dim, steps(i), c);
  }
};

// c [16 columns, 8 N steps] += state times the rows of a tile.
template <int N, int kSlices>
__device__ void read_state(float (&c)[N][4], const uint32_t (&state)[kSlices][4],
                           const bf16* tile) {
#pragma unroll
  for (int k = 0; k < kSlices; ++k)
    multiply_nk(c, state[k], PaddedTile<kSlices * 16 + 8>{tile}, 0, k * 2);
}
// Multiplies the columns of c by `factors`.
template <int N>
__device__ void scale_columns(float (&c)[N][4], const float* factors) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const float2 x = *reinterpret_cast<const float2*>(factors + n * 8 + threadIdx.x % 4 * 2);
    c[n][0] *= x.x;
    c[n][1] *= x.y;
    c[n][2] *= x.x;
    c[n][3] *= x.y;
  }
}

template <class Chunks>
__global__ void __launch_bounds__(kMaxColumns * 2, Chunks::kBlocks)
    pass_kernel(ChunkedForward args, Pass task) {
  extern __shared__ __align__(16) char memory[];
  Chunks{{args, task, Chunks::kChunk, Chunks::kTurns}}.run(
      *reinterpret_cast<typename Chunks::Smem*>(memory));
}
template <class Chunks>
void launch_pass(const ChunkedForward& args, const Pass& task, Stream stream) {
  static_assert(sizeof(typename Chunks::Smem) <= kPortableSharedBytes);
  const Segments& s = task.segments;
  const int64_t parts = s.parts + (Chunks::kTurns ? args.key_dim / s.columns : 0);
  launch_kernel(pass_kernel<Chunks>, unsigned(args.batch * args.heads * s.count * parts),
                unsigned(s.columns * 2), sizeof(typename Chunks::Smem), stream, args, task);
}

}  // namespace assay::ops::cuda::chunks
