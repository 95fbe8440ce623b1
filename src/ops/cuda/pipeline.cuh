#pragma once
// A ring of stages in shared memory that a producer fills with bulk copies and warps consume.
#include "ops/cuda/ptx.cuh"

namespace assay::ops::cuda {

// A position in the ring. The phase changes each time the ring starts again.
template <int kStages>
struct PipelineState {
  int stage = 0;
  int phase = 0;
  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// `barriers` are 2 kStages words of shared memory.
template <int kStages>
struct Pipeline {
  static_assert(kStages >= 2);
  static constexpr size_t kBytes = 2 * kStages * sizeof(uint64_t);
  using State = PipelineState<kStages>;
  uint64_t* barriers;
  __device__ Mbarrier full(int stage) const { return {barriers + stage}; }
  __device__ Mbarrier empty(int stage) const { return {barriers + kStages + stage}; }

  // By one thread; then fence_mbarrier_init() and a barrier of the block.
  __device__ void init(int consumer_threads) const {
    for (int i = 0; i < kStages; ++i) {
      full(i).init(1);
      empty(i).init(consumer_threads);
    }
  }
  // By one thread: waits until the stage is empty. The copies that follow bring `bytes` in total.
  __device__ Mbarrier producer_acquire(int stage, int phase, uint32_t bytes) const {
    empty(stage).wait(phase ^ 1);
    full(stage).arrive_expect_tx(bytes);
    return full(stage);
  }
  __device__ void consumer_wait(State state) const { full(state.stage).wait(state.phase); }
  // By every thread of the consumers, after its last read of the stage. Arrival by one lane per
  // warp is not faster, and racecheck does not follow the lanes that it speaks for.
  __device__ void consumer_release(int stage) const { empty(stage).arrive(); }
};

}  // namespace assay::ops::cuda
