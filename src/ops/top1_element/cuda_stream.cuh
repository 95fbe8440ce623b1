#pragma once
// A block of kGroups warpgroups holds 64 rows a warpgroup of each of kOwn operands and streams kStreamed other ones
// past them, parts of kPart rows, which a further warpgroup brings in with the copy engine.
#include "ops/top1_chunk/cuda_wgmma.cuh"
#include "ops/top1_element/cuda_passes.cuh"

namespace assay::ops::cuda::element {

template <int D_, int kPart_, int kGroups_, int kOwn, int kStreamed, bool kFacts = false>
struct Room {
  static constexpr int D = D_, kPart = kPart_, kGroups = kGroups_, kRows = kGroups * 64, kThreads = (kGroups + 1) * 128;
  static_assert(kGroups == 2 || kGroups == 3);
  static_assert(Packed::kPadding % kPart == 0 && Packed::kPadding % kRows == 0);
  static_assert(kPart == 64 || kPanel<D> == D);  // a part is one tile, or tiles that continue one another
  static constexpr int kOwnBytes = kOwn * kRows * D * 2, kFactBytes = kFacts ? kPart * 4 : 0,
                       kStageBytes = kStreamed * kPart * D * 2 + 2 * kFactBytes;
  static constexpr int kStages = std::min(6, (227 * 1024 - 128 - kOwnBytes) / kStageBytes);
  static constexpr size_t kBytes = kOwnBytes + kStages * kStageBytes + (2 * kStages + 1) * sizeof(uint64_t);
  static_assert(kStages >= 3);  // the part before, this one, and one on its way
  unsigned char* memory;

  __device__ Room() {
    extern __shared__ __align__(1024) unsigned char shared[];
    memory = shared;
  }
  __device__ bf16* own(int which) const { return reinterpret_cast<bf16*>(memory) + which * kRows * D; }
  __device__ bf16* streamed(int stage, int which) const {
    return reinterpret_cast<bf16*>(memory + kOwnBytes) + (stage * kStreamed + which) * kPart * D;
  }
  __device__ float* facts(int stage, int which) const {
    return reinterpret_cast<float*>(memory + kOwnBytes + kStages * kStreamed * kPart * D * 2) +
           (stage * 2 + which) * kPart;
  }
  __device__ Barrier barrier(int i) const {
    return {reinterpret_cast<uint64_t*>(memory + kOwnBytes + kStages * kStageBytes) + i};
  }
  __device__ Barrier full(int stage) const { return barrier(stage); }
  __device__ Barrier empty(int stage) const { return barrier(kStages + stage); }
  __device__ Barrier ready() const { return barrier(2 * kStages); }  // own rows are there

  __device__ void begin() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) full(i).init(1), empty(i).init(kGroups * 4);
      ready().init(1);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
  }
  // The last warpgroup lends its registers to the others.
  __device__ static bool brings() { return threadIdx.x >= kGroups * 128; }
  __device__ static void lend() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kGroups == 2 ? 24 : 32)); }
  __device__ static void borrow() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kGroups == 2 ? 240 : 160));
  }
  // One of its threads: the own rows, own_rows(which), then part after part: rows(i, which), fact(i, which).
  template <class Own, class Rows, class Fact>
  __device__ void bring(int parts, Own&& own_rows, Rows&& rows, Fact&& fact) const {
    if (threadIdx.x % 128) return;
    ready().arrive_and_expect(kOwnBytes);
    for (int which = 0; which < kOwn; ++which) copy_bulk(own(which), own_rows(which), kRows * D * 2, ready());
    for (int i = 0, stage = 0, phase = 1; i < parts; ++i) {
      empty(stage).wait(phase);
      full(stage).arrive_and_expect(kStageBytes);
      for (int which = 0; which < kStreamed; ++which)
        copy_bulk(streamed(stage, which), rows(i, which), kPart * D * 2, full(stage));
      for (int which = 0; kFacts && which < 2; ++which)
        copy_bulk(reinterpret_cast<bf16*>(facts(stage, which)), (const bf16*)fact(i, which), kFactBytes, full(stage));
      if (++stage == kStages) stage = 0, phase ^= 1;
    }
  }
  // The warp has read the stage.
  __device__ void release(int stage) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) empty(stage).arrive();
  }
};

