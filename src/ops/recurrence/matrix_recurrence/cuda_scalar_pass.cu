// The passes over chunks of 64 steps with one decay per step and head. Against time a pass is the
// same pass: chunks in reverse, q and k exchanged, dout for v.
#include "ops/cuda/pipeline.cuh"
#include "ops/cuda/reduce.cuh"
#include "ops/cuda/tensor_map.cuh"
#include "ops/recurrence/matrix_recurrence/cuda_pass.cuh"

namespace assay::ops::cuda::chunks {
namespace {

// One warp per chunk and head, two steps per lane.
__global__ void __launch_bounds__(256) gates_kernel(ChunkedForward args, ScalarGates* gates) {
  const unsigned heads = args.heads;
  const unsigned chunks = ceil_div(args.time, kScalarSteps);
  const unsigned index = blockIdx.x * 8 + threadIdx.x / 32;
  const unsigned h = index % heads;
  const unsigned n = index / heads % chunks;
  const unsigned b = index / heads / chunks;
  const unsigned lane = threadIdx.x % 32;
  if (b >= args.batch) return;
  float decay[2];
  float weight[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int64_t t = n * int64_t{kScalarSteps} + lane * 2 + e;
    decay[e] = 0;
    weight[e] = 1;
    if (t >= args.time) continue;
    if (args.log_decay.rows.data)
      decay[e] = row<float>(args.log_decay, args.heads, b, t, h, 1)[0] * kLog2e;
    if (decay[e] < kLogDecayFloor) decay[e] = kLogDecayFloor;  // NaN stays
    if (args.beta.rows.data) weight[e] = row<float>(args.beta, args.heads, b, t, h, 1)[0];
  }
  const float before = warp_inclusive_scan(decay[0] + decay[1]);
  const float first = __shfl_up_sync(~0u, before, 1);
  decay[0] += lane > 0 ? first : 0;
  ScalarGates& to = gates[index];
  reinterpret_cast<float2*>(to.decays)[lane] = {decay[0], decay[0] + decay[1]};
  reinterpret_cast<float2*>(to.weights)[lane] = {weight[0], weight[1]};
}

// A unit is 64 columns of one head's state, the work of a warpgroup. Units of a group read the same
// rows of q and k, and those of a block have them in common.
struct Units {
  int group;
  int of_block;
  explicit Units(const ChunkedForward& args)
      : group(int(common_sharers(args) * (args.value_dim / kMaxColumns))), of_block(1) {
    if (args.key_dim == kLargestKey) of_block = 2;
    else if (args.key_dim != 96 && group % 3 == 0) of_block = 3;
  }
  __host__ __device__ unsigned blocks() const { return unsigned(group + of_block - 1) / of_block; }
  // The place of unit `unit` of the block among the parts of all heads' segments.
  __device__ unsigned place(const ChunkedForward& args, const Segments& s, int unit) const {
    const unsigned heads = args.heads;
    const unsigned groups = heads * s.parts / group;
    const unsigned above = blockIdx.x / blocks();  // batch, segment, group
    const unsigned part = above % groups * group + blockIdx.x % blocks() * of_block + unit;
    const unsigned batch = above / groups / s.count;
    const unsigned segment = above / groups % s.count;
    return ((batch * heads + part / s.parts) * s.count + segment) * s.parts + part % s.parts;
  }
  // units of the block
  __device__ int there() const {
    return min(of_block, group - int(blockIdx.x % blocks()) * of_block);
  }
};
constexpr int blocks_of_sm(int of_block, int64_t key_dim) {
  return of_block > 1 ? 1 : key_dim == 64 ? 3 : 2;
}
struct Maps {
  CUtensorMap reader;
  CUtensorMap writer;
  CUtensorMap values;
  CUtensorMap states;
};

// A warpgroup has the unit's state in registers, transposed, as the sums of one product. A
// warpgroup more starts the copies of the next chunk.
template <int kK, int kUnits, bool kBackwards, bool kOutputs>
struct ScalarPass : Walk {
  static constexpr int kChunk = kScalarSteps;
  static constexpr int kThreads = (kUnits + 1) * 128;
  static constexpr int kBlocks = blocks_of_sm(kUnits, kK);
  // Registers of a thread of a unit, and of the warpgroup that copies: all that an SM has.
  static constexpr int kAlone = kK == 64 ? 136 : 224;
  static constexpr int kTogether = kUnits == 3 ? 160 : 240;
  static constexpr int kRegisters = kUnits > 1 ? kTogether : kAlone;
  static constexpr int kCopyRegisters = kUnits == 3 ? 32 : 24;
  using Rows = WgmmaTile<kK, kChunk>;
  using Columns = WgmmaTile<kMaxColumns, kChunk>;
  using Ring = Pipeline<2>;
  struct Stage {
    alignas(1024) bf16 writer[kChunk * kK];
    alignas(1024) bf16 values[kUnits][kChunk * kMaxColumns];
    alignas(1024) Tile<kOutputs, kChunk * kK> reader;
    ScalarGates gates[kUnits];
  };
  struct Smem {
    Stage stages[2];
    alignas(1024) bf16 before[kUnits][kMaxColumns * kK];  // the states before a chunk, [V, K]
    float write[kUnits][kChunk];  // factors of the rows that are written to the state
    uint64_t barriers[4];
  };
  const Maps& maps;
  const int unit;

