#pragma once
// Arguments of all kernels: raw memory with its strides, a stream (CUDA) or a pool (CPU). No torch.
#include <cstddef>
#include <cstdint>
#include <functional>

#include "base/error.h"

namespace assay::ops {

enum class DType { f32, f64, bf16 };

// A sequence tensor [B, T, …]: everything after T is contiguous. Strides in elements. data
// == nullptr: absent.
struct View {
  void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t time_stride = 0;
  explicit operator bool() const { return data != nullptr; }
};

// [B, T, G, D], the last two contiguous; head h reads ⌊h / (H/G)⌋. Strides
// may be 0. data == nullptr: absent.
struct HeadView {
  View rows;
  int64_t heads = 1;
  explicit operator bool() const { return bool(rows); }
};

using Stream = void*;  // cudaStream_t
// Runs body(begin, end) over disjoint parts of [0, size) on the caller's pool; `grain`: fewest
// items worth a thread.
using ParallelFor = std::function<void(int64_t size, int64_t grain,
                                       const std::function<void(int64_t, int64_t)>& body)>;

// For functions that kernels of both devices call.
#ifdef __CUDACC__
#define ASSAY_HOST_DEVICE __host__ __device__
#else
#define ASSAY_HOST_DEVICE
#endif

// Hands out pieces of a workspace, each aligned to 256 bytes. Without memory it only counts.
class WorkspaceArena {
 public:
  explicit WorkspaceArena(void* memory = nullptr) : memory_(static_cast<char*>(memory)) {}
  template <class T>
  T* take(int64_t count) {
    char* piece = memory_ ? memory_ + used_ : nullptr;
    used_ += (static_cast<size_t>(count) * sizeof(T) + 255) / 256 * 256;
    return reinterpret_cast<T*>(piece);
  }
  size_t used() const { return used_; }

 private:
  char* memory_;
  size_t used_ = 0;
};

}  // namespace assay::ops
