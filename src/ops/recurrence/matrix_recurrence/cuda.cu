// The kernels over chunks, one after the other.
#include <algorithm>

#include "ops/recurrence/matrix_recurrence/cuda_chunks.cuh"

namespace assay::ops::cuda {
namespace chunks {
namespace {

// 16 rows of what a segment makes of a state before it and, in a block's columns, of zeros.
struct CarryStage {
  float turn[16 * kLargestKey];
  float local[16 * 16];
};
template <int kStages>
struct CarrySmem {
  CarryStage stages[kStages];
  float states[2][16][kLargestKey + 4];  // transposed
};
// The state before each segment: S ← turn S + local. A block has 16 columns of one head's state;
// a thread, one number of 16 rows at a time, whose inputs were asked for kStages − 1 such rows
// earlier.
template <int kStages>
__global__ void __launch_bounds__(256)
    carry_kernel(Pass alone, const float* first, float* starts, int K, int V) {
  extern __shared__ __align__(16) char memory[];
  auto& m = *reinterpret_cast<CarrySmem<kStages>*>(memory);
  const int64_t head = blockIdx.x / (V / 16);
  const int own = blockIdx.x % (V / 16) * 16;
  const int column = threadIdx.x % 16;
  const int y = threadIdx.x / 16;
  for (int n = y; n < K; n += 16)
    m.states[0][column][n] = first ? first[(head * K + n) * V + own + column] : 0;
  const int parts = K / 16;
  const int segments = alone.segments.count;
  const int64_t above = head * segments * K;  // rows of the heads before
  with_stages(
      m.stages, 0, segments * parts,
      [&](CarryStage& to, int i) {
        copy_floats(to.turn, alone.turn + (above + i * 16) * K, 16 * K);
        const int row = threadIdx.x / 4;
        const int x = threadIdx.x % 4 * 4;
        if (row < 16)
          cp_async_16(to.local + row * 16 + x, alone.last + (above + i * 16 + row) * V + own + x);
      },
      [&](const CarryStage& from, int i) {
        const int n = i % parts * 16 + y;
        const int odd = i / parts % 2;
        const float* state = m.states[odd][column];
        float4 sum{from.local[threadIdx.x], 0, 0, 0};
#pragma unroll 8
        for (int k = 0; k < K; k += 4) {
          const float4 a = *reinterpret_cast<const float4*>(from.turn + y * K + k);
          const float4 x = *reinterpret_cast<const float4*>(state + k);
          sum = {sum.x + a.x * x.x, sum.y + a.y * x.y, sum.z + a.z * x.z, sum.w + a.w * x.w};
        }
        starts[(above + i * 16 + y) * V + own + column] = state[n];
        m.states[1 - odd][column][n] = (sum.x + sum.y) + (sum.z + sum.w);
      });
}
// carry_kernel for diagonal decays, `decays` per segment, with one thread per number of the state.
__global__ void __launch_bounds__(256)
    carry_diagonal_kernel(Pass alone, const float* first, float* starts, int size, int decays) {
  const int at = blockIdx.x * 256 + threadIdx.x;
  const int row = at / (size / decays);
  const int64_t head = blockIdx.y;
  const int64_t segments = alone.segments.count;
  if (at >= size) return;
  float state = first ? first[head * size + at] : 0;
#pragma unroll 4
  for (int64_t s = head * segments; s < (head + 1) * segments; ++s) {
    const float own = alone.last[s * size + at];
    starts[s * size + at] = state;
    state = alone.total[s * decays + row] * state + own;
  }
}

struct Scratch {
  Segments segments;
  Prepared tiles;  // here for scalar decays; else in ChunkedForward::chunks
  // For several segments: the final state of each from zeros, its transition, its initial state.
  float* local;
  float* turn;
  float* total;
  float* starts;
  // backward only: the states' gradients; [chunks, 16, V]
  bf16* dstates;
  bf16* dW;
  Scratch(const ChunkedForward& args, bool backwards, WorkspaceArena& arena)
      : segments(args),
        tiles(is_scalar(args) ? Prepared(args, backwards, arena)
                              : workspace_at<Prepared>(args.chunks, args, args.keeps)) {
    const int64_t cut =
        segments.count > 1 ? args.batch * args.heads * segments.count * args.key_dim : 0;
    const int64_t values = backwards ? chunk_count(args) * args.heads * args.value_dim : 0;
    const bool low = args.rule != Rule::gla;
    local = arena.take<float>(cut * args.value_dim);
    turn = arena.take<float>(low ? cut * args.key_dim : 0);
    total = arena.take<float>(low ? 0 : cut);
    starts = arena.take<float>(cut * args.value_dim);
    dstates = arena.take<bf16>(values * args.key_dim);
    dW = arena.take<bf16>(low ? values * kChunkSteps : 0);
  }
};

// A pass from the state `first`, or from zeros. Where there are several segments, a pass over each
// alone finds the states before them.
void run(const ChunkedForward& args, const Scratch& s, Pass task, const float* first,
         Stream stream) {
  const int64_t K = args.key_dim;
  const int64_t V = args.value_dim;
  const int64_t heads = args.batch * args.heads;
  const auto launch = is_scalar(args) ? scalar_pass : pass;
  task.starts = first;
  if (s.segments.count > 1) {
    Pass alone = task;
    alone.alone = true;
    alone.starts = nullptr;
    alone.out = alone.states = nullptr;
    alone.last = s.local;
    alone.turn = s.turn;
    alone.total = s.total;
    launch(args, alone, stream);
    if (args.rule == Rule::gla)
      launch_kernel(carry_diagonal_kernel, dim3(unsigned(ceil_div(K * V, 256)), unsigned(heads)),
                    256, 0, stream, alone, first, s.starts, int(K * V),
                    int(is_scalar(args) ? 1 : K));
    else
      with_constant<8, 3>(cuda_target() == CudaTarget::sm_90a ? 8 : 3, [&](auto stages) {
        constexpr size_t kBytes = sizeof(CarrySmem<stages.value>);
        static_assert(kBytes <= (stages.value == 3 ? kPortableSharedBytes : kMaxSharedBytes));
        launch_kernel(carry_kernel<stages.value>, unsigned(heads * (V / 16)), 256, kBytes, stream,
                      alone, first, s.starts, int(K), int(V));
      });
    task.starts = s.starts;
  }
  launch(args, task, stream);
}

}  // namespace

Segments::Segments(const ChunkedForward& args) {
  constexpr int64_t kLeastSteps = 256;  // steps of a segment, at least
  const int64_t steps = is_scalar(args) ? kScalarChunkSteps : kChunkSteps;
  const int64_t all = ceil_div(args.time, steps);
  columns = kMaxColumns;
  while (args.value_dim % columns || (!is_scalar(args) && args.key_dim % columns)) columns -= 16;
  parts = args.value_dim / columns;
  const int64_t blocks = args.batch * args.heads * parts;
  // As many blocks as the SMs of Hopper run at once. With one more, a pass takes twice as long.
  const int64_t resident = sm_count() * (is_scalar(args)     ? units_of_sm(args)
                                         : args.key_dim > 96 ? 2
                                                             : 4);
  const int64_t wanted = std::min(resident / blocks, all * steps / kLeastSteps);
  count = blocks >= sm_count() ? 1 : std::max<int64_t>(1, wanted);
  chunks = ceil_div(all, count);
  count = ceil_div(all, chunks);
}

}  // namespace chunks

int64_t key_size(Rule rule, bool bonus, int64_t key_dim) {
  if (bonus) return key_dim <= 64 ? 64 : 0;
  if (rule == Rule::dplr) return key_dim <= 64 ? 64 : key_dim <= 128 ? 128 : 0;
  for (const int64_t size : {int64_t{64}, int64_t{96}, int64_t{128}, kLargestKey})
    if (key_dim <= size) return size;
  return 0;
}
int64_t value_size(int64_t value_dim, bool decode, bool scalar) {
  const bool any = decode || (!scalar && (value_dim <= 64 || value_dim % 48 == 0));
  const int64_t step = any ? 16 : chunks::kMaxColumns;
  return ceil_div(value_dim, step) * step;
}
bool is_scalar(const ChunkedForward& args) {
  return args.rule == Rule::gla && args.decay_dim <= 1 && !args.u &&
         cuda_target() == CudaTarget::sm_90a;
}
int64_t chunk_count(const ChunkedForward& args) {
  return args.batch * ceil_div(args.time, is_scalar(args) ? kScalarChunkSteps : kChunkSteps);
}
int64_t key_gradients(const ChunkedForward& args) {
  return is_scalar(args) ? args.heads / chunks::sharers(args) : args.heads;
}

// With scalar decays only the states before the segments are kept; the rest is computed again.
size_t chunk_bytes(const ChunkedForward& args) {
  if (!is_scalar(args)) return workspace_size<chunks::Prepared>(args, args.keeps);
  const int64_t segments = chunks::Segments(args).count;
  return segments == 1
             ? 0
             : sizeof(float) * args.batch * args.heads * segments * args.key_dim * args.value_dim;
}
size_t workspace_bytes(const ChunkedForward& args) {
  return workspace_size<chunks::Scratch>(args, false);
}
size_t workspace_bytes(const ChunkedBackward& bwd) {
  return workspace_size<chunks::Scratch>(bwd.forward, true);
}

void matrix_recurrence(const ChunkedForward& args, void* workspace, Stream stream) {
  using namespace chunks;
  auto s = workspace_at<Scratch>(workspace, args, false);
  if (is_scalar(args)) s.starts = static_cast<float*>(args.chunks);
  const auto launch = args.rule == Rule::delta ? delta_prepare : prepare;
  (is_scalar(args) ? scalar_prepare : launch)(args, s.tiles, stream);
  Pass task{.reader = args.q,
            .writer = args.k,
            .values = args.v,
            .tiles = s.tiles,
            .segments = s.segments};
  task.out = static_cast<bf16*>(args.out);
  task.states = s.tiles.before;
  task.W = s.tiles.W;
  task.last = args.final_state;
  run(args, s, task, args.initial_state, stream);
}

void matrix_recurrence(const ChunkedBackward& bwd, void* workspace, Stream stream) {
  using namespace chunks;
  const ChunkedForward& args = bwd.forward;
  const auto s = workspace_at<Scratch>(workspace, args, true);
  Pass task{.reader = args.q,
            .writer = args.k,
            .values = args.v,
            .tiles = s.tiles,
            .segments = s.segments};
  if (is_scalar(args)) {  // the states before the chunks again
    scalar_prepare(args, s.tiles, stream);
    task.starts =
        s.segments.count > 1 ? static_cast<const float*>(args.chunks) : args.initial_state;
    task.states = s.tiles.before;
    scalar_pass(args, task, stream);
  }
  task.backwards = true;
  std::swap(task.reader, task.writer);
  task.values = bwd.dout;
  task.out = static_cast<bf16*>(bwd.dv);
  task.states = s.dstates;
  task.W = s.dW;
  task.last = bwd.dinitial_state;
  run(args, s, task, bwd.dfinal_state, stream);
  const auto launch = args.rule == Rule::delta ? delta_gradients : gradients;
  (is_scalar(args) ? scalar_gradients : launch)(bwd, task, stream);
}

}  // namespace assay::ops::cuda
