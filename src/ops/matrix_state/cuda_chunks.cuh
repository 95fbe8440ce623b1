#pragma once
// What the three passes over chunks share: where their products lie, and fragments of mma.m16n8k16 (bf16 operands, fp32
// sums) from and to tiles in shared memory. Derivation: README.md, "On CUDA".
#include "ops/cuda.cuh"
#include "ops/matrix_state/kernel.h"

namespace assay::ops::cuda::chunks {

constexpr int kSteps = kChunkSteps;  // a chunk is one operand of the tensor cores

// What a chunk of a head is once it is prepared; bf16 but for `decay`. Names as in README.md.
struct Prepared {
  bf16 *P, *R, *K, *B;  // [16, K]  rows that read the state, columns that are written to it; R, B, or K absent: null
  bf16 *A, *Y, *T, *G;  // [16, 16]
  float* decay;         // [K]      of the whole chunk
  bf16 *before, *W;     // [V, K]   the state before the chunk, transposed; [16, V]
};

// The tiles of every chunk (b, n, h), n the chunk of a sequence. The memory is `Forward::chunks`.
struct Layout {
  int64_t count, K, V;
  Prepared base{};
  Layout(const ChunkedForward& p, void* memory)
      : count(p.batch * ceil_div(p.time, kSteps) * p.heads), K(p.key_dim), V(p.value_dim) {
    Arena arena{static_cast<char*>(memory)};
    const bool low = p.rule != Rule::linear, writes = p.rule != Rule::delta;
    auto vectors = [&](bool present) { return present ? arena.take<bf16>(count * kSteps * K) : nullptr; };
    auto squares = [&](bool present) { return present ? arena.take<bf16>(count * kSteps * kSteps) : nullptr; };
    base.P = vectors(true), base.R = vectors(low), base.K = vectors(writes), base.B = vectors(low);
    base.A = squares(true), base.Y = squares(low), base.T = squares(low), base.G = squares(low);
    base.decay = arena.take<float>(count * K);
    base.before = p.keeps ? arena.take<bf16>(count * V * K) : nullptr;
    base.W = low && p.keeps ? arena.take<bf16>(count * kSteps * V) : nullptr;
    bytes = arena.used;
  }
  size_t bytes;
};

// x of step t and head h. Rows behind the end of the sequence are not there.
template <class T>
__device__ inline const T* row(const Heads& x, int64_t heads, int64_t b, int64_t t, int64_t h, int64_t width) {
  return static_cast<const T*>(x.rows.data) + b * x.rows.batch_stride + t * x.rows.time_stride +
         h / (heads / x.heads) * width;
}

__device__ inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ inline uint32_t pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}
// Two neighbouring fragments of sums are one operand A.
__device__ inline void pack(uint32_t (&a)[4], const float (&left)[4], const float (&right)[4]) {
  a[0] = pack(left[0], left[1]), a[1] = pack(left[2], left[3]);
  a[2] = pack(right[0], right[1]), a[3] = pack(right[2], right[3]);
}

template <bool kTransposed>
__device__ inline void load(uint32_t (&r)[4], const bf16* at) {
  const uint32_t address = __cvta_generic_to_shared(at);
  if constexpr (kTransposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}
// A 16 × 16 piece at `tile` [16, stride] as an operand. A: rows × summed, or transposed from summed × rows. B: for two
// fragments of columns, r[0..1] and r[2..3]; from summed × columns, or transposed from columns × summed.
__device__ inline void load_a(uint32_t (&r)[4], const bf16* tile, int stride) {
  const int lane = threadIdx.x % 32;
  load<false>(r, tile + lane % 16 * stride + lane / 16 * 8);
}
__device__ inline void load_a_transposed(uint32_t (&r)[4], const bf16* tile, int stride) {
  const int lane = threadIdx.x % 32;
  load<true>(r, tile + (lane % 8 + lane / 16 * 8) * stride + lane / 8 % 2 * 8);
}
__device__ inline void load_b(uint32_t (&r)[4], const bf16* tile, int stride) {
  const int lane = threadIdx.x % 32;
  load<true>(r, tile + lane % 16 * stride + lane / 16 * 8);
}
__device__ inline void load_b_transposed(uint32_t (&r)[4], const bf16* tile, int stride) {
  const int lane = threadIdx.x % 32;
  load<false>(r, tile + (lane % 8 + lane / 16 * 8) * stride + lane / 8 % 2 * 8);
}

// 16 bytes to shared memory, zeros where not `present`.
__device__ inline void copy(void* to, const void* from, bool present = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(uint32_t(__cvta_generic_to_shared(to))), "l"(from),
               "r"(present ? 16 : 0));
}
// rows × width numbers, `width` a multiple of 8, by all threads of the block.
__device__ inline void copy_tile(bf16* to, int stride, const bf16* from, int64_t from_stride, int rows, int width,
                                 int present = 1 << 30) {
  for (int i = threadIdx.x; i < rows * (width / 8); i += blockDim.x) {
    const int y = i / (width / 8), x = i % (width / 8) * 8;
    copy(to + y * stride + x, y < present ? from + y * from_stride + x : from, y < present);
  }
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;"); }
template <int kPending>
__device__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// v[i] summed over the lanes of a warp, into lane i, in an order that is always the same.
template <int kHalf = 16>
__device__ inline float sum_over_lanes(float (&v)[2 * kHalf]) {
  const bool upper = threadIdx.x & kHalf;
  float sums[kHalf];
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float low = v[i], high = v[i + kHalf];
    sums[i] = (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, kHalf);
  }
  if constexpr (kHalf == 1) return sums[0];
  else return sum_over_lanes<kHalf / 2>(sums);
}

// What a rule has: a part of low rank, and k vᵀ.
template <Rule kRule>
constexpr bool kLow = kRule != Rule::linear;
template <Rule kRule>
constexpr bool kWrites = kRule != Rule::delta;

void prepare(const ChunkedForward& p, const Prepared& tiles, cudaStream_t stream);
// One pass over the chunks in order of time: out, final_state, `before`, W. Backwards: dv, dinitial_state, the state's
// gradient behind each chunk and dW, from dout and dfinal_state. Few long sequences are cut into segments.
struct Pass {
  bool backwards;
  Prepared tiles;
  Heads values;        // in  v, or dout
  const float* first;  // in  [B, H, K, V] the state to start from, or null for zeros
  bf16* out;           // out [B, T, H, V]
  float* last;         // out [B, H, K, V]
  bf16 *states, *W;    // out [count, V, K], [count, 16, V]; null: not kept
};
size_t pass_bytes(const ChunkedForward& p);  // of its workspace
void pass(const ChunkedForward& p, const Pass& pass, void* workspace, cudaStream_t stream);
void gradients(const ChunkedBackward& q, const Prepared& tiles, const bf16* dstates, const bf16* dW,
               cudaStream_t stream);

// f(std::integral_constant<int, K>) for the key dimensions that the kernels serve.
template <int K>
struct Size {
  static constexpr int value = K;
};
template <class F>
void with_key_dim(int64_t K, F&& f) {
  if (K == 64) f(Size<64>{});
  else if (K == 96) f(Size<96>{});
  else if (K == 128) f(Size<128>{});
  else f(Size<256>{});
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
  else if (p.rule == Rule::pair) f(Case<Rule::pair, false>{}, Size<64>{});
  else if (p.u) f(Case<Rule::linear, true>{}, Size<64>{});
  else all(Case<Rule::linear, false>{});
}

}  // namespace assay::ops::cuda::chunks
