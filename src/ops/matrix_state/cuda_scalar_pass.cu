// The passes over chunks of 64 steps with one decay a step and head. Against time a pass is the
// same pass: rows in reverse, q and k exchanged, dout for v. A warp has 16 columns of a head's
// state in registers, transposed.
#include "ops/cuda/fragment.cuh"
#include "ops/cuda/reduce.cuh"
#include "ops/matrix_state/cuda_scalar.cuh"

namespace assay::ops::cuda::scalar {
namespace {

constexpr int kSquares = 10;  // of 16 × 16, on and below the diagonal of a chunk's scores

// One warp per chunk and head, two steps per lane.
__global__ void __launch_bounds__(256) sums_kernel(ChunkedForward p, Sums sums) {
  const int64_t index = blockIdx.x * int64_t{8} + threadIdx.x / 32,
                chunks = ceil_div(p.time, kChunk);
  if (index >= p.batch * chunks * p.heads) return;
  const int64_t h = index % p.heads, n = index / p.heads % chunks, b = index / p.heads / chunks;
  const int lane = threadIdx.x % 32;
  float decay[2], weight[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int64_t t = n * kChunk + lane * 2 + e;
    decay[e] = 0;
    weight[e] = 1;
    if (t >= p.time) continue;
    if (p.log_decay.rows.data) decay[e] = row<float>(p.log_decay, p.heads, b, t, h, 1)[0] * kLog2e;
    if (decay[e] < kLogDecayFloor) decay[e] = kLogDecayFloor;  // NaN stays
    if (p.beta.rows.data) weight[e] = row<float>(p.beta, p.heads, b, t, h, 1)[0];
  }
  const float before = warp_inclusive_scan(decay[0] + decay[1]);
  const float first = __shfl_up_sync(~0u, before, 1);
  decay[0] += lane > 0 ? first : 0;
  reinterpret_cast<float2*>(sums.decays + index * kChunk)[lane] = {decay[0], decay[0] + decay[1]};
  reinterpret_cast<float2*>(sums.weights + index * kChunk)[lane] = {weight[0], weight[1]};
}

// What the blocks of one launch do: segment by segment of a sequence, some columns of
// the state each.
struct PassParams {
  bool backwards, each;  // `each`: segments end in `last` one by one, and start with zeros
  HeadView reader, writer, values;  // q, k, v; backwards k, q, dout
  Sums sums;
  Segments segments;
  const float* starts;  // in  [B, H, segments, K, V]; null: zeros
  // out [B, T, H, V]; the state before each chunk, transposed; null: not wanted
  bf16 *out, *states;
  // out [B, H, K, V], or with `each` [B, H, segments, K, V]; and [B, H, segments] log₂ decays
  float *last, *total;
};

template <int kK, bool kOutputs>
struct Tiles {
  static constexpr int kRow = kK + 8;
  bf16 reader[kOutputs ? kChunk * kRow : 8], writer[kChunk * kRow], values[kChunk * kColumnStride];
  float decays[kChunk], weights[kChunk];
};
template <int kK, bool kOutputs>
struct ScalarPassSmem {
  static constexpr int kStages = kK > 128 ? 1 : 2;  // for two blocks per SM
  Tiles<kK, kOutputs> stages[kStages];
  bf16 scores[kOutputs ? kChunk * kChunkStride : 8];
  // what scales a row that reads the state before the chunk, and one written to it
  float read[kChunk], write[kChunk];
};

template <int kK, bool kOutputs>
struct ChunkPass {
  using T = Tiles<kK, kOutputs>;
  using S = ScalarPassSmem<kK, kOutputs>;
  static constexpr int kRow = T::kRow;
  const ChunkedForward& p;
  const PassParams& task;
  int64_t batch, head, segment, chunks;  // chunks of the sequence
  int first;                             // column
  S& s;

