// Gradients of q, k, the decays and the weights of every chunk of 64 steps, for all chunks at once.
// One block per chunk and the heads that share q and k, whose gradients are added in registers. A
// warpgroup has the gradient of q, another that of k:
//   gradient = factor · X Sᵀ + mixed · other,
// where (own, other, X, Y, S) are (q, k, dout, v, the state before the chunk) for q and (k, q, v,
// dout, the state's gradient after the chunk) for k, and `mixed` comes from X Yᵀ, own · otherᵀ and
// the gates. A thread of a third warpgroup brings the heads in.
#include <numeric>

#include "ops/cuda/pipeline.cuh"
#include "ops/cuda/reduce.cuh"
#include "ops/cuda/tensor_map.cuh"
#include "ops/recurrence/matrix_recurrence/cuda_chunks.cuh"

namespace assay::ops::cuda::chunks {
namespace {

constexpr int kThreads = 256;  // threads of the two warpgroups with gradients
// Registers of their threads, and of the warpgroup that copies.
constexpr int kRegisters = 240;
constexpr int kCopyRegisters = 24;

struct GradientMaps {
  CUtensorMap q;
  CUtensorMap k;
  CUtensorMap dout;
  CUtensorMap v;
  CUtensorMap before;
  CUtensorMap states;
};

template <int kK>
struct ScalarGradients {
  using KeyTile = WgmmaTile<kK, kScalarSteps>;
  using ValueTile = WgmmaTile<kMaxColumns, kScalarSteps>;
  static_assert(kMaxColumns == kScalarSteps);
  using Ring = Pipeline<2>;
  static constexpr int kPiece = kPanel<kK>;  // columns of a product
  // Heads that put_gates() serves in one turn, each by a warp, because it is a chain of latencies.
  // At K 256 shared memory has no room for more than one.
  static constexpr int kDeferred = kK == 64 || kK == 256 ? 1 : 8;
  static constexpr bool kKeepsRaw = kK <= 128;  // as registers allow; else once per head
  // Up to 64 columns of one head.
  struct Item {
    bf16 states[2][kMaxColumns * kK];            // the state and its gradient, transposed
    bf16 values[2][kScalarSteps * kMaxColumns];  // dout and v
  };
  // Sums of a head over rows and over columns of the contributions of pairs of steps.
  struct Sums {
    float by_row[kScalarSteps];
    float by_column[kScalarSteps];
    float written[kScalarSteps];
    float own[kScalarSteps];
    float direct[kScalarSteps];
    float whole[8];
    ScalarGates gates;
  };
  struct Smem {
    Item items[2];
    bf16 keys[2][kScalarSteps * kK];  // q and k
    ScalarGates gates[2];             // gates of the items
    Sums sums[kDeferred];
    uint64_t barriers[5];  // the last: of q and k
    __device__ Ring ring() { return {barriers}; }
    __device__ Mbarrier keys_ready() { return {barriers + 4}; }
  };
  const ChunkedBackward& bwd;
  const Pass& task;
  int heads;  // heads of the block
  Smem& s;
  const ChunkedForward& args = bwd.forward;
  // b chunks + n
  unsigned chunks = ceil_div(args.time, kScalarSteps);
  unsigned groups = unsigned(args.heads) / heads;
  unsigned index = blockIdx.x / groups;
  unsigned first_head = blockIdx.x % groups * heads;
  // slices: of a head's values, up to kMaxColumns columns each
  int there = int(min(int64_t{kScalarSteps}, args.time - start()));  // steps of the chunk
  int slices = int(ceil_div(args.value_dim, kMaxColumns));
  // side: 0 of q, 1 of k; down: the first of the warp's 16 rows
  int lane = threadIdx.x % 32;
  int side = __shfl_sync(~0u, int(threadIdx.x / 128), 0);
  int down = threadIdx.x / 32 % 4 * 16;
  // raw: own · otherᵀ
  float sum[kK / 8][4] = {};
  float raw[kScalarSteps / 8][4];
  // sums and factors of the current head
  float scores[kScalarSteps / 8][4];
  float dots[2];
  float factor[2];
  float reach[2];
  float whole;

