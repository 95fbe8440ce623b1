// One pass over the chunks in order of time, or against it: all that is sequential. A warp has 16
// columns of a head's state in registers, transposed, as the sums of one product and the operand
// of the next.
#include <algorithm>

#include "ops/cuda/fragment.cuh"
#include "ops/cuda/launch.cuh"
#include "ops/matrix_state/cuda_chunks.cuh"

namespace assay::ops::cuda::chunks {
namespace {

constexpr int kStages = 4;

// What the blocks of one launch do: segment by segment of a sequence, some columns of the state
// each.
struct PassParams {
  Pass pass;
  Segments segments;
  // in  [B, H, segments, K, V] the state before each segment; null: zeros, and no output
  const float* starts;
  // out a segment's own state [.., K, V], what it makes of the one before it
  float *local, *turn, *total;
};  //     [.., K, K] or, without a part of low rank, [.., K]

// A chunk's tiles in shared memory. Forwards: out = A values + P S, W = Y values + R S, S ← decay
// S + Kᵀ values + Bᵀ W. Backwards: dW = B H, dv = Aᵀ values + K H + Yᵀ dW, H ← decay H + Pᵀ
// values + Rᵀ dW.
template <Rule kRule, int kK>
struct Stage {
  static constexpr int kRow = kK + 8;
  bf16 P[kSteps * kRow];
  bf16 K[kWrites<kRule> ? kSteps * kRow : 8];
  bf16 R[kLow<kRule> ? kSteps * kRow : 8], B[kLow<kRule> ? kSteps * kRow : 8];
  bf16 A[kSteps * kSquare], Y[kLow<kRule> ? kSteps * kSquare : 8];
  bf16 values[kSteps * (kMaxColumns + 8)];
  float decay[kK];
};

// kWithOutputs: with outputs, from the states before the segments; else the segments alone.
template <Rule kRule, int kK, bool kBackwards, bool kWithOutputs>
struct ChunkPass {
  using Tiles = Stage<kRule, kK>;
  static constexpr int kRow = Tiles::kRow;
  const ChunkedForward& p;
  const PassParams& task;
  int64_t batch, head, segment, chunks;  // chunks of the sequence
  int first;                             // column
  bool is_turn;                          // follows the unit matrix, not the values

  __device__ int64_t place(int64_t i) const { return kBackwards ? chunks - 1 - i : i; }
  __device__ int64_t index(int64_t i) const { return (batch * chunks + place(i)) * p.heads + head; }
  __device__ int64_t start(int64_t i) const { return place(i) * kSteps; }
  __device__ int64_t begin() const { return segment * task.segments.chunks; }
  __device__ int64_t end() const { return min(chunks, begin() + task.segments.chunks); }

  __device__ void fetch(Tiles& to, int64_t i) const {
    if (i < end()) {
      const int64_t at = index(i);
      const Prepared& from = task.pass.tiles;
      auto vectors = [&](bf16* tile, const bf16* of) {
        copy_tile(tile, kRow, of + at * kSteps * kK, kK, kSteps, kK);
      };
      auto squares = [&](bf16* tile, const bf16* of) {
        copy_tile(tile, kSquare, of + at * kSteps * kSteps, kSteps, kSteps, kSteps);
      };
      if constexpr (kWithOutputs || kBackwards) vectors(to.P, from.P);
      if constexpr (kWithOutputs) squares(to.A, from.A);
      if constexpr (kWrites<kRule> && (kWithOutputs || !kBackwards)) vectors(to.K, from.K);
      if constexpr (kLow<kRule>) {
        vectors(to.R, from.R);
        vectors(to.B, from.B);
        squares(to.Y, from.Y);
      }
      if (kWithOutputs || !is_turn) {
        const bf16* values =
            row<bf16>(task.pass.values, p.heads, batch, start(i), head, p.value_dim) + first;
        copy_tile(to.values, kMaxColumns + 8, values, task.pass.values.rows.time_stride, kSteps,
                  int(task.segments.columns), int(min(int64_t{kSteps}, p.time - start(i))));
      }
      for (int n = threadIdx.x * 4; n < kK; n += blockDim.x * 4)
        cp_async_16(to.decay + n, from.decay + at * kK + n);
    }
    cp_async_commit_group();
  }

