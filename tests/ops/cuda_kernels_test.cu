// Both CUDA kernels against float64 arithmetic on the CPU. Everything that they write is poisoned
// with NaN first, with a margin between rows that has to stay as it is; errors are those of the
// worst row.
#include <gtest/gtest.h>

#include "cuda_memory.h"
#include "ops/recurrence/causal_conv1d/kernel.h"
#include "ops/recurrence/channel_scan/kernel.h"

namespace assay::ops {
namespace {

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// -------------------------------------------------------------------------------- selective scan

struct ScanCase {
  DType dtype;
  int64_t batch;
  int64_t time;
  int64_t channels;
  int64_t groups;
  int64_t state_size;
  bool optional = true;  // D, z, delta_bias, softplus, initial_state, dfinal_state
  int64_t margin = 0;
  int64_t offset = 0;
};

std::ostream& operator<<(std::ostream& out, const ScanCase& c) {
  return out << (c.dtype == DType::f64   ? "f64"
                 : c.dtype == DType::f32 ? "f32"
                                         : "bf16")
             << " B" << c.batch << " T" << c.time << " D" << c.channels << " G" << c.groups << " N"
             << c.state_size << (c.optional ? " all" : " bare") << " margin " << c.margin
             << " offset " << c.offset;
}

struct ScanNumbers {  // the inputs as the kernel sees them, then what comes out
  Numbers u;
  Numbers delta;
  Numbers B;
  Numbers C;
  Numbers z;
  Numbers A;
  Numbers D;
  Numbers bias;
  Numbers initial;
  Numbers dy;
  Numbers dfinal;
  Numbers y;
  Numbers final;
  Numbers du;
  Numbers ddelta;
  Numbers dz;
  Numbers dB;
  Numbers dC;
  Numbers dA;
  Numbers dD;
  Numbers dbias;
  Numbers dinitial;
};

void reference(const ScanCase& c, ScanNumbers& x) {
  const int64_t N = c.state_size;
  const int64_t width = c.channels / c.groups;
  const int64_t rows = c.batch * c.time;
  x.y.assign(rows * c.channels, 0);
  x.du = x.ddelta = x.dz = x.y;
  x.dB.assign(rows * c.groups * N, 0);
  x.dC = x.dB;
  x.final.assign(c.batch * c.channels * N, 0);
  x.dinitial = x.final;
  x.dA.assign(c.channels * N, 0);
  x.dD.assign(c.channels, 0);
  x.dbias = x.dD;
  Numbers states((c.time + 1) * N);
  Numbers G(N);
  for (int64_t b = 0; b < c.batch; ++b)
    for (int64_t d = 0; d < c.channels; ++d) {
      const int64_t state = (b * c.channels + d) * N;
      const double D = c.optional ? x.D[d] : 0;
      auto step = [&](int64_t i) {
        const double raw = x.delta[i] + (c.optional ? x.bias[d] : 0);
        return c.optional ? (raw > 20 ? raw : std::log1p(std::exp(raw))) : raw;
      };
      for (int64_t n = 0; n < N; ++n) states[n] = c.optional ? x.initial[state + n] : 0;
      for (int64_t t = 0; t < c.time; ++t) {
        const int64_t i = (b * c.time + t) * c.channels + d;
        const int64_t j = ((b * c.time + t) * c.groups + d / width) * N;
        double y = D * x.u[i];
        for (int64_t n = 0; n < N; ++n) {
          states[(t + 1) * N + n] = std::exp(step(i) * x.A[d * N + n]) * states[t * N + n] +
                                    step(i) * x.u[i] * x.B[j + n];
          y += states[(t + 1) * N + n] * x.C[j + n];
        }
        x.y[i] = c.optional ? y * x.z[i] * sigmoid(x.z[i]) : y;
        if (c.optional)
          x.dz[i] = x.dy[i] * y * sigmoid(x.z[i]) * (1 + x.z[i] * (1 - sigmoid(x.z[i])));
      }
      for (int64_t n = 0; n < N; ++n) {
        x.final[state + n] = states[c.time * N + n];
        G[n] = c.optional ? x.dfinal[state + n] : 0;
      }
      for (int64_t t = c.time - 1; t >= 0; --t) {
        const int64_t i = (b * c.time + t) * c.channels + d;
        const int64_t j = ((b * c.time + t) * c.groups + d / width) * N;
        const double dout = c.optional ? x.dy[i] * x.z[i] * sigmoid(x.z[i]) : x.dy[i];
        double dstep = 0;
        x.du[i] = D * dout;
        x.dD[d] += dout * x.u[i];
        for (int64_t n = 0; n < N; ++n) {
          const double a = std::exp(step(i) * x.A[d * N + n]);
          const double before = states[t * N + n];
          G[n] += dout * x.C[j + n];
          x.dC[j + n] += dout * states[(t + 1) * N + n];
          x.dB[j + n] += G[n] * step(i) * x.u[i];
          x.du[i] += G[n] * step(i) * x.B[j + n];
          dstep += G[n] * (a * before * x.A[d * N + n] + x.u[i] * x.B[j + n]);
          x.dA[d * N + n] += G[n] * a * before * step(i);
          G[n] *= a;
        }
        x.ddelta[i] = c.optional ? dstep * sigmoid(x.delta[i] + x.bias[d]) : dstep;
        x.dbias[d] += x.ddelta[i];
      }
      for (int64_t n = 0; n < N; ++n) x.dinitial[state + n] = G[n];
    }
}

class CudaScan : public testing::TestWithParam<ScanCase> {};

TEST_P(CudaScan, EqualsFloat64AndItself) {
  if (!gpu_is_seen()) GTEST_SKIP() << "no CUDA device found";
  const ScanCase c = GetParam();
  const int64_t B = c.batch;
  const int64_t T = c.time;
  const int64_t M = c.channels;
  const int64_t N = c.state_size;
  const int64_t GN = c.groups * N;
  const DType real = real_of(c.dtype);
  Random random{std::mt19937_64(7)};
  auto sequence = [&](int64_t width) { return Sequence(c.dtype, B, T, width, c.offset, c.margin); };
  Sequence u = sequence(M);
  Sequence delta = sequence(M);
  Sequence in_B = sequence(GN);
  Sequence in_C = sequence(GN);
  Sequence z = sequence(M);
  Sequence y = sequence(M);
  Sequence dy = sequence(M);
  Sequence du = sequence(M);
  Sequence ddelta = sequence(M);
  Sequence dz = sequence(M);
  Array A(real, M * N);
  Array D(real, M);
  Array bias(real, M);
  Array initial(real, B * M * N);
  Array final(real, B * M * N);
  Array dfinal(real, B * M * N);
  Array dB(real, B * T * GN);
  Array dC(real, B * T * GN);
  Array dA(real, M * N);
  Array dD(real, M);
  Array dbias(real, M);
  Array dinitial(real, B * M * N);
  ScanNumbers x;
  // Means off zero: the relative error of a sum that cancels would say nothing about the kernel.
  x.u = u.set(random.normal(B * T * M, 1));
  x.B = in_B.set(random.normal(B * T * GN, 1));
  x.C = in_C.set(random.normal(B * T * GN, 1));
  x.delta = delta.set(c.optional ? random.normal(B * T * M, -1, 1.5)
                                 : random.uniform(B * T * M, 0.001, 0.2));
  x.z = z.set(random.normal(B * T * M, 1));
  x.dy = dy.set(random.normal(B * T * M, 1));
  x.A = A.set(random.uniform(M * N, -double(std::min<int64_t>(N, 16)), -0.05));
  x.D = D.set(random.normal(M));
  x.bias = bias.set(random.normal(M, -1, 1));
  x.initial = initial.set(random.normal(B * M * N));
  x.dfinal = dfinal.set(random.normal(B * M * N));
  reference(c, x);

  auto maybe = [&](const Sequence& s) { return c.optional ? s.view() : View{}; };
  auto maybe_data = [&](const Array& s) {
    return c.optional ? static_cast<float*>(s.data()) : nullptr;
  };
  auto raw = [](const Array& a) { return static_cast<float*>(a.data()); };
  ChannelScanForward p{.dtype = c.dtype,
                       .update = Update::decay,
                       .batch = B,
                       .time = T,
                       .channels = M,
                       .state_size = N,
                       .delta_softplus = c.optional,
                       .x = u.view(),
                       .delta = delta.view(),
                       .k = in_B.view(),
                       .q = in_C.view(),
                       .rate = {A.data()},
                       .rate_of_channels = true,
                       .groups = c.groups,
                       .z = maybe(z),
                       .D = maybe_data(D),
                       .delta_bias = maybe_data(bias),
                       .initial_state = maybe_data(initial),
                       .y = y.view(),
                       .final_state = raw(final),
                       .chunk_states = nullptr};
  Memory forward_scratch(cuda::workspace_bytes(p));
  Array chunk_states(real, cuda::chunk_states(p));
  cuda::channel_scan(p, forward_scratch.data, nullptr);
  const double limit = tolerance(c.dtype);
  EXPECT_LE(worst_row(y.values(), x.y, M), limit) << "y without chunk_states";
  must(cudaMemset(y.memory.data, 0xff, y.memory.size));
  p.chunk_states = raw(chunk_states);
  cuda::channel_scan(p, forward_scratch.data, nullptr);
  EXPECT_LE(worst_row(y.values(), x.y, M), limit) << "y";
  EXPECT_LE(worst_row(final.values(), x.final, N), limit) << "final_state";

  ChannelScanBackward q{.forward = p,
                        .dy = dy.view(),
                        .dfinal_state = maybe_data(dfinal),
                        .dx = du.view(),
                        .ddelta = ddelta.view(),
                        .dz = maybe(dz),
                        .dk = raw(dB),
                        .dq = raw(dC),
                        .drate = raw(dA),
                        .dD = maybe_data(dD),
                        .ddelta_bias = maybe_data(dbias),
                        .dinitial_state = maybe_data(dinitial)};
  Memory scratch(cuda::workspace_bytes(q));
  std::vector<std::vector<unsigned char>> first;
  for (int run = 0; run < 2; ++run) {
    cuda::channel_scan(q, scratch.data, nullptr);
    must(cudaDeviceSynchronize());
    std::vector<std::vector<unsigned char>> bytes;
    for (const Sequence* s :
         {&du, &ddelta, &dz, static_cast<Sequence*>(&dB), static_cast<Sequence*>(&dC),
          static_cast<Sequence*>(&dA), static_cast<Sequence*>(&dD), static_cast<Sequence*>(&dbias),
          static_cast<Sequence*>(&dinitial)})
      bytes.push_back(s->memory.bytes());
    if (run == 0) first = bytes;
    else EXPECT_EQ(first, bytes) << "two runs differ";
  }
  EXPECT_LE(worst_row(du.values(), x.du, M), limit) << "du";
  EXPECT_LE(worst_row(ddelta.values(), x.ddelta, M), limit) << "ddelta";
  EXPECT_LE(worst_row(dB.values(), x.dB, GN), limit) << "dB";
  EXPECT_LE(worst_row(dC.values(), x.dC, GN), limit) << "dC";
  EXPECT_LE(worst_row(dA.values(), x.dA, N), limit) << "dA";
  if (!c.optional) return;
  EXPECT_LE(worst_row(dz.values(), x.dz, M), limit) << "dz";
  EXPECT_LE(worst_row(dD.values(), x.dD, M), limit) << "dD";
  EXPECT_LE(worst_row(dbias.values(), x.dbias, M), limit) << "ddelta_bias";
  EXPECT_LE(worst_row(dinitial.values(), x.dinitial, N), limit) << "dinitial_state";
}

std::vector<ScanCase> scan_cases() {
  std::vector<ScanCase> cases;
  for (DType dtype : {DType::f32, DType::bf16}) {
    for (int64_t time : {1, 15, 16, 17, 31, 32, 33, 67, 300})
      cases.push_back({dtype, 2, time, 160, 1, 16});
    cases.push_back({dtype, 1, 70, 8, 1, 16, false});
    cases.push_back({dtype, 2, 45, 129, 3, 16, true, 3, 1});
    cases.push_back({dtype, 2, 45, 129, 3, 16, false, 8, 0});
    cases.push_back({dtype, 8, 384, 64, 64, 16});   // chunks of 128
    cases.push_back({dtype, 8, 1501, 64, 64, 16});  // chunks of 512, the last one short
    for (int64_t state_size : {1, 5, 32, 33, 64})
      cases.push_back({dtype, 2, 37, 20, 2, state_size, true, 1, 1});
    cases.push_back({dtype, 2, 50, 144, 1, 16, true, 8, 8});  // rows apart, still aligned
    cases.push_back({dtype, 1, 70, 40, 1, 24, false});
  }
  return cases;
}
INSTANTIATE_TEST_SUITE_P(Shapes, CudaScan, testing::ValuesIn(scan_cases()));

// ---------------------------------------------------------------------------- causal convolution

struct ConvCase {
  DType dtype;
  int64_t batch;
  int64_t time;
  int64_t channels;
  int64_t width;
  bool optional = true;  // bias, silu, initial_state, dfinal_state
  int64_t margin = 0;
  int64_t offset = 0;
};

std::ostream& operator<<(std::ostream& out, const ConvCase& c) {
  return out << (c.dtype == DType::f64   ? "f64"
                 : c.dtype == DType::f32 ? "f32"
                                         : "bf16")
             << " B" << c.batch << " T" << c.time << " D" << c.channels << " K" << c.width
             << (c.optional ? " all" : " bare") << " margin " << c.margin << " offset " << c.offset;
}

struct ConvNumbers {
  Numbers x;
  Numbers weight;
  Numbers bias;
  Numbers initial;
  Numbers dy;
  Numbers dfinal;
  Numbers y;
  Numbers final;
  Numbers dx;
  Numbers dweight;
  Numbers dbias;
  Numbers dinitial;
};

void reference(const ConvCase& c, ConvNumbers& n) {
  const int64_t K = c.width;
  const int64_t M = c.channels;
  const int64_t before = K - 1;
  n.y.assign(c.batch * c.time * M, 0);
  n.dx = n.y;
  n.final.assign(c.batch * M * before, 0);
  n.dinitial = n.final;
  n.dweight.assign(M * K, 0);
  n.dbias.assign(M, 0);
  for (int64_t b = 0; b < c.batch; ++b)
    for (int64_t d = 0; d < M; ++d) {
      // from the first input of initial_state on
      Numbers x(before + c.time);
      Numbers dx(before + c.time);
      for (int64_t i = 0; i < before; ++i)
        x[i] = c.optional ? n.initial[(b * M + d) * before + i] : 0;
      for (int64_t t = 0; t < c.time; ++t) x[before + t] = n.x[(b * c.time + t) * M + d];
      for (int64_t t = 0; t < c.time; ++t) {
        double pre = c.optional ? n.bias[d] : 0;
        for (int64_t j = 0; j < K; ++j) pre += n.weight[d * K + j] * x[t + j];
        const int64_t i = (b * c.time + t) * M + d;
        const double gate = sigmoid(pre);
        const double dpre = c.optional ? n.dy[i] * gate * (1 + pre * (1 - gate)) : n.dy[i];
        n.y[i] = c.optional ? pre * gate : pre;
        n.dbias[d] += dpre;
        for (int64_t j = 0; j < K; ++j) {
          n.dweight[d * K + j] += dpre * x[t + j];
          dx[t + j] += dpre * n.weight[d * K + j];
        }
      }
      for (int64_t i = 0; i < before; ++i) {
        n.final[(b * M + d) * before + i] = x[c.time + i];
        if (c.optional) dx[c.time + i] += n.dfinal[(b * M + d) * before + i];
      }
      for (int64_t i = 0; i < before; ++i) n.dinitial[(b * M + d) * before + i] = dx[i];
      for (int64_t t = 0; t < c.time; ++t) n.dx[(b * c.time + t) * M + d] = dx[before + t];
    }
}

class CudaConv : public testing::TestWithParam<ConvCase> {};

TEST_P(CudaConv, EqualsFloat64AndItself) {
  if (!gpu_is_seen()) GTEST_SKIP() << "no CUDA device found";
  const ConvCase c = GetParam();
  const int64_t B = c.batch;
  const int64_t T = c.time;
  const int64_t M = c.channels;
  const int64_t K = c.width;
  const int64_t before = K - 1;
  const DType real = real_of(c.dtype);
  Random random{std::mt19937_64(11)};
  auto sequence = [&] { return Sequence(c.dtype, B, T, M, c.offset, c.margin); };
  Sequence in = sequence();
  Sequence y = sequence();
  Sequence dy = sequence();
  Sequence dx = sequence();
  Array weight(real, M * K);
  Array bias(real, M);
  Array initial(real, B * M * before);
  Array final(real, B * M * before);
  Array dfinal(real, B * M * before);
  Array dweight(real, M * K);
  Array dbias(real, M);
  Array dinitial(real, B * M * before);
  ConvNumbers x;
  x.x = in.set(random.normal(B * T * M));
  x.dy = dy.set(random.normal(B * T * M));
  x.weight = weight.set(random.normal(M * K, 0, 0.5));
  x.bias = bias.set(random.normal(M));
  x.initial = initial.set(random.normal(B * M * before));
  x.dfinal = dfinal.set(random.normal(B * M * before));
  reference(c, x);

  auto maybe = [&](const Array& a) { return c.optional ? a.data() : nullptr; };
  const CausalConv1dForward p{.dtype = c.dtype,
                              .batch = B,
                              .time = T,
                              .channels = M,
                              .width = K,
                              .silu = c.optional,
                              .x = in.view(),
                              .weight = weight.data(),
                              .bias = maybe(bias),
                              .initial_state = maybe(initial),
                              .y = y.view(),
                              .final_state = final.data()};
  cuda::causal_conv1d(p, nullptr);
  const double limit = tolerance(c.dtype);
  EXPECT_LE(worst_row(y.values(), x.y, M), limit) << "y";
  if (K > 1) EXPECT_LE(worst_row(final.values(), x.final, M * before), limit) << "final_state";

  const CausalConv1dBackward q{.forward = p,
                               .dy = {dy.view()},
                               .dfinal_state = maybe(dfinal),
                               .dx = dx.view(),
                               .dweight = dweight.data(),
                               .dbias = maybe(dbias),
                               .dinitial_state = maybe(dinitial)};
  Memory scratch(cuda::workspace_bytes(q));
  Numbers dweights;
  for (int run = 0; run < 2; ++run) {
    cuda::causal_conv1d(q, scratch.data, nullptr);
    must(cudaDeviceSynchronize());
    if (run == 0) dweights = dweight.values();
    else EXPECT_EQ(dweights, dweight.values()) << "two runs differ";
  }
  EXPECT_LE(worst_row(dx.values(), x.dx, M), limit) << "dx";
  EXPECT_LE(worst_row(dweight.values(), x.dweight, K), limit) << "dweight";
  if (!c.optional) return;
  EXPECT_LE(worst_row(dbias.values(), x.dbias, M), limit) << "dbias";
  if (K > 1)
    EXPECT_LE(worst_row(dinitial.values(), x.dinitial, M * before), limit) << "dinitial_state";
}

std::vector<ConvCase> conv_cases() {
  std::vector<ConvCase> cases;
  for (DType dtype : {DType::f32, DType::bf16, DType::f64}) {
    for (int64_t width = 1; width <= 8; ++width)
      cases.push_back({dtype, 2, 131, 24, width, width % 2 == 0});
    for (int64_t time : {1, 2, 3, 63, 64, 65, 67}) cases.push_back({dtype, 2, time, 136, 4});
    cases.push_back({dtype, 2, 66, 24, 4, true, 8, 8});  // rows apart, still aligned
    cases.push_back({dtype, 3, 66, 13, 4, true, 1, 1});
    cases.push_back({dtype, 2, 3, 8, 8});
  }
  return cases;
}
INSTANTIATE_TEST_SUITE_P(Shapes, CudaConv, testing::ValuesIn(conv_cases()));

// ------------------------------------------------------------------------------------- launches

__global__ void kernel_of_no_block() {}

TEST(CudaLaunch, FailedLaunchNamesItsKernel) {
  if (!gpu_is_seen()) GTEST_SKIP() << "no CUDA device found";
  std::string message = "no error";
  try {
    cuda::launch_kernel(kernel_of_no_block, 0, 32, 0, nullptr);
  } catch (const Error& error) {
    message = error.what();
  }
  EXPECT_NE(message.find("kernel_of_no_block()"), std::string::npos) << message;
  EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "the error stays";
}

}  // namespace
}  // namespace assay::ops