  // By one thread: the rows of all chunks, and the columns and gates of the block's `units`.
  __device__ void copy(Smem& s, int units) const {
    constexpr int W = kPanel<kK>;
    const Ring ring{s.barriers};
    const auto head_of = [&](const HeadView& x, unsigned h) {
      return int(h) / (int(args.heads) / int(x.heads));
    };
    const int reader = head_of(task.reader, head);
    const int writer = head_of(task.writer, head);
    const int parts = task.segments.parts;
    const int sequence = int(batch);
    PipelineState<2> state;
#pragma unroll 1
    for (int i = begin(); i < end(); ++i, state.advance()) {
      Stage& to = s.stages[state.stage];
      const Mbarrier full =
          ring.producer_acquire(state.stage, state.phase, kRowBytes + units * kUnitBytes);
      const int t = int(start(i));
#pragma unroll
      for (int x = 0; x < kK; x += W) {
        if constexpr (kOutputs)
          cp_async_bulk_tensor_4d(to.reader + x * kChunk, maps.reader, x, reader, t, sequence,
                                  full);
        cp_async_bulk_tensor_4d(to.writer + x * kChunk, maps.writer, x, writer, t, sequence, full);
      }
      int part = first / kMaxColumns;
      unsigned h = head;
      for (int u = 0; u < units; ++u) {
        cp_async_bulk_tensor_4d(to.values[u], maps.values, part * kMaxColumns,
                                head_of(task.values, h), t, sequence, full);
        cp_async_bulk(&to.gates[u], task.tiles.gates + (index(i) - head + h), sizeof(ScalarGates),
                      full);
        if (++part < parts) continue;
        part = 0;
        ++h;
      }
    }
  }
  static constexpr uint32_t kRowBytes = (1 + kOutputs) * kChunk * kK * 2;
  static constexpr uint32_t kUnitBytes = kChunk * kMaxColumns * 2 + sizeof(ScalarGates);

  // reader writerᵀ with the decays between, as an operand; zero where the writer comes later.
  __device__ void weights(uint32_t (&to)[4][4], float (&scores)[8][4],
                          const ScalarGates& gates) const {
    const float skip = args.skip ? args.skip[head] : 0;
    const int row = own + lane / 4;
    const float row_decay[2] = {gates.decays[row], gates.decays[row + 8]};
    const float row_weight[2] = {gates.weights[row] * args.scale,
                                 gates.weights[row + 8] * args.scale};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (kBackwards ? j * 16 < own : j * 16 > own) {
#pragma unroll
        for (uint32_t& x : to[j]) x = 0;
        continue;
      }
#pragma unroll
      for (int n = 2 * j; n < 2 * j + 2; ++n) {
        const int column = n * 8 + lane % 4 * 2;
        const float2 decay = *reinterpret_cast<const float2*>(gates.decays + column);
        const float2 weight = *reinterpret_cast<const float2*>(gates.weights + column);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int y = row + e / 2 * 8;
          const int x = column + e % 2;
          const float later = row_decay[e / 2] - (e % 2 ? decay.y : decay.x);
          const float factor =
              kBackwards ? row_weight[e / 2] : (e % 2 ? weight.y : weight.x) * args.scale;
          const float score = scores[n][e] * (ex2_approx(kBackwards ? -later : later) * factor);
          scores[n][e] = y == x ? score + skip : (kBackwards ? x > y : x < y) ? score : 0;
        }
      }
      pack_operand(to[j], scores[2 * j], scores[2 * j + 1]);
    }
  }
  // The factors of row y of the unit: for its reads from the state before the chunk, and for its
  // writes to the state.
  __device__ float2 factors(const ScalarGates& gates, int y) const {
    const float sum = gates.decays[y];
    const float start = ex2_approx(sum) * args.scale;
    const float end = ex2_approx(gates.decays[kChunk - 1] - sum) * gates.weights[y];
    return kBackwards ? float2{end, start} : float2{start, end};
  }

