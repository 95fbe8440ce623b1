#pragma once
// A block of kGroups consumer warpgroups holds 64 rows per warpgroup of each of kOwn
// operands. kStreamed other operands stream past them in parts of kPart rows, which a
// producer warpgroup copies.
#include "ops/attention/passes/attention_passes.cuh"
#include "ops/cuda/pipeline.cuh"
#include "ops/cuda/wgmma.cuh"

namespace assay::ops::cuda::attention {

constexpr int kPartRows = 64;  // statistics of a query are padded to a multiple of this

enum class Bias { none, alibi, decays };  // added to the scores
// f(constant) with the bias of a call.
template <class F>
void with_bias(const Attention& a, F&& f) {
  if (a.slopes) f(std::integral_constant<Bias, Bias::alibi>{});
  else if (a.decay_sums) f(std::integral_constant<Bias, Bias::decays>{});
  else f(std::integral_constant<Bias, Bias::none>{});
}

// The parameters of an Attention, in the types that the kernels compute with.
struct Shape {
  int time;
  int keys;
  int heads;
  int kv_heads;
  int window;
  float scale;          // exponents are products times this, powers of 2
  float query_scale;    // dq is sums times this
  const float* slopes;  // ALiBi, or null
  // as AttentionWorkspace has them
  const float* decay_sums;
  int64_t key_rows;
  Shape(const Attention& a, const AttentionWorkspace& m)
      : time(int(a.time)),
        keys(int(a.keys)),
        heads(int(a.heads)),
        kv_heads(int(a.kv_heads)),
        window(int(std::min(a.window, a.keys))),
        // never 0, so that −inf stays what it is
        scale(std::max(std::abs(float(a.scale)) * kLog2e, 1e-30f)),
        query_scale(float(a.scale)),
        slopes(a.slopes),
        decay_sums(m.decay_sums),
        key_rows(m.key_rows) {}
  __device__ int group() const { return heads / kv_heads; }
};

template <int D_, int kPart_, int kGroups_, int kOwn, int kStreamed, bool kHasStats = false>
struct StreamSmem {
  static constexpr int D = D_;
  static constexpr int kPart = kPart_;
  static constexpr int kGroups = kGroups_;
  static constexpr int kRows = kGroups * 64;
  static constexpr int kThreads = (kGroups + 1) * 128;
  static_assert(kGroups == 2 || kGroups == 3);
  // a part is one tile, or tiles that continue one another
  static_assert(kPart == 64 || kPanel<D> == D);
  static constexpr int kOwnBytes = kOwn * kRows * D * 2;
  static constexpr int kStatsBytes = kHasStats ? kPart * 4 : 0;
  static constexpr int kPartBytes = kPart * D * 2;
  static constexpr int kStageBytes = kStreamed * kPartBytes + 2 * kStatsBytes;
  static constexpr int kStages = std::min(6, int(kMaxSharedBytes - 128 - kOwnBytes) / kStageBytes);
  // A warpgroup may hold one stage while it passes over at most three that it does not read.
  static_assert(kStages >= 5);
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
      ring().init(kGroups * 128);
      own_ready().init(1);
      fence_mbarrier_init();
    }
    __syncthreads();
  }
  // The last warpgroup is the producer. It gives registers to the others.
  __device__ static bool is_producer() { return threadIdx.x >= kGroups * 128; }
  __device__ static void producer_registers() { setmaxnreg_dec<kGroups == 2 ? 24 : 32>(); }
  __device__ static void consumer_registers() { setmaxnreg_inc<kGroups == 2 ? 240 : 160>(); }
  // By one thread of the producer. own_rows(which, to, full) and rows(i, which, to, full) copy own
  // rows and those of part i; stats_of(i, which) are the statistics of the part.
  template <class Own, class Rows, class Stats>
  __device__ void produce(int parts, Own&& own_rows, Rows&& rows, Stats&& stats_of) const {
    if (threadIdx.x % 128) return;
    own_ready().arrive_expect_tx(kOwnBytes);
    for (int which = 0; which < kOwn; ++which) own_rows(which, own(which), own_ready());
    PipelineState<kStages> state;
    for (int i = 0; i < parts; ++i, state.advance()) {
      const Mbarrier full = ring().producer_acquire(state.stage, state.phase, kStageBytes);
      for (int which = 0; which < kStreamed; ++which)
        rows(i, which, streamed(state.stage, which), full);
      for (int which = 0; kHasStats && which < 2; ++which)
        cp_async_bulk(stats(state.stage, which), stats_of(i, which), kStatsBytes, full);
    }
  }
  // The thread has read the stage. Statistics were read by ordinary loads, which the fence orders
  // before the next copy.
  __device__ void release(int stage) const {
    if constexpr (kHasStats) fence_proxy_async();
    ring().consumer_release(stage);
  }
  // The thread passes over `count` parts that it does not read.
  __device__ void skip(PipelineState<kStages>& state, int count) const {
#pragma unroll 1
    for (int i = 0; i < count; ++i, state.advance()) {
      ring().consumer_wait(state);
      ring().consumer_release(state.stage);
    }
  }
};