  // c [16 columns, 16 steps] += state times the rows of a tile.
  __device__ static void read_state(float (&c)[2][4], const uint32_t (&state)[kK / 16][4],
                                    const bf16* tile) {
#pragma unroll
    for (int k = 0; k < kK / 16; ++k) {
      uint32_t b[4];
      load_b_nk(b, PaddedTile<kRow>{tile + k * 16});
      mma_m16n16k16(c[0], c[1], state[k], b);
    }
  }
  // state += x [16 columns, 16 steps] times a tile.
  __device__ static void write_state(float (&state)[kK / 8][4], const uint32_t (&x)[4],
                                     const bf16* tile) {
#pragma unroll
    for (int k = 0; k < kK / 16; ++k) {
      uint32_t b[4];
      load_b_kn(b, PaddedTile<kRow>{tile + k * 16});
      mma_m16n16k16(state[2 * k], state[2 * k + 1], x, b);
    }
  }
  // c += x times a 16 × 16 tile, or its transpose.
  template <bool kTransposed>
  __device__ static void square(float (&c)[2][4], const uint32_t (&x)[4], const bf16* tile) {
    uint32_t b[4];
    if constexpr (kTransposed) load_b_nk(b, PaddedTile<kSquare>{tile});
    else load_b_kn(b, PaddedTile<kSquare>{tile});
    mma_m16n16k16(c[0], c[1], x, b);
  }

  // [16 columns, 16 steps] to `to` [16, stride], of which `steps` are there.
  __device__ static void store(bf16* to, int64_t stride, int steps, const float (&c)[2][4]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int right = 0; right < 2; ++right) {
        uint32_t x = pack_bf16x2(c[half][2 * right], c[half][2 * right + 1]);
        movmatrix_trans(x);
        const int step = half * 8 + lane / 4;
        if (step < steps)
          *reinterpret_cast<uint32_t*>(to + step * stride + right * 8 + lane % 4 * 2) = x;
      }
  }
  __device__ static void store(bf16* to, const uint32_t (&state)[kK / 16][4]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < kK / 16; ++k)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        *reinterpret_cast<uint32_t*>(to + (lane / 4 + e % 2 * 8) * kK + k * 16 + e / 2 * 8 +
                                     lane % 4 * 2) = state[k][e];
  }

  __device__ void chunk(float (&state)[kK / 8][4], const Tiles& t, int64_t i) const {
    const int own = threadIdx.x / 32 * 16, lane = threadIdx.x % 32;
    uint32_t before[kK / 16][4], values[4], low[4];
#pragma unroll
    for (int k = 0; k < kK / 16; ++k) pack_operand(before[k], state[2 * k], state[2 * k + 1]);
    if (kWithOutputs || !is_turn) load_a_km(values, PaddedTile<kMaxColumns + 8>{t.values + own});
    else values[0] = values[1] = values[2] = values[3] = 0;

    float W[2][4] = {}, out[2][4] = {};
    if constexpr (kLow<kRule>) {
      if constexpr (!kBackwards) square<true>(W, values, t.Y);
      read_state(W, before, kBackwards ? t.B : t.R);
      pack_operand(low, W[0], W[1]);
    }
#pragma unroll
    for (int k = 0; k < kK / 8; ++k) {
      const float2 decay = *reinterpret_cast<const float2*>(t.decay + k * 8 + lane % 4 * 2);
      state[k][0] *= decay.x;
      state[k][1] *= decay.y;
      state[k][2] *= decay.x;
      state[k][3] *= decay.y;
    }
    if constexpr (kBackwards || kWrites<kRule>) write_state(state, values, kBackwards ? t.P : t.K);
    if constexpr (kLow<kRule>) write_state(state, low, kBackwards ? t.R : t.B);

    if constexpr (!kWithOutputs) return;
    square<!kBackwards>(out, values, t.A);
    if constexpr (!kBackwards || kWrites<kRule>) read_state(out, before, kBackwards ? t.K : t.P);
    if constexpr (kBackwards && kLow<kRule>) square<false>(out, low, t.Y);

    const int64_t at = index(i), column = first + own;
    const int steps = int(min(int64_t{kSteps}, p.time - start(i)));
    store(task.pass.out + ((batch * p.time + start(i)) * p.heads + head) * p.value_dim + column,
          p.heads * p.value_dim, steps, out);
    if (task.pass.states) store(task.pass.states + (at * p.value_dim + column) * kK, before);
    if (kLow<kRule> && task.pass.W)
      store(task.pass.W + at * kSteps * p.value_dim + column, p.value_dim, kSteps, W);
  }