  __device__ int64_t place(int64_t i) const { return task.backwards ? chunks - 1 - i : i; }
  __device__ int64_t index(int64_t i) const { return (batch * chunks + place(i)) * p.heads + head; }
  __device__ int steps(int64_t i) const {
    return int(min(int64_t{kChunk}, p.time - place(i) * kChunk));
  }
  __device__ int64_t begin() const { return segment * task.segments.chunks; }
  __device__ int64_t end() const { return min(chunks, begin() + task.segments.chunks); }
  // of the chunk
  __device__ int step(int row) const { return task.backwards ? kChunk - 1 - row : row; }

  __device__ void fetch_rows(bf16* to, int stride, const HeadView& x, int64_t i, int64_t dim,
                             int from, int width) const {
    const bf16* rows = row<bf16>(x, p.heads, batch, place(i) * kChunk, head, dim) + from;
    const int there = steps(i), pieces = width / 8;
    for (int at = threadIdx.x; at < kChunk * pieces; at += blockDim.x) {
      const int y = at / pieces, n = at % pieces * 8, t = step(y);
      cp_async_16(to + y * stride + n, rows + min(t, there - 1) * x.rows.time_stride + n,
                  t < there);
    }
  }
  __device__ void fetch(T& to, int64_t i) const {
    if (i < end()) {
      if constexpr (kOutputs) fetch_rows(to.reader, kRow, task.reader, i, kK, 0, kK);
      fetch_rows(to.writer, kRow, task.writer, i, kK, 0, kK);
      fetch_rows(to.values, kColumnStride, task.values, i, p.value_dim, first,
                 int(task.segments.columns));
      for (int n = threadIdx.x * 4; n < 2 * kChunk; n += blockDim.x * 4)
        if (n < kChunk) cp_async_16(to.decays + n, task.sums.decays + index(i) * kChunk + n);
        else
          cp_async_16(to.weights + n - kChunk, task.sums.weights + index(i) * kChunk + n - kChunk);
    }
    cp_async_commit_group();
  }

