// Rows in another order: torch's kernel gives a block to each row, and rows here have 128 bytes.
#include <limits>

#include "ops/attention/top1_chunk/kernel.h"
#include "ops/cuda/launch.cuh"

namespace assay::ops::cuda {
namespace {

__global__ void __launch_bounds__(256) gather_kernel(const uint4* from, const int64_t* index,
                                                     unsigned vectors, unsigned width, uint4* to) {
  const unsigned i = blockIdx.x * 256 + threadIdx.x;
  if (i < vectors) to[i] = from[index[i / width] * width + i % width];
}

}  // namespace

void gather_rows(const void* from, const int64_t* index, int64_t rows, int64_t row_bytes, void* to,
                 Stream stream) {
  const int64_t width = row_bytes / 16;
  const bool small = rows * width < std::numeric_limits<unsigned>::max() - 256;
  check("gather_rows", small ? nullptr : "takes fewer than 2^36 bytes");
  if (rows > 0)
    launch_threads(gather_kernel, rows * width, 256, stream, static_cast<const uint4*>(from), index,
                   unsigned(rows * width), unsigned(width), static_cast<uint4*>(to));
}

}  // namespace assay::ops::cuda
