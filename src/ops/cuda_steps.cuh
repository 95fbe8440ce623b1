#pragma once
// What the kernels of decoding's few steps share. Such a kernel takes microseconds, so the next of them may start while
// it ends (programmatic dependent launch).
#include "ops/cuda.cuh"

namespace assay::ops::cuda {

// From here on the next kernel may start. Then, before anything is read or written: all that came before is there.
__device__ inline void let_the_next_start() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ inline void wait_for_those_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// A launch of a kernel that begins with the two lines above, with `shared` bytes of shared memory.
template <class... Parameters, class... Arguments>
void launch_early(void (*kernel)(Parameters...), dim3 blocks, unsigned threads, size_t shared, Stream stream,
                  const Arguments&... arguments) {
  if (shared > 48 << 10) cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared));
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks, config.blockDim = threads, config.dynamicSmemBytes = shared,
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &early, config.numAttrs = 1;
  if (cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...) != cudaSuccess) return;  // check_launch() says why
}

// Four of a state, 16-byte aligned. What is written nothing reads again soon: marked so, it leaves the second cache
// early, in the order in which it came (times: matrix_state/README.md).
struct Four {
  float at[4] = {};
  __device__ float& operator[](int i) { return at[i]; }
  __device__ float operator[](int i) const { return at[i]; }
};
__device__ inline Four read_four(const float* from) {
  const float4 x = *reinterpret_cast<const float4*>(from);
  return {x.x, x.y, x.z, x.w};
}
__device__ inline void write_four(float* to, Four x) {
  __stcs(reinterpret_cast<float4*>(to), make_float4(x[0], x[1], x[2], x[3]));
}

// Numbers of f32 or bf16, found without branches, so that loads that follow one another are in flight together: a bf16
// is the upper half of a float.
__device__ inline float number(const void* row, DType dtype, int64_t i) {
  const bool half = dtype == DType::bf16;
  const char* at = static_cast<const char*>(row) + i * (half ? 2 : 4);
  const uint32_t low = *reinterpret_cast<const uint16_t*>(at);
  const uint32_t high = *reinterpret_cast<const uint16_t*>(at + (half ? 0 : 2));
  return __uint_as_float(high << 16 | (half ? 0 : low));
}

// kCount numbers from a place that 16 bytes divide, or 8 where 8 does not divide kCount.
template <int kCount>
__device__ inline void load_numbers(float (&x)[kCount], const void* row, DType dtype, int64_t first) {
  constexpr int kWords = kCount % 8 == 0 ? 4 : 2;  // of one load
  const bool half = dtype == DType::bf16;
  const auto* at =
      reinterpret_cast<const Pack<uint32_t, kWords>*>(static_cast<const char*>(row) + first * (half ? 2 : 4));
  Pack<uint32_t, kWords> words[kCount / kWords] = {};
#pragma unroll
  for (int i = 0; i < kCount / kWords; ++i)
    if (i < kCount / kWords / 2 || !half) words[i] = at[i];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const uint32_t pair = words[i / 2 / kWords].at[i / 2 % kWords], whole = words[i / kWords].at[i % kWords];
    x[i] = __uint_as_float(!half ? whole : i % 2 ? pair & 0xffff0000u : pair << 16);
  }
}

}  // namespace assay::ops::cuda
