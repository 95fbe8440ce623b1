#pragma once
// Code shared by the kernels over chunks: data prepared for each chunk, a pass over them, and tiles
// of mma.m16n8k16 (bf16 operands, fp32 sums) in shared memory. Derivation: README.md, "On CUDA".
#include "ops/cuda/fragment.cuh"
#include "ops/cuda/launch.cuh"
#include "ops/recurrence/matrix_recurrence/kernel.h"

namespace assay::ops::cuda::chunks {

constexpr int kSteps = kChunkSteps;  // a chunk is one operand of the tensor cores
constexpr int kSquare = kSteps + 8;  // row stride with which ldmatrix meets every bank once
constexpr int kMaxColumns = 64;      // columns of the state that a block holds
constexpr int kColumnStride = kMaxColumns + 8;

// Chunks whose decays are one number per step and head, or none.
constexpr int kScalarSteps = kScalarChunkSteps;
constexpr int kScalarSquare = kScalarSteps + 8;
// log₂ of a decay that is 0: two to this power is 0 in fp32, and no difference is NaN
constexpr float kLogDecayFloor = -160;

// Gates of the steps of a chunk: log₂ of the decays up to each, itself included; factors of k vᵀ.
struct alignas(16) ScalarGates {
  float decays[kScalarSteps];
  float weights[kScalarSteps];
};

// A tile in shared memory that only some kernels have.
template <bool kPresent, int kSize>
using Tile = bf16[kPresent ? kSize : 8];

// Whether a rule has a part of low rank, and whether it writes k vᵀ.
template <Rule kRule>
constexpr bool kLow = kRule != Rule::gla;
template <Rule kRule>
constexpr bool kWrites = kRule != Rule::delta;

// f(Size) for the key dimensions that the kernels serve.
template <int K>
using Size = std::integral_constant<int, K>;
template <class F>
void with_key_dim(int64_t K, F&& f) {
  with_constant<64, 96, 128, 256>(K, f);
}
// f(Case, Size) for every key_size(): pairs have two key dimensions, bonuses one. Rule::delta has
// kernels of its own but for the pass.
template <Rule kRule_, bool kBonus_>
struct Case {
  static constexpr Rule kRule = kRule_;
  static constexpr bool kBonus = kBonus_;
};
template <class F>
void with_case(const ChunkedForward& args, F&& f) {
  if (args.rule == Rule::dplr)
    with_constant<64, 128>(args.key_dim, [&](auto size) { f(Case<Rule::dplr, false>{}, size); });
  else if (args.u) f(Case<Rule::gla, true>{}, Size<64>{});
  else with_key_dim(args.key_dim, [&](auto size) { f(Case<Rule::gla, false>{}, size); });
}
// As with_case, for Rule::delta too.
template <class F>
void with_rule(const ChunkedForward& args, F&& f) {
  if (args.rule != Rule::delta) with_case(args, f);
  else with_key_dim(args.key_dim, [&](auto size) { f(Case<Rule::delta, false>{}, size); });
}

// Inputs of the passes for a chunk of 16 steps of one head, as they are in shared memory; names as
// in README.md. Each pass reads one contiguous part.
template <Rule kRule, int kK>
struct alignas(16) ChunkTiles {
  static constexpr int kRow = kK + 8;
  bf16 A[kSteps * kSquare];
  Tile<kWrites<kRule>, kSteps * kRow> K;
  Tile<kLow<kRule>, kSteps * kRow> R;
  Tile<kLow<kRule>, kSteps * kRow> B;
  Tile<kLow<kRule>, kSteps * kSquare> Y;
  float decay[kK];  // decay of the whole chunk
  bf16 P[kSteps * kRow];
};

// The data prepared for the chunks of every head, (b, n, h), n the chunk of a sequence. Fields that
// the rule does not have are null. Scalar decays have only `gates` and `before`.
struct Prepared {
  void* tiles;  // ChunkTiles
  // [16, 16]
  bf16* T;
  bf16* G;
  ScalarGates* gates;
  // [V, K], the state before the chunk, transposed, of 16 steps in the order of States; [16, V]
  bf16* before;
  bf16* W;