// kRows rows of head h from `first` on, as tiles of 64 rows.
template <int D, int kRows>
__device__ void load_rows(bf16* to, const CUtensorMap& from, int b, int first, int h,
                          Mbarrier full) {
  constexpr int W = kPanel<D>;
#pragma unroll
  for (int row = 0; row < kRows; row += 64)
#pragma unroll
    for (int column = 0; column < D; column += W)
      cp_async_bulk_tensor_4d(to + row * D + column * 64, from, column, h, first + row, b, full);
}

// q, or its product with the sign of the scale, so that scores rise with what is maximised.
View signed_queries(const Attention& a, const AttentionWorkspace& m, Stream stream);
// Writes m.decay_sums, if there are decays.
void prepare_sums(const Attention& a, const AttentionWorkspace& m, Stream stream);

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
  // `offset` numbers after another one.
  __device__ OperandA(const OperandA& before, int offset)
      : descriptor(advance_descriptor(before.descriptor, offset * 2 >> 4)) {}
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
  int first;
  int count;
  int64_t head;  // b · heads + h
  int b;
  int h;
  // Blocks of one head follow one another, so that what they stream stays in the L2 cache.
  __device__ RowRange(int heads, int rows, int block_rows, bool last_first) {
    const int blocks = (rows + block_rows - 1) / block_rows;
    const int block = blockIdx.x % blocks;
    head = blockIdx.x / blocks;
    b = int(head) / heads;
    h = int(head) % heads;
    first = (last_first ? blocks - 1 - block : block) * block_rows;
    count = min(block_rows, rows - first);
  }
  // Row i of the lane, 0 or 1, within the block.
  __device__ static int row(int i) { return threadIdx.x / 32 * 16 + i * 8 + threadIdx.x % 32 / 4; }
  // The warpgroup's first row, and how many it has. The shuffle lets the compiler know that all
  // lanes of the warp have the same number, so that descriptors stay in uniform registers.
  __device__ static int group_row() { return __shfl_sync(~0u, int(threadIdx.x / 128 * 64), 0); }
  __device__ int group_count() const { return min(64, count - group_row()); }
};

// The parts [begin, end).
struct Parts {
  int begin;
  int end;
  __device__ int count() const { return end - begin; }
};

// Row r sees the columns [r + low, r + low + width) of those that exist.
struct Band {
  int low;
  int width;
  int columns;
  static __device__ Band of_queries(const Shape& shape) {
    return {shape.keys - shape.time - shape.window + 1, shape.window, shape.keys};
  }
  static __device__ Band of_keys(const Shape& shape) {
    return {shape.time - shape.keys, shape.window, shape.time};
  }

  // The parts that rows see. There is none without rows.
  template <int kPart>
  __device__ Parts parts(int first, int count) const {
    const int end = min(columns, first + count - 1 + low + width);
    if (count <= 0 || end <= 0) return {0, 0};
    const int begin = min(max(first + low, 0), end);
    return {begin / kPart, (end + kPart - 1) / kPart};
  }
  // Whether a row of the warpgroup does not see the whole part.
  template <int kPart>
  __device__ bool cuts(int group_first, int part) const {
    return part * kPart < group_first + 63 + low || (part + 1) * kPart > group_first + low + width;
  }
  // f(score) of the scores that are not seen. `row` is the lane's row 0; row 1 is eight further on.
  template <int N, class F>
  __device__ void each_hidden(float (&s)[N][4], int row, int first_column, F&& f) const {
    const int column = first_column + threadIdx.x % 4 * 2 - row - low;
    each_element(s, [&](float& x, int n, int e) {
      const int offset = column - e / 2 * 8;
      if (unsigned(offset + n * 8 + e % 2) >= unsigned(width)) f(x);
    });
  }
};

// A number of each of the lane's two rows, or of each of its columns of a part.
struct OfRows {
  float of[2];
  __device__ float at(int, int e) const { return of[e / 2]; }
};
template <int kPart>
struct OfColumns {
  float2 of[kPart / 8];
  __device__ float at(int n, int e) const { return e % 2 ? of[n].y : of[n].x; }
  __device__ void load(const float* from) {
#pragma unroll
    for (int n = 0; n < kPart / 8; ++n)
      of[n] = *reinterpret_cast<const float2*>(from + n * 8 + threadIdx.x % 4 * 2);
  }
};

// Scores become scale · score − c of their keys, in base 2. c of a query changes nothing in its
// row.
template <int N, class Sums>
__device__ void subtract_sums(float (&s)[N][4], float scale, const Sums& sums) {
  each_element(s, [&](float& x, int n, int e) { x = fmaf(x, scale, -sums.at(n, e)); });
}

// ALiBi in base 2 over the scores of a part, to be added to a score of the lane:
// −slope · (position of the query − position of the key).
struct Alibi {
  float step;
  float at[2];
  // kKeys: rows are keys and columns are queries. `row` is the lane's row 0.
  template <bool kKeys>
  static __device__ Alibi of(const Shape& shape, int h, int row, int first_column) {
    const float slope = shape.slopes[h] * kLog2e;
    const float step = kKeys ? -slope : slope;
    const int past = shape.keys - shape.time;
    const int column = first_column + threadIdx.x % 4 * 2;
    const int distance = column - row + (kKeys ? past : -past);
    return {step, {step * float(distance), step * float(distance - 8)}};
  }
  __device__ float term(int n, int e) const { return fmaf(step, float(n * 8 + e % 2), at[e / 2]); }
};

}  // namespace assay::ops::cuda::attention
