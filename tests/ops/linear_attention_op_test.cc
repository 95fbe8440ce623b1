// linear_attention, simple_gla, gla, rwkv5, rwkv6 against their naive twins, golden files, and
// themselves cut in two.
#include <gmock/gmock.h>

#include <cmath>

#include "ops/core/paths.h"
#include "ops/recurrence/linear_attention/linear_attention.h"
#include "ops/recurrences.h"

namespace assay::ops {
namespace {

constexpr double kScale = 0.3;
const std::set<std::string> kSequences{"q", "k", "v", "g", "gk", "r", "w"};

Operator with_scale(const std::string& op, double scale = kScale) {
  if (op == "linear_attention")
    return [=](Named a) {
      return linear_attention(a["q"], a["k"], a["v"], scale, find(a, "initial_state"));
    };
  if (op == "simple_gla")
    return [=](Named a) {
      return simple_gla(a["q"], a["k"], a["v"], a["g"], scale, find(a, "initial_state"));
    };
  if (op == "gla")
    return [=](Named a) {
      return gla(a["q"], a["k"], a["v"], a["gk"], scale, find(a, "initial_state"));
    };
  const auto rwkv = op == "rwkv5" ? rwkv5 : rwkv6;
  return [=](Named a) {
    return rwkv(a["r"], a["k"], a["v"], a["w"], a["u"], scale, find(a, "initial_state"));
  };
}

Operator twin(const std::string& op) {
  if (op.starts_with("rwkv"))
    return [](Named a) {
      const at::Tensor r = a["r"];
      const at::Tensor w =
          a["w"].dim() == 2 ? a["w"].expand({r.size(0), r.size(1), -1, -1}) : a["w"];
      return rwkv6_reference(r, a["k"], a["v"], w, a["u"], kScale, find(a, "initial_state"));
    };
  return [](Named a) {
    const int64_t heads = std::max({a["q"].size(2), a["k"].size(2), a["v"].size(2)});
    const at::Tensor none = at::zeros({a["q"].size(0), a["q"].size(1), heads, 1}, a["q"].options());
    const at::Tensor decay = a.contains("gk")  ? a["gk"]
                             : a.contains("g") ? a["g"].unsqueeze(-1)
                                               : none;
    return gla_reference(a["q"], a["k"], a["v"], decay, kScale, find(a, "initial_state"));
  };
}

struct Shape {
  int64_t batch;
  int64_t time;
  int64_t heads;
  int64_t key_dim;
  int64_t value_dim;
  int64_t q_heads = heads;
  int64_t k_heads = heads;
  int64_t v_heads = heads;
};
std::ostream& operator<<(std::ostream& out, const Shape& s) {
  return out << "B " << s.batch << " T " << s.time << " H " << s.heads << " K " << s.key_dim
             << " V " << s.value_dim << " heads of q, k, v " << s.q_heads << " " << s.k_heads << " "
             << s.v_heads << " seed 7";
}

Named random_arguments(const std::string& op, const Shape& s, at::ScalarType dtype = at::kDouble) {
  torch::manual_seed(7);
  auto normal = [&](at::IntArrayRef shape) { return at::randn(shape, at::kDouble).to(dtype); };
  auto decay = [&](at::IntArrayRef shape) {
    return (-at::rand(shape, at::kDouble).square() * 0.3).to(dtype);
  };
  const bool rwkv = op.starts_with("rwkv");
  Named a{{rwkv ? "r" : "q", normal({s.batch, s.time, s.q_heads, s.key_dim})},
          {"k", normal({s.batch, s.time, s.k_heads, s.key_dim})},
          {"v", normal({s.batch, s.time, s.v_heads, s.value_dim})},
          {"initial_state", at::randn({s.batch, s.heads, s.key_dim, s.value_dim},
                                      dtype == at::kDouble ? at::kDouble : at::kFloat)}};
  if (op == "simple_gla") a["g"] = decay({s.batch, s.time, s.heads});
  if (op == "gla") a["gk"] = decay({s.batch, s.time, s.heads, s.key_dim});
  if (op == "rwkv5") a["w"] = decay({s.heads, s.key_dim});
  if (op == "rwkv6") a["w"] = decay({s.batch, s.time, s.heads, s.key_dim});
  if (rwkv) a["u"] = normal({s.heads, s.key_dim});
  return a;
}

struct LinearAttentionOps : testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(, LinearAttentionOps,
                         testing::Values("linear_attention", "simple_gla", "gla", "rwkv5", "rwkv6"),
                         [](auto& i) { return i.param; });

TEST_P(LinearAttentionOps, EqualTheirTwins) {
  for (const Shape& shape : {Shape{2, 1, 2, 5, 3},
                             {2, 15, 1, 4, 4},
                             {1, 64, 2, 6, 5},
                             {2, 65, 3, 8, 12},
                             {1, 101, 2, 16, 7},
                             {1, 300, 1, 4, 3}}) {
    SCOPED_TRACE(shape);
    expect_equal_to_twin(with_scale(GetParam()), twin(GetParam()),
                         random_arguments(GetParam(), shape), 1e-12);
  }
}

TEST_P(LinearAttentionOps, TakeFewerHeads) {
  for (const Shape& shape : {Shape{2, 66, 4, 5, 3, 4, 2, 2},
                             {1, 66, 4, 5, 3, 1, 1, 4},
                             {1, 66, 6, 5, 3, 2, 2, 6},
                             {1, 66, 6, 5, 3, 3, 2, 6}}) {
    SCOPED_TRACE(shape);
    expect_equal_to_twin(with_scale(GetParam()), twin(GetParam()),
                         random_arguments(GetParam(), shape), 1e-12);
  }
}

TEST_P(LinearAttentionOps, SingleAndHalfPrecision) {
  const Shape shape{2, 131, 2, 16, 20};
  expect_equal_to_twin(with_scale(GetParam()), twin(GetParam()),
                       random_arguments(GetParam(), shape, at::kFloat), 1e-5);
  const Named half = random_arguments(GetParam(), shape, at::kBFloat16);
  expect_equal_to_twin(with_scale(GetParam()), twin(GetParam()), half, 1e-2);
  const auto [out, state] = with_scale(GetParam())(half);
  EXPECT_EQ(out.scalar_type(), at::kBFloat16);
  EXPECT_EQ(state.scalar_type(), at::kFloat);
}

TEST_P(LinearAttentionOps, OnCudaEqualTheirTwins) {
  // rwkv5's decays are the same at every step: a rounding of exp(w) in float32 counts T times.
  const int64_t time = GetParam() == std::string("rwkv5") ? 67 : 131;
  expect_equal_to_twin_on_cuda(with_scale(GetParam()), twin(GetParam()),
                               random_arguments(GetParam(), {2, time, 4, 16, 20, 4, 2, 2}));
}

TEST_P(LinearAttentionOps, OnCudaEqualTheirTwinsOnTensorCores) {
  for (const Shape& shape : {Shape{2, 50, 2, 64, 32},
                             {1, 70, 4, 64, 64, 4, 2, 2},
                             {1, 33, 2, 128, 80},
                             {2, 16, 2, 96, 96},
                             {1, 90, 2, 96, 96},
                             {1, 1, 1, 256, 16},
                             {1, 129, 6, 128, 80, 2, 1, 6},
                             {1, 65, 4, 256, 128, 4, 2, 1},
                             {1, 520, 2, 64, 32},  // in segments
                             {1, 520, 2, 128, 32},
                             {1, 1100, 2, 256, 32}}) {
    SCOPED_TRACE(shape);
    Named a = random_arguments(GetParam(), shape);
    if (shape.time > 500)  // so that something of the first steps is left
      for (const auto& gate : {"g", "gk", "w"})
        if (a.contains(gate)) a[gate] = a[gate] * 0.05;
    expect_equal_to_twin_on_cuda(with_scale(GetParam()), twin(GetParam()), a, /*only_bf16=*/true);
  }
}

// Blocks of the gradients take several heads that share q and k if there are many blocks.
TEST(SimpleGlaOp, OnCudaManyBlocksEqualTheTwin) {
  expect_equal_to_twin_on_cuda(with_scale("simple_gla"), twin("simple_gla"),
                               random_arguments("simple_gla", {132, 70, 4, 64, 64, 1, 1, 4}),
                               /*only_bf16=*/true);
}

TEST_P(LinearAttentionOps, OnCudaLongSequencesMayBeCut) {
  expect_long_sequence_cut_on_cuda(
      with_scale(GetParam()), random_arguments(GetParam(), {1, 102437, 2, 64, 64}), kSequences);
}

TEST_P(LinearAttentionOps, MisalignedArgumentsGiveTheSameBits) {
  expect_misaligned_alike(with_scale(GetParam()), random_arguments(GetParam(), {2, 70, 2, 8, 16}));
}
TEST_P(LinearAttentionOps, OnCudaMisalignedArgumentsGiveTheSameBits) {
  for (const int64_t time : {70, 1})
    expect_misaligned_alike_on_cuda(with_scale(GetParam()),
                                    random_arguments(GetParam(), {2, time, 2, 64, 32}));
}

TEST_P(LinearAttentionOps, OnCudaForgetEverythingAtMinusInfinity) {
  const std::string op = GetParam();
  if (op == "linear_attention" || op == "rwkv5")
    GTEST_SKIP() << "has no decay of its own for one step";
  Named a = random_arguments(op, {1, 70, 2, 64, 32});
  const at::Tensor gate = a[op == "simple_gla" ? "g" : op == "gla" ? "gk" : "w"];
  gate.select(1, 5).fill_(-1000);
  gate.select(1, 40).fill_(-INFINITY);
  expect_equal_to_twin_on_cuda(with_scale(op), twin(op), a);
}

TEST_P(LinearAttentionOps, MayBeCutAnywhere) {
  expect_cut_anywhere(
      with_scale(GetParam()), random_arguments(GetParam(), {2, 131, 2, 6, 5}),
      GetParam() == std::string("rwkv5") ? std::set<std::string>{"r", "k", "v"} : kSequences,
      {1, 63, 64, 65, 130}, 1e-12);
}

TEST_P(LinearAttentionOps, ForgetEverythingAtMinusInfinity) {
  const std::string op = GetParam();
  if (op == "linear_attention" || op == "rwkv5")
    GTEST_SKIP() << "has no decay of its own for one step";
  Named a = random_arguments(op, {1, 70, 2, 4, 3}, at::kFloat);
  const std::string gate = op == "simple_gla" ? "g" : op == "gla" ? "gk" : "w";
  a[gate].select(1, 40).fill_(-INFINITY);
  const auto [out, state] = with_scale(op)(a);
  const auto [expected, expected_state] = twin(op)(a);
  EXPECT_LE(worst_row_error(out, expected), 1e-5);
  EXPECT_LE(worst_row_error(state, expected_state), 1e-5);
}

TEST_P(LinearAttentionOps, NanNeverReachesAnEarlierStep) {
  const std::string op = GetParam();
  Named a = random_arguments(op, {1, 70, 2, 4, 3}, at::kFloat);
  const auto expected = std::get<0>(with_scale(op)(a));
  a["k"][0][40][1].fill_(NAN);
  const auto [out, state] = with_scale(op)(a);
  EXPECT_TRUE(at::equal(out.narrow(1, 0, 40), expected.narrow(1, 0, 40)));
  EXPECT_TRUE(at::equal(out.select(2, 0), expected.select(2, 0)));  // the other head
  EXPECT_TRUE(out.select(2, 1).narrow(1, 40, 30).isnan().all().item<bool>());
  EXPECT_TRUE(state.select(1, 1).isnan().all().item<bool>());
}

TEST(LinearAttentionOp, EqualsTheGoldenFiles) {
  if (golden_data_is_complete())
    expect_equal_to_golden("linear_attn_T128", with_scale("linear_attention", 0.25), "o");
  // Normalised by scale · q_t Σ_j k_j + 1e-10: a column of ones in v carries the sum.
  const double scale = std::pow(12, -0.5);
  const auto normalised = [=](Named a) -> Outputs {
    const at::Tensor v = at::cat({a["v"], at::ones_like(a["v"].narrow(-1, 0, 1))}, -1);
    const auto [sums, state] = linear_attention(a["q"], a["k"], v, scale);
    return {sums.narrow(-1, 0, 20) / (sums.narrow(-1, 20, 1) + 1e-10), state.narrow(-1, 0, 20)};
  };
  // A quotient of sums alike
  expect_equal_to_golden("linear_attn_T65_norm", normalised, "o", /*single=*/1e-4);
}

TEST(SimpleGlaOp, EqualsTheGoldenFiles) {
  for (const auto& [name, scale] :
       golden_cases<double>({{"simple_gla_T128", 0.25}, {"simple_gla_T65", std::pow(12, -0.5)}}))
    expect_equal_to_golden(name, with_scale("simple_gla", scale), "o");
}

TEST(SimpleGlaOp, WithAConstantDecayIsRetention) {
  for (const auto& [file, scale] :
       golden_cases<double>({{"retention_T128", 0.25}, {"retention_T65", std::pow(20, -0.5)}})) {
    const auto retention = [scale = scale](Named a) {
      const at::Tensor q = a["q"];
      const at::Tensor head = at::arange(q.size(2), q.options());
      const at::Tensor g = at::log1p(-at::exp2(-5 - head)).expand({q.size(0), q.size(1), -1});
      return simple_gla(q, a["k"], a["v"], g, scale);
    };
    expect_equal_to_golden(file, retention, "o");
    const Named golden = read_golden(golden_file(file));
    if (!golden.contains("out.final_state_own")) continue;
    const auto [out, state] =
        retention({{"q", golden.at("in.q")}, {"k", golden.at("in.k")}, {"v", golden.at("in.v")}});
    EXPECT_LE(worst_row_error(state, golden.at("out.final_state_own")), 1e-12);
  }
}

TEST(GlaOp, EqualsTheGoldenFiles) {
  for (const auto& [name, scale] : golden_cases<double>(
           {{"gla_T128", 0.25}, {"gla_T64_strong_decay", 0.25}, {"gla_T65", std::pow(12, -0.5)}}))
    expect_equal_to_golden(name, with_scale("gla", scale), "o");
}

TEST(Rwkv6Op, EqualsTheGoldenFiles) {
  for (const auto& [name, scale] : golden_cases<double>({{"rwkv6_T128", 1}, {"rwkv6_T65", 1}}))
    expect_equal_to_golden(name, with_scale("rwkv6", scale), "o");
}

// After thirty steps that forget nearly all, thirty that keep nearly all: sums of log decays lose
// their last digits when one is subtracted from another.
TEST(LinearAttentionOp, StaysExactBehindStrongDecays) {
  for (const std::string op : {"simple_gla", "gla", "rwkv6"}) {
    SCOPED_TRACE(op);
    Named a = random_arguments(op, {1, 64, 2, 16, 8}, at::kFloat);
    at::Tensor& gate = a[op == "simple_gla" ? "g" : op == "gla" ? "gk" : "w"];
    gate.narrow(1, 0, 30).sub_(40);
    gate.narrow(1, 30, 34).mul_(0.1);
    expect_equal_to_twin(with_scale(op), twin(op), a, 1e-5);
  }
}

TEST_P(LinearAttentionOps, NameTheWrongArgument) {
  const std::string op = GetParam();
  const std::string query = op.starts_with("rwkv") ? "r" : "q";
  const Named good = random_arguments(op, {2, 5, 4, 3, 6});
  auto with = [&](const std::string& name, auto change) {
    Named bad = good;
    bad[name] = change(bad[name]);
    return message_of(with_scale(op), bad);
  };
  EXPECT_EQ(message_of(with_scale(op), good), "no error");
  EXPECT_EQ(with("k", [](auto t) { return t.narrow(1, 0, 4); }),
            op + ": k has shape [2, 4, 4, 3], expected [B, T, heads of k, K] = [2, 5, 4, 3]");
  EXPECT_THAT(with(query, [](auto t) { return t.narrow(1, 0, 0); }),
              testing::HasSubstr(query + " has shape"));
  EXPECT_THAT(with(query, [](auto t) { return t[0]; }), testing::HasSubstr(query + " has shape"));
  EXPECT_THAT(with("v", [](auto t) { return t[0]; }), testing::HasSubstr("v has shape"));
  EXPECT_THAT(with("v", [](auto t) { return t.narrow(2, 0, 3); }),
              testing::HasSubstr("v has 3 heads"));
  EXPECT_THAT(with("v", [](auto t) { return t.to(at::kInt); }), testing::HasSubstr("v holds Int"));
  EXPECT_THAT(with("k", [](auto t) { return t.to(at::kMeta); }),
              testing::HasSubstr("k is on meta"));
  EXPECT_THAT(with("initial_state", [](auto t) { return t.transpose(2, 3); }),
              testing::HasSubstr("initial_state has shape [2, 4, 6, 3], expected [B, H, K, V]"));
  for (const std::string gate : {"g", "gk", "w", "u"})
    if (good.contains(gate)) {
      EXPECT_THAT(with(gate, [](auto t) { return t.narrow(-1, 0, 2); }),
                  testing::HasSubstr(gate + " has shape"));
      EXPECT_THAT(with(gate, [](auto t) { return t.to(at::kInt); }),
                  testing::HasSubstr(gate + " holds Int"));
    }
}

}  // namespace
}  // namespace assay::ops
