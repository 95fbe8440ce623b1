// The passes over chunks of 64 steps with one decay per step and head. Against time a pass is the
// same pass: rows in reverse, q and k exchanged, dout for v.
#include "ops/cuda/reduce.cuh"
#include "ops/matrix_state/cuda_pass.cuh"

namespace assay::ops::cuda::chunks {
namespace {

constexpr int kSquares = 10;  // of 16 × 16, on and below the diagonal of a chunk's scores

// One warp per chunk and head, two steps per lane.
__global__ void __launch_bounds__(256) gates_kernel(ChunkedForward p, ScalarGates* gates) {
  const unsigned heads = p.heads, chunks = ceil_div(p.time, kScalarSteps),
                 index = blockIdx.x * 8 + threadIdx.x / 32, h = index % heads,
                 n = index / heads % chunks, b = index / heads / chunks, lane = threadIdx.x % 32;
  if (b >= p.batch) return;
  float decay[2], weight[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int64_t t = n * int64_t{kScalarSteps} + lane * 2 + e;
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
  ScalarGates& to = gates[index];
  reinterpret_cast<float2*>(to.decays)[lane] = {decay[0], decay[0] + decay[1]};
  reinterpret_cast<float2*>(to.weights)[lane] = {weight[0], weight[1]};
}

template <int kK, bool kOutputs>
struct ScalarPass : Walk {
  static constexpr int kChunk = kScalarSteps, kBlocks = kOutputs || kK > 128 ? 2 : 4, kRow = kK + 8;
  static constexpr bool kTurns = false;
  struct Stage {
    Tile<kOutputs, kChunk * kRow> reader;
    bf16 writer[kChunk * kRow], values[kChunk * kColumnStride];
    ScalarGates gates;
  };
  struct Smem {
    Stage stages[kK > 128 ? 1 : 2];  // for two blocks per SM
    Tile<kOutputs, kChunk * kScalarSquare> scores;
    // what scales a row that reads the state before the chunk, and one written to it
    float read[kChunk], write[kChunk];
  };

  // of the chunk
  __device__ int step(int row) const { return task.backwards ? kChunk - 1 - row : row; }

  __device__ void fetch(Stage& to, int i) const {
    auto rows = [&](bf16* tile, int stride, const HeadView& x, int64_t dim, int from, int width) {
      copy_tile(tile, stride, row<bf16>(x, p.heads, batch, start(i), head, dim) + from,
                x.rows.time_stride, kChunk, width, steps(i), kAll, task.backwards);
    };
    if constexpr (kOutputs) rows(to.reader, kRow, task.reader, kK, 0, kK);
    rows(to.writer, kRow, task.writer, kK, 0, kK);
    rows(to.values, kColumnStride, task.values, p.value_dim, first, task.segments.columns);
    copy_floats(to.gates.decays, task.tiles.gates[index(i)].decays, 2 * kChunk);
  }

  __device__ void factors(Smem& s, const Stage& t) const {
    for (int y = threadIdx.x; y < kChunk; y += blockDim.x) {
      const float sum = t.gates.decays[step(y)], weight = t.gates.weights[step(y)];
      const float start = ex2_approx(sum) * p.scale,
                  end = ex2_approx(t.gates.decays[kChunk - 1] - sum) * weight;
      s.read[y] = task.backwards ? end : start;
      s.write[y] = task.backwards ? start : end;
    }
  }
  // reader writerᵀ with the decays between, on and below the diagonal; three squares of 16 × 16 a
  // warp at once.
  __device__ void scores(Smem& s, const Stage& t) const {
    const int warps = blockDim.x / 32;
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
          uint32_t a[4];
          load_a_mk(a, PaddedTile<kRow>{t.reader}, down[i], k / 8);
          multiply_nk(c[i], a, PaddedTile<kRow>{t.writer}, right[i], k / 8);
        }
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        if (square + i * warps >= kSquares) break;
        each_element(c[i], [&](float& score, int n, int e) {
          const int y = down[i] + e / 2 * 8 + lane / 4, x = right[i] + n * 8 + lane % 4 * 2 + e % 2;
          const int late = step(task.backwards ? x : y), early = step(task.backwards ? y : x);
          score = score * ex2_approx(t.gates.decays[late] - t.gates.decays[early]) *
                  t.gates.weights[early] * p.scale;
          if (y <= x) score = y == x ? score + skip : 0;
        });
        bf16* to = s.scores + down[i] * kScalarSquare + right[i];
        store_fragment(to, kScalarSquare, c[i][0]);
        store_fragment(to + 8, kScalarSquare, c[i][1]);
      }
    }
  }

  // out [16 columns, 64 rows] = values scores + the state read.
  __device__ void outputs(const float (&state)[kK / 8][4], const uint32_t (&values)[4][4],
                          const Smem& s, const Stage& t, int i) const {
    uint32_t before[kK / 16][4];
    float out[8][4] = {};
    pack_operand(before, state);
    read_state(out, before, t.reader);
    scale_columns(out, s.read);
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int n = j; n < 4; ++n) {
        uint32_t b[4];
        load_b_nk(b, PaddedTile<kScalarSquare>{s.scores}, n * 16, j * 2);
        mma_m16n16k16(out[2 * n], out[2 * n + 1], values[j], b);
      }
    store_out(i, task.backwards, out);
  }
  // state ← decay state + what the chunk writes.
  __device__ void update(float (&state)[kK / 8][4], uint32_t (&values)[4][4], const Smem& s,
                         const Stage& t) const {
    const float total = ex2_approx(t.gates.decays[kChunk - 1]);
    each_element(state, [&](float& x, int, int) { x *= total; });
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 write =
            *reinterpret_cast<const float2*>(s.write + j * 16 + e / 2 * 8 + lane % 4 * 2);
        const float2 x = unpack_bf16x2(values[j][e]);
        values[j][e] = pack_bf16x2(x.x * write.x, x.y * write.y);
      }
      multiply_kn(state, values[j], PaddedTile<kRow>{t.writer}, j * 16);
    }
  }

  __device__ void run(Smem& s) const {
    float state[kK / 8][4], total = 0;
    load(state, task.starts);
    with_stages(
        s.stages, begin(), end(), [&](Stage& to, int i) { fetch(to, i); },
        [&](const Stage& t, int i) {
          factors(s, t);
          if constexpr (kOutputs) scores(s, t);
          keep(state, i);
          __syncthreads();
          uint32_t values[4][4];
#pragma unroll
          for (int j = 0; j < 4; ++j)
            load_a_km(values[j], PaddedTile<kColumnStride>{t.values + own}, j * 16);
          if constexpr (kOutputs) outputs(state, values, s, t, i);
          update(state, values, s, t);
          total += t.gates.decays[kChunk - 1];
        });
    store(state);
    if (task.alone && first == 0 && threadIdx.x == 0) task.total[of_segment] = ex2_approx(total);
  }
};

}  // namespace

void scalar_prepare(const ChunkedForward& p, const Prepared& tiles, Stream stream) {
  launch_kernel(gates_kernel, unsigned(ceil_div(chunk_count(p) * p.heads, 8)), 256, 0, stream, p,
                tiles.gates);
}
void scalar_pass(const ChunkedForward& p, const Pass& task, Stream stream) {
  with_key_dim(p.key_dim, [&](auto size) {
    if (task.out) launch_pass<ScalarPass<size.value, true>>(p, task, stream);
    else launch_pass<ScalarPass<size.value, false>>(p, task, stream);
  });
}

}  // namespace assay::ops::cuda::chunks
