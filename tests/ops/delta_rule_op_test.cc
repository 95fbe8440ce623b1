// delta_rule, gated_delta_rule, rwkv7 against their naive twins, golden files, and themselves
// cut in two.
#include <gmock/gmock.h>

#include <cmath>

#include "ops/recurrence/delta_rule/delta_rule.h"
#include "ops/recurrences.h"

namespace assay::ops {
namespace {

constexpr double kScale = 0.3;

Operator with_scale(const std::string& op, double scale = kScale) {
  if (op == "delta_rule")
    return [=](Named a) {
      return delta_rule(a["q"], a["k"], a["v"], a["beta"], scale, find(a, "initial_state"));
    };
  if (op == "gated_delta_rule")
    return [=](Named a) {
      return gated_delta_rule(a["q"], a["k"], a["v"], a["g"], a["beta"], scale,
                              find(a, "initial_state"));
    };
  return [=](Named a) {
    return rwkv7(a["r"], a["w"], a["k"], a["v"], a["a"], a["b"], scale, find(a, "initial_state"));
  };
}
Operator twin(const std::string& op) {
  if (op == "rwkv7")
    return [](Named a) {
      return rwkv7_reference(a["r"], a["w"], a["k"], a["v"], a["a"], a["b"], kScale,
                             find(a, "initial_state"));
    };
  return [](Named a) {
    const at::Tensor g = a.contains("g") ? a["g"] : at::zeros_like(a["beta"]);
    return gated_delta_rule_reference(a["q"], a["k"], a["v"], g, a["beta"], kScale,
                                      find(a, "initial_state"));
  };
}

struct Shape {
  int64_t batch;
  int64_t time;
  int64_t heads;
  int64_t key_dim;
  int64_t value_dim;
  int64_t q_heads = heads;
};
std::ostream& operator<<(std::ostream& out, const Shape& s) {
  return out << "B " << s.batch << " T " << s.time << " H " << s.heads << " K " << s.key_dim
             << " V " << s.value_dim << " heads of q and k " << s.q_heads << " seed 7";
}

// Unit keys and rates in (0, 1) (b = κ ⊙ rate, a = −κ for rwkv7), as the architectures make them:
// products stay bounded.
Named random_arguments(const std::string& op, const Shape& s, at::ScalarType dtype = at::kDouble) {
  torch::manual_seed(7);
  auto normal = [&](int64_t heads, int64_t dim) {
    return at::randn({s.batch, s.time, heads, dim}, at::kDouble);
  };
  auto unit = [&](int64_t heads) {
    const at::Tensor x = normal(heads, s.key_dim);
    return x / x.norm(2, -1, true);
  };
  const at::Tensor kappa = unit(s.heads);
  Named a{{"v", normal(s.heads, s.value_dim)}, {"k", unit(s.q_heads)}};
  a[op == "rwkv7" ? "r" : "q"] = normal(s.q_heads, s.key_dim);
  if (op == "rwkv7") {
    a["a"] = -kappa;
    a["b"] = kappa * at::rand_like(kappa);
    a["w"] = -at::rand_like(kappa).square() * 0.3;
  } else {
    a["beta"] = at::rand({s.batch, s.time, s.heads}, at::kDouble);
  }
  if (op == "gated_delta_rule") a["g"] = -at::rand_like(a["beta"]).square() * 0.3;
  for (auto& [name, tensor] : a) tensor = tensor.to(dtype);
  a["initial_state"] = at::randn({s.batch, s.heads, s.key_dim, s.value_dim},
                                 dtype == at::kDouble ? at::kDouble : at::kFloat);
  return a;
}

struct DeltaRuleOps : testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(, DeltaRuleOps, testing::Values("delta_rule", "gated_delta_rule", "rwkv7"),
                         [](auto& i) { return i.param; });

TEST_P(DeltaRuleOps, EqualTheirTwins) {
  for (const Shape& shape : {Shape{2, 1, 2, 5, 3},
                             {2, 15, 1, 4, 4},
                             {1, 64, 2, 6, 5},
                             {2, 65, 3, 8, 12},
                             {1, 101, 2, 16, 7},
                             {1, 300, 1, 4, 3}}) {
    SCOPED_TRACE(shape);
    expect_equal_to_twin(with_scale(GetParam()), twin(GetParam()),
                         random_arguments(GetParam(), shape), 1e-11);
  }
}

TEST_P(DeltaRuleOps, TakeFewerHeads) {
  if (GetParam() == std::string("rwkv7")) GTEST_SKIP() << "its sequences all have H heads";
  const Shape shape{2, 66, 4, 5, 3, 2};
  SCOPED_TRACE(shape);
  expect_equal_to_twin(with_scale(GetParam()), twin(GetParam()),
                       random_arguments(GetParam(), shape), 1e-11);
}

TEST_P(DeltaRuleOps, SingleAndHalfPrecision) {
  const Shape shape{2, 131, 2, 16, 20};
  expect_equal_to_twin(with_scale(GetParam()), twin(GetParam()),
                       random_arguments(GetParam(), shape, at::kFloat), 1e-5);
  const Named half = random_arguments(GetParam(), shape, at::kBFloat16);
  expect_equal_to_twin(with_scale(GetParam()), twin(GetParam()), half, 1e-2);
  const auto [out, state] = with_scale(GetParam())(half);
  EXPECT_EQ(out.scalar_type(), at::kBFloat16);
  EXPECT_EQ(state.scalar_type(), at::kFloat);
}

TEST_P(DeltaRuleOps, OnCudaEqualTheirTwins) {
  expect_equal_to_twin_on_cuda(with_scale(GetParam()), twin(GetParam()),
                               random_arguments(GetParam(), {2, 131, 2, 16, 20}));
}

void expect_twin_on_tensor_cores(const std::string& op, const Shape& shape) {
  SCOPED_TRACE(shape);
  Named a = random_arguments(op, shape);
  if (shape.time > 500)  // so that something of the first steps is left
    for (const auto& [name, factor] :
         {std::pair{"g", 0.05}, {"w", 0.05}, {"beta", 0.1}, {"b", 0.1}})
      if (a.contains(name)) a[name] = a[name] * factor;
  expect_equal_to_twin_on_cuda(with_scale(op), twin(op), a, /*only_bf16=*/true);
}

TEST_P(DeltaRuleOps, OnCudaEqualTheirTwinsOnTensorCores) {
  const int64_t shared = GetParam() == std::string("rwkv7") ? 4 : 2;
  for (const Shape& shape : {Shape{2, 50, 2, 64, 32},
                             {1, 70, 4, 64, 64, shared},
                             {1, 33, 2, 128, 80},
                             {2, 16, 2, 96, 96},
                             {1, 90, 2, 96, 96},
                             {1, 40, 2, 64, 192},
                             {1, 129, 2, 128, 80},
                             {1, 1, 1, 256, 16}})
    expect_twin_on_tensor_cores(GetParam(), shape);
}

// Both arguments are one tensor, in place of two with the same numbers.
void expect_sum_of_gradients(at::ScalarType dtype, at::Device device) {
  Named a = random_arguments("rwkv7", {2, 50, 2, 64, 32}, dtype);
  for (auto& [name, tensor] : a) tensor = tensor.to(device).requires_grad_();
  const at::Tensor k = a["b"].detach().clone().requires_grad_();
  const auto gradients = [&](const at::Tensor& of_k, const std::vector<at::Tensor>& leaves) {
    const auto [out, last] =
        rwkv7(a["r"], a["w"], of_k, a["v"], a["a"], a["b"], kScale, a["initial_state"]);
    return torch::autograd::grad({out.to(at::kFloat).square().sum(), last.square().sum()}, leaves);
  };
  const auto found = gradients(a["b"], {a["b"], a["a"]});
  const auto wanted = gradients(k, {a["b"], a["a"], k});
  const at::Tensor sum = wanted[0].to(at::kDouble) + wanted[2].to(at::kDouble);
  const double tolerance = dtype == at::kDouble ? 1e-12 : 5e-3;
  EXPECT_LE(((found[0].to(at::kDouble) - sum).norm() / sum.norm()).item<double>(), tolerance);
  EXPECT_TRUE(found[1].equal(wanted[1]));
}
TEST(Rwkv7Op, OneTensorAsKAndBHasTheSumOfTheirGradients) {
  expect_sum_of_gradients(at::kDouble, at::kCPU);
}
TEST(Rwkv7Op, OnCudaOneTensorAsKAndBHasTheSumOfTheirGradients) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  expect_sum_of_gradients(at::kBFloat16, at::kCUDA);
}

TEST_P(DeltaRuleOps, OnCudaEqualTheirTwinsInTwoSegments) {
  for (const int64_t key_dim : {64, 128})
    expect_twin_on_tensor_cores(GetParam(), {1, 520, 2, key_dim, 32});
}

TEST_P(DeltaRuleOps, OnCudaEqualTheirTwinsInSegmentsOfWideStates) {
  expect_twin_on_tensor_cores(GetParam(), {1, 1100, 2, 256, 32});
}

TEST_P(DeltaRuleOps, OnCudaLongSequencesMayBeCut) {
  expect_long_sequence_cut_on_cuda(with_scale(GetParam()),
                                   random_arguments(GetParam(), {1, 102437, 2, 64, 64}),
                                   {"q", "k", "v", "beta", "g", "r", "w", "a", "b"});
}

TEST_P(DeltaRuleOps, OnCudaMisalignedArgumentsGiveTheSameBits) {
  expect_misaligned_alike_on_cuda(with_scale(GetParam()),
                                  random_arguments(GetParam(), {2, 70, 2, 64, 32}));
}

TEST_P(DeltaRuleOps, MayBeCutAnywhere) {
  expect_cut_anywhere(with_scale(GetParam()), random_arguments(GetParam(), {2, 131, 2, 6, 5}),
                      {"q", "k", "v", "g", "beta", "r", "w", "a", "b"}, {1, 63, 64, 65, 130},
                      1e-11);
}

TEST(DeltaRuleOp, EqualsTheGoldenFiles) {
  for (const auto& [name, scale] :
       golden_cases<double>({{"delta_rule_T128", 0.25}, {"delta_rule_T65", std::pow(12, -0.5)}}))
    expect_equal_to_golden(name, with_scale("delta_rule", scale), "o");
}
TEST(GatedDeltaRuleOp, EqualsTheGoldenFiles) {
  for (const auto& [name, scale] : golden_cases<double>(
           {{"gated_delta_rule_T128", 0.25}, {"gated_delta_rule_T65", std::pow(12, -0.5)}}))
    expect_equal_to_golden(name, with_scale("gated_delta_rule", scale), "o");
}
TEST(Rwkv7Op, EqualsTheGoldenFiles) {
  for (const auto& [name, scale] :
       golden_cases<double>({{"dplr_T128", 0.25}, {"dplr_T65_rwkv7", 0.25}})) {
    const auto dplr = [scale = scale](Named a) {
      return rwkv7(a["q"], a["gk"], a["k"], a["v"], a["a"], a["b"], scale,
                   find(a, "initial_state"));
    };
    expect_equal_to_golden(name, dplr, "o");
  }
}

// The gated delta rule as RWKV-7 writes it: a = exp(g) k reads before the decay, b = −β k, and β
// k stores v.
TEST(Rwkv7Op, HoldsTheGatedDeltaRule) {
  Named a = random_arguments("gated_delta_rule", {2, 70, 2, 6, 5});
  const auto [out, state] = with_scale("gated_delta_rule")(a);
  const at::Tensor g = a["g"].unsqueeze(-1);
  const at::Tensor beta = a["beta"].unsqueeze(-1);
  const auto [same, same_state] =
      rwkv7(a["q"], g.expand_as(a["k"]), beta * a["k"], a["v"], at::exp(g) * a["k"], -beta * a["k"],
            kScale, a["initial_state"]);
  EXPECT_LE(worst_row_error(same, out), 1e-12);
  EXPECT_LE(worst_row_error(same_state, state), 1e-12);
}

TEST_P(DeltaRuleOps, NameTheWrongArgument) {
  const std::string op = GetParam();
  const Named good = random_arguments(op, {2, 5, 4, 3, 6});
  auto with = [&](const std::string& name, auto change) {
    Named bad = good;
    bad[name] = change(bad[name]);
    return message_of(with_scale(op), bad);
  };
  EXPECT_EQ(message_of(with_scale(op), good), "no error");
  for (const auto& [name, tensor] : good) {
    EXPECT_THAT(with(name, [](auto t) { return t.narrow(0, 0, 1); }),
                testing::HasSubstr("has shape"))
        << name;
    EXPECT_THAT(with(name, [](auto t) { return t.to(at::kInt); }),
                testing::HasSubstr(name + " holds Int"))
        << name;
  }
  for (const std::string gate : {"g", "beta", "a", "b", "w", "initial_state"})
    if (good.contains(gate))
      EXPECT_THAT(with(gate, [](auto t) { return t.narrow(2, 0, 2); }),
                  testing::HasSubstr(gate + " has shape"));
  EXPECT_THAT(with("v", [](auto t) { return t.narrow(1, 0, 0); }),
              testing::HasSubstr("v has shape"));
}

}  // namespace
}  // namespace assay::ops
