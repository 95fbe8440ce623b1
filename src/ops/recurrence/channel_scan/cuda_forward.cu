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
  ForwardWorkspace(const Plan& a, WorkspaceArena& arena)
      : starts(arena.take<float>(a.p.chunk_states ? 0 : a.rows() * a.states)),
        decays(arena.take<float>(a.decay_numbers())) {}
};

// The state that each chunk but the last adds to what it was given, and what tells its decay.
template <class T, class Shape>
__global__ void __launch_bounds__(kThreads) ends_kernel(Plan a, float* starts, float* decays) {
  extern __shared__ __align__(16) char memory[];
  using Loader = TileLoader<T, Shape, 2>;
  const LaneState<T, Shape> lane(a, false);
  if (lane.chunk + 1 == a.chunks) return;
  const View views[] = {a.p.x, a.p.delta};
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
  store(starts + lane.states(a.chunks, lane.chunk), S);
  if constexpr (Shape::kHasRate) store(decays + lane.states(a.chunks, lane.chunk), P);
  else if (lane.first) decays[lane.channels(a.chunks, lane.chunk)] = sum;
}

template <class T, class Shape>
__global__ void __launch_bounds__(kThreads) outputs_kernel(Plan a, float* starts) {
  extern __shared__ __align__(16) char memory[];
  using Loader = TileLoader<T, Shape, 3>;
  using State = typename Shape::State;
  constexpr bool kSequential = Shape::kRule == Rule::exact;
  const LaneState<T, Shape> lane(a, kSequential);
  const View views[] = {a.p.x, a.p.delta, a.p.z};
  Loader feed(*reinterpret_cast<typename Loader::LoaderSmem*>(memory), lane, views);
  feed.start(0);
  const Column<T> ys = lane.kept_column(a.p.y);
  const bool gated = a.p.z.data;
  State S = kSequential ? lane.read(a.p.initial_state, lane.b)
                        : load<State>(starts + lane.states(a.chunks, lane.chunk));
  if constexpr (Shape::kRule == Rule::channel) feed.channel_rate = lane.decay_rates();
  for (int tile = 0; tile < lane.steps; tile += kTile) {
    feed.finish();
    feed.start(tile + kTile);
    if (kSequential && a.p.chunk_states && lane.live && tile % a.chunk == 0)
      store(starts + lane.states(a.chunks, tile / a.chunk), S);
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
  if (kSequential || lane.chunk + 1 == a.chunks) lane.write(a.p.final_state, lane.b, S);
}

// A thread is a state here.
__global__ void __launch_bounds__(256, 4)
    carry_kernel(Plan a, float* states, const float* decays, const float* first, float* last,
                 bool backwards) {
  constexpr int kAhead = 8;
  const int64_t line = a.p.channels * a.states;
  const int64_t i = blockIdx.x * int64_t{256} + threadIdx.x;
  if (i >= a.p.batch * line) return;
  const int64_t b = i / line;
  const int64_t d = i % line / a.states;
  const int64_t n = i % a.states;
  const bool inside = n < a.p.state_size;
  const bool by_channel = a.rule == Rule::channel;
  const int64_t outer = (b * a.p.channels + d) * a.p.state_size + n;
  const float A = by_channel && inside
                      ? static_cast<const float*>(a.p.rate.data)[d * a.p.state_size + n] * kLog2e
                      : 0.f;
  // row of the channel in the first chunk of the loop, and the stride to the next one
  const int64_t row = (b * a.chunks + (backwards ? a.chunks - 1 : 0)) * a.p.channels + d;
  const int64_t row_stride = backwards ? -a.p.channels : a.p.channels;
  const int64_t state_stride = row_stride * a.states;
  const int64_t decay_stride = by_channel ? row_stride : state_stride;
  float* to = states + row * a.states + n;
  const float* from = to;
  const float* decay = decays + (by_channel ? row : row * a.states + n);
  float carried = first && inside ? first[outer] : 0.f;
  for (int chunks = int(a.chunks); chunks > 0; chunks -= kAhead) {
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

void carry(const Plan& a, float* states, const float* decays, const float* first, float* last,
           bool backwards, Stream stream) {
  launch_threads(carry_kernel, a.p.batch * a.p.channels * a.states, 256, stream, a, states, decays,
                 first, last, backwards);
}

Plan::Plan(const ChannelScanForward& p, std::initializer_list<View> read,
           std::initializer_list<View> others)
    : Plan(p) {
  if (p.state_size < 1 || p.state_size > kMaxTokenStates || p.dtype == DType::f64)
    throw Unsupported("channel_scan on CUDA takes float32 or bfloat16 and a state_size of 1 to " +
                      std::to_string(kMaxTokenStates) + ", not " + std::to_string(p.state_size));
  for (const auto& views : {read, others})
    for (const View& v : views)
      if (v.time_stride < 0 || v.time_stride > kMaxStride)
        throw Unsupported("channel_scan on CUDA takes a stride of time of 0 to 2^28 numbers, not " +
                          std::to_string(v.time_stride));
  const int64_t element = p.dtype == DType::bf16 ? 2 : 4;
  aligned = group_width * element % 16 == 0 && rows_aligned(read, element);
}

}  // namespace token

int64_t chunk_size(const ChannelScanForward& p) { return token::Plan(p).chunk; }
int64_t chunk_states(const ChannelScanForward& p) {
  const token::Plan a(p);
  return a.rows() * a.states;
}
size_t workspace_bytes(const ChannelScanForward& p) {
  return workspace_size<token::ForwardWorkspace>(token::Plan(p));
}

void channel_scan(const ChannelScanForward& p, void* workspace, Stream stream) {
  using namespace token;
  const Plan a(p, {p.x, p.delta, p.z}, {p.k, p.q, p.rate, p.y});
  const auto s = workspace_at<ForwardWorkspace>(workspace, a);
  float* starts = p.chunk_states ? p.chunk_states : s.starts;
  with_shape(a, [&]<class T, class Shape>(T, Shape) {
    constexpr bool kSequential = Shape::kRule == Rule::exact;
    if constexpr (!kSequential) {
      if (a.chunks > 1)
        launch_kernel(ends_kernel<T, Shape>, a.blocks(false), kThreads,
                      sizeof(typename TileLoader<T, Shape, 2>::LoaderSmem), stream, a, starts,
                      s.decays);
      carry(a, starts, s.decays, p.initial_state, nullptr, false, stream);
    }
    launch_kernel(outputs_kernel<T, Shape>, a.blocks(kSequential), kThreads,
                  sizeof(typename TileLoader<T, Shape, 3>::LoaderSmem), stream, a, starts);
  });
}

}  // namespace assay::ops::cuda
