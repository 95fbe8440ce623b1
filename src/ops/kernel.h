#pragma once
// What every kernel takes: raw memory with its strides, a stream (CUDA) or a pool (CPU). No torch.
#include <cstddef>
#include <cstdint>
#include <functional>

#include "base/error.h"

namespace assay::ops {

enum class DType { f32, f64, bf16 };

// A sequence tensor [B, T, …]: everything behind T is contiguous. Strides in elements. data == nullptr: absent.
struct View {
  void* data = nullptr;
  int64_t batch_stride = 0, time_stride = 0;
  explicit operator bool() const { return data != nullptr; }
};

using Stream = void*;  // cudaStream_t
// Runs body(begin, end) over disjoint parts of [0, size) on the caller's pool; `grain`: fewest items worth a thread.
using ParallelFor = std::function<void(int64_t size, int64_t grain, const std::function<void(int64_t, int64_t)>& body)>;

}  // namespace assay::ops
