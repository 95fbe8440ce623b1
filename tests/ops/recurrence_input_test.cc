// Errors of every operator with a state for input that it cannot take, and its results for input
// that is only unusual.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <map>

#include "ops/recurrence/delta_rule/delta_rule.h"
#include "ops/recurrence/linear_attention/linear_attention.h"
#include "ops/recurrence/longhorn/longhorn.h"
#include "ops/recurrence/selective_scan/selective_scan.h"
#include "ops/recurrence/ssd/ssd.h"
#include "ops/recurrence/taylor_exp/taylor_exp.h"

namespace assay::ops {
namespace {

using Result = std::tuple<at::Tensor, at::Tensor>;
using State = std::optional<at::Tensor>;

constexpr int64_t B = 2;
constexpr int64_t H = 3;
constexpr int64_t K = 4;
constexpr int64_t V = 6;

at::Tensor random(at::IntArrayRef shape) { return at::randn(shape, at::kDouble); }
at::Tensor decay(at::IntArrayRef shape, double sign) { return sign * random(shape).abs(); }

// `sign` −1: log decays as they should be; +1: above zero.
struct Case {
  std::string name;
  std::vector<int64_t> state;
  std::function<Result(int64_t time, double sign, const State&)> run;
};

std::vector<Case> cases() {
  const auto q = [](int64_t T) { return random({B, T, H, K}); };
  const auto v = [](int64_t T) { return random({B, T, H, V}); };
  const auto g = [](int64_t T) { return random({B, T, H}).sigmoid(); };
  const std::vector<int64_t> matrix = {B, H, K, V};
  return {
      {"linear_attention", matrix,
       [=](int64_t T, double, auto& S) { return linear_attention(q(T), q(T), v(T), 1, S); }},
      {"simple_gla", matrix,
       [=](int64_t T, double s, auto& S) {
         return simple_gla(q(T), q(T), v(T), decay({B, T, H}, s), 1, S);
       }},
      {"gla", matrix,
       [=](int64_t T, double s, auto& S) {
         return gla(q(T), q(T), v(T), decay({B, T, H, K}, s), 1, S);
       }},
      {"delta_rule", matrix,
       [=](int64_t T, double, auto& S) { return delta_rule(q(T), q(T), v(T), g(T), 1, S); }},
      {"gated_delta_rule", matrix,
       [=](int64_t T, double s, auto& S) {
         return gated_delta_rule(q(T), q(T), v(T), decay({B, T, H}, s), g(T), 1, S);
       }},
      {"rwkv5", matrix,
       [=](int64_t T, double s, auto& S) {
         return rwkv5(q(T), q(T), v(T), decay({H, K}, s), random({H, K}), 1, S);
       }},
      {"rwkv6", matrix,
       [=](int64_t T, double s, auto& S) {
         return rwkv6(q(T), q(T), v(T), decay({B, T, H, K}, s), random({H, K}), 1, S);
       }},
      {"rwkv7", matrix,
       [=](int64_t T, double s, auto& S) {
         return rwkv7(q(T), decay({B, T, H, K}, s), q(T), v(T), q(T), q(T), 1, S);
       }},
      {"taylor_exp_attention",
       {B, H, 1 + K + K * (K + 1) / 2, V + 1},
       [=](int64_t T, double, auto& S) {
         return taylor_exp_attention(q(T), q(T), v(T), 1, true, 1e-6, S);
       }},
      {"ssd",
       {B, H, V, K},
       [=](int64_t T, double s, auto& S) {
         const at::Tensor b = random({B, T, 1, K});
         return ssd(v(T), g(T), decay({H}, s), b, b, {}, {}, {}, false, S);
       }},
      {"selective_scan",
       {B, V, K},
       [=](int64_t T, double s, auto& S) {
         const at::Tensor x = random({B, T, V});
         const at::Tensor b = random({B, T, 1, K});
         return selective_scan(x, x.sigmoid(), decay({V, K}, s), b, b, {}, {}, {}, false, S);
       }},
      {"longhorn",
       {B, V, K},
       [=](int64_t T, double, auto& S) {
         const at::Tensor x = random({B, T, V});
         const at::Tensor k = random({B, T, K});
         return longhorn(x, x, k, k, {}, {}, {}, false, S);
       }},
  };
}

struct RecurrenceInput : testing::TestWithParam<Case> {
  std::string error(int64_t time, const State& state) {
    try {
      GetParam().run(time, -1, state);
      return "no error";
    } catch (const c10::ValueError& error) {
      return error.what_without_backtrace();
    }
  }
  void expect(const std::string& text, const std::string& part) {
    EXPECT_EQ(text.find(GetParam().name + ": "), 0u) << text;
    EXPECT_NE(text.find(part), std::string::npos) << text;
  }
};

TEST_P(RecurrenceInput, AWrongStateIsNamed) {
  const std::vector<int64_t> right = GetParam().state;
  for (size_t i = 0; i < right.size(); ++i) {
    auto wrong = right;
    ++wrong[i];
    expect(error(5, random(wrong)), "initial_state has shape");
  }
  expect(error(5, random({1})), "initial_state has shape");
  expect(error(5, random(right).to(at::kLong)), "initial_state holds Long");
  expect(error(5, random(right).to(at::kMeta)), "initial_state is on meta");
  EXPECT_EQ(error(5, random(right)), "no error");
}

TEST_P(RecurrenceInput, AnEmptySequenceIsRefused) { expect(error(0, {}), "none of them 0"); }

TEST(RecurrenceInputs, AScaleThatIsNoNumberIsRefused) {
  const at::Tensor q = random({B, 5, H, K});
  const at::Tensor v = random({B, 5, H, V});
  const at::Tensor u = random({H, K});
  const at::Tensor g = random({B, 5, H});
  const std::map<std::string, std::function<void(double)>> calls = {
      {"linear_attention", [&](double s) { linear_attention(q, q, v, s); }},
      {"simple_gla", [&](double s) { simple_gla(q, q, v, g, s); }},
      {"gla", [&](double s) { gla(q, q, v, q, s); }},
      {"delta_rule", [&](double s) { delta_rule(q, q, v, g, s); }},
      {"gated_delta_rule", [&](double s) { gated_delta_rule(q, q, v, g, g, s); }},
      {"rwkv5", [&](double s) { rwkv5(q, q, v, u, u, s); }},
      {"rwkv6", [&](double s) { rwkv6(q, q, v, q, u, s); }},
      {"rwkv7", [&](double s) { rwkv7(q, q, q, v, q, q, s); }},
      {"taylor_exp_attention", [&](double s) { taylor_exp_attention(q, q, v, s, true, 1e-6); }}};
  for (const auto& [name, call] : calls) {
    EXPECT_NO_THROW(call(0.5)) << name;
    for (const double scale : {double(INFINITY), double(NAN)}) try {
        call(scale);
        ADD_FAILURE() << name << " took a scale of " << scale;
      } catch (const c10::ValueError& error) {
        EXPECT_EQ(std::string(error.what_without_backtrace()).find(name + ": scale is "), 0u)
            << error.what();
      }
  }
}

// A look at the values would stop a GPU: the state grows, as the formula says, and says so
// by its size.
TEST_P(RecurrenceInput, DecaysAboveZeroGrow) {
  const auto norm = [&](double sign) {
    torch::manual_seed(3);
    const auto [out, last] = GetParam().run(40, sign, {});
    EXPECT_TRUE(at::isfinite(out).all().template item<bool>());
    return last.norm().template item<double>();
  };
  const double shrinking = norm(-1);
  const double growing = norm(1);
  const bool has_decay = GetParam().name != "linear_attention" && GetParam().name != "delta_rule" &&
                         GetParam().name != "taylor_exp_attention" && GetParam().name != "longhorn";
  if (has_decay) EXPECT_GT(growing, 10 * shrinking);
  else EXPECT_EQ(growing, shrinking);
}

INSTANTIATE_TEST_SUITE_P(All, RecurrenceInput, testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace assay::ops
