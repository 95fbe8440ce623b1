#pragma once
// Fragments of mma.m16n8k16 and the tiles in shared memory that they come from.
//   A 16 × 16, row-major   4 registers of 2 bf16: rows lane / 4 and + 8, columns 2 (lane % 4), + 8
//   B 16 × 8               2 registers: column lane / 4, rows 2 (lane % 4) and + 8
//   C 16 × 8               c[0..1]: row lane / 4, columns 2 (lane % 4) and + 1; c[2..3]: row + 8
// A tile gives the address of a 16-byte vector (8 bf16) of a row. Both kinds of tile let
// ldmatrix read eight rows from different banks: SwizzledTile permutes the vectors of a row,
// PaddedTile pads rows.
#include "ops/cuda/ptx.cuh"

namespace assay::ops::cuda {

// The position of a vector within a row of kWidth bf16, which is a multiple of 32.
template <int kWidth>
__device__ constexpr int swizzle(int row, int vector) {
  static_assert(kWidth % 32 == 0);
  return vector ^ (kWidth % 64 == 0 ? row & 7 : (row >> 1) & 3);
}

// Rows of kWidth bf16.
template <int kWidth_>
struct SwizzledTile {
  static constexpr int kWidth = kWidth_;
  bf16* data;
  __device__ bf16* at(int row, int vector) const {
    return data + row * kWidth + (swizzle<kWidth>(row, vector) << 3);
  }
  __device__ uint32_t address(int row, int vector) const { return shared_address(at(row, vector)); }
};

// Rows that begin kStride bf16 apart.
template <int kStride>
struct PaddedTile {
  static_assert(kStride % 16 == 8, "an odd number of vectors per row avoids bank conflicts");
  const bf16* data;
  __device__ uint32_t address(int row, int vector) const {
    return shared_address(data + row * kStride + vector * 8);
  }
};

// Operands from a tile at (row, vector). The suffix says how the tile stores the operand: mk rows
// of A, km rows of its transpose, nk rows are columns of B, kn rows of B. load_b_* load two B
// operands, 16 columns: b[0..1] and b[2..3].
template <class Tile>
__device__ void load_a_mk(uint32_t (&a)[4], Tile tile, int row = 0, int vector = 0) {
  const int lane = threadIdx.x % 32;
  ldmatrix_x4(a, tile.address(row + lane % 16, vector + lane / 16));
}
template <class Tile>
__device__ void load_a_km(uint32_t (&a)[4], Tile tile, int row = 0, int vector = 0) {
  const int lane = threadIdx.x % 32;
  ldmatrix_x4_trans(a, tile.address(row + lane % 8 + lane / 16 * 8, vector + lane / 8 % 2));
}
template <class Tile>
__device__ void load_b_nk(uint32_t (&b)[4], Tile tile, int row = 0, int vector = 0) {
  const int lane = threadIdx.x % 32;
  ldmatrix_x4(b, tile.address(row + lane % 8 + lane / 16 * 8, vector + lane / 8 % 2));
}
template <class Tile>
__device__ void load_b_kn(uint32_t (&b)[4], Tile tile, int row = 0, int vector = 0) {
  const int lane = threadIdx.x % 32;
  ldmatrix_x4_trans(b, tile.address(row + lane % 16, vector + lane / 16));
}

// An A operand to 16 rows of a tile that stores rows of A.
template <class Tile>
__device__ void store_a_mk(Tile tile, int row, int vector, const uint32_t (&a)[4]) {
  const int lane = threadIdx.x % 32;
  stmatrix_x4(tile.address(row + lane % 16, vector + lane / 16), a);
}

// f(element e of fragment n, n, e).
template <int N, class F>
__device__ void each_element(float (&c)[N][4], F&& f) {
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) f(c[n][e], n, e);
}

// Two products with neighbouring columns.
__device__ inline void mma_m16n16k16(float (&left)[4], float (&right)[4], const uint32_t (&a)[4],
                                     const uint32_t (&b)[4]) {
  mma_m16n8k16(left, a, b[0], b[1]);
  mma_m16n8k16(right, a, b[2], b[3]);
}