  __device__ void factors(const T& t) const {
    for (int y = threadIdx.x; y < kChunk; y += blockDim.x) {
      const float sum = t.decays[step(y)], weight = t.weights[step(y)];
      const float start = ex2_approx(sum) * p.scale,
                  end = ex2_approx(t.decays[kChunk - 1] - sum) * weight;
      s.read[y] = task.backwards ? end : start;
      s.write[y] = task.backwards ? start : end;
    }
  }
  // reader writerᵀ with the decays between, on and below the diagonal; three squares of 16 × 16 a
  // warp at once.
  __device__ void scores(const T& t) const {
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const float skip = p.skip ? p.skip[head] : 0;
    for (int square = threadIdx.x / 32; square < kSquares; square += 3 * warps) {
      float c[3][2][4] = {};
      int down[3], right[3];
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        const int id = min(square + i * warps, kSquares - 1), y = (id > 0) + (id > 2) + (id > 5);
        down[i] = y * 16;
        right[i] = (id - y * (y + 1) / 2) * 16;
      }
#pragma unroll
      for (int k = 0; k < kK; k += 16)
#pragma unroll
        for (int i = 0; i < 3; ++i) {
          uint32_t a[4], b[4];
          load_a_mk(a, PaddedTile<kRow>{t.reader + down[i] * kRow + k});
          load_b_nk(b, PaddedTile<kRow>{t.writer + right[i] * kRow + k});
          mma_m16n16k16(c[i][0], c[i][1], a, b);
        }
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        if (square + i * warps >= kSquares) break;
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int below = 0; below < 2; ++below) {
            const int y = down[i] + below * 8 + lane / 4, x = right[i] + half * 8 + lane % 4 * 2;
            float score[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const int late = step(task.backwards ? x + e : y),
                        early = step(task.backwards ? y : x + e);
              score[e] = c[i][half][below * 2 + e] * ex2_approx(t.decays[late] - t.decays[early]) *
                         t.weights[early] * p.scale;
              if (y <= x + e) score[e] = y == x + e ? score[e] + skip : 0;
            }
            *reinterpret_cast<uint32_t*>(s.scores + y * kChunkStride + x) =
                pack_bf16x2(score[0], score[1]);
          }
      }
    }
  }

  // out [16 columns, 64 rows] = values scores + the state read.
  __device__ void outputs(const float (&state)[kK / 8][4], const uint32_t (&values)[4][4],
                          const T& t, int64_t i) const {
    const int lane = threadIdx.x % 32;
    float out[8][4] = {};
#pragma unroll
    for (int k = 0; k < kK / 16; ++k) {
      uint32_t a[4], b[4];
      pack_operand(a, state[2 * k], state[2 * k + 1]);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        load_b_nk(b, PaddedTile<kRow>{t.reader + n * 16 * kRow + k * 16});
        mma_m16n16k16(out[2 * n], out[2 * n + 1], a, b);
      }
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 read = *reinterpret_cast<const float2*>(s.read + n * 8 + lane % 4 * 2);
      out[n][0] *= read.x;
      out[n][1] *= read.y;
      out[n][2] *= read.x;
      out[n][3] *= read.y;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int n = j; n < 4; ++n) {
        uint32_t b[4];
        load_b_nk(b, PaddedTile<kChunkStride>{s.scores + n * 16 * kChunkStride + j * 16});
        mma_m16n16k16(out[2 * n], out[2 * n + 1], values[j], b);
      }
    store(out, i);
  }
  // Lanes of a quad have 32 neighbouring bytes of a row.
  __device__ void store(const float (&out)[8][4], int64_t i) const {
    const int lane = threadIdx.x % 32, there = steps(i);
    const bool odd = lane % 2;
    bf16* to = task.out + ((batch * p.time + place(i) * kChunk) * p.heads + head) * p.value_dim +
               first + threadIdx.x / 32 * 16 + odd * 8 + (lane & 2) * 2;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      uint32_t low = pack_bf16x2(out[n][0], out[n][1]), high = pack_bf16x2(out[n][2], out[n][3]);
      movmatrix_trans(low);
      movmatrix_trans(high);
      const uint32_t other = __shfl_xor_sync(~0u, odd ? low : high, 1);
      const int t = step(n * 8 + lane / 4);
      if (t < there)
        *reinterpret_cast<uint2*>(to + t * p.heads * p.value_dim) =
            odd ? uint2{other, high} : uint2{low, other};
    }
  }
  // The state, bf16: the lanes of a quad exchange their pairs of numbers, and have 16 bytes of
  // a row each.
  __device__ void keep(const float (&state)[kK / 8][4], int64_t i) const {
    const int lane = threadIdx.x % 32;
    const bool odd = lane & 1, high = lane & 2;
    bf16* to = task.states +
               (index(i) * p.value_dim + first + threadIdx.x / 32 * 16 + lane / 4) * kK +
               lane % 4 * 8;
#pragma unroll
    for (int k = 0; k < kK / 8; k += 4)
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        uint32_t x[4], y[4];
#pragma unroll
        for (int e = 0; e < 4; ++e)
          x[e] = pack_bf16x2(state[k + e][2 * below], state[k + e][2 * below + 1]);
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
          const uint32_t other = __shfl_xor_sync(~0u, odd ? x[e] : x[e + 1], 1);
          y[e] = odd ? other : x[e];
          y[e + 1] = odd ? x[e + 1] : other;
        }
        const uint32_t left = __shfl_xor_sync(~0u, high ? y[0] : y[2], 2);
        const uint32_t right = __shfl_xor_sync(~0u, high ? y[1] : y[3], 2);
        *reinterpret_cast<uint4*>(to + below * 8 * kK + k * 8) =
            high ? uint4{left, right, y[2], y[3]} : uint4{y[0], y[1], left, right};
      }
  }
  // state ← decay state + what the chunk writes.
  __device__ void update(float (&state)[kK / 8][4], uint32_t (&values)[4][4], const T& t) const {
    const float total = ex2_approx(t.decays[kChunk - 1]);
    each_element(state, [&](float& x, int, int) { x *= total; });
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 write =
            *reinterpret_cast<const float2*>(s.write + j * 16 + e / 2 * 8 + threadIdx.x % 4 * 2);
        const float2 x = unpack_bf16x2(values[j][e]);
        values[j][e] = pack_bf16x2(x.x * write.x, x.y * write.y);
      }
