#pragma once
// What the kernels of this folder compute with: tiles of bf16 rows in shared memory, swizzled so that the eight rows an
// ldmatrix reads lie in different banks, and the products of a warp (mma.m16n8k16, bf16 operands, fp32 sums).
//   A 16 × 16, row-major      lane's registers: rows lane/4 and +8, columns 2·(lane%4) and +8
//   C 16 × 8                  c[0..1]: row lane/4, columns 2·(lane%4) and +1; c[2..3]: row + 8
#include <cstdint>
#include <initializer_list>

#include "ops/cuda.cuh"
#include "ops/top1_chunk/kernel.h"

namespace assay::ops::cuda::top1 {

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// exp2 of one instruction: 2 units in the last place, 0 below the normal numbers.
__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline uint32_t pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}
__device__ inline float2 unpack(uint32_t pair) { return __bfloat1622float2(reinterpret_cast<__nv_bfloat162&>(pair)); }

// Rows of W numbers; vectors of 8 are permuted within a row.
template <int W>
struct Tile {
  static_assert(W % 32 == 0);
  static constexpr int kWidth = W;
  bf16* data;
  __device__ bf16* at(int row, int vector) const {
    const int turn = W % 64 == 0 ? row & 7 : (row >> 1) & 3;
    return data + row * W + ((vector ^ turn) << 3);
  }
  __device__ uint32_t address(int row, int vector) const { return __cvta_generic_to_shared(at(row, vector)); }
};

__device__ inline void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
__device__ inline void load_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// A operand: 16 rows × 16 columns (two vectors) of the tile, or the transpose of 16 columns × 16 rows.
template <class Layout>
__device__ void load_a(uint32_t (&a)[4], Layout tile, int row, int vector) {
  const int lane = threadIdx.x % 32;
  load_matrices(a, tile.address(row + lane % 16, vector + lane / 16));
}
template <int W>
__device__ void load_a_transposed(uint32_t (&a)[4], Tile<W> tile, int row, int vector) {
  const int lane = threadIdx.x % 32;
  load_transposed(a, tile.address(row + lane % 8 + lane / 16 * 8, vector + lane / 8 % 2));
}
// B operands of two products side by side, 16 × 8 each: b[0..1] and b[2..3]. The tile holds B's columns as rows, or
// (transposed) B itself.
template <class Layout>
__device__ void load_b(uint32_t (&b)[4], Layout tile, int row, int vector) {
  const int lane = threadIdx.x % 32;
  load_matrices(b, tile.address(row + lane % 8 + lane / 16 * 8, vector + lane / 8 % 2));
}
template <int W>
__device__ void load_b_transposed(uint32_t (&b)[4], Tile<W> tile, int row, int vector) {
  const int lane = threadIdx.x % 32;
  load_transposed(b, tile.address(row + lane % 16, vector + lane / 16));
}

__device__ inline void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Two products side by side.
__device__ inline void multiply_add(float (&left)[4], float (&right)[4], const uint32_t (&a)[4],
                                    const uint32_t (&b)[4]) {
  multiply_add(left, a, b[0], b[1]), multiply_add(right, a, b[2], b[3]);
}

// 16 bytes into shared memory behind the thread's back; zeros unless `wanted`.
__device__ inline void copy_async(bf16* to, const bf16* from, bool wanted) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(uint32_t(__cvta_generic_to_shared(to))), "l"(from),
               "r"(wanted ? 16 : 0));
}
__device__ inline void copy_async(float* to, const float* from, bool wanted) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(uint32_t(__cvta_generic_to_shared(to))), "l"(from),
               "r"(wanted ? 4 : 0));
}
// On its way to the L2 cache.
__device__ inline void prefetch(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;"); }
template <int kPending>
__device__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending));
}

template <int D>
__device__ bf16* row_of(const View& x, int64_t b, int64_t t, int64_t h) {
  return static_cast<bf16*>(x.data) + b * x.batch_stride + t * x.time_stride + h * D;
}

// Rows [first, first + count) of one head to a tile's first rows, zeros up to `padded`. By all threads of the block.
template <class Layout>
__device__ void copy_rows(Layout to, const View& x, int64_t b, int64_t first, int64_t h, int count, int padded) {
  constexpr int D = Layout::kWidth;
  for (int i = threadIdx.x; i < padded * (D / 8); i += blockDim.x) {
    const int row = i / (D / 8), vector = i % (D / 8);
    copy_async(to.at(row, vector), row_of<D>(x, b, first + min(row, count - 1), h) + vector * 8, row < count);
  }
}

// Lane q of four holds word q of each of four vectors; then vector q as a whole. Its own inverse.
__device__ inline void transpose_quad(uint32_t (&w)[4]) {
  const int q = threadIdx.x % 4;
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const bool high = q & step;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const uint32_t got = __shfl_xor_sync(~0u, high ? w[i] : w[i + step], step);
      w[i] = high ? got : w[i];
      w[i + step] = high ? w[i + step] : got;
    }
  }
}

// One row of C operands, 32 columns: to and from memory 16 bytes a lane. `half`: row lane/4 (0) or + 8 (1).
__device__ inline void store_row32(bf16* row, const float (&c)[4][4], int half, float factor) {
  uint32_t w[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) w[i] = pack(c[i][2 * half] * factor, c[i][2 * half + 1] * factor);
  transpose_quad(w);
  if (row) *reinterpret_cast<uint4*>(row + threadIdx.x % 4 * 8) = make_uint4(w[0], w[1], w[2], w[3]);
}
// The lane's part of such a row, zeros of a null one; and c = c · factor + row · row_factor with it.
__device__ inline uint4 load_row32(const bf16* row) {
  return row ? *reinterpret_cast<const uint4*>(row + threadIdx.x % 4 * 8) : make_uint4(0, 0, 0, 0);
}
__device__ inline void add_row32(float (&c)[4][4], const uint4& row, int half, float factor, float row_factor) {
  uint32_t w[4] = {row.x, row.y, row.z, row.w};
  transpose_quad(w);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 x = unpack(w[i]);
    c[i][2 * half] = c[i][2 * half] * factor + x.x * row_factor;
    c[i][2 * half + 1] = c[i][2 * half + 1] * factor + x.y * row_factor;
  }
}

// A choice that counts: an earlier chunk than the query's own; else −1.
__device__ inline int valid_choice(int64_t choice, int own) { return choice >= 0 && choice < own ? int(choice) : -1; }

// Of a call: null or why it is not taken; the error that says so; what its Scratch(call, arena) takes of a workspace.
inline const char* why_unaligned(std::initializer_list<View> all) {
  for (const View& x : all)
    if (reinterpret_cast<uintptr_t>(x.data) % 16 || x.batch_stride % 8 || x.time_stride % 8)
      return "takes rows that begin at multiples of 16 bytes";
  return nullptr;
}
inline void check(const char* operation, const char* why_not) {
  if (why_not) throw Unsupported(std::string(operation) + " on CUDA " + why_not);
}
template <class Scratch, class Call>
size_t scratch_bytes(const Call& call) {
  Arena arena;
  Scratch(call, arena);
  return arena.used;
}

// f(std::integral_constant) for the head_dim that has kernels.
template <class F>
void with_head_dim(int64_t head_dim, F&& f) {
  if (head_dim == 64) f(std::integral_constant<int, 64>{});
  else if (head_dim == 96) f(std::integral_constant<int, 96>{});
  else f(std::integral_constant<int, 128>{});
}

}  // namespace assay::ops::cuda::top1
