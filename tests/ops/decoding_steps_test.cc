// The few steps of decoding on CUDA, which need no gradient: every operator with a state against
// itself in float64 on the CPU (its own tests compare that with its naive twin), on the same
// numbers, its outputs poisoned with NaN first.
#include "ops/recurrence/delta_rule/delta_rule.h"
#include "ops/recurrence/linear_attention/linear_attention.h"
#include "ops/recurrence/longhorn/longhorn.h"
#include "ops/recurrence/selective_scan/selective_scan.h"
#include "ops/recurrence/ssd/ssd.h"
#include "ops/recurrence/taylor_exp/taylor_exp.h"
#include "ops/recurrences.h"

namespace assay::ops {
namespace {

at::Tensor normal(at::IntArrayRef shape) { return at::randn(shape, at::kDouble); }
at::Tensor unit(at::IntArrayRef shape) {
  const at::Tensor x = normal(shape);
  return x / x.norm(2, -1, true);
}
at::Tensor decay(at::IntArrayRef shape) { return -at::rand(shape, at::kDouble).square(); }

// Sizes of an operator with a matrix per head; q and k may have fewer heads.
struct Heads {
  int64_t batch;
  int64_t heads;
  int64_t key_dim;
  int64_t value_dim;
  int64_t key_heads = heads;
};
Named attention(const Heads& s, int64_t T, const std::string& query = "q") {
  return {{query, normal({s.batch, T, s.key_heads, s.key_dim})},
          {"k", unit({s.batch, T, s.key_heads, s.key_dim})},
          {"v", normal({s.batch, T, s.heads, s.value_dim})},
          {"initial_state", normal({s.batch, s.heads, s.key_dim, s.value_dim})}};
}
// Sizes of an operator with a vector per channel.
struct Channels {
  int64_t batch;
  int64_t channels;
  int64_t states;
  int64_t groups = 1;
  int64_t head_dim = 1;
};

struct Case {
  std::string name;
  std::function<Named(int64_t time)> arguments;
  Operator op;
  bool single = false;  // float32 sequences take the same kernel
};

std::vector<Case> with_heads() {
  std::vector<Case> cases;
  auto add = [&](const std::string& op, const Heads& s, auto arguments, const Operator& run) {
    cases.push_back({op + " K " + std::to_string(s.key_dim) + " V " + std::to_string(s.value_dim),
                     arguments, run});
  };
  const Heads small{3, 4, 64, 64};
  const Heads apart{2, 2, 64, 112};
  const Heads odd{2, 3, 16, 20};
  for (const Heads& s :
       {small, apart, Heads{2, 4, 96, 96, 2}, {1, 3, 128, 80, 1}, {1, 2, 256, 144}, odd}) {
    const std::vector<int64_t> gates{s.batch, 0, s.heads};
    const std::vector<int64_t> keys{s.batch, 0, s.heads, s.key_dim};
    auto of = [](std::vector<int64_t> shape, int64_t T) {
      shape[1] = T;
      return shape;
    };
    add(
        "linear_attention", s, [=](int64_t T) { return attention(s, T); },
        [](Named a) {
          return linear_attention(a["q"], a["k"], a["v"], 0.3, find(a, "initial_state"));
        });
    add(
        "simple_gla", s,
        [=](int64_t T) {
          Named a = attention(s, T);
          a["g"] = decay(of(gates, T));
          return a;
        },
        [](Named a) {
          return simple_gla(a["q"], a["k"], a["v"], a["g"], 0.3, find(a, "initial_state"));
        });
    add(
        "gla", s,
        [=](int64_t T) {
          Named a = attention(s, T);
          a["gk"] = decay(of(keys, T));
          return a;
        },
        [](Named a) {
          return gla(a["q"], a["k"], a["v"], a["gk"], 0.3, find(a, "initial_state"));
        });
    add(
        "gated_delta_rule", s,
        [=](int64_t T) {
          Named a = attention(s, T);
          a["g"] = decay(of(gates, T));
          a["beta"] = at::rand(of(gates, T), at::kDouble);
          return a;
        },
        [](Named a) {
          return gated_delta_rule(a["q"], a["k"], a["v"], a["g"], a["beta"], 0.3,
                                  find(a, "initial_state"));
        });
    add(
        "delta_rule", s,
        [=](int64_t T) {
          Named a = attention(s, T);
          a["beta"] = at::rand(of(gates, T), at::kDouble);
          return a;
        },
        [](Named a) {
          return delta_rule(a["q"], a["k"], a["v"], a["beta"], 0.3, find(a, "initial_state"));
        });
  }
  for (const Heads& s : {small, apart, odd}) {
    const int64_t B = s.batch;
    const int64_t H = s.heads;
    const int64_t K = s.key_dim;
    for (const bool same : {false, true})
      add(
          same ? "rwkv5" : "rwkv6", s,
          [=](int64_t T) {
            Named a = attention(s, T, "r");
            a["w"] = same ? decay({H, K}) : decay({B, T, H, K});
            a["u"] = normal({H, K});
            return a;
          },
          [=](Named a) {
            return (same ? rwkv5 : rwkv6)(a["r"], a["k"], a["v"], a["w"], a["u"], 0.3,
                                          find(a, "initial_state"));
          });
    add(
        "rwkv7", s,
        [=](int64_t T) {
          Named a = attention(s, T, "r");
          a["a"] = -unit({B, T, H, K});
          a["b"] = -a["a"] * at::rand_like(a["a"]);
          a["w"] = decay({B, T, H, K});
          return a;
        },
        [](Named a) {
          return rwkv7(a["r"], a["w"], a["k"], a["v"], a["a"], a["b"], 0.3,
                       find(a, "initial_state"));
        });
  }
  return cases;
}

std::vector<Case> with_channels() {
  std::vector<Case> cases;
  auto add = [&](const std::string& op, const Channels& s, auto arguments, const Operator& run) {
    cases.push_back(
        {op + " N " + std::to_string(s.states) + " channels " + std::to_string(s.channels),
         arguments, run,
         /*single=*/true});
  };
  for (const Channels& s : {Channels{3, 96, 16},
                            {5, 41, 16},
                            {2, 70, 3},
                            {1, 33, 8},
                            {2, 48, 24},
                            {2, 64, 30},
                            {2, 72, 64},
                            {2, 40, 128},
                            {2, 64, 16, 2}}) {
    const int64_t B = s.batch;
    const int64_t M = s.channels;
    const int64_t N = s.states;
    const auto scanned = [=](int64_t T) -> Named {
      return {{"u", normal({B, T, M})},
              {"delta", normal({B, T, M}) - 1},
              {"A", decay({M, N}) - 0.1},
              {"B", normal({B, T, s.groups, N})},
              {"C", normal({B, T, s.groups, N})},
              {"D", normal({M})},
              {"z", normal({B, T, M})},
              {"delta_bias", normal({M})},
              {"initial_state", normal({B, M, N})}};
    };
    const Operator scan = [](Named a) {
      return selective_scan(a["u"], a["delta"], a["A"], a["B"], a["C"], find(a, "D"), find(a, "z"),
                            find(a, "delta_bias"), true, find(a, "initial_state"));
    };
    add("selective_scan", s, scanned, scan);
    if (s.groups > 1) continue;
    add(
        "selective_scan by token", s,
        [=](int64_t T) {
          Named a = scanned(T);
          a["A"] = decay({B, T, N}) - 0.1;
          return a;
        },
        scan);
    for (const bool exact : {false, true})
      add(
          exact ? "longhorn exact" : "longhorn", s,
          [=](int64_t T) -> Named {
            return {{"x", normal({B, T, M})}, {"dt", normal({B, T, M})},
                    {"k", normal({B, T, N})}, {"q", normal({B, T, N})},
                    {"D", normal({M})},       {"z", normal({B, T, M})},
                    {"dt_bias", normal({M})}, {"initial_state", normal({B, M, N})}};
          },
          [=](Named a) {
            return longhorn(a["x"], a["dt"], a["k"], a["q"], find(a, "D"), find(a, "z"),
                            find(a, "dt_bias"), exact, find(a, "initial_state"));
          });
  }
  for (const Channels& s : {Channels{3, 192, 128, 1, 64},
                            {2, 96, 64, 3, 32},
                            {5, 60, 24, 1, 12},
                            {2, 24, 8, 1, 12},
                            {2, 24, 16, 1, 12},
                            {2, 24, 30, 1, 12}})
    add(
        "ssd", s,
        [=](int64_t T) -> Named {
          const int64_t B = s.batch;
          const int64_t P = s.head_dim;
          const int64_t H = s.channels / P;
          const int64_t N = s.states;
          return {{"x", normal({B, T, H, P})},
                  {"dt", normal({B, T, H}) - 1},
                  {"A", decay({H}) - 0.1},
                  {"B", normal({B, T, s.groups, N})},
                  {"C", normal({B, T, s.groups, N})},
                  {"D", normal({H})},
                  {"z", normal({B, T, H, P})},
                  {"dt_bias", normal({H})},
                  {"initial_state", normal({B, H, P, N})}};
        },
        [](Named a) {
          return ssd(a["x"], a["dt"], a["A"], a["B"], a["C"], find(a, "D"), find(a, "z"),
                     find(a, "dt_bias"), true, find(a, "initial_state"));
        });
  for (const Heads& s : {Heads{3, 4, 16, 64, 2}, {2, 2, 5, 7}, {1, 3, 8, 130}})
    for (const bool normalize : {false, true})
      cases.push_back({"taylor_exp_attention K " + std::to_string(s.key_dim) + " V " +
                           std::to_string(s.value_dim),
                       [=](int64_t T) {
                         Named a = attention(s, T);
                         const int64_t F = 1 + s.key_dim + s.key_dim * (s.key_dim + 1) / 2;
                         at::Tensor& state = a["initial_state"] =
                             normal({s.batch, s.heads, F, s.value_dim + 1});
                         state.select(-1, s.value_dim).zero_().select(-1, 0).fill_(20);
                         return a;
                       },
                       [=](Named a) {
                         return taylor_exp_attention(a["q"], a["k"], a["v"], 0.4, normalize, 1e-6,
                                                     find(a, "initial_state"));
                       },
                       /*single=*/true});
  return cases;
}

// On the GPU in `dtype`, with so many numbers beside each step; gates and parameters maybe in
// float32. The state is.
at::Tensor placed(const std::string& name, const at::Tensor& x, at::ScalarType dtype, bool mixed,
                  int64_t margin) {
  static const std::set<std::string> parameters{"A", "D",  "u", "dt_bias", "delta_bias",
                                                "g", "gk", "w", "beta"};
  const bool single =
      name == "initial_state" || (mixed && parameters.contains(name) && x.dim() != 3);
  const at::Tensor there = x.to(at::kCUDA, single ? at::kFloat : dtype);
  if (margin == 0 || name == "initial_state" || x.dim() < 3) return there;
  const at::Tensor rows =
      at::empty({x.size(0), x.size(1), x[0][0].numel() + margin}, there.options());
  return rows.narrow(2, margin, x[0][0].numel()).copy_(there.flatten(2)).view(x.sizes());
}

// Memory that the operator's own allocations come from, NaN.
void poison(const at::Tensor& like) { at::full_like(like, NAN); }

void expect_right(const Case& c, int64_t time, at::ScalarType dtype, bool mixed, int64_t margin,
                  bool first) {
  SCOPED_TRACE(testing::Message() << c.name << " T " << time << " " << dtype
                                  << (mixed ? " mixed" : "") << " margin " << margin
                                  << (first ? " without a state" : "") << " seed 7");
  torch::manual_seed(7);
  Named there;
  Named exact;
  for (const auto& [name, tensor] : c.arguments(time)) {
    if (first && name == "initial_state") continue;
    there[name] = placed(name, tensor, dtype, mixed, margin);
    exact[name] = there[name].to(at::kCPU, at::kDouble);
  }
  const Outputs expected = c.op(exact);
  poison(std::get<0>(expected).to(at::kCUDA, dtype));
  poison(std::get<1>(expected).to(at::kCUDA, at::kFloat));
  const auto [out, state] = c.op(there);
  EXPECT_EQ(out.scalar_type(), dtype);
  EXPECT_LE(worst_row_error(out, std::get<0>(expected).to(at::kCUDA)),
            dtype == at::kFloat ? 1e-5 : 1e-2);
  EXPECT_LE(worst_row_error(state, std::get<1>(expected).to(at::kCUDA)), 1e-5);
  const auto [again, state_again] = c.op(there);
  EXPECT_TRUE(at::equal(out, again) && at::equal(state, state_again)) << "two runs differ";
}

void expect_all_right(const std::vector<Case>& cases) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  const at::NoGradGuard no_grad;
  for (const Case& c : cases) {
    for (const int64_t time : {1, 2, 3, 8})
      for (const bool mixed : {false, true})
        expect_right(c, time, at::kBFloat16, mixed, time == 2 ? 3 : time == 3 ? 8 : 0, false);
    expect_right(c, 1, at::kBFloat16, false, 0, true);
    if (c.single) expect_right(c, 3, at::kFloat, false, 1, false);
  }
}

TEST(DecodingStepsOnCuda, OfMatrixRecurrencesAreRight) { expect_all_right(with_heads()); }
TEST(DecodingStepsOnCuda, OfChannelsAreRight) { expect_all_right(with_channels()); }

}  // namespace
}  // namespace assay::ops
