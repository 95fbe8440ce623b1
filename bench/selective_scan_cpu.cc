// The CPU kernels of the selective scan compared with a plain scalar loop (-O3, same machine, same
// run, float32, one thread). Prints nanoseconds of processor time per (b, t, d, n), which other
// programs on the machine hardly change.
//   bench_selective_scan_cpu [batch time channels state_size]
#include <fmt/format.h>

#include <cmath>
#include <ctime>
#include <functional>
#include <vector>

#include "base/random.h"
#include "ops/core/cpu_target.h"
#include "ops/recurrence/selective_scan/kernel.h"

using namespace assay;
using namespace assay::ops;
using Floats = std::vector<float>;

namespace {

struct Problem {
  int64_t batch;
  int64_t time;
  int64_t channels;
  int64_t N;
  Floats u;
  Floats delta;
  Floats z;
  Floats B;
  Floats C;
  Floats A;
  Floats D;
  Floats bias;
  Floats dy;
  Floats y;
  Floats state;
  Floats chunk_states;
  Floats du;
  Floats ddelta;
  Floats dz;
  Floats dB;
  Floats dC;
  Floats dA;
  Floats dD;
  Floats dbias;

  Problem(int64_t batch, int64_t time, int64_t channels, int64_t N)
      : batch(batch), time(time), channels(channels), N(N) {
    const int64_t rows = batch * time * channels;
    const int64_t BC = batch * time * N;
    auto normal = [](Floats& x, int64_t size, float mean) {
      Random random(1, "bench", size);
      x.resize(size);
      for (float& value : x) value = mean + float(random.uniform() - 0.5);
    };
    for (Floats* x : {&u, &z, &dy}) normal(*x, rows, 0);
    for (Floats* x : {&B, &C}) normal(*x, BC, 0);
    normal(delta, rows, -2);
    normal(A, channels * N, -4);
    normal(D, channels, 1);
    normal(bias, channels, 0);
    for (Floats* x : {&y, &du, &ddelta, &dz}) x->resize(rows);
    for (Floats* x : {&dB, &dC}) x->resize(BC);
    dA.resize(A.size());
    dD.resize(channels);
    dbias.resize(channels);
    state.resize(batch * channels * N);
    chunk_states.resize(state.size() * ((time + cpu::kChunk - 1) / cpu::kChunk));
  }

