// The CPU kernels of the causal convolution against plain loops in double, and
// against finite differences.
#include <gtest/gtest.h>

#include <map>

#include "ops/buffers.h"
#include "ops/core/cpu_target.h"
#include "ops/recurrence/causal_conv1d/kernel.h"
#include "ops/simd_target.h"

namespace assay::ops {
namespace {

struct Shape {
  int64_t batch;
  int64_t time;
  int64_t channels;
  int64_t width;
  bool silu = true;
  bool bias = true;
  bool initial = true;
};
std::ostream& operator<<(std::ostream& out, const Shape& s) {
  return out << "B" << s.batch << " T" << s.time << " Dm" << s.channels << " K" << s.width
             << (s.silu ? " silu" : "") << (s.bias ? " bias" : "")
             << (s.initial ? " initial_state" : "");
}
// By the names of kernel.h; an absent tensor is empty
using Tensors = std::map<std::string, Numbers>;

Tensors random_inputs(const Shape& s, uint64_t seed, DType dtype) {
  const DType real = real_of(dtype);
  const int64_t rows = s.batch * s.time * s.channels;
  const int64_t states = s.batch * s.channels * (s.width - 1);
  Tensors x;
  x["x"] = normal(seed, "x", rows, dtype);
  x["weight"] = normal(seed, "weight", s.channels * s.width, real);
  x["bias"] = normal(seed, "bias", s.bias ? s.channels : 0, real);
  x["initial_state"] = normal(seed, "initial_state", s.initial ? states : 0, real);
  x["dy"] = normal(seed, "dy", rows, dtype);
  x["dfinal_state"] = normal(seed, "dfinal_state", s.initial ? states : 0, real);
  return x;
}

// One number at a time: each output is put together from its inputs, each gradient scattered
// back to them.
Tensors naive(const Shape& s, Tensors& in) {
  const int64_t past = s.width - 1;
  Tensors out;
  out["y"].resize(in["x"].size());
  out["dx"].resize(in["x"].size());
  out["final_state"].resize(s.batch * s.channels * past);
  for (const char* name : {"weight", "bias", "initial_state"})
    out["d" + std::string(name)].resize(in[name].size());
  for (int64_t b = 0; b < s.batch; ++b)
    for (int64_t d = 0; d < s.channels; ++d) {
      auto row = [&](int64_t t) { return (b * s.time + t) * s.channels + d; };
      auto state = [&](int64_t i) { return (b * s.channels + d) * past + i; };
      auto x = [&](int64_t t) {
        return t >= 0 ? in["x"][row(t)] : s.initial ? in["initial_state"][state(t + past)] : 0;
      };
      auto add = [&](int64_t t, double gradient) {
        if (t >= 0) out["dx"][row(t)] += gradient;
        else if (s.initial) out["dinitial_state"][state(t + past)] += gradient;
      };
      for (int64_t t = 0; t < s.time; ++t) {
        double pre = s.bias ? in["bias"][d] : 0;
        for (int64_t j = 0; j < s.width; ++j)
          pre += in["weight"][d * s.width + j] * x(t - past + j);
        const double gate = 1 / (1 + std::exp(-pre));
        out["y"][row(t)] = s.silu ? pre * gate : pre;
        const double dpre = in["dy"][row(t)] * (s.silu ? gate + pre * gate * (1 - gate) : 1);
        if (s.bias) out["dbias"][d] += dpre;
        for (int64_t j = 0; j < s.width; ++j) {
          out["dweight"][d * s.width + j] += dpre * x(t - past + j);
          add(t - past + j, dpre * in["weight"][d * s.width + j]);
        }
      }
      for (int64_t i = 0; i < past; ++i) {
        out["final_state"][state(i)] = x(s.time - past + i);
        if (s.initial) add(s.time - past + i, in["dfinal_state"][state(i)]);
      }
    }
  return out;
}

Tensors kernel(const Shape& s, Tensors& x, DType dtype, int threads = 2) {
  const DType real = real_of(dtype);
  const int64_t states = s.batch * s.channels * (s.width - 1);
  std::map<std::string, Buffer> in;
  std::map<std::string, Buffer> out;
  for (const auto& [name, numbers] : x)
    in.emplace(name, Buffer(name == "x" || name == "dy" ? dtype : real, numbers));
  auto fresh = [&](const char* name, DType type, size_t size) {
    return out.emplace(name, Buffer(type, int64_t(size))).first->second.data();
  };
  auto rows = [&](void* data) { return View{data, s.time * s.channels, s.channels}; };
  CausalConv1dForward p{dtype, s.batch, s.time, s.channels, s.width, s.silu};
  p.x = rows(in.at("x").data());
  p.weight = in.at("weight").data();
  p.bias = in.at("bias").data();
  p.initial_state = in.at("initial_state").data();
  p.y = rows(fresh("y", dtype, x["x"].size()));
  p.final_state = fresh("final_state", real, states);
  cpu::causal_conv1d(p, pool(threads));
  CausalConv1dBackward q{p};
  q.dy[0] = rows(in.at("dy").data());
  q.dfinal_state = in.at("dfinal_state").data();
  q.dx = rows(fresh("dx", dtype, x["x"].size()));
  q.dweight = fresh("dweight", real, x["weight"].size());
  q.dbias = fresh("dbias", real, x["bias"].size());
  q.dinitial_state = fresh("dinitial_state", real, x["initial_state"].size());
  Workspace workspace(cpu::workspace_bytes(q));
  cpu::causal_conv1d(q, workspace.data(), pool(threads));
  Tensors result;
  for (const auto& [name, buffer] : out) result[name] = buffer.numbers();
  return result;
}

int64_t row_length(const Shape& s, const std::string& name) {
  return name == "final_state" || name == "dinitial_state" ? s.channels * (s.width - 1)
         : name == "dweight"                               ? s.width
                                                           : s.channels;
}

class CausalConv1dKernel : public testing::TestWithParam<Shape> {};

TEST_P(CausalConv1dKernel, EqualsThePlainLoops) {
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

TEST_P(CausalConv1dKernel, GivesTheSameBitsWhateverTheThreads) {
  Tensors x = random_inputs(GetParam(), 2, DType::f32);
  const Tensors one = kernel(GetParam(), x, DType::f32, 1);
  for (const int threads : {2, 3, 7})
    EXPECT_EQ(one, kernel(GetParam(), x, DType::f32, threads)) << GetParam();
}

TEST_P(CausalConv1dKernel, GradientsAreTheSlopes) {
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
  for (const std::string name : {"x", "weight", "bias", "initial_state"}) {
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
TEST(CausalConv1dKernelTargets, AllEqualThePlainLoops) {
  const Shape s{2, 67, 70, 4};
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

INSTANTIATE_TEST_SUITE_P(Shapes, CausalConv1dKernel,
                         testing::Values(Shape{1, 1, 12, 4}, Shape{2, 65, 20, 4},
                                         Shape{1, 67, 24, 3}, Shape{2, 3, 70, 8},
                                         Shape{1, 33, 5, 1}, Shape{2, 64, 130, 32},
                                         Shape{1, 7, 20, 32},
                                         Shape{2, 67, 12, 4, false, false, false},
                                         Shape{2, 32, 65, 2, true, false, false}),
                         [](const auto& info) {
                           const Shape& s = info.param;
                           return "B" + std::to_string(s.batch) + "T" + std::to_string(s.time) +
                                  "Dm" + std::to_string(s.channels) + "K" + std::to_string(s.width);
                         });

}  // namespace
}  // namespace assay::ops
