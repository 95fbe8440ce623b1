// The CPU kernels of the selective scan against plain loops in double, and
// against finite differences.
#include <gtest/gtest.h>

#include <map>

#include "ops/buffers.h"
#include "ops/core/cpu_target.h"
#include "ops/recurrence/selective_scan/kernel.h"
#include "ops/simd_target.h"

namespace assay::ops {
namespace {

struct Shape {
  int64_t batch;
  int64_t time;
  int64_t channels;
  int64_t groups;
  int64_t state_size;
  bool softplus = true;
  bool z = true;
  bool D = true;
  bool bias = true;
  bool initial = true;
};
std::ostream& operator<<(std::ostream& out, const Shape& s) {
  return out << "B" << s.batch << " T" << s.time << " Dm" << s.channels << " G" << s.groups << " N"
             << s.state_size << (s.softplus ? " softplus" : "") << (s.z ? " z" : "")
             << (s.D ? " D" : "") << (s.bias ? " bias" : "") << (s.initial ? " initial_state" : "");
}
// By the names of kernel.h; an absent tensor is empty
using Tensors = std::map<std::string, Numbers>;

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

Tensors random_inputs(const Shape& s, uint64_t seed, DType dtype) {
  const DType real = real_of(dtype);
  const int64_t rows = s.batch * s.time * s.channels;
  const int64_t BC = s.batch * s.time * s.groups * s.state_size;
  const int64_t states = s.batch * s.channels * s.state_size;
  Tensors x;
  x["u"] = normal(seed, "u", rows, dtype);
  x["delta"] = normal(seed, "delta", rows, dtype, s.softplus ? 0 : 0.5, s.softplus ? 1 : 0.1);
  x["B"] = normal(seed, "B", BC, dtype);
  x["C"] = normal(seed, "C", BC, dtype);
  x["A"] = normal(seed, "A", s.channels * s.state_size, real);
  for (double& a : x["A"]) a = -0.1 - std::abs(a);
  for (double& a : x["A"]) a = real == DType::f32 ? float(a) : a;
  x["z"] = normal(seed, "z", s.z ? rows : 0, dtype);
  x["D"] = normal(seed, "D", s.D ? s.channels : 0, real);
  x["delta_bias"] =
      normal(seed, "delta_bias", s.bias ? s.channels : 0, real, 0, s.softplus ? 0.3 : 0.03);
  x["initial_state"] = normal(seed, "initial_state", s.initial ? states : 0, real);
  x["dy"] = normal(seed, "dy", rows, dtype);
  x["dfinal_state"] = normal(seed, "dfinal_state", s.initial ? states : 0, real);
  return x;
}

// Forward and gradient, one number at a time, every state kept. `sizes`: sums of the absolute terms
// of dB and dC.
Tensors naive(const Shape& s, Tensors& x, Tensors* sizes = nullptr) {
  const auto [batch, time, channels, groups, N, softplus, has_z, has_D, has_bias, initial] = s;
  const Numbers& u = x["u"];
  const Numbers& raw = x["delta"];
  const Numbers& z = x["z"];
  const Numbers& B = x["B"];
  const Numbers& C = x["C"];
  const Numbers& A = x["A"];
  const Numbers& D = x["D"];
  const Numbers& bias = x["delta_bias"];
  const Numbers& S0 = x["initial_state"];
  const Numbers& dy = x["dy"];
  const Numbers& dS = x["dfinal_state"];
  Tensors out;
  for (const char* name : {"u", "delta", "z", "B", "C", "A", "D", "delta_bias", "initial_state"})
    out["d" + std::string(name)].assign(x[name].size(), 0);
  Numbers& y = out["y"];
  Numbers& last = out["final_state"];
  Numbers& du = out["du"];
  Numbers& ddelta = out["ddelta"];
  Numbers& dz = out["dz"];
  Numbers& dB = out["dB"];
  Numbers& dC = out["dC"];
  Numbers& dA = out["dA"];
  Numbers& dD = out["dD"];
  Numbers& dbias = out["ddelta_bias"];
  Numbers dB_size(B.size());
  Numbers dC_size(C.size());
  y.resize(u.size());
  last.resize(batch * channels * N);
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t d = 0; d < channels; ++d) {
      const int64_t group = d / (channels / groups);
      const int64_t state = (b * channels + d) * N;
      auto row = [&](int64_t t) { return (b * time + t) * channels + d; };
      auto bc = [&](int64_t t, int64_t n) { return ((b * time + t) * groups + group) * N + n; };
      auto step = [&](int64_t t) { return raw[row(t)] + (has_bias ? bias[d] : 0); };
      auto soft = [&](double x) { return softplus && x <= 20 ? std::log1p(std::exp(x)) : x; };
      std::vector<Numbers> S(time + 1, Numbers(N, 0.0));
      std::vector<Numbers> decay(time, Numbers(N));
      if (initial) S[0].assign(&S0[state], &S0[state] + N);
      Numbers plain(time);
      Numbers delta(time);
      for (int64_t t = 0; t < time; ++t) {
        const int64_t i = row(t);
        delta[t] = soft(step(t));
        plain[t] = has_D ? D[d] * u[i] : 0;
        for (int64_t n = 0; n < N; ++n) {
          decay[t][n] = std::exp(delta[t] * A[d * N + n]);
          S[t + 1][n] = decay[t][n] * S[t][n] + delta[t] * u[i] * B[bc(t, n)];
          plain[t] += S[t + 1][n] * C[bc(t, n)];
        }
        y[i] = has_z ? plain[t] * z[i] * sigmoid(z[i]) : plain[t];
      }
      std::copy(S[time].begin(), S[time].end(), &last[state]);

      Numbers H(N, 0.0);
      if (!dS.empty()) H.assign(&dS[state], &dS[state] + N);
      for (int64_t t = time - 1; t >= 0; --t) {
        const int64_t i = row(t);
        const double gate = has_z ? sigmoid(z[i]) : 1;
        const double g = has_z ? dy[i] * z[i] * gate : dy[i];
        if (has_z) dz[i] = dy[i] * plain[t] * (gate + z[i] * gate * (1 - gate));
        if (has_D) dD[d] += g * u[i];
        du[i] = has_D ? g * D[d] : 0;
        double dstep = 0;
        for (int64_t n = 0; n < N; ++n) {
          const int64_t k = bc(t, n);
          const int64_t a = d * N + n;
          H[n] += g * C[k];
          dC[k] += g * S[t + 1][n];
          dB[k] += H[n] * delta[t] * u[i];
          dC_size[k] += std::abs(g * S[t + 1][n]);
          dB_size[k] += std::abs(H[n] * delta[t] * u[i]);
          dA[a] += H[n] * decay[t][n] * S[t][n] * delta[t];
          du[i] += H[n] * B[k] * delta[t];
          dstep += H[n] * (B[k] * u[i] + decay[t][n] * S[t][n] * A[a]);
          H[n] *= decay[t][n];
        }
        ddelta[i] = dstep * (softplus && step(t) <= 20 ? sigmoid(step(t)) : 1);
        if (has_bias) dbias[d] += ddelta[i];
      }
      if (initial) std::copy(H.begin(), H.end(), &out["dinitial_state"][state]);
    }
  if (sizes) *sizes = {{"dB", dB_size}, {"dC", dC_size}};
  return out;
}

View rows(Buffer& buffer, const Shape& s, int64_t width) {
  return {buffer.data(), s.time * width, width};
}

// The kernels; `threads` cut the work. Outputs are NaN before.
Tensors kernel(const Shape& s, Tensors& x, DType dtype, int threads = 2) {
  const DType real = real_of(dtype);
  const int64_t BC = s.groups * s.state_size;
  const int64_t chunks = (s.time + cpu::kChunk - 1) / cpu::kChunk;
  std::map<std::string, Buffer> in;
  std::map<std::string, Buffer> out;
  for (const auto& [name, numbers] : x) {
    const bool sequence =
        name == "u" || name == "delta" || name == "B" || name == "C" || name == "z" || name == "dy";
    in.emplace(name, Buffer(sequence ? dtype : real, numbers));
  }
  auto at = [&](const char* name) -> Buffer& { return in.at(name); };
  auto fresh = [&](const char* name, DType type, size_t size) -> Buffer& {
    return out.emplace(name, Buffer(type, int64_t(size))).first->second;
  };
  SelectiveScanForward p{dtype, s.batch, s.time, s.channels, s.groups, s.state_size, s.softplus};
  p.u = rows(at("u"), s, s.channels);
  p.delta = rows(at("delta"), s, s.channels);
  p.z = rows(at("z"), s, s.channels);
  p.B = rows(at("B"), s, BC);
  p.C = rows(at("C"), s, BC);
  p.A = at("A").data();
  p.D = at("D").data();
  p.delta_bias = at("delta_bias").data();
  p.initial_state = at("initial_state").data();
  p.y = rows(fresh("y", dtype, x["u"].size()), s, s.channels);
  p.final_state = fresh("final_state", real, s.batch * s.channels * s.state_size).data();
  Buffer chunk_states(real, s.batch * chunks * s.channels * s.state_size);
  p.chunk_states = chunk_states.data();
  Workspace forward(cpu::workspace_bytes(p));
  cpu::selective_scan(p, forward.data(), pool(threads));

  SelectiveScanBackward q{p};
  q.dy = rows(at("dy"), s, s.channels);
  q.dfinal_state = at("dfinal_state").data();
  q.du = rows(fresh("du", dtype, x["u"].size()), s, s.channels);
  q.ddelta = rows(fresh("ddelta", dtype, x["u"].size()), s, s.channels);
  q.dz = rows(fresh("dz", dtype, x["z"].size()), s, s.channels);
  q.dB = fresh("dB", real, x["B"].size()).data();
  q.dC = fresh("dC", real, x["B"].size()).data();
  q.dA = fresh("dA", real, x["A"].size()).data();
  q.dD = fresh("dD", real, x["D"].size()).data();
  q.ddelta_bias = fresh("ddelta_bias", real, x["delta_bias"].size()).data();
  q.dinitial_state = fresh("dinitial_state", real, x["initial_state"].size()).data();
  Workspace backward(cpu::workspace_bytes(q));
  cpu::selective_scan(q, backward.data(), pool(threads));
  Tensors result;
  for (const auto& [name, buffer] : out) result[name] = buffer.numbers();
  return result;
}

int64_t row_length(const Shape& s, const std::string& name) {
  if (name == "y" || name == "du" || name == "ddelta" || name == "dz" || name == "dD" ||
      name == "ddelta_bias")
    return s.channels;
  return s.state_size;
}

const Shape kShapes[] = {
    {1, 1, 12, 1, 4},
    {2, 65, 20, 1, 8},
    {1, 67, 24, 2, 16},
    {2, 64, 24, 2, 100},
    {3, 130, 130, 2, 16},
    {1, 67, 12, 1, 16, false, false, false, false, false},
    {2, 65, 96, 1, 8, true, false, true, false, true},
    {1, 1, 1, 1, 1, true, true, false, true, false},
    {1, 66, 7, 7, 256, false, true, true, true, true},
};

class SelectiveScanKernel : public testing::TestWithParam<Shape> {};

TEST_P(SelectiveScanKernel, EqualsThePlainLoops) {
  constexpr uint64_t seed = 1;
  for (const auto& [dtype, tolerance] :
       {std::pair{DType::f64, 1e-12}, {DType::f32, 1e-5}, {DType::bf16, 1e-2}}) {
    Tensors x = random_inputs(GetParam(), seed, dtype);
    const Tensors expected = naive(GetParam(), x);
    const Tensors actual = kernel(GetParam(), x, dtype);
    for (const auto& [name, numbers] : expected)
      EXPECT_LE(worst_row_error(actual.at(name), numbers, row_length(GetParam(), name)), tolerance)
          << name << " " << name_of(dtype) << " seed " << seed << " " << GetParam();
  }
}

TEST_P(SelectiveScanKernel, GivesTheSameBitsWhateverTheThreads) {
  Tensors x = random_inputs(GetParam(), 2, DType::f32);
  const Tensors one = kernel(GetParam(), x, DType::f32, 1);
  for (const int threads : {2, 3, 7})
    EXPECT_EQ(one, kernel(GetParam(), x, DType::f32, threads)) << GetParam();
}

// Σ gradient · v against the slope of Σ dy y + Σ dfinal_state final_state along a random direction
// v of one input.
TEST_P(SelectiveScanKernel, GradientsAreTheSlopes) {
  constexpr double h = 1e-5;
  Tensors x = random_inputs(GetParam(), 3, DType::f64);
  Tensors gradients = kernel(GetParam(), x, DType::f64);
  auto loss = [&](Tensors& at) {
    const Tensors out = kernel(GetParam(), at, DType::f64);
    double total = 0;
    for (size_t i = 0; i < x["dy"].size(); ++i) total += x["dy"][i] * out.at("y")[i];
    for (size_t i = 0; i < x["dfinal_state"].size(); ++i)
      total += x["dfinal_state"][i] * out.at("final_state")[i];
    return total;
  };
  for (const std::string name :
       {"u", "delta", "z", "B", "C", "A", "D", "delta_bias", "initial_state"}) {
    const Numbers v = normal(4, name, x[name].size(), DType::f64);
    Tensors above = x;
    Tensors below = x;
    double slope = 0;
    double size = 1;
    for (size_t i = 0; i < v.size(); ++i) {
      above[name][i] += h * v[i];
      below[name][i] -= h * v[i];
      slope += gradients["d" + name][i] * v[i];
      size += std::abs(gradients["d" + name][i] * v[i]);
    }
    EXPECT_NEAR((loss(above) - loss(below)) / (2 * h), slope, 1e-6 * size)
        << name << " " << GetParam();
  }
}

// Every instruction set that this machine has, not only the best.
TEST(SelectiveScanKernelTargets, AllEqualThePlainLoops) {
  const Shape s{2, 67, 70, 2, 16};
  for (const int64_t target : targets()) {
    const SimdTarget only(target);
    for (const auto& [dtype, tolerance] :
         {std::pair{DType::f64, 1e-12}, {DType::f32, 1e-5}, {DType::bf16, 1e-2}}) {
      Tensors x = random_inputs(s, 8, dtype);
      const Tensors expected = naive(s, x);
      const Tensors actual = kernel(s, x, dtype);
      for (const auto& [name, numbers] : expected)
        EXPECT_LE(worst_row_error(actual.at(name), numbers, row_length(s, name)), tolerance)
            << name << " " << name_of(dtype) << " " << cpu_target();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, SelectiveScanKernel, testing::ValuesIn(kShapes),
                         [](const auto& info) {
                           const Shape& s = info.param;
                           return "B" + std::to_string(s.batch) + "T" + std::to_string(s.time) +
                                  "Dm" + std::to_string(s.channels) + "G" +
                                  std::to_string(s.groups) + "N" + std::to_string(s.state_size);
                         });

// Steps so strong that the decay underflows, and steps beyond softplus' switch at 20. dB and dC are
// sums over channels. Here the previous state has decayed, so that the N numbers of a row of dB or
// dC share one sum over the channels, and where that sum cancels, nothing bounds the error relative
// to the row. The error is bounded relative to the sum of the absolute terms: each addition adds
// one rounding error of that size at most, so all of them `channels`. A term itself has about 10
// rounded factors, and 10 more rounding errors in its exponentials.
TEST(SelectiveScanKernelRange, StrongDecayStaysExact) {
  const Shape s{1, 70, 20, 1, 8};
  for (const auto& [dtype, tolerance, rounding] :
       {std::tuple{DType::f64, 1e-12, 0x1p-53}, {DType::f32, 1e-5, 0x1p-24}}) {
    Tensors sizes;
    Tensors x = random_inputs(s, 5, dtype);
    for (size_t i = 0; i < x["delta"].size(); i += 3) x["delta"][i] = 15 + double(i % 40);
    for (double& a : x["A"]) a *= 64;
    const Tensors expected = naive(s, x, &sizes);
    const Tensors actual = kernel(s, x, dtype);
    for (const auto& [name, numbers] : expected) {
      // These are sums of terms around 1e-30
      if (name == "dA" || name == "dinitial_state") continue;
      const bool over_channels = sizes.contains(name);
      const double bound = over_channels ? (s.channels + 20) * rounding : tolerance;
      const Numbers& size = over_channels ? sizes.at(name) : numbers;
      EXPECT_LE(worst_row_error(actual.at(name), numbers, size, row_length(s, name)), bound)
          << name << name_of(dtype);
    }
  }
}

TEST(SelectiveScanKernelRange, NaNReachesTheOutput) {
  const Shape s{1, 3, 5, 1, 4};
  for (const char* name : {"u", "delta", "A", "B", "C", "D", "z", "delta_bias", "initial_state"}) {
    Tensors x = random_inputs(s, 6, DType::f32);
    // With and without a payload
    for (const uint64_t bits : {0x7FF8'0000'0000'0000, 0x7FFF'FFFF'FFFF'FFFF}) {
      x[name][0] = std::bit_cast<double>(bits);
      EXPECT_TRUE(std::isnan(kernel(s, x, DType::f32).at("y")[0])) << name << " " << bits;
    }
  }
}

}  // namespace
}  // namespace assay::ops