  SelectiveScanForward forward() {
    SelectiveScanForward p{DType::f32, batch, time, channels, 1, N, true};
    auto view = [&](Floats& x, int64_t width) { return View{x.data(), time * width, width}; };
    p.u = view(u, channels);
    p.delta = view(delta, channels);
    p.z = view(z, channels);
    p.y = view(y, channels);
    p.B = view(B, N);
    p.C = view(C, N);
    p.A = A.data();
    p.D = D.data();
    p.delta_bias = bias.data();
    p.final_state = state.data();
    p.chunk_states = chunk_states.data();
    return p;
  }
  SelectiveScanBackward backward() {
    SelectiveScanBackward q{forward()};
    auto view = [&](Floats& x) { return View{x.data(), time * channels, channels}; };
    q.dy = view(dy);
    q.du = view(du);
    q.ddelta = view(ddelta);
    q.dz = view(dz);
    q.dB = dB.data();
    q.dC = dC.data();
    q.dA = dA.data();
    q.dD = dD.data();
    q.ddelta_bias = dbias.data();
    return q;
  }
};

// The recurrence as one would write it down; `states` [T + 1, N] and `decays` [T, N]
// of one channel.
void plain_forward(Problem& p, int64_t b, int64_t d, Floats& states, Floats& decays,
                   Floats& plain) {
  for (int64_t t = 0; t < p.time; ++t) {
    const int64_t i = (b * p.time + t) * p.channels + d;
    const float delta = std::log1p(std::exp(p.delta[i] + p.bias[d]));
    const float* B = &p.B[(b * p.time + t) * p.N];
    const float* C = &p.C[(b * p.time + t) * p.N];
    float sum = p.D[d] * p.u[i];
    for (int64_t n = 0; n < p.N; ++n) {
      const float decay = decays[t * p.N + n] = std::exp(delta * p.A[d * p.N + n]);
      const float state = states[(t + 1) * p.N + n] =
          decay * states[t * p.N + n] + delta * p.u[i] * B[n];
      sum += state * C[n];
    }
    plain[t] = sum;
    p.y[i] = sum * p.z[i] / (1 + std::exp(-p.z[i]));
  }
}
void plain_backward(Problem& p, int64_t b, int64_t d, const Floats& states, const Floats& decays,
                    const Floats& plain) {
  Floats carry(p.N, 0.f);
  for (int64_t t = p.time - 1; t >= 0; --t) {
    const int64_t i = (b * p.time + t) * p.channels + d;
    const int64_t bc = (b * p.time + t) * p.N;
    const float raw = p.delta[i] + p.bias[d];
    const float delta = std::log1p(std::exp(raw));
    const float gate = 1 / (1 + std::exp(-p.z[i]));
    const float g = p.dy[i] * p.z[i] * gate;
    float dinput = 0;
    float ddelta = 0;
    p.dz[i] = p.dy[i] * plain[t] * gate * (1 + p.z[i] * (1 - gate));
    p.dD[d] += g * p.u[i];
    for (int64_t n = 0; n < p.N; ++n) {
      carry[n] += g * p.C[bc + n];
      p.dC[bc + n] += g * states[(t + 1) * p.N + n];
      p.dB[bc + n] += carry[n] * delta * p.u[i];
      dinput += carry[n] * p.B[bc + n];
      carry[n] *= decays[t * p.N + n];
      p.dA[d * p.N + n] += carry[n] * states[t * p.N + n] * delta;
      ddelta += carry[n] * states[t * p.N + n] * p.A[d * p.N + n];
    }
    p.du[i] = dinput * delta + g * p.D[d];
    p.ddelta[i] = (ddelta + dinput * p.u[i]) / (1 + std::exp(-raw));
    p.dbias[d] += p.ddelta[i];
  }
}

// The least of some runs, in nanoseconds per (b, t, d, n).
double nanoseconds(const Problem& p, int runs, const std::function<void()>& work) {
  double best = 1e30;
  for (int run = 0; run < runs; ++run) {
    const std::clock_t start = std::clock();
    work();
    best = std::min(best, 1e9 * double(std::clock() - start) / CLOCKS_PER_SEC);
  }
  return best / double(p.batch * p.time * p.channels * p.N);
}

void one_thread(int64_t size, int64_t, const std::function<void(int64_t, int64_t)>& body) {
  body(0, size);
}

}  // namespace

int main(int argc, char** argv) {
  auto argument = [&](int i, int64_t otherwise) {
    return i < argc ? std::stoll(argv[i]) : otherwise;
  };
  Problem p(argument(1, 4), argument(2, 512), argument(3, 512), argument(4, 16));
  const auto forward = p.forward();
  const auto backward = p.backward();
  std::vector<char> memory(std::max(cpu::workspace_bytes(forward), cpu::workspace_bytes(backward)) +
                           64);
  void* workspace =
      reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);

  Floats states((p.time + 1) * p.N);
  Floats decays(p.time * p.N);
  Floats plain(p.time);
  auto each_channel = [&](bool with_backward) {
    for (int64_t b = 0; b < p.batch; ++b)
      for (int64_t d = 0; d < p.channels; ++d) {
        plain_forward(p, b, d, states, decays, plain);
        if (with_backward) plain_backward(p, b, d, states, decays, plain);
      }
  };
  const double loop = nanoseconds(p, 3, [&] { each_channel(false); });
  // Backward alone would lack the states it kept
  const double both = nanoseconds(p, 3, [&] { each_channel(true); });
  fmt::print("B {} T {} Dm {} N {}, float32, ns per (b, t, d, n)\n", p.batch, p.time, p.channels,
             p.N);
  fmt::print("{:28} forward {:6.3f}   forward + backward {:6.3f}\n", "scalar loop", loop, both);
  const double f = nanoseconds(p, 20, [&] { cpu::selective_scan(forward, workspace, one_thread); });
  const double r =
      nanoseconds(p, 20, [&] { cpu::selective_scan(backward, workspace, one_thread); });
  fmt::print("{:28} forward {:6.3f}   forward + backward {:6.3f}   {:.1f}x, {:.1f}x\n",
             "kernel, " + cpu_target(), f, f + r, loop / f, both / (f + r));
}
