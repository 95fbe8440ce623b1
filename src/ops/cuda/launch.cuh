#pragma once
// Launches that report their errors, and what a launch asks of the device.
#include <cuda_runtime.h>
#include <cxxabi.h>

#include <cstdlib>
#include <initializer_list>
#include <string>

#include "ops/core/cuda_target.h"
#include "ops/cuda/types.cuh"

namespace assay::ops::cuda {

// Throws if `error` is one. fail() is not used because nvcc rejects fmt's compile-time check of its
// format string.
inline void check_cuda(const std::string& what, cudaError_t error) {
  if (error == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // so that no later launch reports it
  throw Error(what + ": " + cudaGetErrorString(error));
}
// The name of a kernel with its template arguments and parameters.
inline std::string name_of(const void* kernel) {
  const char* mangled = nullptr;
  if (cudaFuncGetName(&mangled, kernel) != cudaSuccess || !mangled) {
    static_cast<void>(cudaGetLastError());
    return "a CUDA kernel";
  }
  int status = 0;
  char* name = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
  const std::string text = name ? name : mangled;
  std::free(name);
  return text;
}
// Throws with the kernel's name if its launch, or a call before it, left an error.
inline void check_launch(const void* kernel) {
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess)
    check_cuda(name_of(kernel) + " could not be launched", error);
}
// Throws Unsupported if a call has a reason not to be taken.
inline void check(const char* operation, const char* why_not) {
  if (why_not) throw Unsupported(std::string(operation) + " on CUDA " + why_not);
}

inline cudaStream_t cuda_stream(Stream stream) { return static_cast<cudaStream_t>(stream); }

__host__ __device__ constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr size_t kMaxSharedBytes = 227 << 10;      // shared memory of a block on sm_90
constexpr size_t kPortableSharedBytes = 99 << 10;  // of a block on every GPU from sm_80
inline size_t max_shared_bytes() {
  return cuda_target() == CudaTarget::sm_90a ? kMaxSharedBytes : kPortableSharedBytes;
}

// Dynamic shared memory has to be allowed when it and the static shared memory exceed 48 KB.
template <class... Parameters>
void allow_shared_memory(void (*kernel)(Parameters...), size_t bytes) {
  if (bytes == 0) return;
  // check_launch() reports an error.
  static_cast<void>(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)));
}
// A launch with any amount of dynamic shared memory.
template <class... Parameters, class... Arguments>
void launch_kernel(void (*kernel)(Parameters...), dim3 grid, unsigned threads, size_t shared_bytes,
                   Stream stream, const Arguments&... arguments) {
  allow_shared_memory(kernel, shared_bytes);
  kernel<<<grid, threads, shared_bytes, cuda_stream(stream)>>>(arguments...);
  check_launch(reinterpret_cast<const void*>(kernel));
}
// A launch with one thread per item, in blocks of `threads`.
template <class... Parameters, class... Arguments>
void launch_threads(void (*kernel)(Parameters...), int64_t items, unsigned threads, Stream stream,
                    const Arguments&... arguments) {
  launch_kernel(kernel, unsigned(ceil_div(items, threads)), threads, 0, stream, arguments...);
}
// launch_kernel() with programmatic dependent launch: the kernel may start while the one before it
// ends, so all threads call griddep_wait() before they use memory that another kernel uses. Code
// for compute_80 cannot wait, so there the kernel starts when the one before it has ended.
template <class... Parameters, class... Arguments>
void launch_pdl(void (*kernel)(Parameters...), dim3 grid, unsigned threads, size_t shared_bytes,
                Stream stream, const Arguments&... arguments) {
  if (cuda_target() != CudaTarget::sm_90a)
    return launch_kernel(kernel, grid, threads, shared_bytes, stream, Parameters(arguments)...);
  allow_shared_memory(kernel, shared_bytes);
  cudaLaunchAttribute pdl{};
  pdl.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  pdl.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = cuda_stream(stream);
  config.attrs = &pdl;
  config.numAttrs = 1;
  static_cast<void>(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...));
  check_launch(reinterpret_cast<const void*>(kernel));
}

// The SMs of the current device; 132, as on an H200, where sizes are asked for without a device.
inline int sm_count() {
  int device = 0;
  int count = 0;
  const bool found =
      cudaGetDevice(&device) == cudaSuccess &&
      cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) == cudaSuccess;
  if (!found) static_cast<void>(cudaGetLastError());
  return found ? count : 132;
}

// Bytes of the workspace that Workspace(arguments…, arena) takes, and the workspace in `memory`.
template <class Workspace, class... Arguments>
size_t workspace_size(const Arguments&... arguments) {
  WorkspaceArena arena;
  Workspace(arguments..., arena);
  return arena.used();
}
template <class Workspace, class... Arguments>
Workspace workspace_at(void* memory, const Arguments&... arguments) {
  WorkspaceArena arena(memory);
  return Workspace(arguments..., arena);
}

inline bool is_aligned(const void* pointer, size_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}
// Whether every row of [B, T, …] tensors of `element` bytes begins at a multiple of `bytes`.
inline bool rows_aligned(std::initializer_list<View> views, int64_t element, int64_t bytes = 16) {
  for (const View& x : views)
    if (!is_aligned(x.data, bytes) || x.batch_stride * element % bytes ||
        x.time_stride * element % bytes)
      return false;
  return true;
}

// f(std::integral_constant) of the constant that equals `value`.
template <auto... kConstants, class Value, class F>
void with_constant(Value value, F&& f) {
  const auto take = [&](auto constant) {
    if (value == constant()) f(constant);
    return value == constant();
  };
  if (!(take(std::integral_constant<decltype(kConstants), kConstants>{}) || ...))
    throw Error("no CUDA kernel was compiled for the constant " + std::to_string(int64_t(value)));
}
// run(T{}, elements of a vector): vectors of 16 bytes if `size` and the alignment allow it, else of
// one element.
template <class Run>
void with_vectors(DType dtype, int64_t size, bool aligned, Run&& run) {
  with_type(dtype, [&](auto zero) {
    constexpr int kSize = 16 / sizeof(zero);
    if (aligned && size % kSize == 0) run(zero, std::integral_constant<int, kSize>{});
    else run(zero, std::integral_constant<int, 1>{});
  });
}
template <class Run>
void with_vectors(DType dtype, int64_t size, std::initializer_list<const void*> pointers,
                  Run&& run) {
  bool aligned = true;
  for (const void* pointer : pointers) aligned = aligned && is_aligned(pointer, 16);
  with_vectors(dtype, size, aligned, run);
}

}  // namespace assay::ops::cuda
