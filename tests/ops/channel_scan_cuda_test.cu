// The scan whose decay comes from the token, all three updates, against float64 arithmetic on the
// CPU. Everything that it writes is poisoned with NaN first, with a margin between rows that has to
// stay as it is.
#include <gtest/gtest.h>

#include "cuda_memory.h"
#include "ops/recurrence/channel_scan/kernel.h"

namespace assay::ops {
namespace {

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

struct Case {
  DType dtype;
  Update update;
  int64_t batch;
  int64_t time;
  int64_t channels;
  int64_t state_size;
  bool optional = true;  // D, z, delta_bias, softplus, initial_state, dfinal_state
  int64_t margin = 0;
  int64_t offset = 0;
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << (c.dtype == DType::f32 ? "f32 " : "bf16 ")
             << (c.update == Update::decay      ? "decay"
                 : c.update == Update::diagonal ? "diagonal"
                                                : "exact")
             << " B" << c.batch << " T" << c.time << " D" << c.channels << " N" << c.state_size
             << (c.optional ? " all" : " bare") << " margin " << c.margin << " offset " << c.offset
             << " seed 7";
}

struct Expected {  // the inputs as the kernel sees them, then what comes out
  Numbers x;
  Numbers delta;
  Numbers k;
  Numbers q;
  Numbers rate;
  Numbers z;
  Numbers D;
  Numbers bias;
  Numbers initial;
  Numbers dy;
  Numbers dfinal;
  Numbers y;
  Numbers final;
  Numbers dx;
  Numbers ddelta;
  Numbers dz;
  Numbers dk;
  Numbers dq;
  Numbers drate;
  Numbers dD;
  Numbers dbias;
  Numbers dinitial;
};

// One channel of one sequence, forwards and backwards.
void channel(const Case& c, Expected& e, int64_t b, int64_t d) {
  const int64_t N = c.state_size;
  const int64_t T = c.time;
  const int64_t state = (b * c.channels + d) * N;
  const double D = c.optional ? e.D[d] : 0;
  Numbers S((T + 1) * N);
  Numbers G(N);
  Numbers decay(N);
  auto at = [&](int64_t t) { return (b * T + t) * c.channels + d; };
  auto token = [&](int64_t t) { return (b * T + t) * N; };
  struct Step {
    double size;
    double slope;
    double square;
  };
  auto step_at = [&](int64_t t) -> Step {
    const double raw = e.delta[at(t)] + (c.optional ? e.bias[d] : 0);
    if (c.update == Update::decay && !c.optional) return {raw, 1, 0};
    if (c.update == Update::decay)
      return {raw > 20 ? raw : std::log1p(std::exp(raw)), sigmoid(raw), 0};
    double square = 0;
    for (int64_t n = 0; n < N; ++n) square += e.k[token(t) + n] * e.k[token(t) + n];
    const double beta = sigmoid(raw);
    const double held = 1 / (1 + beta * square);
    return {beta * held, held * held * beta * (1 - beta), square};
  };
  auto decays = [&](int64_t t, double p) {
    for (int64_t n = 0; n < N; ++n) {
      const double k = e.k[token(t) + n];
      decay[n] = c.update == Update::decay      ? std::exp(p * e.rate[token(t) + n])
                 : c.update == Update::diagonal ? 1 - p * k * k
                                                : 1;
    }
  };
  auto written = [&](int64_t t) {  // x, or for the exact update what S does not say of it yet
    double rest = e.x[at(t)];
    for (int64_t n = 0; n < N && c.update == Update::exact; ++n)
      rest -= S[t * N + n] * e.k[token(t) + n];
    return rest;
  };
  for (int64_t n = 0; n < N; ++n) S[n] = c.optional ? e.initial[state + n] : 0;
  for (int64_t t = 0; t < T; ++t) {
    const Step p = step_at(t);
    const double rest = written(t);
    const double z = c.optional ? e.z[at(t)] : 0;
    double y = D * e.x[at(t)];
    decays(t, p.size);
    for (int64_t n = 0; n < N; ++n) {
      S[(t + 1) * N + n] = decay[n] * S[t * N + n] + p.size * rest * e.k[token(t) + n];
      y += S[(t + 1) * N + n] * e.q[token(t) + n];
    }
    e.y[at(t)] = c.optional ? y * z * sigmoid(z) : y;
    if (c.optional) e.dz[at(t)] = e.dy[at(t)] * y * sigmoid(z) * (1 + z * (1 - sigmoid(z)));
  }
  for (int64_t n = 0; n < N; ++n) {
    e.final[state + n] = S[T * N + n];
    G[n] = c.optional ? e.dfinal[state + n] : 0;
  }
  for (int64_t t = T - 1; t >= 0; --t) {
    const Step p = step_at(t);
    const double rest = written(t);
    const double dout = c.optional ? e.dy[at(t)] * e.z[at(t)] * sigmoid(e.z[at(t)]) : e.dy[at(t)];
    double dwrite = 0;
    double dstep = 0;
    decays(t, p.size);
    for (int64_t n = 0; n < N; ++n) {
      G[n] += dout * e.q[token(t) + n];
      dwrite += G[n] * e.k[token(t) + n];
      e.dq[token(t) + n] += dout * S[(t + 1) * N + n];
    }
    dstep = rest * dwrite;
    for (int64_t n = 0; n < N; ++n) {
      const double k = e.k[token(t) + n];
      const double before = S[t * N + n];
      const double ddecay = G[n] * before;
      e.dk[token(t) + n] += p.size * rest * G[n];
      if (c.update == Update::decay) {
        dstep += ddecay * decay[n] * e.rate[token(t) + n];
        e.drate[token(t) + n] += ddecay * decay[n] * p.size;
      } else if (c.update == Update::diagonal) {
        dstep -= ddecay * k * k;
        e.dk[token(t) + n] -= 2 * p.size * k * ddecay;
      } else {
        e.dk[token(t) + n] -= p.size * dwrite * before;
      }
      G[n] = c.update == Update::exact ? G[n] - p.size * dwrite * k : G[n] * decay[n];
    }
    if (c.update != Update::decay)
      for (int64_t n = 0; n < N; ++n)
        e.dk[token(t) + n] -= 2 * e.k[token(t) + n] * dstep * p.size * p.size;
    e.dx[at(t)] = D * dout + p.size * dwrite;
    e.ddelta[at(t)] = dstep * p.slope;
    e.dD[d] += dout * e.x[at(t)];
    e.dbias[d] += e.ddelta[at(t)];
  }
  for (int64_t n = 0; n < N; ++n) e.dinitial[state + n] = G[n];
}

void reference(const Case& c, Expected& e) {
  const int64_t rows = c.batch * c.time;
  e.y.assign(rows * c.channels, 0);
  e.dx = e.ddelta = e.dz = e.y;
  e.dk.assign(rows * c.state_size, 0);
  e.dq = e.drate = e.dk;
  e.final.assign(c.batch * c.channels * c.state_size, 0);
  e.dinitial = e.final;
  e.dD.assign(c.channels, 0);
  e.dbias = e.dD;
  for (int64_t b = 0; b < c.batch; ++b)
    for (int64_t d = 0; d < c.channels; ++d) channel(c, e, b, d);
}

class ChannelScanCuda : public testing::TestWithParam<Case> {};

TEST_P(ChannelScanCuda, EqualsFloat64AndItself) {
  if (!gpu_is_seen()) GTEST_SKIP() << "no CUDA device found";
  const Case c = GetParam();
  const int64_t B = c.batch;
  const int64_t T = c.time;
  const int64_t M = c.channels;
  const int64_t N = c.state_size;
  Random random{std::mt19937_64(7)};
  auto sequence = [&](int64_t width) { return Sequence(c.dtype, B, T, width, c.offset, c.margin); };
  auto floats = [](int64_t size) { return Array(DType::f32, size); };
  auto raw = [](const Array& a) { return static_cast<float*>(a.data()); };
  Sequence x = sequence(M);
  Sequence delta = sequence(M);
  Sequence k = sequence(N);
  Sequence q = sequence(N);
  Sequence z = sequence(M);
  Sequence y = sequence(M);
  Sequence dy = sequence(M);
  Sequence dx = sequence(M);
  Sequence ddelta = sequence(M);
  Sequence dz = sequence(M);
  Sequence rate(DType::f32, B, T, N, c.offset, c.margin);
  Array D = floats(M);
  Array bias = floats(M);
  Array initial = floats(B * M * N);
  Array final = floats(B * M * N);
  Array dfinal = floats(B * M * N);
  Array dk = floats(B * T * N);
  Array dq = floats(B * T * N);
  Array drate = floats(B * T * N);
  Array dD = floats(M);
  Array dbias = floats(M);
  Array dinitial = floats(B * M * N);
  Expected e;
  // Means off zero: the relative error of a sum that cancels would say nothing about the kernel.
  e.x = x.set(random.normal(B * T * M, 1));
  e.k = k.set(random.normal(B * T * N, 0.3, 0.5));
  e.q = q.set(random.normal(B * T * N, 1));
  e.rate = rate.set(random.uniform(B * T * N, -3, -0.05));
  e.delta =
      delta.set(c.optional || c.update != Update::decay ? random.normal(B * T * M, -1, 1.5)
                                                        : random.uniform(B * T * M, 0.001, 0.2));
  e.z = z.set(random.normal(B * T * M, 1));
  e.dy = dy.set(random.normal(B * T * M, 1));
  e.D = D.set(random.normal(M));
  e.bias = bias.set(random.normal(M, -1, 1));
  e.initial = initial.set(random.normal(B * M * N));
  e.dfinal = dfinal.set(random.normal(B * M * N));
  reference(c, e);

  auto maybe = [&](const Sequence& s) { return c.optional ? s.view() : View{}; };
  auto maybe_raw = [&](const Array& a) { return c.optional ? raw(a) : nullptr; };
  ChannelScanForward p{
      .dtype = c.dtype, .update = c.update, .batch = B, .time = T, .channels = M, .state_size = N};
  p.delta_softplus = c.optional;
  p.x = x.view();
  p.delta = delta.view();
  p.k = k.view();
  p.q = q.view();
  if (c.update == Update::decay) p.rate = rate.view();
  p.z = maybe(z);
  p.D = maybe_raw(D);
  p.delta_bias = maybe_raw(bias);
  p.initial_state = maybe_raw(initial);
  p.y = y.view();
  p.final_state = raw(final);
  p.chunk_states = nullptr;
  Memory forward_scratch(cuda::workspace_bytes(p));
  Array chunk_states = floats(cuda::chunk_states(p));
  const double limit = tolerance(c.dtype);
  cuda::channel_scan(p, forward_scratch.data, nullptr);
  EXPECT_LE(worst_row(y.values(), e.y, M), limit) << "y without chunk_states";
  must(cudaMemset(y.memory.data, 0xff, y.memory.size));
  must(cudaMemset(final.data(), 0xff, final.memory.size));
  p.chunk_states = raw(chunk_states);
  cuda::channel_scan(p, forward_scratch.data, nullptr);
  EXPECT_LE(worst_row(y.values(), e.y, M), limit) << "y";
  EXPECT_LE(worst_row(final.values(), e.final, N), limit) << "final_state";

  ChannelScanBackward work{.forward = p, .dy = dy.view(), .dfinal_state = maybe_raw(dfinal)};
  work.dx = dx.view();
  work.ddelta = ddelta.view();
  work.dz = maybe(dz);
  work.dk = raw(dk);
  work.dq = raw(dq);
  work.drate = c.update == Update::decay ? raw(drate) : nullptr;
  work.dD = maybe_raw(dD);
  work.ddelta_bias = maybe_raw(dbias);
  work.dinitial_state = maybe_raw(dinitial);
  Memory scratch(cuda::workspace_bytes(work));
  std::vector<std::vector<unsigned char>> first;
  for (int run = 0; run < 2; ++run) {
    cuda::channel_scan(work, scratch.data, nullptr);
    must(cudaDeviceSynchronize());
    std::vector<std::vector<unsigned char>> bytes;
    for (const Sequence* s : std::initializer_list<const Sequence*>{&dx, &ddelta, &dz, &dk, &dq,
                                                                    &drate, &dD, &dbias, &dinitial})
      bytes.push_back(s->memory.bytes());
    if (run == 0) first = bytes;
    else EXPECT_EQ(first, bytes) << "two runs differ";
  }
  EXPECT_LE(worst_row(dx.values(), e.dx, M), limit) << "dx";
  EXPECT_LE(worst_row(ddelta.values(), e.ddelta, M), limit) << "ddelta";
  EXPECT_LE(worst_row(dk.values(), e.dk, N), limit) << "dk";
  EXPECT_LE(worst_row(dq.values(), e.dq, N), limit) << "dq";
  if (c.update == Update::decay) EXPECT_LE(worst_row(drate.values(), e.drate, N), limit) << "drate";
  if (!c.optional) return;
  EXPECT_LE(worst_row(dz.values(), e.dz, M), limit) << "dz";
  EXPECT_LE(worst_row(dD.values(), e.dD, M), limit) << "dD";
  EXPECT_LE(worst_row(dbias.values(), e.dbias, M), limit) << "ddelta_bias";
  EXPECT_LE(worst_row(dinitial.values(), e.dinitial, N), limit) << "dinitial_state";
}

std::vector<Case> cases() {
  std::vector<Case> cases;
  for (Update update : {Update::decay, Update::diagonal, Update::exact})
    for (DType dtype : {DType::f32, DType::bf16}) {
      for (int64_t time : {1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 101, 300})
        cases.push_back({dtype, update, 2, time, 160, 16});
      cases.push_back({dtype, update, 1, 70, 8, 16, false});
      cases.push_back({dtype, update, 2, 45, 43, 16, true, 3, 1});
      cases.push_back({dtype, update, 2, 45, 72, 16, false, 8, 0});
      for (int64_t N : {3, 5, 8, 9, 24, 32, 33, 64}) cases.push_back({dtype, update, 1, 50, 72, N});
      cases.push_back({dtype, update, 50, 1940, 24, 4});  // chunks of 64
    }
  return cases;
}
INSTANTIATE_TEST_SUITE_P(Shapes, ChannelScanCuda, testing::ValuesIn(cases()));

TEST(ChannelScanCudaShapes, SaysWhatItDoesNotTake) {
  const ChannelScanForward large{DType::f32, Update::exact, 1, 1, 1, 65};
  const ChannelScanForward wide{DType::f64, Update::exact, 1, 1, 1, 16};
  EXPECT_THROW(cuda::channel_scan(large, nullptr, nullptr), Unsupported);
  EXPECT_THROW(cuda::channel_scan(wide, nullptr, nullptr), Unsupported);
}

}  // namespace
}  // namespace assay::ops