  __device__ int64_t batch() const { return index / chunks; }
  __device__ int64_t start() const { return index % chunks * int64_t{kScalarSteps}; }
  __device__ int row_of(int below) const { return down + below * 8 + lane / 4; }
  __device__ int items() const { return heads * slices; }
  __device__ bool wants() const { return bwd.dlog_decay || bwd.dbeta || bwd.dskip; }
  __device__ KeyTile keys(int which) const { return {s.keys[which]}; }
  static __device__ KeyTile state(Item& x, int which) { return {x.states[which]}; }
  static __device__ ValueTile values(Item& x, int which) { return {x.values[which]}; }

  // By one thread: q and k, and then the heads, up to 64 columns at a time.
  __device__ void copy(const GradientMaps& maps) {
    const int sequence = int(batch());
    const int t = int(start());
    const auto tile = [&](bf16* to, int width, const CUtensorMap& map, int column, int head,
                          int row, int b, Mbarrier full) {
      for (int x = 0; x < width; x += kPiece)
        cp_async_bulk_tensor_4d(to + x * kScalarSteps, map, column + x, head, row, b, full);
    };
    const auto head_of = [&](const HeadView& x, int head) {
      return head / (int(args.heads) / int(x.heads));
    };
    s.keys_ready().arrive_expect_tx(sizeof(s.keys));
    tile(s.keys[0], kK, maps.q, 0, head_of(args.q, first_head), t, sequence, s.keys_ready());
    tile(s.keys[1], kK, maps.k, 0, head_of(args.k, first_head), t, sequence, s.keys_ready());
    typename Ring::State state;
#pragma unroll 1
    for (int i = 0; i < items(); ++i, state.advance()) {
      Item& to = s.items[state.stage];
      const Mbarrier full =
          s.ring().producer_acquire(state.stage, state.phase, sizeof(Item) + sizeof(ScalarGates));
      const int head = int(first_head) + i / slices;
      const int column = i % slices * kMaxColumns;
      const int at = int(index) * int(args.heads) + head;
      const int row = at * int(args.value_dim) + column;
      tile(to.states[0], kK, maps.before, 0, 0, row, 0, full);
      tile(to.states[1], kK, maps.states, 0, 0, row, 0, full);
      cp_async_bulk_tensor_4d(to.values[0], maps.dout, column, head_of(bwd.dout, head), t, sequence,
                              full);
      cp_async_bulk_tensor_4d(to.values[1], maps.v, column, head_of(args.v, head), t, sequence,
                              full);
      cp_async_bulk(&s.gates[state.stage], task.tiles.gates + at, sizeof(ScalarGates), full);
    }
  }

