#pragma once
// A block of kGroups consumer warpgroups holds 64 rows per warpgroup of each of kOwn
// operands. kStreamed other operands stream past them in parts of kPart rows, which a
// producer warpgroup copies.
#include "ops/cuda/launch.cuh"
#include "ops/cuda/pipeline.cuh"
#include "ops/cuda/wgmma.cuh"
#include "ops/top1_element/cuda_passes.cuh"

namespace assay::ops::cuda::element {

template <int D_, int kPart_, int kGroups_, int kOwn, int kStreamed, bool kHasStats = false>
struct StreamSmem {
  static constexpr int D = D_, kPart = kPart_, kGroups = kGroups_;
  static constexpr int kRows = kGroups * 64, kThreads = (kGroups + 1) * 128;
  static_assert(kGroups == 2 || kGroups == 3);
  static_assert(Packed::kPadding % kPart == 0 && Packed::kPadding % kRows == 0);
  // a part is one tile, or tiles that continue one another
  static_assert(kPart == 64 || kPanel<D> == D);
  static constexpr int kOwnBytes = kOwn * kRows * D * 2, kStatsBytes = kHasStats ? kPart * 4 : 0;
  static constexpr int kPartBytes = kPart * D * 2;
  static constexpr int kStageBytes = kStreamed * kPartBytes + 2 * kStatsBytes;
  static constexpr int kStages = std::min(6, int(kMaxSharedBytes - 128 - kOwnBytes) / kStageBytes);
  static_assert(kStages >= 3);  // the part before, this one, and one under way
  using Ring = Pipeline<kStages>;
  static constexpr size_t kBytes =
      kOwnBytes + kStages * kStageBytes + Ring::kBytes + sizeof(uint64_t);
  static_assert(kBytes <= kMaxSharedBytes);
  unsigned char* memory;

  __device__ StreamSmem() {
    extern __shared__ __align__(1024) unsigned char shared[];
    memory = shared;
  }
  __device__ bf16* own(int which) const {
    return reinterpret_cast<bf16*>(memory) + which * kRows * D;
  }
  __device__ bf16* streamed(int stage, int which) const {
    return reinterpret_cast<bf16*>(memory + kOwnBytes) + (stage * kStreamed + which) * kPart * D;
  }
  __device__ float* stats(int stage, int which) const {
    return reinterpret_cast<float*>(memory + kOwnBytes + kStages * kStreamed * kPartBytes) +
           (stage * 2 + which) * kPart;
  }
  __device__ uint64_t* barriers() const {
    return reinterpret_cast<uint64_t*>(memory + kOwnBytes + kStages * kStageBytes);
  }
  __device__ Ring ring() const { return {barriers()}; }
  __device__ Mbarrier own_ready() const { return {barriers() + 2 * kStages}; }