  Prepared(const ChunkedForward& args, bool keeps, WorkspaceArena& arena) {
    const bool scalar = is_scalar(args);
    const bool low = args.rule != Rule::gla;
    const int64_t count = chunk_count(args) * args.heads;
    const int64_t square = kSteps * kSteps;
    int64_t bytes = 0;
    if (!scalar)
      with_rule(args, [&](auto which, auto size) {
        bytes = sizeof(ChunkTiles<which.kRule, size.value>);
      });
    auto take = [&](bool present, int64_t size) {
      return present ? arena.take<bf16>(count * size) : nullptr;
    };
    tiles = arena.take<char>(count * bytes);
    T = take(low, square);
    G = take(low, square);
    gates = arena.take<ScalarGates>(scalar ? count : 0);
    before = take(keeps, args.value_dim * args.key_dim);
    W = take(low && keeps, kSteps * args.value_dim);
  }
  template <Rule kRule, int kK>
  __device__ ChunkTiles<kRule, kK>& at(int64_t index) const {
    return static_cast<ChunkTiles<kRule, kK>*>(tiles)[index];
  }
};

// x of step t and head h. Rows past the end of the sequence are not there. The division is one of
// 32 bits, because one of 64 bits is a call.
template <class T>
__device__ inline const T* row(const HeadView& x, int64_t heads, int64_t b, int64_t t, int64_t h,
                               int64_t width) {
  const unsigned head = unsigned(h) / (unsigned(heads) / unsigned(x.heads));
  return static_cast<const T*>(x.rows.data) + b * x.rows.batch_stride + t * x.rows.time_stride +
         head * width;
}

constexpr int kAll = 1 << 30;
// rows × width numbers, `width` a multiple of 8, by all threads of the block; zeros where a row or
// column is not present.
__device__ inline void copy_tile(bf16* to, int stride, const bf16* from, int64_t from_stride,
                                 int rows, int width, int present_rows = kAll,
                                 int present_columns = kAll) {
  for (int i = threadIdx.x; i < rows * (width / 8); i += blockDim.x) {
    const int y = i / (width / 8);
    const int x = i % (width / 8) * 8;
    const bool present = y < present_rows && (present_columns == kAll || x < present_columns);
    cp_async_16(to + y * stride + x, present ? from + y * from_stride + x : from, present);
  }
}

// c [16, 8 N] += a [16, 16] B from a tile at (row, vector), which stores B as load_b_nk() and
// load_b_kn() say.
template <int N, class Operand>
__device__ void multiply_nk(float (&c)[N][4], const uint32_t (&a)[4], Operand tile, int row = 0,
                            int vector = 0) {
#pragma unroll
  for (int n = 0; n < N; n += 2) {
    uint32_t b[4];
    load_b_nk(b, tile, row + n * 8, vector);
    mma_m16n16k16(c[n], c[n + 1], a, b);
  }
}
template <int N, class Operand>
__device__ void multiply_kn(float (&c)[N][4], const uint32_t (&a)[4], Operand tile, int row = 0,
                            int vector = 0) {
#pragma unroll
  for (int n = 0; n < N; n += 2) {
    uint32_t b[4];
    load_b_kn(b, tile, row, vector + n);
    mma_m16n16k16(c[n], c[n + 1], a, b);
  }
}
// A C fragment to a tile, from `to` on.
__device__ inline void store_fragment(bf16* to, int stride, const float (&c)[4]) {
  to += threadIdx.x % 32 / 4 * stride + threadIdx.x % 4 * 2;
  store_bf16x2(to, c[0], c[1]);
  store_bf16x2(to + 8 * stride, c[2], c[3]);
}
// `count` numbers, a multiple of 4, by all threads of the block.
__device__ inline void copy_floats(float* to, const float* from, int count) {
  for (int n = threadIdx.x * 4; n < count; n += blockDim.x * 4) cp_async_16(to + n, from + n);
}

// body(stage, i) for i from `begin` to `end`, each by all threads of the block, with what
// fetch(stage, i) copies asynchronously. The copies of kStages − 1 later ones are under way.
template <int kStages, class Stage, class Fetch, class Body>
__device__ void with_stages(Stage (&stages)[kStages], int begin, int end, Fetch&& fetch,
                            Body&& body) {
  auto start = [&](int i) {
    if (i < end) fetch(stages[(i - begin) % kStages], i);
    cp_async_commit_group();
  };
  constexpr int kAhead = kStages > 1 ? kStages - 1 : 1;
  for (int i = 0; i < kAhead; ++i) start(begin + i);
  for (int i = begin; i < end; ++i) {
    cp_async_wait_group<kAhead - 1>();
    __syncthreads();  // the stage has arrived, and the one before it is no longer read
    if (kStages > 1) start(i + kAhead);
    body(stages[(i - begin) % kStages], i);
    if (kStages > 1) continue;
    __syncthreads();
    start(i + 1);
  }
}

// How the sequences are cut into segments, which blocks compute at the same time.
struct Segments {
  // segments of a sequence; chunks of each but the last; columns of a block; blocks for all of V
  int count;
  int chunks;
  int columns;
  int parts;
  explicit Segments(const ChunkedForward& args);
};
// One pass over the chunks in order of time: out, final_state, `before`, W. Backwards: dv,
// dinitial_state, the state's gradient after each chunk and dW, from dout and dfinal_state.
struct Pass {
  // `alone`: every segment from zeros, to its own `last`
  bool backwards;
  bool alone;
  // q, k, v; backwards k, q, dout
  HeadView reader;
  HeadView writer;
  HeadView values;
  Prepared tiles;
  Segments segments;
  const float* starts;  // in  [B, H, segments, K, V] the state before each segment; null: zeros
  bf16* out;            // out [B, T, H, V]; null: without outputs
  // out [count, V, K], [count, 16, V]; null: not kept
  bf16* states;
  bf16* W;
  float* last;  // out [B, H, K, V], alone [B, H, segments, K, V]; null: not kept
  // out, alone: what a segment makes of the state before it, [B, H, segments, K, K], or of
  // diagonal decays [.., K], of scalar ones [..]
  float* turn;
  float* total;
};

void prepare(const ChunkedForward& args, const Prepared& tiles, Stream stream);
void pass(const ChunkedForward& args, const Pass& task, Stream stream);
// From what the backward pass read and kept.
void gradients(const ChunkedBackward& bwd, const Pass& task, Stream stream);
// The three functions above for scalar decays.
void scalar_prepare(const ChunkedForward& args, const Prepared& tiles, Stream stream);
void scalar_pass(const ChunkedForward& args, const Pass& task, Stream stream);
void scalar_gradients(const ChunkedBackward& bwd, const Pass& task, Stream stream);
// prepare and gradients for Rule::delta, with one decay per step and head, or none.
void delta_prepare(const ChunkedForward& args, const Prepared& tiles, Stream stream);
void delta_gradients(const ChunkedBackward& bwd, const Pass& task, Stream stream);
int64_t common_sharers(const ChunkedForward& args);  // heads that share both q and k
int64_t sharers(const ChunkedForward& args);         // those whose gradients of q and k are one sum
// Blocks' shares of 64 columns of one head's state that an SM holds at the same time.
int units_of_sm(const ChunkedForward& args);

}  // namespace assay::ops::cuda::chunks