  // Sets the factors of the rows against the state for a head, and its sums to 0.
  __device__ void begin(const ScalarGates& gates) {
    whole = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float decay = gates.decays[row_of(i)];
      reach[i] = side == 0 ? ex2_approx(decay) * args.scale
                           : ex2_approx(gates.decays[kScalarSteps - 1] - decay);
      factor[i] = side == 0 ? reach[i] : reach[i] * gates.weights[row_of(i)];
      dots[i] = 0;
    }
  }
  // c += a bᵀ over the columns of two tiles.
  template <class Tile>
  static __device__ void multiply_rows(float (&c)[kScalarSteps / 8][4], Tile a, Tile b, bool keep) {
    const WgmmaDescriptor from_a = warp_uniform(a.rows());
    const WgmmaDescriptor from_b = warp_uniform(b.rows());
#pragma unroll
    for (int k = 0; k < Tile::kWidth / 16; ++k)
      wgmma<kScalarSteps, false, false>(c, from_a + Tile::rows_at(0, k),
                                        from_b + Tile::rows_at(0, k), keep || k > 0);
  }
  // Adds up to 64 columns of the values; `first`, of a head. By products with them, the gradient
  // that comes through the state, and dots += its rows times those of q or k.
  __device__ void add(Item& x, bool first) {
    const WgmmaDescriptor a = warp_uniform(values(x, side).rows());
    const WgmmaDescriptor b = warp_uniform(state(x, side).columns());
    wgmma_fence();
    multiply_rows(scores, values(x, side), values(x, 1 - side), !first);
#pragma unroll
    for (int piece = 0; piece < kK; piece += kPiece) {
      float c[kPiece / 8][4];
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kMaxColumns / 16; ++k)
        wgmma<kPiece, false, true>(c, a + ValueTile::rows_at(0, k),
                                   b + KeyTile::columns_at(piece, k), k > 0);
      wgmma_commit_group();
      if (piece == 0 && wants()) whole += inner_product(x);
      wgmma_wait_group<0>(c, scores);
#pragma unroll
      for (int n = 0; n < kPiece / 8; n += 2) {
        uint32_t own[4];
        load_a_mk(own, keys(side), down, piece / 8 + n);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 y = unpack_bf16x2(own[i]);
          float(&from)[4] = c[n + i / 2];
          float(&to)[4] = sum[piece / 8 + n + i / 2];
          const int row = i % 2;
          dots[row] += from[2 * row] * y.x + from[2 * row + 1] * y.y;
          to[2 * row] += factor[row] * from[2 * row];
          to[2 * row + 1] += factor[row] * from[2 * row + 1];
        }
      }
    }
  }
  // The part of this thread in ⟨state, gradient⟩: the diagonal of 16 rows of one times those of the
  // other, which takes a tenth of the instructions of fp32 arithmetic.
  __device__ float inner_product(Item& x) const {
    float c[2][4] = {};
#pragma unroll
    for (int k = 0; k < kK / 32; ++k) {
      uint32_t a[4];
      const int vector = side * (kK / 16) + k * 2;
      load_a_mk(a, state(x, 0), down, vector);
      multiply_nk(c, a, state(x, 1), down, vector);
    }
    const int below = lane / 4 - lane % 4 * 2;
    return below == 0 ? c[0][0] + c[1][2] : below == 1 ? c[0][1] + c[1][3] : 0;
  }

  // From the gradients of the scores to those of q kᵀ, and sums over rows of what each pair
  // contributes. Rows are the steps that read, or (kSide 1) those that write.
  template <int kSide>
  __device__ void mix(const ScalarGates& gates, Sums& to) {
    float rows[2] = {0, 0};
    float decay[2];
    float weight[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      decay[i] = gates.decays[row_of(i)];
      weight[i] = gates.weights[row_of(i)];
    }
    const int first = down / 8;  // the warp's rows are columns of n-tiles first and first + 1
#pragma unroll
    for (int n = 0; n < kScalarSteps / 8; ++n) {
      float(&d)[4] = scores[n];
      if (kSide == 0 ? n > first + 1 : n < first) {
        for (float& y : d) y = 0;
        continue;
      }
      const int column = n * 8 + lane % 4 * 2;
      const auto of_columns = [&](const float* of) {
        return *reinterpret_cast<const float2*>(of + column);
      };
      const float2 decays = of_columns(gates.decays);
      float2 scale{float(args.scale), float(args.scale)};
      if (kSide == 0) {
        const float2 weights = of_columns(gates.weights);
        scale = {scale.x * weights.x, scale.y * weights.y};
      }
      const bool diagonal = n / 2 == first / 2;
      if (kSide == 0 && diagonal)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (column + e % 2 == row_of(e / 2)) {
            to.own[row_of(e / 2)] = d[e] * float(args.scale) * raw[n][e];
            to.direct[row_of(e / 2)] = d[e];
          }
      float before[4];  // gradients for two different steps, not a step with itself
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float theirs = e % 2 ? decays.y : decays.x;
        const float apart = kSide == 0 ? decay[e / 2] - theirs : theirs - decay[e / 2];
        before[e] = d[e] *= ex2_approx(apart) * (e % 2 ? scale.y : scale.x);
      }
      if (diagonal)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int ahead =
              kSide == 0 ? row_of(e / 2) - column - e % 2 : column + e % 2 - row_of(e / 2);
          d[e] = ahead >= 0 ? d[e] : 0;
          before[e] = ahead > 0 ? before[e] : 0;
        }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        rows[e / 2] += before[e] * raw[n][e];
        if (kSide == 1) d[e] *= weight[e / 2];
      }
    }
    if (!wants()) return;
    if (kSide == 0 && threadIdx.x < kScalarSteps) {
      to.gates.decays[threadIdx.x] = gates.decays[threadIdx.x];
      to.gates.weights[threadIdx.x] = gates.weights[threadIdx.x];
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sums[2] = {rows[i], dots[i] * reach[i]};
      butterfly_sum<1, 4>(sums);
      if (lane % 4 > 0) continue;
      if (kSide == 0) {
        to.by_row[row_of(i)] = sums[0] + sums[1];
      } else {
        to.by_column[row_of(i)] = sums[0];
        to.written[row_of(i)] = sums[1];
      }
    }
    whole = butterfly<1, 32>(whole, Plus{});
    if (lane == 0) to.whole[threadIdx.x / 32] = whole;
  }
  // sum += mixed · other, where `scores` have become `mixed`.
  __device__ void through_scores() {
    uint32_t mixed[kScalarSteps / 16][4];
    pack_operand(mixed, scores);
    const WgmmaDescriptor b = warp_uniform(keys(1 - side).columns());
    warpgroup_fence_operand(sum);
    wgmma_fence();
    wgmma_rows<kK>(sum, mixed,
                   [&](int column, int k) { return b + KeyTile::columns_at(column, k); });
    wgmma_commit_group();
    wgmma_wait_group<0>(sum);
  }

  // One warp, two steps per lane. The gradient of a log decay is the sum over all that goes from
  // before its step to it or after it: state to state, state to row, column to state and, within
  // the chunk, column to row.
  __device__ void put_gates(const Sums& x, int64_t head) const {
    float falling[2];
    float rising[2];
    float weights[2];
    float direct = 0;
    float through = 0;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int t = lane * 2 + e;
      const float column = x.by_column[t];
      const float state = x.written[t];
      falling[e] = x.by_row[t] - column * x.gates.weights[t];
      rising[e] = state * x.gates.weights[t];
      weights[e] = column + x.own[t] + state;
      direct += x.direct[t];
    }
    for (int i = 0; i < kThreads / 32; ++i) through += x.whole[i];
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
      const int64_t at = (batch() * args.time + start() + t) * args.heads + head;
      if (t >= there) continue;
      if (bwd.dlog_decay)
        static_cast<float*>(bwd.dlog_decay)[at] = decay < kLogDecayFloor + 1 ? 0 : sum;
      if (bwd.dbeta) bwd.dbeta[at] = weights[e];
    }
    if (bwd.dskip && lane == 0) bwd.dskip[index * args.heads + head] = direct;
  }

  __device__ void store() const {
    void* to = side == 0 ? bwd.dq : bwd.dk;
    bf16* rows[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t t = batch() * args.time + start() + row_of(i);
      rows[i] = row_of(i) < there ? static_cast<bf16*>(to) + (t * groups + first_head / heads) * kK
                                  : nullptr;
    }
    store_lane_rows(keys(side), down, 0, sum, rows);
  }

  __device__ void run() {
    const NamedBarrier both = warpgroup_barrier(2);
    typename Ring::State now;
    s.keys_ready().wait(0);
    for (int i = 0; i < items(); ++i, now.advance()) {
      s.ring().consumer_wait(now);
      Item& x = s.items[now.stage];
      const ScalarGates& gates = s.gates[now.stage];
      if (i % slices == 0) begin(gates);
      add(x, i % slices == 0);
      const int head = i / slices;
      const int place = head % kDeferred;
      const int warp = threadIdx.x / 32;
      const bool last = i % slices == slices - 1;
      if (last) {
        if (!kKeepsRaw || head == 0) {
          wgmma_fence();
          multiply_rows(raw, keys(side), keys(1 - side), false);
          wgmma_commit_group();
          wgmma_wait_group<0>(raw);
        }
        if (side == 0) mix<0>(gates, s.sums[place]);
        else mix<1>(gates, s.sums[place]);
      }
      fence_proxy_async();  // the reads of the stage before its next copy
      s.ring().consumer_release(now.stage);
      if (!last) continue;
      through_scores();
      if (!wants() || (place < kDeferred - 1 && head < heads - 1)) continue;
      named_barrier_sync<kThreads>(both);
      if (warp <= place) put_gates(s.sums[warp], first_head + head - place + warp);
      named_barrier_sync<kThreads>(both);
    }
    named_barrier_sync<kThreads>(both);
    store();
  }
};