// The stage of the part that comes next.
template <class Room>
struct Ring {
  int stage = 0, phase = 0;
  __device__ void wait(const Room& room) const { room.full(stage).wait(phase); }
  __device__ void advance() {
    if (++stage == Room::kStages) stage = 0, phase ^= 1;
  }
};

// A descriptor of what lies further on: the address is its low half and never carries.
__device__ inline uint64_t behind(uint64_t descriptor, uint32_t offset) {
  return descriptor & ~uint64_t{0xffffffff} | (uint32_t(descriptor) + offset);
}

// The warpgroup's 64 own rows of one operand, as the left side of products.
template <int D, bool kRegisters>
struct Left;
template <int D>
struct Left<D, false> {
  uint64_t descriptor;
  __device__ explicit Left(const bf16* rows)
      : descriptor(uniform(Panels<D, 64>{const_cast<bf16*>(rows) + threadIdx.x / 128 * 64 * D}.rows())) {}
  __device__ uint64_t step(int k) const { return behind(descriptor, Panels<D, 64>::rows_at(0, k)); }
};
template <int D>
struct Left<D, true> {
  uint32_t a[D / 16][4];
  __device__ explicit Left(const bf16* rows) {
    const Panels<D, 64> tile{const_cast<bf16*>(rows) + threadIdx.x / 128 * 64 * D};
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
    for (int k = 0; k < D / 16; ++k) load_matrices(a[k], tile.address(row, 2 * k + lane / 16));
  }
  __device__ const uint32_t (&step(int k) const)[4] { return a[k]; }
};

// s [64, kPart] = own · rowsᵀ
template <int D, int kPart, bool kRegisters>
__device__ void scores(float (&s)[kPart / 8][4], const Left<D, kRegisters>& own, uint64_t rows) {
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
    const uint64_t b = behind(rows, Panels<D, 64>::rows_at(0, k));
    if constexpr (kRegisters) product<kPart, false>(s, own.step(k), b, k > 0);
    else product<kPart, false, false>(s, own.step(k), b, k > 0);
  }
}
// sum [64, D] += weights [64, kPart] · rows
template <int D, int kPart>
__device__ void accumulate(float (&sum)[D / 8][4], const uint32_t (&weights)[kPart / 16][4], uint64_t rows) {
  using P = Panels<D, 64>;
#pragma unroll
  for (int k = 0; k < kPart / 16; ++k) {
    product<64, true>(sum, weights[k], behind(rows, P::columns_at(0, k)));
    if constexpr (D == 96) product<32, true, 8>(sum, weights[k], behind(rows, P::columns_at(64, k)));
    if constexpr (D == 128) product<64, true, 8>(sum, weights[k], behind(rows, P::columns_at(64, k)));
  }
}

template <int N>
__device__ void pack_operand(uint32_t (&a)[N / 2][4], const float (&s)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) a[n / 2][n % 2 * 2 + half] = pack(s[n][2 * half], s[n][2 * half + 1]);
}
// A block's own rows, some of one head.
struct Rows {
  int first, count;
  int64_t head;  // b · heads + h
  int b, h;
  // Blocks of one head follow one another, so that what they stream stays in the L2 cache.
  __device__ Rows(int heads, int rows, int block_rows, bool last_first) {
    const int blocks = (rows + block_rows - 1) / block_rows, block = blockIdx.x % blocks;
    head = blockIdx.x / blocks, b = int(head) / heads, h = int(head) % heads;
    first = (last_first ? blocks - 1 - block : block) * block_rows, count = min(block_rows, rows - first);
  }
  // Row i of the lane, 0 or 1, within the block.
  __device__ static int row(int i) { return threadIdx.x / 32 * 16 + i * 8 + threadIdx.x % 32 / 4; }
  __device__ static int group_row() { return threadIdx.x / 128 * 64; }
};

}  // namespace assay::ops::cuda::element