#pragma unroll
      for (int k = 0; k < kK / 16; ++k) {
        uint32_t b[4];
        load_b_kn(b, PaddedTile<kRow>{t.writer + j * 16 * kRow + k * 16});
        mma_m16n16k16(state[2 * k], state[2 * k + 1], values[j], b);
      }
    }
  }

  // f(the state's numbers of this thread, their place in [K, V]).
  template <class F>
  __device__ void each(float (&state)[kK / 8][4], F&& f) const {
    const int lane = threadIdx.x % 32, column = first + threadIdx.x / 32 * 16 + lane / 4;
    each_element(state, [&](float& x, int k, int e) {
      f(x, (k * 8 + lane % 4 * 2 + e % 2) * p.value_dim + column + e / 2 * 8);
    });
  }

  __device__ void run() const {
    const int64_t of_head = batch * p.heads + head,
                  of_segment = of_head * task.segments.count + segment;
    const int64_t size = kK * p.value_dim;
    fetch(s.stages[0], begin());
    float state[kK / 8][4], total = 0;
    const float* from = task.starts ? task.starts + of_segment * size : nullptr;
    each(state, [&](float& x, int64_t at) { x = from ? from[at] : 0; });
    for (int64_t i = begin(); i < end(); ++i) {
      const T& t = s.stages[(i - begin()) % S::kStages];
      cp_async_wait_group<0>();
      __syncthreads();  // the chunk has arrived, and the one before it is no longer read
      if (S::kStages > 1) fetch(s.stages[(i - begin() + 1) % S::kStages], i + 1);
      factors(t);
      if constexpr (kOutputs) scores(t);
      if (task.states) keep(state, i);
      __syncthreads();
      uint32_t values[4][4];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        load_a_km(values[j], PaddedTile<kColumnStride>{t.values + j * 16 * kColumnStride +
                                                       threadIdx.x / 32 * 16});
      if constexpr (kOutputs) outputs(state, values, t, i);
      update(state, values, t);
      total += t.decays[kChunk - 1];
      if (S::kStages > 1) continue;
      __syncthreads();
      fetch(s.stages[0], i + 1);
    }
    if (task.each && first == 0 && threadIdx.x == 0) task.total[of_segment] = total;
    if (!task.last || (!task.each && segment + 1 < task.segments.count)) return;
    float* to = task.last + (task.each ? of_segment : of_head) * size;
    each(state, [&](float x, int64_t at) { to[at] = x; });
  }
};

template <int kK, bool kOutputs>
__global__ void __launch_bounds__(kColumns * 2, kOutputs || kK > 128 ? 2 : 4)
    pass_kernel(ChunkedForward p, PassParams task) {
  extern __shared__ __align__(16) char memory[];
  const int64_t part = blockIdx.x % task.segments.parts, rest = blockIdx.x / task.segments.parts;
  const int64_t segment = rest % task.segments.count, head = rest / task.segments.count;
  ChunkPass<kK, kOutputs>{p,
                          task,
                          head / p.heads,
                          head % p.heads,
                          segment,
                          ceil_div(p.time, kChunk),
                          int(part * task.segments.columns),
                          *reinterpret_cast<ScalarPassSmem<kK, kOutputs>*>(memory)}
      .run();
}

// The state before each segment: S ← decay S + local.
__global__ void __launch_bounds__(256)
    carry_kernel(const float* first, const float* local, const float* total, float* starts,
                 int64_t segments, int64_t size) {
  const int64_t head = blockIdx.y, at = blockIdx.x * int64_t{256} + threadIdx.x;
  if (at >= size) return;
  float state = first ? first[head * size + at] : 0;
#pragma unroll 4
  for (int64_t s = head * segments; s < (head + 1) * segments; ++s) {
    const float own = local[s * size + at];
    starts[s * size + at] = state;
    state = ex2_approx(total[s]) * state + own;
  }
}

