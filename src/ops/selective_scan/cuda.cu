// Which kernel takes which call.
#include <initializer_list>
#include <string>

#include "ops/cuda/launch.cuh"
#include "ops/cuda/types.cuh"
#include "ops/selective_scan/cuda_any.cuh"
#include "ops/selective_scan/cuda_n16.cuh"

namespace assay::ops::cuda {
namespace {

bool takes_n16(const SelectiveScanForward& p) {
  return p.state_size == n16::kStates && p.dtype != DType::f64;
}

void check_strides(std::initializer_list<View> views) {
  for (const View& v : views)
    if (v.time_stride < 0 || v.time_stride > n16::kMaxStride)
      throw Unsupported("selective_scan on CUDA takes a stride of time of 0 to 2^28 numbers, not " +
                        std::to_string(v.time_stride));
}

void check(const SelectiveScanForward& p) {
  if (p.state_size < 1 || p.state_size > 32 * any::kMaxPerLane)
    throw Unsupported("selective_scan on CUDA takes a state_size of 1 to 256, not " +
                      std::to_string(p.state_size));
}

}  // namespace

int64_t chunk_size(const SelectiveScanForward& p) {
  return takes_n16(p) ? n16::chunk_size(p) : any::kChunk;
}

size_t workspace_bytes(const SelectiveScanForward& p) {
  if (!takes_n16(p)) return 0;
  return workspace_size<n16::ForwardScratch>(n16::Plan(p));
}

size_t workspace_bytes(const SelectiveScanBackward& q) {
  if (takes_n16(q.forward)) return workspace_size<n16::BackwardScratch>(n16::Plan(q.forward));
  return with_type(q.forward.dtype, [&](auto type) {
    return workspace_size<any::Scratch<Real<decltype(type)>>>(q.forward);
  });
}

void selective_scan(const SelectiveScanForward& p, void* workspace, Stream raw_stream) {
  const auto stream = cuda_stream(raw_stream);
  check(p);
  check_strides({p.u, p.delta, p.z, p.B, p.C, p.y});
  if (!takes_n16(p))
    with_type(p.dtype, [&](auto type) { any::forward<decltype(type)>(p, stream); });
  else if (p.dtype == DType::bf16) n16::forward<bf16>(p, workspace, stream);
  else n16::forward<float>(p, workspace, stream);
}

void selective_scan(const SelectiveScanBackward& q, void* workspace, Stream raw_stream) {
  const auto stream = cuda_stream(raw_stream);
  check(q.forward);
  check_strides({q.forward.u, q.forward.delta, q.forward.z, q.forward.B, q.forward.C, q.dy, q.du,
                 q.ddelta, q.dz});
  if (!takes_n16(q.forward))
    with_type(q.forward.dtype,
              [&](auto type) { any::backward<decltype(type)>(q, workspace, stream); });
  else if (q.forward.dtype == DType::bf16) n16::backward<bf16>(q, workspace, stream);
  else n16::backward<float>(q, workspace, stream);
}

}  // namespace assay::ops::cuda
