#pragma once
// What the kernels of decoding's few steps share. Such a kernel takes microseconds, so it starts while the one before
// it still runs (programmatic dependent launch), and asks for its state then: a prefetch changes no result.
#include "ops/cuda.cuh"

namespace assay::ops::cuda {

// From here on the next kernel may start. Then, before anything is read or written: all that came before is there.
__device__ inline void let_the_next_start() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ inline void wait_for_those_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// To the second cache, by one thread; `bytes` are rounded down to what the copy takes, 16 by 16.
__device__ inline void prefetch(const void* from, int64_t bytes) {
  const auto whole = unsigned(bytes / 16 * 16);
  const char* aligned = reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(from) / 16 * 16);
  if (whole > 0) asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(aligned), "r"(whole));
}

// A launch of a kernel that begins with the two lines above.
template <class... Parameters, class... Arguments>
void launch_early(void (*kernel)(Parameters...), dim3 blocks, unsigned threads, Stream stream,
                  const Arguments&... arguments) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks, config.blockDim = threads, config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &early, config.numAttrs = 1;
  if (cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...) != cudaSuccess) return;  // check_launch() says why
}

// Number i of a row of f32 or bf16.
__device__ inline float number(const void* row, DType dtype, int64_t i) {
  return dtype == DType::bf16 ? real(static_cast<const bf16*>(row)[i]) : static_cast<const float*>(row)[i];
}

template <int kWidth, class T>
__device__ inline void load_pack(float* x, const T* from) {
  const auto pack = *reinterpret_cast<const Pack<T, kWidth>*>(from);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) x[i] = real(pack.at[i]);
}
// kCount numbers, from a place that 16 bytes divide, or 8 where kCount is 4 (bf16) or no multiple of 8.
template <int kCount>
__device__ inline void load_numbers(float (&x)[kCount], const void* row, DType dtype, int64_t first) {
  constexpr int kWidth = kCount % 8 == 0 ? 8 : 4;
  if (dtype == DType::bf16)
#pragma unroll
    for (int i = 0; i < kCount; i += kWidth) load_pack<kWidth>(x + i, static_cast<const bf16*>(row) + first + i);
  else
#pragma unroll
    for (int i = 0; i < kCount; i += 4) load_pack<4>(x + i, static_cast<const float*>(row) + first + i);
}

}  // namespace assay::ops::cuda
