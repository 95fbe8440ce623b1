// Gradients of q, k, the decays and the weights of every chunk of 64 steps, for all chunks at once.
// One block per chunk and the heads that share q and k, whose gradients are added in its registers.
#include <numeric>

#include "ops/cuda/reduce.cuh"
#include "ops/matrix_state/cuda_chunks.cuh"

namespace assay::ops::cuda::chunks {
namespace {

constexpr int kWarps = 8;

// A warp has 16 rows, and half of the columns: of the scores 32, of q and k kK / 2.
template <int kK>
struct ScalarGradients {
  static constexpr int kRow = kK + 8, kPairs = kK / 32;
  // Heads whose gates wait until every warp has one: `gates` is a chain of latencies.
  static constexpr int kDeferred = kK > 64 ? kWarps : 1;
  // Up to 64 columns of one head: the state and its gradient, transposed.
  struct Item {
    bf16 before[kMaxColumns * kRow], dafter[kMaxColumns * kRow];
    bf16 dout[kScalarSteps * kColumnStride], values[kScalarSteps * kColumnStride];
    ScalarGates gates;
  };
  // Of a head, over rows and columns of what each pair of steps contributes.
  struct Sums {
    float by_row[2][kScalarSteps], by_column[4][kScalarSteps], written[2][kScalarSteps],
        own[kScalarSteps], direct[kScalarSteps], whole[kWarps];
    ScalarGates gates;
  };
  struct Smem {
    // mixed: gradients of q kᵀ
    bf16 q[kScalarSteps * kRow], k[kScalarSteps * kRow], mixed[kScalarSteps * kScalarSquare];
    Sums sums[kDeferred];
    Item items[kK <= 128 ? 2 : 1];
  };
  const ChunkedBackward& g;
  const Pass& task;
  int heads;  // of the block
  Smem& s;
  const ChunkedForward& p = g.forward;
  unsigned chunks = ceil_div(p.time, kScalarSteps), groups = unsigned(p.heads) / heads,
           index = blockIdx.x / groups, first_head = blockIdx.x % groups * heads;  // b chunks + n
  int there = int(min(int64_t{kScalarSteps}, p.time - start()));  // steps of the chunk
  int lane = threadIdx.x % 32, down = threadIdx.x / 32 % 4 * 16, half = threadIdx.x / 128;
  float raw[4][4] = {}, dq[kK / 16][4] = {}, dk[kK / 16][4] = {};  // raw: q kᵀ
  float scores[4][4], read[2], written[2], whole;                  // of a head
  // of the rows lane / 4 and that + 8
  float early[2], late[2];

  __device__ int64_t batch() const { return index / chunks; }
  __device__ int64_t start() const { return index % chunks * int64_t{kScalarSteps}; }
  __device__ int row_of(int below) const { return down + below * 8 + lane / 4; }
  __device__ bool wants() const { return g.dlog_decay || g.dbeta || g.dskip; }

  __device__ void fetch(Item& to, int64_t head, int64_t first) {
    const int columns = int(min(int64_t{kMaxColumns}, p.value_dim - first));
    const int64_t at = index * p.heads + head, state = (at * p.value_dim + first) * kK;
    copy_chunk_rows<kK, 32 * kWarps>(to.before, task.tiles.before + state, kK, columns);
    copy_chunk_rows<kK, 32 * kWarps>(to.dafter, task.states + state, kK, columns);
    auto rows = [&](bf16* tile, const HeadView& x) {
      copy_chunk_rows<kMaxColumns, 32 * kWarps>(
          tile, row<bf16>(x, p.heads, batch(), start(), head, p.value_dim) + first,
          x.rows.time_stride, there, columns);
    };
    rows(to.dout, g.dout);
    rows(to.values, p.v);
    copy_floats(to.gates.decays, task.tiles.gates[at].decays, 2 * kScalarSteps);
  }

  __device__ void begin(const Item& x) {
    whole = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float sum = x.gates.decays[row_of(i)];
      early[i] = ex2_approx(sum) * p.scale;
      late[i] = ex2_approx(x.gates.decays[kScalarSteps - 1] - sum);
      read[i] = written[i] = 0;
    }
    each_element(scores, [](float& x, int, int) { x = 0; });
  }