template <bool kOutputs>
void launch(const ChunkedForward& p, const PassParams& task, Stream stream) {
  with_key_dim(p.key_dim, [&](auto size) {
    constexpr int kK = size.value;
    const int64_t blocks = p.batch * p.heads * task.segments.count * task.segments.parts;
    launch_kernel(pass_kernel<kK, kOutputs>, unsigned(blocks), unsigned(task.segments.columns * 2),
                  sizeof(ScalarPassSmem<kK, kOutputs>), stream, p, task);
  });
}

Segments segments_of(const ChunkedForward& p) { return Segments(p, kChunk, p.value_dim); }

struct SegmentWorkspace {
  float *local, *total, *starts;
  SegmentWorkspace(const ChunkedForward& p, WorkspaceArena& arena) {
    const int64_t count = segments_of(p).count, cut = count > 1 ? p.batch * p.heads * count : 0;
    local = arena.take<float>(cut * p.key_dim * p.value_dim);
    total = arena.take<float>(cut);
    starts = arena.take<float>(cut * p.key_dim * p.value_dim);
  }
};

// Where there are several segments: what each makes of zeros, and from it the states
// they start from.
const float* find_starts(const ChunkedForward& p, PassParams task, const float* first,
                         float* starts, const SegmentWorkspace& scratch, Stream stream) {
  if (task.segments.count == 1) return first;
  task.each = true;
  task.out = nullptr;
  task.states = nullptr;
  task.last = scratch.local;
  task.total = scratch.total;
  launch<false>(p, task, stream);
  const int64_t size = p.key_dim * p.value_dim;
  launch_kernel(carry_kernel, dim3(unsigned(ceil_div(size, 256)), unsigned(p.batch * p.heads)), 256,
                0, stream, first, scratch.local, scratch.total, starts, task.segments.count, size);
  return starts;
}

void find_sums(const ChunkedForward& p, const Sums& sums, Stream stream) {
  const int64_t count = p.batch * chunks_of(p) * p.heads;
  launch_kernel(sums_kernel, unsigned(ceil_div(count, 8)), 256, 0, stream, p, sums);
}

}  // namespace

size_t starts_bytes(const ChunkedForward& p) {
  const int64_t segments = segments_of(p).count;
  return segments > 1
             ? size_t(p.batch * p.heads * segments * p.key_dim * p.value_dim) * sizeof(float)
             : 0;
}
size_t pass_bytes(const ChunkedForward& p) { return workspace_size<SegmentWorkspace>(p); }

void forward(const ChunkedForward& p, const Sums& sums, float* starts, void* workspace,
             Stream stream) {
  const auto scratch = workspace_at<SegmentWorkspace>(workspace, p);
  find_sums(p, sums, stream);
  PassParams task{false, false, p.q, p.k, p.v, sums, segments_of(p)};
  task.starts = find_starts(p, task, p.initial_state, starts, scratch, stream);
  task.out = static_cast<bf16*>(p.out);
  task.last = p.final_state;
  launch<true>(p, task, stream);
}

void backward(const ChunkedBackward& bwd, const float* starts, const States& states,
              void* workspace, Stream stream) {
  const ChunkedForward& p = bwd.forward;
  const auto scratch = workspace_at<SegmentWorkspace>(workspace, p);
  find_sums(p, states.sums, stream);
  PassParams again{false, false, p.q, p.k, p.v, states.sums, segments_of(p)};
  again.starts = again.segments.count > 1 ? starts : p.initial_state;
  again.states = states.before;
  launch<false>(p, again, stream);
  PassParams task{true, false, p.k, p.q, bwd.dout, states.sums, segments_of(p)};
  task.starts = find_starts(p, task, bwd.dfinal_state, scratch.starts, scratch, stream);
  task.out = static_cast<bf16*>(bwd.dv);
  task.states = states.dafter;
  task.last = bwd.dinitial_state;
  launch<true>(p, task, stream);
}

}  // namespace assay::ops::cuda::scalar
