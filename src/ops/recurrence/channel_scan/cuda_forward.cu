// The forward: chunks from 0 at once, a scan over the chunks, outputs. The exact update, whose
// states cannot be joined chunk by chunk, walks the whole sequence.
#include <string>

#include "ops/recurrence/channel_scan/cuda_tiles.cuh"

namespace assay::ops::cuda {
namespace token {
namespace {

constexpr int kUnrolled = 8;  // steps

struct ForwardWorkspace {
  // state before each chunk, where the caller keeps none; its decay
  float* starts;
  float* decays;
  ForwardWorkspace(const Plan& plan, WorkspaceArena& arena)
      : starts(arena.take<float>(plan.args.chunk_states ? 0 : plan.rows() * plan.states)),
        decays(arena.take<float>(plan.decay_numbers())) {}
};

// The state that each chunk but the last adds to what it was given, and what tells its decay.
template <class T, class Shape>
__global__ void __launch_bounds__(kThreads) ends_kernel(Plan plan, float* starts, float* decays) {
  extern __shared__ __align__(16) char memory[];
  using Loader = TileLoader<T, Shape, 2>;
  const LaneState<T, Shape> lane(plan, false);
  if (lane.chunk + 1 == plan.chunks) return;
  const View views[] = {plan.args.x, plan.args.delta};
  Loader feed(*reinterpret_cast<typename Loader::LoaderSmem*>(memory), lane, views);
  feed.start(0);
  typename Shape::State S = {};
  typename Shape::State P;
  float sum = 0;
  if constexpr (Shape::kRule == Rule::channel) feed.channel_rate = lane.decay_rates();
#pragma unroll
  for (float& x : P.at) x = 1;
  for (int tile = 0; tile < lane.steps; tile += kTile) {
    feed.finish();
    feed.start(tile + kTile);
#pragma unroll kUnrolled
    for (int i = 0; i < kTile; ++i) {
      const float step = feed.step_size(i, true);  // only the last chunk may end early
      sum += step;
      feed.advance(S, i, step, [&](int n, float kept) {
        if constexpr (Shape::kHasRate) P[n] *= kept;
      });
    }
    __syncthreads();
  }
  if (!lane.live) return;
  store(starts + lane.states(plan.chunks, lane.chunk), S);
  if constexpr (Shape::kHasRate) store(decays + lane.states(plan.chunks, lane.chunk), P);
  else if (lane.first) decays[lane.channels(plan.chunks, lane.chunk)] = sum;
}

template <class T, class Shape>
__global__ void __launch_bounds__(kThreads) outputs_kernel(Plan plan, float* starts) {
  extern __shared__ __align__(16) char memory[];
  using Loader = TileLoader<T, Shape, 3>;
  using State = typename Shape::State;
  constexpr bool kSequential = Shape::kRule == Rule::exact;
  const LaneState<T, Shape> lane(plan, kSequential);
  const View views[] = {plan.args.x, plan.args.delta, plan.args.z};
  Loader feed(*reinterpret_cast<typename Loader::LoaderSmem*>(memory), lane, views);
  feed.start(0);
  const Column<T> ys = lane.kept_column(plan.args.y);
  const bool gated = plan.args.z.data;
  State S = kSequential ? lane.read(plan.args.initial_state, lane.b)
                        : load<State>(starts + lane.states(plan.chunks, lane.chunk));
  if constexpr (Shape::kRule == Rule::channel) feed.channel_rate = lane.decay_rates();
  for (int tile = 0; tile < lane.steps; tile += kTile) {
    feed.finish();
    feed.start(tile + kTile);
    if (kSequential && plan.args.chunk_states && lane.live && tile % plan.chunk == 0)
      store(starts + lane.states(plan.chunks, tile / plan.chunk), S);
#pragma unroll kUnrolled
    for (int i = 0; i < kTile; ++i) {
      const float step = feed.step_size(i, tile + i < lane.steps);
      feed.advance(S, i, step, [](int, float) {});
      const float y = lane.over_parts(dot(S, feed.q(i), lane.D * feed.get(0, i)));
      const float gate = SiluGate(feed.get(2, i)).value;
      lane.store(ys, tile + i, gated ? y * gate : y);
    }
    __syncthreads();
  }
  if (kSequential || lane.chunk + 1 == plan.chunks) lane.write(plan.args.final_state, lane.b, S);
}

// A thread is a state here.
__global__ void __launch_bounds__(256, 4)
    carry_kernel(Plan plan, float* states, const float* decays, const float* first, float* last,
                 bool backwards) {
  constexpr int kAhead = 8;
  const int64_t line = plan.args.channels * plan.states;
  const int64_t i = blockIdx.x * int64_t{256} + threadIdx.x;
  if (i >= plan.args.batch * line) return;
  const int64_t b = i / line;
  const int64_t d = i % line / plan.states;
  const int64_t n = i % plan.states;
  const bool inside = n < plan.args.state_size;
  const bool by_channel = plan.rule == Rule::channel;
  const int64_t outer = (b * plan.args.channels + d) * plan.args.state_size + n;
  const float A =
      by_channel && inside
          ? static_cast<const float*>(plan.args.rate.data)[d * plan.args.state_size + n] * kLog2e
          : 0.f;
  // row of the channel in the first chunk of the loop, and the stride to the next one
  const int64_t row =
      (b * plan.chunks + (backwards ? plan.chunks - 1 : 0)) * plan.args.channels + d;
  const int64_t row_stride = backwards ? -plan.args.channels : plan.args.channels;
  const int64_t state_stride = row_stride * plan.states;
  const int64_t decay_stride = by_channel ? row_stride : state_stride;
  float* to = states + row * plan.states + n;
  const float* from = to;
  const float* decay = decays + (by_channel ? row : row * plan.states + n);
  float carried = first && inside ? first[outer] : 0.f;
  for (int chunks = int(plan.chunks); chunks > 0; chunks -= kAhead) {
    // A chunk after the last adds 0 to what is carried, and keeps all of it.
    float own[kAhead] = {};
    float kept[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      kept[k] = by_channel ? 0 : 1;
      if (k < chunks) {
        own[k] = *from;
        kept[k] = *decay;
      }
      from += state_stride;
      decay += decay_stride;
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (k < chunks) *to = carried;
      to += state_stride;
      carried = (by_channel ? ex2_approx(A * kept[k]) : kept[k]) * carried + own[k];
    }
  }
  if (last && inside) last[outer] = carried;
}

}  // namespace

void carry(const Plan& plan, float* states, const float* decays, const float* first, float* last,
           bool backwards, Stream stream) {
  launch_threads(carry_kernel, plan.args.batch * plan.args.channels * plan.states, 256, stream,
                 plan, states, decays, first, last, backwards);
}

Plan::Plan(const ChannelScanForward& args, std::initializer_list<View> read,
           std::initializer_list<View> others)
    : Plan(args) {
  if (args.state_size < 1 || args.state_size > kMaxTokenStates || args.dtype == DType::f64)
    throw Unsupported("channel_scan on CUDA takes float32 or bfloat16 and a state_size of 1 to " +
                      std::to_string(kMaxTokenStates) + ", not " + std::to_string(args.state_size));
  for (const auto& views : {read, others})
    for (const View& v : views)
      if (v.time_stride < 0 || v.time_stride > kMaxStride)
        throw Unsupported("channel_scan on CUDA takes a stride of time of 0 to 2^28 numbers, not " +
                          std::to_string(v.time_stride));
  const int64_t element = args.dtype == DType::bf16 ? 2 : 4;
  aligned = group_width * element % 16 == 0 && rows_aligned(read, element);
}

}  // namespace token

int64_t chunk_size(const ChannelScanForward& args) { return token::Plan(args).chunk; }
int64_t chunk_states(const ChannelScanForward& args) {
  const token::Plan plan(args);
  return plan.rows() * plan.states;
}
size_t workspace_bytes(const ChannelScanForward& args) {
  return workspace_size<token::ForwardWorkspace>(token::Plan(args));
}

void channel_scan(const ChannelScanForward& args, void* workspace, Stream stream) {
  using namespace token;
  const Plan plan(args, {args.x, args.delta, args.z}, {args.k, args.q, args.rate, args.y});
  const auto s = workspace_at<ForwardWorkspace>(workspace, plan);
  float* starts = args.chunk_states ? args.chunk_states : s.starts;
  with_shape(plan, [&]<class T, class Shape>(T, Shape) {
    constexpr bool kSequential = Shape::kRule == Rule::exact;
    if constexpr (!kSequential) {
      if (plan.chunks > 1)
        launch_kernel(ends_kernel<T, Shape>, plan.blocks(false), kThreads,
                      sizeof(typename TileLoader<T, Shape, 2>::LoaderSmem), stream, plan, starts,
                      s.decays);
      carry(plan, starts, s.decays, args.initial_state, nullptr, false, stream);
    }
    launch_kernel(outputs_kernel<T, Shape>, plan.blocks(kSequential), kThreads,
                  sizeof(typename TileLoader<T, Shape, 3>::LoaderSmem), stream, plan, starts);
  });
}

}  // namespace assay::ops::cuda
