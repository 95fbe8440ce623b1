// longhorn, diagonal and exact, against its naive twin, golden files, and itself cut in two.
#include <gmock/gmock.h>

#include "ops/recurrence/delta_rule/delta_rule.h"
#include "ops/recurrence/longhorn/longhorn.h"
#include "ops/recurrences.h"

namespace assay::ops {
namespace {

Operator with(bool exact) {
  return [=](Named a) {
    return longhorn(a["x"], a["dt"], a["k"], a["q"], find(a, "D"), find(a, "z"), find(a, "dt_bias"),
                    exact, find(a, "initial_state"));
  };
}
Operator twin(bool exact) {
  return [=](Named a) {
    return longhorn_reference(a["x"], a["dt"], a["k"], a["q"], find(a, "D"), find(a, "z"),
                              find(a, "dt_bias"), exact, find(a, "initial_state"));
  };
}

Named random_arguments(int64_t batch, int64_t time, int64_t channels, int64_t N,
                       bool scalar = false, at::ScalarType dtype = at::kDouble) {
  torch::manual_seed(7);
  const auto real = dtype == at::kDouble ? at::kDouble : at::kFloat;
  const int64_t rates = scalar ? 1 : channels;
  auto normal = [&](at::IntArrayRef shape, at::ScalarType type) {
    return at::randn(shape, at::kDouble).to(type);
  };
  return {{"x", normal({batch, time, channels}, dtype)},
          {"dt", normal({batch, time, rates}, dtype)},
          {"k", normal({batch, time, N}, dtype)},
          {"q", normal({batch, time, N}, dtype)},
          {"D", normal({channels}, real)},
          {"z", normal({batch, time, channels}, dtype)},
          {"dt_bias", normal({rates}, real)},
          {"initial_state", normal({batch, channels, N}, real)}};
}

struct LonghornForms : testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(, LonghornForms, testing::Bool(),
                         [](auto& i) { return i.param ? "exact" : "diagonal"; });

TEST_P(LonghornForms, EqualsItsTwin) {
  for (const auto& [batch, time, channels, N, scalar] : {std::tuple{2, 1, 3, 4, false},
                                                         {2, 33, 20, 5, true},
                                                         {1, 65, 70, 16, false},
                                                         {2, 101, 9, 8, false}}) {
    SCOPED_TRACE(testing::Message() << "B " << batch << " T " << time << " Dm " << channels << " N "
                                    << N << " scalar " << scalar << " seed 7");
    expect_equal_to_twin(with(GetParam()), twin(GetParam()),
                         random_arguments(batch, time, channels, N, scalar), 1e-12);
  }
}

TEST_P(LonghornForms, SingleAndHalfPrecision) {
  const Named single = random_arguments(2, 67, 24, 16, false, at::kFloat);
  expect_equal_to_twin(with(GetParam()), twin(GetParam()), single, 1e-5);
  const Named half = random_arguments(2, 67, 24, 16, false, at::kBFloat16);
  expect_equal_to_twin(with(GetParam()), twin(GetParam()), half, 1e-2);
  const auto [y, state] = with(GetParam())(half);
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  EXPECT_EQ(state.scalar_type(), at::kFloat);
}

TEST_P(LonghornForms, OnCudaEqualsItsTwin) {
  for (const auto& [batch, time, channels, N, scalar] : {std::tuple{2, 67, 24, 16, false},
                                                         {1, 1, 24, 16, false},
                                                         {2, 33, 20, 5, true},
                                                         {1, 131, 72, 40, false},
                                                         {1, 40, 24, 70, false}}) {
    SCOPED_TRACE(testing::Message() << "B " << batch << " T " << time << " Dm " << channels << " N "
                                    << N << " scalar " << scalar << " seed 7");
    expect_equal_to_twin_on_cuda(with(GetParam()), twin(GetParam()),
                                 random_arguments(batch, time, channels, N, scalar));
  }
}

TEST_P(LonghornForms, OnCudaMayBeCutAnywhere) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  Named there;
  for (const auto& [name, tensor] : random_arguments(2, 101, 24, 16))
    there[name] = tensor.to(at::kCUDA, at::kFloat);
  const auto in_two = [&](int64_t cut) {
    Named first = there;
    Named second = there;
    for (const auto& name : {"x", "dt", "k", "q", "z"}) {
      first[name] = there[name].narrow(1, 0, cut);
      second[name] = there[name].narrow(1, cut, 101 - cut);
    }
    const auto [out, state] = with(GetParam())(first);
    second["initial_state"] = state;
    const auto [rest, last] = with(GetParam())(second);
    return Outputs{at::cat({out, rest}, 1), last};
  };
  const auto [whole, last] = with(GetParam())(there);
  for (const int64_t cut : {1, 32, 50, 100}) {
    const auto [out, state] = in_two(cut);
    EXPECT_LE(worst_row_error(out, whole), 1e-5) << "cut at " << cut;
    EXPECT_LE(worst_row_error(state, last), 1e-5) << "cut at " << cut;
  }
}

TEST_P(LonghornForms, OnCudaLongSequencesMayBeCut) {
  expect_long_sequence_cut_on_cuda(with(GetParam()), random_arguments(1, 102437, 64, 16),
                                   {"x", "dt", "k", "q", "z"});
}

TEST_P(LonghornForms, MayBeCutAnywhere) {
  expect_cut_anywhere(with(GetParam()), random_arguments(2, 101, 7, 4), {"x", "dt", "k", "q", "z"},
                      {1, 32, 50, 100}, 1e-12);
}

// The files hold [B, C, T].
TEST(LonghornOp, EqualsTheGoldenFiles) {
  auto time_second = [](bool exact) {
    return [=](Named a) -> Outputs {
      for (const std::string name : {"x", "dt", "k", "q", "z"})
        if (a.contains(name)) a[name] = a[name].transpose(1, 2);
      const auto [y, state] = with(exact)(a);
      return {y.transpose(1, 2), state};
    };
  };
  for (const auto& [name, exact] : golden_cases<bool>({{"longhorn_T128", false},
                                                       {"longhorn_T65", false},
                                                       {"longhorn_T65_large_k", false},
                                                       {"longhorn_T65_plain", false},
                                                       {"longhorn_scalar_T65", false},
                                                       {"longhorn_exact_T128", true},
                                                       {"longhorn_exact_T65", true}}))
    expect_equal_to_golden(name, time_second(exact), "y");
}

TEST(LonghornOp, ExactWithOneRateIsADeltaRuleOfOneHead) {
  Named a = random_arguments(2, 50, 12, 5, /*scalar=*/true);
  const auto [y, state] =
      longhorn(a["x"], a["dt"], a["k"], a["q"], {}, {}, {}, true, a["initial_state"]);
  const at::Tensor beta = at::sigmoid(a["dt"]);
  const at::Tensor epsilon = beta / (1 + beta * a["k"].square().sum(-1, true));
  const auto [same, same_state] =
      delta_rule(a["q"].unsqueeze(2), a["k"].unsqueeze(2), a["x"].unsqueeze(2), epsilon, 1,
                 a["initial_state"].transpose(1, 2).unsqueeze(1));
  EXPECT_LE(worst_row_error(same.squeeze(2), y), 1e-12);
  EXPECT_LE(worst_row_error(same_state.squeeze(1).transpose(1, 2), state), 1e-12);
}

TEST_P(LonghornForms, NamesTheWrongArgument) {
  const Named good = random_arguments(2, 5, 4, 3);
  auto changed = [&](const std::string& name, auto change) {
    Named bad = good;
    bad[name] = change(bad[name]);
    return message_of(with(GetParam()), bad);
  };
  EXPECT_EQ(message_of(with(GetParam()), good), "no error");
  for (const auto& [name, tensor] : good) {
    EXPECT_THAT(changed(name, [](auto t) { return t.unsqueeze(0); }),
                testing::HasSubstr(name + " has shape"));
    EXPECT_THAT(changed(name, [](auto t) { return t.to(at::kInt); }),
                testing::HasSubstr(name + " holds Int"));
  }
  EXPECT_THAT(changed("dt", [](auto t) { return t.narrow(2, 0, 3); }),
              testing::HasSubstr("dt has shape"));
  EXPECT_THAT(changed("x", [](auto t) { return t.narrow(1, 0, 0); }),
              testing::HasSubstr("x has shape"));
}

}  // namespace
}  // namespace assay::ops