// Two neighbouring C fragments as an A operand.
__device__ inline void pack_operand(uint32_t (&a)[4], const float (&left)[4],
                                    const float (&right)[4]) {
  a[0] = pack_bf16x2(left[0], left[1]);
  a[1] = pack_bf16x2(left[2], left[3]);
  a[2] = pack_bf16x2(right[0], right[1]);
  a[3] = pack_bf16x2(right[2], right[3]);
}
template <int N>
__device__ void pack_operand(uint32_t (&a)[N / 2][4], const float (&c)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; n += 2) pack_operand(a[n / 2], c[n], c[n + 1]);
}

// A warp's 16 rows of sums, N fragments, to a tile from (row, vector) on, as bf16.
template <int N, class Tile>
__device__ void store_sums(Tile tile, int row, int vector, const float (&c)[N][4]) {
  static_assert(N * 8 <= Tile::kWidth);
#pragma unroll
  for (int n = 0; n < N; n += 2) {
    uint32_t a[4];
    pack_operand(a, c[n], c[n + 1]);
    store_a_mk(tile, row, vector + n, a);
  }
}

// As store_sums; then the tile's rows go to global memory, 16 bytes per lane. rows: where columns
// of the lane's rows begin, lane / 4 and lane / 4 + 8; a null row is not written.
template <int N, class Tile>
__device__ void store_lane_rows(Tile tile, int row, int vector, const float (&c)[N][4],
                                bf16* const (&rows)[2]) {
  store_sums(tile, row, vector, c);
  __syncwarp();
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half)
    if (rows[half])
#pragma unroll
      for (int i = lane % 4; i < N; i += 4)
        *reinterpret_cast<uint4*>(rows[half] + i * 8) =
            *reinterpret_cast<const uint4*>(tile.at(row + half * 8 + lane / 4, vector + i));
}
// The lane's part of such rows; of a null row, zeros.
template <int N>
__device__ void load_lane_rows(uint32_t (&c)[2][N], bf16* const (&rows)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int n = 0; n < N; ++n)
      c[half][n] =
          rows[half] ? *reinterpret_cast<const uint32_t*>(rows[half] + n * 8 + threadIdx.x % 4 * 2)
                     : 0;
}
// c = c · factor + rows · row_factor, where rows are as load_lane_rows leaves them.
template <int N>
__device__ void add_lane_rows(float (&c)[N][4], const uint32_t (&rows)[2][N],
                              const float (&factor)[2], const float (&row_factor)[2]) {
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 x = unpack_bf16x2(rows[half][n]);
      c[n][2 * half] = c[n][2 * half] * factor[half] + x.x * row_factor[half];
      c[n][2 * half + 1] = c[n][2 * half + 1] * factor[half] + x.y * row_factor[half];
    }
}

// Lane q of a quad holds word q of each of four vectors; afterwards it holds vector q. The function
// is its own inverse.
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

// Columns [32 i, 32 i + 32) of N fragments.
template <int N>
__device__ float (&columns32(float (&c)[N][4], int i))[4][4] {
  return *reinterpret_cast<float(*)[4][4]>(&c[4 * i]);
}
template <int N>
__device__ const float (&columns32(const float (&c)[N][4], int i))[4][4] {
  return *reinterpret_cast<const float(*)[4][4]>(&c[4 * i]);
}

// One row of four C fragments, 32 columns, to global memory with 16 bytes per lane. `half` selects
// row lane / 4 (0) or row lane / 4 + 8 (1). A null row is not written.
__device__ inline void store_row32(bf16* row, const float (&c)[4][4], int half, float factor) {
  uint32_t w[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    w[i] = pack_bf16x2(c[i][2 * half] * factor, c[i][2 * half + 1] * factor);
  transpose_quad(w);
  if (row)
    *reinterpret_cast<uint4*>(row + threadIdx.x % 4 * 8) = make_uint4(w[0], w[1], w[2], w[3]);
}

}  // namespace assay::ops::cuda