  // f(the state's numbers of this thread, their place in [K, width]).
  template <class F>
  __device__ void each(float (&state)[kK / 8][4], int64_t width, F&& f) const {
    const int lane = threadIdx.x % 32, column = first + threadIdx.x / 32 * 16 + lane / 4;
    each_element(state, [&](float& x, int k, int e) {
      const int n = k * 8 + lane % 4 * 2 + e % 2, v = column + e / 2 * 8;
      f(x, n * width + v, n == v);
    });
  }

  __device__ void run(Tiles* stages) const {
    for (int i = 0; i < kStages - 1; ++i) fetch(stages[i], begin() + i);
    const int64_t of_head = batch * p.heads + head,
                  of_segment = of_head * task.segments.count + segment;
    float state[kK / 8][4], total[kK / 8][2];
#pragma unroll
    for (int k = 0; k < kK / 8; ++k) total[k][0] = total[k][1] = 1;
    const float* from =
        kWithOutputs && task.starts ? task.starts + of_segment * kK * p.value_dim : nullptr;
    each(state, p.value_dim, [&](float& x, int at, bool unit) {
      x = from ? from[at] : !kWithOutputs && is_turn && unit;
    });
    for (int64_t i = begin(); i < end(); ++i) {
      const int64_t stage = i - begin();
      cp_async_wait_group<kStages - 2>();
      __syncthreads();  // the chunk has arrived, and the one before it is no longer read
      fetch(stages[(stage + kStages - 1) % kStages], i + kStages - 1);
      const Tiles& t = stages[stage % kStages];
      chunk(state, t, i);
      if constexpr (!kWithOutputs && !kLow<kRule>)
#pragma unroll
        for (int k = 0; k < kK / 8; ++k) {
          total[k][0] *= t.decay[k * 8 + threadIdx.x % 4 * 2];
          total[k][1] *= t.decay[k * 8 + threadIdx.x % 4 * 2 + 1];
        }
    }
    if constexpr (kWithOutputs) {
      if (segment + 1 < task.segments.count) return;
      float* to = task.pass.last + of_head * kK * p.value_dim;
      each(state, p.value_dim, [&](float x, int at, bool) { to[at] = x; });
    } else {
      const int64_t width = is_turn ? kK : p.value_dim;
      float* to = (is_turn ? task.turn : task.local) + of_segment * kK * width;
      each(state, width, [&](float x, int at, bool) { to[at] = x; });
      if (!kLow<kRule> && first == 0 && threadIdx.x < 4)
#pragma unroll
        for (int k = 0; k < kK / 8; ++k)
          for (int e = 0; e < 2; ++e)
            task.total[of_segment * kK + k * 8 + threadIdx.x * 2 + e] = total[k][e];
    }
  }
};

template <Rule kRule, int kK, bool kBackwards, bool kWithOutputs>
__global__ void __launch_bounds__(kMaxColumns * 2) pass_kernel(ChunkedForward p, PassParams task) {
  extern __shared__ __align__(16) char memory[];
  const int64_t parts =
      task.segments.parts + (!kWithOutputs && kLow<kRule> ? kK / task.segments.columns : 0);
  const int64_t part = blockIdx.x % parts, segment = blockIdx.x / parts % task.segments.count;
  const int64_t head = blockIdx.x / parts / task.segments.count;
  const bool is_turn = part >= task.segments.parts;
  ChunkPass<kRule, kK, kBackwards, kWithOutputs>{
      p,
      task,
      head / p.heads,
      head % p.heads,
      segment,
      ceil_div(p.time, kSteps),
      int((part - (is_turn ? task.segments.parts : 0)) * task.segments.columns),
      is_turn}
      .run(reinterpret_cast<Stage<kRule, kK>*>(memory));
}

