#pragma once
// Descriptors of tensors for the copy engine.
#include <cudaTypedefs.h>

#include "ops/cuda/launch.cuh"
#include "ops/cuda/wgmma.cuh"

namespace assay::ops::cuda {

// Rows of heads [B, T, H, D] in bf16, copied as panels of WgmmaTile<D, 64>: coordinates are
// (column, head, row, sequence). Rows begin at multiples of 16 bytes.
inline CUtensorMap rows_map(const View& x, int64_t batch, int64_t time, int64_t heads,
                            int64_t head_dim) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    check_cuda("cuTensorMapEncodeTiled of the driver was not found",
               cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                cudaEnableDefault, &result));
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  const bool wide = head_dim % 64 == 0;
  const auto count = [](int64_t size) { return cuuint64_t(size); };
  const cuuint64_t sizes[] = {count(head_dim), count(heads), count(time), count(batch)};
  // The stride of a dimension of size 1 may be any number.
  const auto stride = [&](int64_t elements, int64_t size) {
    return count(size > 1 ? elements * 2 : head_dim * 2);
  };
  const cuuint64_t strides[] = {count(head_dim * 2), stride(x.time_stride, time),
                                stride(x.batch_stride, batch)};
  const cuuint32_t box[] = {wide ? 64u : 32u, 1, 64, 1};
  const cuuint32_t steps[] = {1, 1, 1, 1};
  CUtensorMap map;
  if (!encode ||
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, x.data, sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE,
             wide ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS)
    throw Error("the driver does not make a tensor map of the rows of heads");
  return map;
}

// Stores a box of a tensor from shared memory, at these coordinates, innermost first.
__device__ inline void cp_async_bulk_tensor_4d_store(const CUtensorMap& to, const void* from,
                                                     int x0, int x1, int x2, int x3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::
          "l"(&to),
      "r"(shared_address(from)), "r"(x0), "r"(x1), "r"(x2), "r"(x3)
      : "memory");
}
// The stores of this thread so far are one group.
__device__ inline void cp_async_bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until all groups have read shared memory, which may then be used again.
__device__ inline void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

}  // namespace assay::ops::cuda