  __device__ void init() const {
    if (threadIdx.x == 0) {
      ring().init(kGroups * 4);
      own_ready().init(1);
      fence_mbarrier_init();
    }
    __syncthreads();
  }
  // The last warpgroup is the producer. It gives registers to the others.
  __device__ static bool is_producer() { return threadIdx.x >= kGroups * 128; }
  __device__ static void producer_registers() { setmaxnreg_dec<kGroups == 2 ? 24 : 32>(); }
  __device__ static void consumer_registers() { setmaxnreg_inc<kGroups == 2 ? 240 : 160>(); }
  // By one thread of the producer: the own rows, own_rows(which), then part after part rows(i,
  // which) and, with statistics, stats_of(i, which).
  template <class Own, class Rows, class Stats>
  __device__ void produce(int parts, Own&& own_rows, Rows&& rows, Stats&& stats_of) const {
    if (threadIdx.x % 128) return;
    own_ready().arrive_expect_tx(kOwnBytes);
    for (int which = 0; which < kOwn; ++which)
      cp_async_bulk(own(which), own_rows(which), kRows * D * 2, own_ready());
    PipelineState<kStages> state;
    for (int i = 0; i < parts; ++i, state.advance()) {
      const Mbarrier full = ring().producer_acquire(state.stage, state.phase, kStageBytes);
      for (int which = 0; which < kStreamed; ++which)
        cp_async_bulk(streamed(state.stage, which), rows(i, which), kPartBytes, full);
      for (int which = 0; kHasStats && which < 2; ++which)
        cp_async_bulk(stats(state.stage, which), stats_of(i, which), kStatsBytes, full);
    }
  }
  // The warp has read the stage.
  __device__ void release(int stage) const {
    __syncwarp();
    ring().consumer_release(stage);
  }
};

// A descriptor `offset` further on. The address is its low half, and the addition never carries.
__device__ inline uint64_t advance_descriptor(uint64_t descriptor, uint32_t offset) {
  return descriptor & ~uint64_t{0xffffffff} | (uint32_t(descriptor) + offset);
}

// The warpgroup's 64 own rows of one operand as A, in shared memory or in registers.
template <int D, bool kRegisters>
struct OperandA;
template <int D>
struct OperandA<D, false> {
  uint64_t descriptor;
  __device__ explicit OperandA(const bf16* rows)
      : descriptor(warp_uniform(
            WgmmaTile<D, 64>{const_cast<bf16*>(rows) + threadIdx.x / 128 * 64 * D}.rows())) {}
  __device__ uint64_t step(int k) const {
    return advance_descriptor(descriptor, WgmmaTile<D, 64>::rows_at(0, k));
  }
};
template <int D>
struct OperandA<D, true> {
  uint32_t a[D / 16][4];
  __device__ explicit OperandA(const bf16* rows) {
    const WgmmaTile<D, 64> tile{const_cast<bf16*>(rows) + threadIdx.x / 128 * 64 * D};
#pragma unroll
    for (int k = 0; k < D / 16; ++k) load_a_mk(a[k], tile, threadIdx.x % 128 / 32 * 16, 2 * k);
  }
  __device__ const uint32_t (&step(int k) const)[4] { return a[k]; }
};

// s [64, kPart] = own · rowsᵀ
template <int D, int kPart, bool kRegisters>
__device__ void scores(float (&s)[kPart / 8][4], const OperandA<D, kRegisters>& own,
                       uint64_t rows) {
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
    const uint64_t b = advance_descriptor(rows, WgmmaTile<D, 64>::rows_at(0, k));
    if constexpr (kRegisters) wgmma<kPart, false>(s, own.step(k), b, k > 0);
    else wgmma<kPart, false, false>(s, own.step(k), b, k > 0);
  }
}
// sum [64, D] += weights [64, kPart] · rows
template <int D, int kPart>
__device__ void accumulate(float (&sum)[D / 8][4], const uint32_t (&weights)[kPart / 16][4],
                           uint64_t rows) {
  wgmma_rows<D>(sum, weights, [&](int column, int k) {
    return advance_descriptor(rows, WgmmaTile<D, 64>::columns_at(column, k));
  });
}

// A block's own rows, some of one head.
struct RowRange {
  int first, count;
  int64_t head;  // b · heads + h
  int b, h;
  // Blocks of one head follow one another, so that what they stream stays in the L2 cache.
  __device__ RowRange(int heads, int rows, int block_rows, bool last_first) {
    const int blocks = (rows + block_rows - 1) / block_rows, block = blockIdx.x % blocks;
    head = blockIdx.x / blocks;
    b = int(head) / heads;
    h = int(head) % heads;
    first = (last_first ? blocks - 1 - block : block) * block_rows;
    count = min(block_rows, rows - first);
  }
  // Row i of the lane, 0 or 1, within the block.
  __device__ static int row(int i) { return threadIdx.x / 32 * 16 + i * 8 + threadIdx.x % 32 / 4; }
  __device__ static int group_row() { return threadIdx.x / 128 * 64; }
};

}  // namespace assay::ops::cuda::element
