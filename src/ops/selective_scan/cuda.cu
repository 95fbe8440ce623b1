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
  return workspace_size<n16::ForwardWorkspace>(n16::Plan(p));
}

size_t workspace_bytes(const SelectiveScanBackward& bwd) {
  if (takes_n16(bwd.forward)) return workspace_size<n16::BackwardWorkspace>(n16::Plan(bwd.forward));
  return with_type(bwd.forward.dtype, [&](auto type) {
    return workspace_size<any::GeneralWorkspace<Real<decltype(type)>>>(bwd.forward);
  });
}

void selective_scan(const SelectiveScanForward& p, void* workspace, Stream stream) {
  check(p);
  check_strides({p.u, p.delta, p.z, p.B, p.C, p.y});
  if (!takes_n16(p))
    with_type(p.dtype, [&](auto type) { any::forward<decltype(type)>(p, stream); });
  else if (p.dtype == DType::bf16) n16::forward<bf16>(p, workspace, stream);
  else n16::forward<float>(p, workspace, stream);
}

void selective_scan(const SelectiveScanBackward& bwd, void* workspace, Stream stream) {
  check(bwd.forward);
  check_strides({bwd.forward.u, bwd.forward.delta, bwd.forward.z, bwd.forward.B, bwd.forward.C,
                 bwd.dy, bwd.du, bwd.ddelta, bwd.dz});
  if (!takes_n16(bwd.forward))
    with_type(bwd.forward.dtype,
              [&](auto type) { any::backward<decltype(type)>(bwd, workspace, stream); });
  else if (bwd.forward.dtype == DType::bf16) n16::backward<bf16>(bwd, workspace, stream);
  else n16::backward<float>(bwd, workspace, stream);
}

}  // namespace assay::ops::cuda
