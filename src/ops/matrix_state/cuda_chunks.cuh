#pragma once
// What the three passes over chunks share: where their products lie, and fragments of mma.m16n8k16
// (bf16 operands, fp32 sums) from and to tiles in shared memory. Derivation: README.md, "On CUDA".
#include "ops/cuda/launch.cuh"
#include "ops/cuda/ptx.cuh"
#include "ops/matrix_state/kernel.h"

namespace assay::ops::cuda::chunks {

constexpr int kSteps = kChunkSteps;  // a chunk is one operand of the tensor cores
constexpr int kSquare = kSteps + 8;  // row stride with which ldmatrix meets every bank once

// What a chunk of a head is once it is prepared; bf16 but for `decay`. Names as in README.md.
struct Prepared {
  // [16, K]  rows that read the state, columns that are written to it; R, B, or K absent: null
  bf16 *P, *R, *K, *B;
  bf16 *A, *Y, *T, *G;  // [16, 16]
  float* decay;         // [K]      of the whole chunk
  bf16 *before, *W;     // [V, K]   the state before the chunk, transposed; [16, V]

  Prepared() = default;
  // The tiles of every chunk (b, n, h), n the chunk of a sequence. The memory is `Forward::chunks`.
  Prepared(const ChunkedForward& p, WorkspaceArena& arena) {
    const int64_t count = p.batch * ceil_div(p.time, kSteps) * p.heads;
    const bool low = p.rule != Rule::gla, writes = p.rule != Rule::delta;
    auto vectors = [&](bool present) {
      return present ? arena.take<bf16>(count * kSteps * p.key_dim) : nullptr;
    };
    auto squares = [&](bool present) {
      return present ? arena.take<bf16>(count * kSteps * kSteps) : nullptr;
    };
    P = vectors(true);
    R = vectors(low);
    K = vectors(writes);
    B = vectors(low);
    A = squares(true);
    Y = squares(low);
    T = squares(low);
    G = squares(low);
    decay = arena.take<float>(count * p.key_dim);
    before = p.keeps ? arena.take<bf16>(count * p.value_dim * p.key_dim) : nullptr;
    W = low && p.keeps ? arena.take<bf16>(count * kSteps * p.value_dim) : nullptr;
  }
};

// x of step t and head h. Rows past the end of the sequence are not there.
template <class T>
__device__ inline const T* row(const HeadView& x, int64_t heads, int64_t b, int64_t t, int64_t h,
                               int64_t width) {
  return static_cast<const T*>(x.rows.data) + b * x.rows.batch_stride + t * x.rows.time_stride +
         h / (heads / x.heads) * width;
}

// rows × width numbers, `width` a multiple of 8, by all threads of the block.
__device__ inline void copy_tile(bf16* to, int stride, const bf16* from, int64_t from_stride,
                                 int rows, int width, int present = 1 << 30) {
  for (int i = threadIdx.x; i < rows * (width / 8); i += blockDim.x) {
    const int y = i / (width / 8), x = i % (width / 8) * 8;
    cp_async_16(to + y * stride + x, y < present ? from + y * from_stride + x : from, y < present);
  }
}
constexpr int kMaxColumns = 64;  // of the state, that a block holds
// How the sequences are cut into segments, which blocks compute at the same time.
struct Segments {
  // of a sequence; of a segment but the last; of a block; blocks for all of V
  int64_t count, chunks, columns, parts;
  // For chunks of `steps` steps. The columns of a block divide V and `width`.
  Segments(const ChunkedForward& p, int64_t steps, int64_t width);
};
// What a rule has: a part of low rank, and k vᵀ.
template <Rule kRule>
constexpr bool kLow = kRule != Rule::gla;
template <Rule kRule>
constexpr bool kWrites = kRule != Rule::delta;

void prepare(const ChunkedForward& p, const Prepared& tiles, Stream stream);
// One pass over the chunks in order of time: out, final_state, `before`, W. Backwards: dv,
// dinitial_state, the state's gradient after each chunk and dW, from dout and dfinal_state. Few
// long sequences are cut into segments.
struct Pass {
  bool backwards;
  Prepared tiles;
  HeadView values;     // in  v, or dout
  const float* first;  // in  [B, H, K, V] the state to start from, or null for zeros
  bf16* out;           // out [B, T, H, V]
  float* last;         // out [B, H, K, V]
  bf16 *states, *W;    // out [count, V, K], [count, 16, V]; null: not kept
};
size_t pass_bytes(const ChunkedForward& p);  // of its workspace
void pass(const ChunkedForward& p, const Pass& pass, void* workspace, Stream stream);
void gradients(const ChunkedBackward& bwd, const Prepared& tiles, const bf16* dstates,
               const bf16* dW, Stream stream);

// f(Size) for the key dimensions that the kernels serve.
template <int K>
using Size = std::integral_constant<int, K>;
template <class F>
void with_key_dim(int64_t K, F&& f) {
  with_constant<64, 96, 128, 256>(K, f);
}
// f(Case, Size) for every key_size(): pairs and bonuses have one key dimension.
template <Rule kRule_, bool kBonus_>
struct Case {
  static constexpr Rule kRule = kRule_;
  static constexpr bool kBonus = kBonus_;
};
template <class F>
void with_case(const ChunkedForward& p, F&& f) {
  auto all = [&](auto which) { with_key_dim(p.key_dim, [&](auto size) { f(which, size); }); };
  if (p.rule == Rule::delta) all(Case<Rule::delta, false>{});
  else if (p.rule == Rule::dplr) f(Case<Rule::dplr, false>{}, Size<64>{});
  else if (p.u) f(Case<Rule::gla, true>{}, Size<64>{});
  else all(Case<Rule::gla, false>{});
}

}  // namespace assay::ops::cuda::chunks