  // Through the state: sum += factor x stateᵀ, and dots += the rows of `other` times x stateᵀ.
  __device__ void through_state(float (&sum)[kK / 16][4], const uint32_t (&x)[4][4],
                                const bf16* state, const float (&factor)[2], const bf16* other,
                                float (&dots)[2]) const {
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      const int column = half * (kK / 2) + pair * 16;
      float c[2][4] = {};
#pragma unroll
      for (int v = 0; v < 4; ++v) multiply_kn(c, x[v], PaddedTile<kRow>{state}, v * 16, column / 8);
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float2 y = load_bf16x2(other + row_of(i) * kRow + column + n * 8 + lane % 4 * 2);
          dots[i] += c[n][2 * i] * y.x + c[n][2 * i + 1] * y.y;
          sum[2 * pair + n][2 * i] += factor[i] * c[n][2 * i];
          sum[2 * pair + n][2 * i + 1] += factor[i] * c[n][2 * i + 1];
        }
    }
  }
  __device__ void add(const Item& x) {
    uint32_t dout[4][4], values[4][4];
#pragma unroll
    for (int v = 0; v < 4; ++v) {
      load_a_mk(dout[v], PaddedTile<kColumnStride>{x.dout}, down, v * 2);
      load_a_mk(values[v], PaddedTile<kColumnStride>{x.values}, down, v * 2);
      multiply_nk(scores, dout[v], PaddedTile<kColumnStride>{x.values}, half * 32, v * 2);
    }
    through_state(dq, dout, x.before, early, s.q, read);
    const float ends[2]{late[0] * x.gates.weights[row_of(0)], late[1] * x.gates.weights[row_of(1)]};
    through_state(dk, values, x.dafter, ends, s.k, written);
    if (wants()) whole += inner_product(x);
  }
  // The part of this thread in ⟨state, gradient⟩: the diagonal of 16 rows of one times those of the
  // other, which takes a tenth of the instructions of fp32 arithmetic.
  __device__ float inner_product(const Item& x) const {
    float c[2][4] = {};
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      uint32_t a[4];
      const int vector = half * (kK / 16) + k * 2;
      load_a_mk(a, PaddedTile<kRow>{x.before}, down, vector);
      multiply_nk(c, a, PaddedTile<kRow>{x.dafter}, down, vector);
    }
    const int below = lane / 4 - lane % 4 * 2;
    return below == 0 ? c[0][0] + c[1][2] : below == 1 ? c[0][1] + c[1][3] : 0;
  }

  // From the gradients of the scores to those of q kᵀ, and sums over rows and columns of what
  // each pair contributes.
  __device__ void mix(const Item& x, Sums& sum) {
    float rows[2], columns[4][2] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      rows[i] = early[i] * read[i];
      written[i] *= late[i];
    }
    each_element(scores, [&](float& score, int n, int e) {
      const int t = row_of(e / 2), j = half * 32 + n * 8 + lane % 4 * 2 + e % 2;
      const float d = score, weight = x.gates.weights[j],
                  between = ex2_approx(x.gates.decays[t] - x.gates.decays[j]) * p.scale;
      const float y = t >= j ? d * between : 0, product = t >= j ? y * raw[n][e] : 0;
      score = y * weight;
      if (t == j) {
        sum.own[t] = product;
        sum.direct[t] = d;
      } else {
        rows[e / 2] += product * weight;
        columns[n][e % 2] += product;
      }
    });