template <int kK>
__global__ void __launch_bounds__(kThreads + 128, 1)
    scalar_gradients_kernel(ChunkedBackward bwd, Pass task, int heads,
                            const __grid_constant__ GradientMaps maps) {
  using Gradients = ScalarGradients<kK>;
  extern __shared__ __align__(1024) char memory[];
  auto& s = *reinterpret_cast<typename Gradients::Smem*>(memory);
  if (threadIdx.x == 0) {
    s.ring().init(kThreads);
    s.keys_ready().init(1);
    fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x >= kThreads) {
    setmaxnreg_dec<kCopyRegisters>();
    Gradients gradients{bwd, task, heads, s};
    if (threadIdx.x == kThreads) gradients.copy(maps);
  } else {
    setmaxnreg_inc<kRegisters>();
    Gradients{bwd, task, heads, s}.run();
  }
}

}  // namespace

int64_t common_sharers(const ChunkedForward& args) {
  return std::gcd(args.heads / args.q.heads, args.heads / args.k.heads);
}
int64_t sharers(const ChunkedForward& args) {
  const int64_t both = common_sharers(args);
  const int64_t blocks_wanted = 4 * sm_count();
  int64_t heads = both;
  while (heads > 1 && (both % heads || chunk_count(args) * (args.heads / heads) < blocks_wanted))
    --heads;
  return heads;
}

void scalar_gradients(const ChunkedBackward& bwd, const Pass& task, Stream stream) {
  const ChunkedForward& args = bwd.forward;
  const int64_t heads = sharers(args);
  const int64_t blocks = chunk_count(args) * (args.heads / heads);
  const auto map = [&](const HeadView& x, int64_t width) {
    return rows_map(x.rows, args.batch, args.time, x.heads, width);
  };
  const auto states = [&](bf16* x) {
    return rows_map({x, 0, args.key_dim}, 1, chunk_count(args) * args.heads * args.value_dim, 1,
                    args.key_dim);
  };
  const GradientMaps maps{map(args.q, args.key_dim),     map(args.k, args.key_dim),
                          map(bwd.dout, args.value_dim), map(args.v, args.value_dim),
                          states(task.tiles.before),     states(task.states)};
  with_key_dim(args.key_dim, [&](auto size) {
    launch_kernel(scalar_gradients_kernel<size.value>, unsigned(blocks), kThreads + 128,
                  sizeof(typename ScalarGradients<size.value>::Smem), stream, bwd, task, int(heads),
                  maps);
  });
}

}  // namespace assay::ops::cuda::chunks
