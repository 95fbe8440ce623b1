#pragma once
// Rows of heads [B, T, H, D] and the calls of attention kernels.
#include "ops/cuda/launch.cuh"
#include "ops/cuda/ptx.cuh"

namespace assay::ops::cuda {

template <int D>
__device__ bf16* head_row(const View& x, int64_t b, int64_t t, int64_t h) {
  return static_cast<bf16*>(x.data) + b * x.batch_stride + t * x.time_stride + h * D;
}

// Copies rows [first, first + count) of one head to the first rows of a tile, and zeros up to row
// `padded`. By all threads of the block; asynchronous.
template <class Tile>
__device__ void copy_rows(Tile to, const View& x, int64_t b, int64_t first, int64_t h, int count,
                          int padded) {
  constexpr int D = Tile::kWidth;
  for (int i = threadIdx.x; i < padded * (D / 8); i += blockDim.x) {
    const int row = i / (D / 8);
    const int vector = i % (D / 8);
    const bf16* from = head_row<D>(x, b, first + min(row, count - 1), h) + vector * 8;
    cp_async_16(to.at(row, vector), from, row < count);
  }
}

// Null, or why rows of bf16 are not taken.
inline const char* why_unaligned(std::initializer_list<View> all) {
  return rows_aligned(all, sizeof(bf16)) ? nullptr
                                         : "takes rows that begin at multiples of 16 bytes";
}
inline const char* why_not_head_dim(int64_t head_dim) {
  return head_dim == 64 || head_dim == 96 || head_dim == 128 ? nullptr
                                                             : "takes a head_dim of 64, 96 or 128";
}
// f(std::integral_constant) for such a head_dim.
template <class F>
void with_head_dim(int64_t head_dim, F&& f) {
  with_constant<64, 96, 128>(head_dim, f);
}

}  // namespace assay::ops::cuda