// The state before each segment: S ← turn S + local. A block has 16 columns of one head's state.
template <bool kDiagonal>
__global__ void __launch_bounds__(256) carry_kernel(PassParams task, float* starts, int K, int V) {
  extern __shared__ float state[];  // [K, 16], two of them
  const int64_t head = blockIdx.x / (V / 16);
  const int column = threadIdx.x % 16, v = blockIdx.x % (V / 16) * 16 + column;
  float *now = state, *next = state + K * 16;
  for (int n = threadIdx.x / 16; n < K; n += 16)
    now[n * 16 + column] = task.pass.first ? task.pass.first[(head * K + n) * V + v] : 0;
  for (int64_t s = head * task.segments.count; s < (head + 1) * task.segments.count; ++s) {
    __syncthreads();
    for (int n = threadIdx.x / 16; n < K; n += 16) {
      const int64_t at = (s * K + n) * V + v;
      starts[at] = now[n * 16 + column];
      float sum = task.local[at];
      if constexpr (kDiagonal) {
        sum += task.total[s * K + n] * now[n * 16 + column];
      } else {
        const float4* turn = reinterpret_cast<const float4*>(task.turn + (s * K + n) * K);
#pragma unroll 8
        for (int m = 0; m < K / 4; ++m) {
          const float4 x = turn[m];
          const float* y = now + m * 64 + column;
          sum += x.x * y[0] + x.y * y[16] + x.z * y[32] + x.w * y[48];
        }
      }
      next[n * 16 + column] = sum;
    }
    float* other = now;
    now = next;
    next = other;
  }
}

// How the sequences are cut, and the memory of the segments' states.
struct Plan {
  PassParams task;
  float* starts;
  Plan(const ChunkedForward& p, WorkspaceArena& arena)
      : task{.segments = Segments(p, kSteps, p.key_dim)} {
    const int64_t count = task.segments.count, cut = count > 1 ? p.batch * p.heads * count : 0,
                  K = p.key_dim, V = p.value_dim;
    task.local = arena.take<float>(cut * K * V);
    task.turn = arena.take<float>(p.rule == Rule::gla ? 0 : cut * K * K);
    task.total = arena.take<float>(p.rule == Rule::gla ? cut * K : 0);
    starts = arena.take<float>(cut * K * V);
  }
};

template <Rule kRule, int kK, bool kBackwards>
void run(const ChunkedForward& p, Plan plan, Stream stream) {
  PassParams& task = plan.task;
  const int64_t heads = p.batch * p.heads * task.segments.count;
  constexpr size_t bytes = kStages * sizeof(Stage<kRule, kK>);
  task.starts = task.pass.first;
  if (task.segments.count > 1) {
    const int64_t parts = task.segments.parts + (kLow<kRule> ? kK / task.segments.columns : 0);
    launch_kernel(pass_kernel<kRule, kK, kBackwards, false>, unsigned(heads * parts),
                  unsigned(task.segments.columns * 2), bytes, stream, p, task);
    launch_kernel(carry_kernel<!kLow<kRule>>, unsigned(p.batch * p.heads * (p.value_dim / 16)), 256,
                  size_t(kK) * 32 * sizeof(float), stream, task, plan.starts, kK, int(p.value_dim));
    task.starts = plan.starts;
  }
  launch_kernel(pass_kernel<kRule, kK, kBackwards, true>, unsigned(heads * task.segments.parts),
                unsigned(task.segments.columns * 2), bytes, stream, p, task);
}

}  // namespace

Segments::Segments(const ChunkedForward& p, int64_t steps, int64_t width) {
  constexpr int64_t kLeastSteps = 256;  // of a segment
  const int64_t all = ceil_div(p.time, steps);
  columns = kMaxColumns;
  while (p.value_dim % columns || width % columns) columns -= 16;
  parts = p.value_dim / columns;
  const int64_t blocks = p.batch * p.heads * parts;
  const int64_t busy = 2 * sm_count();  // two blocks per SM keep the GPU busy
  const int64_t wanted = std::min(ceil_div(busy, blocks), all * steps / kLeastSteps);
  count = blocks >= busy / 2 ? 1 : std::max<int64_t>(1, wanted);
  chunks = ceil_div(all, count);
  count = ceil_div(all, chunks);
}

size_t pass_bytes(const ChunkedForward& p) { return workspace_size<Plan>(p); }

void pass(const ChunkedForward& p, const Pass& work, void* workspace, Stream stream) {
  auto plan = workspace_at<Plan>(workspace, p);
  plan.task.pass = work;
  with_case(p, [&](auto which, auto size) {
    if (work.backwards) run<which.kRule, size.value, true>(p, plan, stream);
    else run<which.kRule, size.value, false>(p, plan, stream);
  });
}

}  // namespace assay::ops::cuda::chunks
