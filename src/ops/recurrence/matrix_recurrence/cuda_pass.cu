// One pass over the chunks of 16 steps, in order of time or against it: all that is sequential.
#include "ops/recurrence/matrix_recurrence/cuda_pass.cuh"

namespace assay::ops::cuda::chunks {
namespace {

// Forwards: out = A values + P S, W = Y values + R S, S ← decay S + Kᵀ values + Bᵀ W.
// Backwards: dW = B H, dv = Aᵀ values + K H + Yᵀ dW, H ← decay H + Pᵀ values + Rᵀ dW.
// Without outputs: the segments alone.
template <Rule kRule, int kK, bool kBackwards, bool kOutputs>
struct PreparedPass : Walk {
  using Tiles = ChunkTiles<kRule, kK>;
  static constexpr int kChunk = kSteps;
  static constexpr int kBlocks = 1;
  static constexpr int kRow = kK + 8;
  static constexpr int kStages = kLow<kRule> && kK > 128 ? 3 : 4;  // fits kPortableSharedBytes
  static constexpr bool kTurns = !kOutputs && kLow<kRule>;
  static constexpr bool kTotals = !kOutputs && !kLow<kRule>;
  struct Stage : Tiles {
    bf16 values[kSteps * kColumnStride];
    alignas(16) uint64_t full;  // mbarrier: the tiles have arrived
  };
  struct Smem {
    Stage stages[kStages];
  };

  // The vector of the values that this thread copies: there are as many as threads.
  const int vectors = task.segments.columns / 8;
  const int y = threadIdx.x / vectors;
  const int x = threadIdx.x % vectors * 8;
  const bf16* values =
      row<bf16>(task.values, args.heads, batch, y, head, args.value_dim) + first + x;

  // Bulk copies bring the tiles; on GPUs without them, all threads copy. Without outputs neither
  // A is read nor, forwards, P or, backwards, K.
  __device__ void fetch(Stage& to, int i) const {
    constexpr int kBegin = kOutputs ? 0 : kBackwards ? offsetof(Tiles, R) : offsetof(Tiles, K);
    constexpr int kBytes = (kOutputs || kBackwards ? sizeof(Tiles) : offsetof(Tiles, P)) - kBegin;
    static_assert(kBegin % 16 == 0 && kBytes % 16 == 0);
    const auto* from = reinterpret_cast<const char*>(&task.tiles.at<kRule, kK>(index(i))) + kBegin;
    char* tiles = reinterpret_cast<char*>(static_cast<Tiles*>(&to)) + kBegin;
    if constexpr (kHasBulkCopies) {
      if (threadIdx.x == 0) {
        const Mbarrier full{&to.full};
        full.arrive_expect_tx(kBytes);
        cp_async_bulk(tiles, from, kBytes, full);
      }
    } else {
      for (int at = threadIdx.x * 16; at < kBytes; at += blockDim.x * 16)
        cp_async_16(tiles + at, from + at);
    }
    if (is_turn) return;
    const bool present = start(i) + y < args.time;
    cp_async_16(to.values + y * kColumnStride + x,
                present ? values + start(i) * task.values.rows.time_stride
                        : static_cast<const bf16*>(task.tiles.tiles),
                present);
  }

  // The state before chunk i as the gradients read it: 16 × 16 numbers at a time, as the warp holds
  // them.
  __device__ void keep_operand(const uint32_t (&state)[kK / 16][4], int i) const {
    if (!task.states) return;
    bf16* to = task.states + (index(i) * args.value_dim + first + own) * kK + lane * 8;
#pragma unroll
    for (int k = 0; k < kK / 16; ++k)
      *reinterpret_cast<uint4*>(to + k * 256) = {state[k][0], state[k][1], state[k][2],
                                                 state[k][3]};
  }
  __device__ void chunk(float (&state)[kK / 8][4], const Stage& t, int i) const {
    using Rows = PaddedTile<kRow>;
    using Square = PaddedTile<kSquare>;
    uint32_t before[kK / 16][4];
    uint32_t values[4] = {};
    uint32_t low[4];
    pack_operand(before, state);
    if (!is_turn) load_a_km(values, PaddedTile<kColumnStride>{t.values + own});
    if constexpr (kOutputs) keep_operand(before, i);

    float W[2][4] = {};
    float out[2][4] = {};
    if constexpr (kLow<kRule>) {
      if constexpr (!kBackwards) multiply_nk(W, values, Square{t.Y});
      read_state(W, before, kBackwards ? t.B : t.R);
      pack_operand(low, W[0], W[1]);
    }
    scale_columns(state, t.decay);
    if constexpr (kBackwards || kWrites<kRule>)
      multiply_kn(state, values, Rows{kBackwards ? t.P : t.K});
    if constexpr (kLow<kRule>) multiply_kn(state, low, Rows{kBackwards ? t.R : t.B});

    if constexpr (!kOutputs) return;
    if constexpr (kBackwards) multiply_kn(out, values, Square{t.A});
    else multiply_nk(out, values, Square{t.A});
    if constexpr (!kBackwards || kWrites<kRule>) read_state(out, before, kBackwards ? t.K : t.P);
    if constexpr (kBackwards && kLow<kRule>) multiply_kn(out, low, Square{t.Y});
    store_out(i, out);
    if (kLow<kRule> && task.W)
      store_rows(task.W + index(i) * kSteps * args.value_dim, args.value_dim, kSteps, W);
  }

  __device__ void run(Smem& s) const {
    float state[kK / 8][4];
    float total[kK / 8][4];
    if constexpr (kHasBulkCopies) {
      if (threadIdx.x == 0) {
        for (Stage& stage : s.stages) Mbarrier{&stage.full}.init(1);
        fence_mbarrier_init();
      }
      __syncthreads();
    }
    load(state, kOutputs ? task.starts : nullptr);
    each_element(total, [](float& x, int, int) { x = 1; });
    with_stages(
        s.stages, begin(), end(), [&](Stage& to, int i) { fetch(to, i); },
        [&](Stage& t, int i) {
          if constexpr (kHasBulkCopies) Mbarrier{&t.full}.wait((i - begin()) / kStages % 2);
          chunk(state, t, i);
          if constexpr (kTotals) scale_columns(total, t.decay);
        });
    store(state);
    if (kTotals && first == 0 && threadIdx.x < 4)
      each_element(total, [&](float x, int k, int e) {
        if (e < 2) task.total[of_segment * kK + k * 8 + threadIdx.x * 2 + e] = x;
      });
  }
};

}  // namespace

void pass(const ChunkedForward& args, const Pass& task, Stream stream) {
  with_rule(args, [&](auto which, auto size) {
    with_constant<false, true>(task.backwards, [&](auto backwards) {
      with_constant<false, true>(task.out != nullptr, [&](auto outputs) {
        launch_pass<PreparedPass<which.kRule, size.value, backwards.value, outputs.value>>(
            args, task, stream);
      });
    });
  });
}

}  // namespace assay::ops::cuda::chunks
