// The forward of the recurrence on the CPU, which needs no sum over lanes.
#include "ops/recurrence/matrix_recurrence/kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/recurrence/matrix_recurrence/cpu.cc"
#include "ops/cpu/highway.h"
//
#include "ops/recurrence/matrix_recurrence/cpu-inl.h"

HWY_BEFORE_NAMESPACE();
namespace assay::ops::HWY_NAMESPACE {
namespace {

template <class R>
void forward_tile(const MatrixRecurrenceForward& p, const Tile& tile, Scratch<R>& s) {
  const int64_t chunks = (p.time + kStateChunk - 1) / kStateChunk;
  read_bonus(p, tile, s);
  read_state(state_at<R>(p.initial_state, p, tile), p, tile, s.state);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const int64_t t0 = chunk * kStateChunk;
    const int64_t steps = std::min(kStateChunk, p.time - t0);
    write_state(s.state, p, tile, state_at<R>(p.chunk_states, p, tile, chunks, chunk));
    read_chunk(p, tile, t0, steps, s);
    forward_chunk<R, false>(p, tile.width, steps, s);
    write_values(s.out, p.out, p, tile, t0, steps);
  }
  write_state(s.state, p, tile, state_at<R>(p.final_state, p, tile));
}

template <class R>
void forward(const MatrixRecurrenceForward& p, void* workspace, const ParallelFor& parallel) {
  for_each_tile<R>(p, false, static_cast<std::byte*>(workspace), parallel,
                   [&](const Tile& tile, Scratch<R>& s) HWY_ATTR { forward_tile(p, tile, s); });
}

size_t state_forward_bytes(const MatrixRecurrenceForward& p) {
  return p.dtype == DType::f64 ? workers_bytes<double>(p, false) : workers_bytes<float>(p, false);
}
void state_forward(const MatrixRecurrenceForward& p, void* workspace, const ParallelFor& parallel) {
  p.dtype == DType::f64 ? forward<double>(p, workspace, parallel)
                        : forward<float>(p, workspace, parallel);
}

}  // namespace
}  // namespace assay::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace assay::ops::cpu {
HWY_EXPORT(state_forward_bytes);
size_t workspace_bytes(const MatrixRecurrenceForward& p) {
  return HWY_DYNAMIC_DISPATCH(state_forward_bytes)(p);
}
ASSAY_CPU_WORKSPACE_KERNEL(matrix_recurrence, state_forward, MatrixRecurrenceForward)
}  // namespace assay::ops::cpu
#endif