  // The state before chunk i in bf16 to shared memory, and from there to what the gradients read.
  __device__ void put(Smem& s, const ScalarGates& gates, const float (&state)[kK / 8][4],
                      int i) const {
    const NamedBarrier barrier = warpgroup_barrier(unit);
    const Rows before{s.before[unit]};
    const int y = threadIdx.x % 128;
    if (y == 0) cp_async_bulk_wait_group_read();
    named_barrier_sync<128>(barrier);  // the one before was read
    if (kOutputs || task.states) store_sums(before, own, 0, state);
    if (y < kChunk) s.write[unit][y] = factors(gates, y).y;
    fence_proxy_async();
    named_barrier_sync<128>(barrier);
    if (y > 0 || !task.states) return;
    constexpr int W = kPanel<kK>;
#pragma unroll
    for (int x = 0; x < kK; x += W)
      cp_async_bulk_tensor_4d_store(maps.states, before.data + x * kMaxColumns, x, 0,
                                    int(index(i) * args.value_dim) + first, 0);
    cp_async_bulk_commit_group();
  }
  __device__ void store_rows(int i, const float (&out)[8][4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int y = own + half * 8 + lane / 4;
      bf16* row = y < steps(i) ? task.out +
                                     ((batch * args.time + start(i) + y) * args.heads + head) *
                                         args.value_dim +
                                     first
                               : nullptr;
#pragma unroll
      for (int c = 0; c < 2; ++c)
        store_row32(row ? row + c * 32 : nullptr, columns32(out, c), half, 1);
    }
  }

  __device__ void chunk(float (&state)[kK / 8][4], Smem& s, const Stage& t, int i) const {
    const ScalarGates& gates = t.gates[unit];
    const Columns values{const_cast<bf16*>(t.values[unit])};
    const WgmmaDescriptor writer = warp_uniform(Rows{const_cast<bf16*>(t.writer)}.rows());
    const WgmmaDescriptor written = warp_uniform(Rows{const_cast<bf16*>(t.writer)}.columns());
    float scores[8][4];
    float out[8][4];
    put(s, gates, state, i);
    if constexpr (kOutputs) {
      const WgmmaDescriptor reader = warp_uniform(Rows{const_cast<bf16*>(t.reader)}.rows());
      const WgmmaDescriptor before = warp_uniform(Rows{s.before[unit]}.rows());
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kK / 16; ++k)
        wgmma<64, false, false>(scores, reader + Rows::rows_at(0, k), writer + Rows::rows_at(0, k),
                                k > 0);
      wgmma_commit_group();
#pragma unroll
      for (int k = 0; k < kK / 16; ++k)
        wgmma<64, false, false>(out, reader + Rows::rows_at(0, k), before + Rows::rows_at(0, k),
                                k > 0);
      wgmma_commit_group();
      uint32_t between[4][4];
      wgmma_wait_group<1>(scores);
      weights(between, scores, gates);
      const float read[2] = {factors(gates, own + lane / 4).x,
                             factors(gates, own + lane / 4 + 8).x};
      wgmma_wait_group<0>(out);
      each_element(out, [&](float& x, int, int e) { x *= read[e / 2]; });
      const WgmmaDescriptor columns = warp_uniform(values.columns());
      wgmma_fence();
      wgmma_rows<kMaxColumns>(out, between, [&](int column, int k) {
        return columns + Columns::columns_at(column, k);
      });
      wgmma_commit_group();
    }
    uint32_t scaled[4][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      load_a_km(scaled[j], values, j * 16, own / 8);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 write =
            *reinterpret_cast<const float2*>(s.write[unit] + j * 16 + e / 2 * 8 + lane % 4 * 2);
        const float2 x = unpack_bf16x2(scaled[j][e]);
        scaled[j][e] = pack_bf16x2(x.x * write.x, x.y * write.y);
      }
    }
    const float total = ex2_approx(gates.decays[kChunk - 1]);
    each_element(state, [&](float& x, int, int) { x *= total; });
    wgmma_fence();
    wgmma_rows<kK>(state, scaled,
                   [&](int column, int k) { return written + Rows::columns_at(column, k); });
    wgmma_commit_group();
    if constexpr (kOutputs) {
      wgmma_wait_group<1>(out);
      store_rows(i, out);
    }
    wgmma_wait_group<0>(state);
  }

  __device__ void run(Smem& s) const {
    const Ring ring{s.barriers};
    float state[kK / 8][4];
    float total = 0;
    load(state, task.starts);
    PipelineState<2> now;
    for (int i = begin(); i < end(); ++i, now.advance()) {
      ring.consumer_wait(now);
      const Stage& t = s.stages[now.stage];
      chunk(state, s, t, i);
      total += t.gates[unit].decays[kChunk - 1];
      fence_proxy_async();  // the reads of the stage before its next copy
      ring.consumer_release(now.stage);
    }
    if (threadIdx.x % 128 == 0) cp_async_bulk_wait_group_read();
    store(state);
    if (task.alone && first == 0 && threadIdx.x % 128 == 0)
      task.total[of_segment] = ex2_approx(total);
  }
};