#pragma unroll
    for (int n = 0; n < 4; ++n)
      store_fragment(s.mixed + down * kScalarSquare + half * 32 + n * 8, kScalarSquare, scores[n]);
    if (!wants()) return;
    if (threadIdx.x < kScalarSteps) {
      sum.gates.decays[threadIdx.x] = x.gates.decays[threadIdx.x];
      sum.gates.weights[threadIdx.x] = x.gates.weights[threadIdx.x];
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sums[2] = {rows[i], written[i]};
      butterfly_sum<1, 4>(sums);
      if (lane % 4 == 0) {
        sum.by_row[half][row_of(i)] = sums[0];
        sum.written[half][row_of(i)] = sums[1];
      }
    }
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        columns[n][e] = butterfly<4, 32>(columns[n][e], Plus{});
        if (lane < 4) sum.by_column[down / 16][half * 32 + n * 8 + lane * 2 + e] = columns[n][e];
      }
    whole = butterfly<1, 32>(whole, Plus{});
    if (lane == 0) sum.whole[threadIdx.x / 32] = whole;
  }
  // dq += mixed k, dk += mixedᵀ q.
  __device__ void through_scores() {
#pragma unroll
    for (int j = 0; j < kScalarSteps; j += 16) {
      uint32_t a[4];
      if (j <= down) {
        load_a_mk(a, PaddedTile<kScalarSquare>{s.mixed}, down, j / 8);
        multiply_kn(dq, a, PaddedTile<kRow>{s.k}, j, half * (kK / 16));
      }
      if (j >= down) {
        load_a_km(a, PaddedTile<kScalarSquare>{s.mixed}, j, down / 8);
        multiply_kn(dk, a, PaddedTile<kRow>{s.q}, j, half * (kK / 16));
      }
    }
  }

  // One warp, two steps per lane. The gradient of a log decay is the sum over all that goes from
  // before its step to it or after it: state to state, state to row, column to state and, within
  // the chunk, column to row.
  __device__ void gates(const Sums& x, int64_t head) const {
    float falling[2], rising[2], weights[2], direct = 0, through = 0;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int t = lane * 2 + e;
      float column = 0;
      for (int i = 0; i < 4; ++i) column += x.by_column[i][t];
      const float state = x.written[0][t] + x.written[1][t];
      falling[e] = x.by_row[0][t] + x.by_row[1][t] - column * x.gates.weights[t];
      rising[e] = state * x.gates.weights[t];
      weights[e] = column + x.own[t] + state;
      direct += x.direct[t];
    }
    for (int i = 0; i < kWarps; ++i) through += x.whole[i];
    through *= ex2_approx(x.gates.decays[kScalarSteps - 1]);
    direct = butterfly<1, 32>(direct, Plus{});
    // up to the second step
    const float before = warp_inclusive_scan(rising[0] + rising[1]) - rising[1];
    float behind = falling[0] + falling[1];
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const float down = __shfl_down_sync(~0u, behind, distance);
      if (lane + distance < 32) behind += down;
    }
    const float first = before - rising[0];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int t = lane * 2 + e;
      const float decay = x.gates.decays[t] - (t > 0 ? x.gates.decays[t - 1] : 0);
      const float sum = through + (e == 0 ? behind + first : behind - falling[0] + before);
      const int64_t at = (batch() * p.time + start() + t) * p.heads + head;
      if (t >= there) continue;
      if (g.dlog_decay)
        static_cast<float*>(g.dlog_decay)[at] = decay < kLogDecayFloor + 1 ? 0 : sum;
      if (g.dbeta) g.dbeta[at] = weights[e];
    }
    if (g.dskip && lane == 0) g.dskip[index * p.heads + head] = direct;
  }

  __device__ void store(void* to, const float (&x)[kK / 16][4]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t t = batch() * p.time + start() + row_of(i);
      bf16* row = static_cast<bf16*>(to) + (t * groups + first_head / heads) * kK +
                  half * (kK / 2) + lane % 4 * 2;
      if (row_of(i) >= there) continue;
#pragma unroll
      for (int n = 0; n < kK / 16; ++n) store_bf16x2(row + n * 8, x[n][2 * i], x[n][2 * i + 1]);
    }
  }

  __device__ void run() {
    const int slices = int(ceil_div(p.value_dim, kMaxColumns)), items = heads * slices;
    auto fetch_keys = [&](bf16* to, const HeadView& x) {
      copy_chunk_rows<kK, 32 * kWarps>(to, row<bf16>(x, p.heads, batch(), start(), first_head, kK),
                                       x.rows.time_stride, there);
    };
    fetch_keys(s.q, p.q);
    fetch_keys(s.k, p.k);
    with_stages(
        s.items, 0, items,
        [&](Item& to, int i) { fetch(to, first_head + i / slices, i % slices * kMaxColumns); },
        [&](const Item& x, int i) {
          if (i == 0)
#pragma unroll
            for (int k = 0; k < kK; k += 16) {
              uint32_t a[4];
              load_a_mk(a, PaddedTile<kRow>{s.q}, down, k / 8);
              multiply_nk(raw, a, PaddedTile<kRow>{s.k}, half * 32, k / 8);
            }
          if (i % slices == 0) begin(x);
          add(x);
          if (i % slices < slices - 1) return;
          const int head = i / slices, place = head % kDeferred, warp = threadIdx.x / 32;
          mix(x, s.sums[place]);
          __syncthreads();
          through_scores();
          if (!wants() || (place < kDeferred - 1 && head < heads - 1)) return;
          if (warp <= place) gates(s.sums[warp], first_head + head - place + warp);
        });
    store(g.dq, dq);
    store(g.dk, dk);
  }
};

template <int kK>
__global__ void __launch_bounds__(32 * kWarps, kK <= 64 ? 2 : 1)
    scalar_gradients_kernel(ChunkedBackward g, Pass task, int heads) {
  using Gradients = ScalarGradients<kK>;
  extern __shared__ __align__(16) char memory[];
  Gradients{g, task, heads, *reinterpret_cast<typename Gradients::Smem*>(memory)}.run();
}

}  // namespace

int64_t common_sharers(const ChunkedForward& p) {
  return std::gcd(p.heads / p.q.heads, p.heads / p.k.heads);
}
int64_t sharers(const ChunkedForward& p) {
  const int64_t both = common_sharers(p), blocks_wanted = 4 * sm_count();
  int64_t heads = both;
  while (heads > 1 && (both % heads || chunk_count(p) * (p.heads / heads) < blocks_wanted)) --heads;
  return heads;
}

void scalar_gradients(const ChunkedBackward& bwd, const Pass& task, Stream stream) {
  const ChunkedForward& p = bwd.forward;
  const int64_t heads = sharers(p), blocks = chunk_count(p) * (p.heads / heads);
  with_key_dim(p.key_dim, [&](auto size) {
    using Smem = typename ScalarGradients<size.value>::Smem;
    const bool one = heads * ceil_div(p.value_dim, kMaxColumns) == 1;  // item, in one stage
    launch_kernel(scalar_gradients_kernel<size.value>, unsigned(blocks), 32 * kWarps,
                  one ? offsetof(Smem, items[1]) : sizeof(Smem), stream, bwd, task, int(heads));
  });
}

}  // namespace assay::ops::cuda::chunks
