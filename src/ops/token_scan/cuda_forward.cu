// The forward: chunks from 0 at once, a scan over the chunks, outputs. The exact update, whose
// states cannot be joined chunk by chunk, walks the whole sequence.
#include <string>

#include "ops/cuda/launch.cuh"
#include "ops/cuda/math.cuh"
#include "ops/token_scan/cuda_tiles.cuh"

namespace assay::ops::cuda {
namespace token {
namespace {

struct ForwardWorkspace {
  // packed; state before each chunk, where the caller keeps none; its decay
  float *tokens, *starts, *products;
  ForwardWorkspace(const Plan& a, WorkspaceArena& arena) {
    tokens = arena.take<float>(a.token_numbers());
    starts = arena.take<float>(a.chunk_numbers());
    products = arena.take<float>(a.p.update == Update::exact ? 0 : a.chunk_numbers());
  }
};

template <class T>
__global__ void __launch_bounds__(256) pack_kernel(Plan a, float* tokens) {
  const int64_t i = blockIdx.x * int64_t{256} + threadIdx.x, row = i / a.states, b = row / a.p.time,
                t = row % a.p.time;
  const int n = int(i % a.states);
  if (row >= a.p.batch * a.p.time) return;
  auto at = [&](const auto* data, const View& v) {
    return data + b * v.batch_stride + t * v.time_stride;
  };
  const T* k = at(static_cast<const T*>(a.p.k.data), a.p.k);
  const T* q = at(static_cast<const T*>(a.p.q.data), a.p.q);
  const bool there = n < a.p.state_size;
  Token& out = reinterpret_cast<Token*>(tokens)[i / kPerLane];
  const float key = there ? to_compute(k[n]) : 0.f;
  out.k[n % kPerLane] = key;
  out.q[n % kPerLane] = there ? to_compute(q[n]) : 0.f;
  out.rate[n % kPerLane] = !a.p.rate.data ? key * key
                           : there
                               ? at(static_cast<const float*>(a.p.rate.data), a.p.rate)[n] * kLog2e
                               : 0.f;
  if (n % kPerLane > 0) return;
  float square = 0;
  if (a.p.update != Update::decay)
    for (int m = 0; m < a.p.state_size; ++m) square += to_compute(k[m]) * to_compute(k[m]);
  out.square = square;
  out.unused[0] = out.unused[1] = out.unused[2] = 0;
}

// The state that each chunk but the last adds to what it was given, and the product of its decays.
template <class T, Update kUpdate, int kLanes>
__global__ void __launch_bounds__(kThreads) ends_kernel(Plan a, ForwardWorkspace s, float* starts) {
  extern __shared__ __align__(16) char memory[];
  const LaneState<kLanes> lane(a, false);
  if (lane.chunk + 1 == a.chunks) return;
  const View views[] = {a.p.x, a.p.delta};
  TileLoader<T, 2, kLanes> feed(lane, views, s.tokens, memory);
  feed.start(0);
  Eight S = {}, P;
#pragma unroll
  for (float& x : P.at) x = 1;
  for (int tile = 0; tile < lane.steps; tile += kTile) {
    feed.finish();
    feed.start(tile + kTile);
#pragma unroll 4
    for (int i = 0; i < kTile; ++i) {
      const float x = feed.get(0, i), raw = feed.get(1, i) + lane.bias;
      const Token& token = feed.token(i);
      // only the last chunk may end early
      const float step = step_size<T, kUpdate>(a, raw, token.square, true);
      const Eight k = token.k, rate = token.rate;
#pragma unroll
      for (int n = 0; n < kPerLane; ++n) {
        const float factor = decay<kUpdate>(step, rate[n]);
        S[n] = factor * S[n] + step * x * k[n];
        P[n] *= factor;
      }
    }
  }
  if (!lane.live) return;
  store(starts + lane.states(a.chunks, lane.chunk), S);
  store(s.products + lane.states(a.chunks, lane.chunk), P);
}

template <class T, Update kUpdate, int kLanes>
__global__ void __launch_bounds__(kThreads)
    outputs_kernel(Plan a, const float* tokens, float* starts) {
  extern __shared__ __align__(16) char memory[];
  constexpr bool kSequential = kUpdate == Update::exact;
  const LaneState<kLanes> lane(a, kSequential);
  const View views[] = {a.p.x, a.p.delta, a.p.z};
  TileLoader<T, 3, kLanes> feed(lane, views, tokens, memory);
  feed.start(0);
  T* out = lane.template at<T>(a.p.y, 0);
  const bool gated = a.p.z.data;
  Eight S = kSequential ? lane.read_state(a.p.initial_state)
                        : load(starts + lane.states(a.chunks, lane.chunk));
  for (int tile = 0; tile < lane.steps; tile += kTile) {
    feed.finish();
    feed.start(tile + kTile);
    if (kSequential && a.p.chunk_states && lane.live && tile % a.chunk == 0)
      store(starts + lane.states(a.chunks, tile / a.chunk), S);
#pragma unroll 1
    // first what does not depend on S, last what nothing depends on
    for (int sub = 0; sub < kTile; sub += kSub) {
      float step[kSub], y[kSub];
#pragma unroll
      for (int i = 0; i < kSub; ++i)
        step[i] = step_size<T, kUpdate>(a, feed.get(1, sub + i) + lane.bias,
                                        feed.token(sub + i).square, tile + sub + i < lane.steps);
#pragma unroll
      for (int i = 0; i < kSub; ++i) {
        const Token& token = feed.token(sub + i);
        advance<kUpdate, kLanes>(S, step[i], feed.get(0, sub + i), token);
        y[i] = dot(S, token.q);
      }
#pragma unroll
      for (int i = 0; i < kSub; ++i) {
        const float sum = lane.over_parts(y[i]) + lane.D * feed.get(0, sub + i);
        if (lane.first && tile + sub + i < lane.steps)
          *out = from_compute<T>(gated ? sum * SiluGate(feed.get(2, sub + i)).value : sum);
        out += a.p.y.time_stride;
      }
    }
  }
  if (kSequential || lane.chunk + 1 == a.chunks) lane.write_state(a.p.final_state, S);
}

// A thread is a state here.
__global__ void __launch_bounds__(256)
    carry_kernel(Plan a, float* states, const float* products, const float* first, float* last,
                 bool backwards) {
  constexpr int kAhead = 8;
  const int64_t line = a.p.channels * a.states, i = blockIdx.x * int64_t{256} + threadIdx.x;
  if (i >= a.p.batch * line) return;
  const int64_t b = i / line, d = i % line / a.states, n = i % a.states;
  const int64_t outer = (b * a.p.channels + d) * a.p.state_size + n,
                begin = b * a.chunks * line + i % line;
  float carried = first && n < a.p.state_size ? first[outer] : 0.f;
  for (int64_t c = 0; c < a.chunks; c += kAhead) {
    float own[kAhead], product[kAhead];
    auto at = [&](int k) { return begin + (backwards ? a.chunks - 1 - c - k : c + k) * line; };
#pragma unroll
    for (int k = 0; k < kAhead; ++k)
      if (c + k < a.chunks) {
        own[k] = states[at(k)];
        product[k] = products[at(k)];
      }
#pragma unroll
    for (int k = 0; k < kAhead; ++k)
      if (c + k < a.chunks) {
        states[at(k)] = carried;
        carried = product[k] * carried + own[k];
      }
  }
  if (last && n < a.p.state_size) last[outer] = carried;
}

template <class T, Update kUpdate, int kLanes>
void run(const Plan& a, const ForwardWorkspace& s, Stream stream) {
  constexpr bool kSequential = kUpdate == Update::exact;
  float* starts = a.p.chunk_states ? a.p.chunk_states : s.starts;
  if constexpr (!kSequential) {
    if (a.chunks > 1)
      launch_kernel(ends_kernel<T, kUpdate, kLanes>, a.blocks(false), kThreads,
                    TileLoader<T, 2, kLanes>::kBytes, stream, a, s, starts);
    carry(a, starts, s.products, a.p.initial_state, nullptr, false, stream);
  }
  launch_kernel(outputs_kernel<T, kUpdate, kLanes>, a.blocks(kSequential), kThreads,
                TileLoader<T, 3, kLanes>::kBytes, stream, a, static_cast<const float*>(s.tokens),
                starts);
}

}  // namespace

void pack(const Plan& a, float* tokens, Stream stream) {
  const auto kernel = a.p.dtype == DType::bf16 ? pack_kernel<bf16> : pack_kernel<float>;
  launch_threads(kernel, a.p.batch * a.p.time * a.states, 256, stream, a, tokens);
}

void carry(const Plan& a, float* states, const float* products, const float* first, float* last,
           bool backwards, Stream stream) {
  launch_threads(carry_kernel, a.p.batch * a.p.channels * a.states, 256, stream, a, states,
                 products, first, last, backwards);
}

void check(const TokenScanForward& p) {
  if (p.state_size < 1 || p.state_size > kMaxTokenStates || p.dtype == DType::f64)
    throw Unsupported("token_scan on CUDA takes float32 or bfloat16 and a state_size of 1 to " +
                      std::to_string(kMaxTokenStates) + ", not " + std::to_string(p.state_size));
}

}  // namespace token

int64_t chunk_size(const TokenScanForward& p) { return token::Plan(p).chunk; }
int64_t chunk_states(const TokenScanForward& p) { return token::Plan(p).chunk_numbers(); }
size_t workspace_bytes(const TokenScanForward& p) {
  return workspace_size<token::ForwardWorkspace>(token::Plan(p));
}
void token_scan(const TokenScanForward& p, void* workspace, Stream stream) {
  token::check(p);
  const token::Plan a(p, p.dtype == DType::bf16 ? 2 : 4, {p.x, p.delta, p.z});
  const auto s = workspace_at<token::ForwardWorkspace>(workspace, a);
  token::pack(a, s.tokens, stream);
  token::with_shape(
      p, [&]<class T>(T, auto update, auto lanes) { token::run<T, update, lanes>(a, s, stream); });
}

}  // namespace assay::ops::cuda