template <int kK, int kUnits, bool kBackwards, bool kOutputs>
__global__ void __launch_bounds__(ScalarPass<kK, kUnits, kBackwards, kOutputs>::kThreads,
                                  ScalarPass<kK, kUnits, kBackwards, kOutputs>::kBlocks)
    scalar_pass_kernel(ChunkedForward args, Pass task, Units units,
                       const __grid_constant__ Maps maps) {
  using Chunks = ScalarPass<kK, kUnits, kBackwards, kOutputs>;
  extern __shared__ __align__(1024) char memory[];
  auto& s = *reinterpret_cast<typename Chunks::Smem*>(memory);
  if (threadIdx.x == 0) {
    Pipeline<2>{s.barriers}.init(units.there() * 128);
    fence_mbarrier_init();
  }
  __syncthreads();
  const int warpgroup = threadIdx.x / 128;
  const int unit = warpgroup % kUnits;
  const Chunks chunks{
      {args, task, Chunks::kChunk, false, units.place(args, task.segments, unit)}, maps, unit};
  if (warpgroup == kUnits) {
    setmaxnreg_dec<Chunks::kCopyRegisters>();
    if (threadIdx.x % 128 == 0) chunks.copy(s, units.there());
  } else if (unit < units.there()) {
    setmaxnreg_inc<Chunks::kRegisters>();
    chunks.run(s);
  }
}

}  // namespace

void scalar_prepare(const ChunkedForward& args, const Prepared& tiles, Stream stream) {
  launch_kernel(gates_kernel, unsigned(ceil_div(chunk_count(args) * args.heads, 8)), 256, 0, stream,
                args, tiles.gates);
}
int units_of_sm(const ChunkedForward& args) {
  const int of_block = Units(args).of_block;
  return of_block * blocks_of_sm(of_block, args.key_dim);
}
void scalar_pass(const ChunkedForward& args, const Pass& task, Stream stream) {
  const auto map = [&](const HeadView& x, int64_t width) {
    return rows_map(x.rows, args.batch, args.time, x.heads, width);
  };
  const Maps maps{map(task.reader, args.key_dim), map(task.writer, args.key_dim),
                  map(task.values, args.value_dim),
                  task.states
                      ? rows_map({task.states, 0, args.key_dim}, 1,
                                 chunk_count(args) * args.heads * args.value_dim, 1, args.key_dim)
                      : CUtensorMap{}};
  const Units units(args);
  const auto launch = [&](auto size, auto of_block, auto backwards, auto outputs) {
    using Chunks = ScalarPass<size.value, of_block.value, backwards.value, outputs.value>;
    const int64_t groups = args.heads * task.segments.parts / units.group;
    launch_kernel(scalar_pass_kernel<size.value, of_block.value, backwards.value, outputs.value>,
                  unsigned(args.batch * task.segments.count * groups * units.blocks()),
                  Chunks::kThreads, sizeof(typename Chunks::Smem), stream, args, task, units, maps);
  };
  with_constant<false, true>(task.backwards, [&](auto backwards) {
    with_constant<false, true>(task.out != nullptr, [&](auto outputs) {
      with_key_dim(args.key_dim, [&](auto size) {
        if constexpr (size.value == kLargestKey) launch(size, Size<2>{}, backwards, outputs);
        else if constexpr (size.value == 96) launch(size, Size<1>{}, backwards, outputs);
        else
          with_constant<1, 3>(units.of_block,
                              [&](auto of_block) { launch(size, of_block, backwards, outputs); });
      });
    });
  });
}

}  // namespace assay::ops::cuda::chunks
