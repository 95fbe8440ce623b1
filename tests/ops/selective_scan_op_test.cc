// The operator against its naive twin, the golden files, itself cut in two, and wrong arguments.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "ops/core/paths.h"
#include "ops/golden.h"
#include "ops/recurrence/channel_scan/channel_scan.h"
#include "ops/recurrence/selective_scan/selective_scan.h"

namespace assay::ops {
namespace {

using Optional = std::optional<at::Tensor>;

struct Arguments {
  at::Tensor u;
  at::Tensor delta;
  at::Tensor A;
  at::Tensor B;
  at::Tensor C;
  Optional D;
  Optional z;
  Optional delta_bias;
  bool delta_softplus = true;
  Optional initial_state;

  std::map<std::string, at::Tensor> tensors() const {
    std::map<std::string, at::Tensor> all{{"u", u}, {"delta", delta}, {"A", A}, {"B", B}, {"C", C}};
    for (const auto& [name, tensor] : {std::pair{"D", D},
                                       {"z", z},
                                       {"delta_bias", delta_bias},
                                       {"initial_state", initial_state}})
      if (tensor) all[name] = *tensor;
    return all;
  }
};
auto run(const Arguments& a) {
  return selective_scan(a.u, a.delta, a.A, a.B, a.C, a.D, a.z, a.delta_bias, a.delta_softplus,
                        a.initial_state);
}
auto run_reference(const Arguments& a) {
  return selective_scan_reference(a.u, a.delta, a.A, a.B, a.C, a.D, a.z, a.delta_bias,
                                  a.delta_softplus, a.initial_state);
}

Arguments random_arguments(int64_t batch, int64_t time, int64_t channels, int64_t groups, int64_t N,
                           at::ScalarType dtype = at::kDouble, at::ScalarType real = at::kDouble,
                           at::Device device = at::kCPU) {
  torch::manual_seed(7);
  auto normal = [&](at::IntArrayRef shape, at::ScalarType type) {
    return at::randn(shape, at::kDouble).to(device, type).requires_grad_();
  };
  Arguments a{normal({batch, time, channels}, dtype), normal({batch, time, channels}, dtype),
              (-at::rand({channels, N}, at::kDouble) - 0.1).to(device, real).requires_grad_(),
              normal({batch, time, groups, N}, dtype), normal({batch, time, groups, N}, dtype)};
  a.D = normal({channels}, real);
  a.z = normal({batch, time, channels}, dtype);
  a.delta_bias = normal({channels}, real);
  a.initial_state = normal({batch, channels, N}, real);
  return a;
}

// The arguments with A [B, T, N], read from the token.
Arguments with_token_decay(Arguments a) {
  at::Tensor like = a.B.detach().squeeze(2).to(a.A.scalar_type());
  a.A = (-at::rand_like(like) - 0.1).requires_grad_();
  return a;
}

// Gradients of Σ weights ⊙ y + Σ state_weights ⊙ final_state by name; an undefined weight leaves
// that output out.
std::map<std::string, at::Tensor> gradients(const Arguments& a,
                                            const std::tuple<at::Tensor, at::Tensor>& out,
                                            const at::Tensor& weights,
                                            const at::Tensor& state_weights) {
  at::Tensor loss = at::zeros({}, a.u.options().dtype(at::kDouble));
  if (weights.defined()) loss = loss + (std::get<0>(out).to(at::kDouble) * weights).sum();
  if (state_weights.defined())
    loss = loss + (std::get<1>(out).to(at::kDouble) * state_weights).sum();
  std::vector<at::Tensor> inputs;
  const auto named = a.tensors();
  for (const auto& [name, tensor] : named) inputs.push_back(tensor);
  const auto grads = torch::autograd::grad({loss}, inputs, {}, /*retain_graph=*/true, false,
                                           /*allow_unused=*/true);
  std::map<std::string, at::Tensor> result;
  for (size_t i = 0; const auto& [name, tensor] : named) {
    result[name] = grads[i].defined() ? grads[i] : at::zeros_like(tensor);
    EXPECT_EQ(result[name].scalar_type(), tensor.scalar_type()) << name;
    ++i;
  }
  return result;
}

void expect_equal_to_reference(const Arguments& a, double tolerance, const at::Tensor& weights,
                               const at::Tensor& state_weights) {
  Arguments exact = a;  // the twin in double on the same numbers
  for (at::Tensor* t : {&exact.u, &exact.delta, &exact.A, &exact.B, &exact.C})
    *t = t->detach().to(at::kDouble).requires_grad_();
  for (Optional* t : {&exact.D, &exact.z, &exact.delta_bias, &exact.initial_state})
    if (*t) *t = (*t)->detach().to(at::kDouble).requires_grad_();
  const auto out = run(a);
  const auto expected = run_reference(exact);
  EXPECT_LE(worst_row_error(std::get<0>(out), std::get<0>(expected)), tolerance);
  EXPECT_LE(worst_row_error(std::get<1>(out), std::get<1>(expected)), tolerance);
  const auto actual = gradients(a, out, weights, state_weights);
  for (const auto& [name, gradient] : gradients(exact, expected, weights, state_weights))
    EXPECT_LE(worst_row_error(actual.at(name), gradient), tolerance) << "gradient of " << name;
}

TEST(SelectiveScanOp, EqualsItsReference) {
  for (const auto& [time, channels, groups, N] :
       {std::tuple{1, 12, 1, 4}, {65, 20, 1, 8}, {67, 24, 2, 16}, {130, 24, 2, 100}}) {
    SCOPED_TRACE(testing::Message() << "T " << time << " Dm " << channels << " G " << groups
                                    << " N " << N << " seed 7");
    const Arguments a = random_arguments(2, time, channels, groups, N);
    const at::Tensor weights = at::randn_like(a.u);
    const at::Tensor state_weights = at::randn_like(*a.initial_state);
    expect_equal_to_reference(a, 1e-12, weights, state_weights);
    expect_equal_to_reference(a, 1e-12, weights, {});
    expect_equal_to_reference(a, 1e-12, {}, state_weights);
  }
}

TEST(SelectiveScanOp, WithTheTokensDecayEqualsItsReference) {
  for (const auto& [time, channels, N] :
       {std::tuple{1, 12, 4}, {64, 7, 5}, {65, 20, 8}, {130, 24, 16}}) {
    SCOPED_TRACE(testing::Message()
                 << "T " << time << " Dm " << channels << " N " << N << " seed 7");
    const Arguments a = with_token_decay(random_arguments(2, time, channels, 1, N));
    const at::Tensor weights = at::randn_like(a.u);
    const at::Tensor state_weights = at::randn_like(*a.initial_state);
    expect_equal_to_reference(a, 1e-12, weights, state_weights);
    expect_equal_to_reference(a, 1e-12, {}, state_weights);
  }
  Arguments bare = with_token_decay(random_arguments(2, 66, 20, 1, 8));
  bare.D = bare.z = bare.delta_bias = bare.initial_state = std::nullopt;
  bare.delta_softplus = false;
  bare.delta = bare.delta.detach().abs().requires_grad_();
  expect_equal_to_reference(bare, 1e-12, at::randn_like(bare.u), {});
  const Arguments single =
      with_token_decay(random_arguments(2, 67, 24, 1, 16, at::kFloat, at::kFloat));
  expect_equal_to_reference(single, 1e-5, at::randn_like(single.u, at::kDouble), {});
}

TEST(SelectiveScanOp, WithTheTokensDecayOnCudaEqualsItsReference) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  for (const auto& [time, N] : {std::pair{1, 16}, {131, 16}, {131, 24}, {33, 70}})
    for (const auto& [dtype, real, tolerance] : {std::tuple{at::kDouble, at::kDouble, 1e-12},
                                                 {at::kFloat, at::kFloat, 1e-5},
                                                 {at::kBFloat16, at::kFloat, 1e-2}}) {
      SCOPED_TRACE(testing::Message() << "T " << time << " N " << N << " " << dtype << " seed 7");
      const Arguments a =
          with_token_decay(random_arguments(2, time, 24, 1, N, dtype, real, at::kCUDA));
      expect_equal_to_reference(a, tolerance, at::randn_like(a.u).to(at::kDouble),
                                at::randn_like(*a.initial_state).to(at::kDouble));
    }
}

// A GPU takes this path for float64 and for sizes of the state that its kernel does not take.
TEST(SelectiveScanOp, ComposedOfPrefixesEqualsItsReference) {
  for (const auto& [groups, N] : {std::pair{1, 5}, {2, 70}}) {
    SCOPED_TRACE(testing::Message() << "G " << groups << " N " << N << " seed 7");
    const Arguments a = random_arguments(2, 67, 24, groups, N);
    const auto [y, state] = by_prefixes({Update::decay, a.delta_softplus, a.u, a.delta, a.B, a.C,
                                         a.A, a.D, a.z, a.delta_bias, a.initial_state});
    const auto [expected_y, expected_state] = run_reference(a);
    EXPECT_LE(worst_row_error(y, expected_y), 1e-12);
    EXPECT_LE(worst_row_error(state, expected_state), 1e-12);
    const std::vector<at::Tensor> inputs{a.u, a.delta, a.A, a.B, a.C, *a.initial_state};
    const at::Tensor weights = at::randn_like(a.u);
    const auto got = torch::autograd::grad({(y * weights).sum() + state.sum()}, inputs);
    const auto expected =
        torch::autograd::grad({(expected_y * weights).sum() + expected_state.sum()}, inputs);
    for (size_t i = 0; i < inputs.size(); ++i)
      EXPECT_LE(worst_row_error(got[i], expected[i]), 1e-12) << "gradient of input " << i;
  }
}

TEST(SelectiveScanOp, OptionalArgumentsMayBeAbsent) {
  Arguments a = random_arguments(2, 66, 20, 2, 8);
  a.D = a.z = a.delta_bias = a.initial_state = std::nullopt;
  a.delta_softplus = false;
  a.delta = a.delta.detach().abs().requires_grad_();
  expect_equal_to_reference(a, 1e-12, at::randn_like(a.u), {});
}

TEST(SelectiveScanOp, SingleAndMixedPrecision) {
  const Arguments single = random_arguments(2, 67, 24, 2, 16, at::kFloat, at::kFloat);
  expect_equal_to_reference(single, 1e-5, at::randn_like(single.u, at::kDouble), {});
  const Arguments mixed = random_arguments(2, 67, 24, 2, 16, at::kBFloat16, at::kFloat);
  // Weights that bf16 holds: the gradient of a bf16 output is bf16.
  const at::Tensor weights = at::randn_like(mixed.u).to(at::kDouble);
  expect_equal_to_reference(mixed, 1e-2, weights, {});
  EXPECT_EQ(std::get<0>(run(mixed)).scalar_type(), at::kBFloat16);
  EXPECT_EQ(std::get<1>(run(mixed)).scalar_type(), at::kFloat);
}

TEST(SelectiveScanOp, OnCudaEqualsItsReference) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  for (const auto& [groups, N] : {std::pair{1, 16}, {2, 24}, {2, 70}})
    for (const auto& [dtype, real, tolerance] : {std::tuple{at::kDouble, at::kDouble, 1e-12},
                                                 {at::kFloat, at::kFloat, 1e-5},
                                                 {at::kBFloat16, at::kFloat, 1e-2}}) {
      SCOPED_TRACE(testing::Message() << "G " << groups << " N " << N << " " << dtype << " seed 7");
      const Arguments a = random_arguments(2, 131, 24, groups, N, dtype, real, at::kCUDA);
      expect_equal_to_reference(a, tolerance, at::randn_like(a.u).to(at::kDouble), {});
    }
}

// B, C as slices of one projection, u and z as halves of another: read where they lie.
TEST(SelectiveScanOp, OnCudaLongSequencesMayBeCut) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  const at::NoGradGuard no_grad;
  const int64_t time = 102437;
  const int64_t cut = 51237;
  const Arguments a = random_arguments(1, time, 64, 1, 16, at::kBFloat16, at::kFloat, at::kCUDA);
  Arguments first = a;
  Arguments second = a;
  for (const auto part : {&Arguments::u, &Arguments::delta, &Arguments::B, &Arguments::C}) {
    first.*part = (a.*part).narrow(1, 0, cut);
    second.*part = (a.*part).narrow(1, cut, time - cut);
  }
  first.z = a.z->narrow(1, 0, cut);
  second.z = a.z->narrow(1, cut, time - cut);
  const auto [whole, last] = run(a);
  second.initial_state = std::get<1>(run(first));
  const auto [rest, end] = run(second);
  EXPECT_LE(worst_row_error(rest.slice(1, -64), whole.slice(1, -64)), 1e-2);
  EXPECT_LE(worst_row_error(end, last), 1e-4);
}

TEST(SelectiveScanOp, ReadsSlices) {
  const int64_t batch = 2;
  const int64_t time = 67;
  const int64_t channels = 24;
  const int64_t N = 16;
  Arguments a = random_arguments(batch, time, channels, 1, N);
  const at::Tensor wide = at::randn({batch, time, 5 + 2 * N}, at::kDouble);
  const at::Tensor halves = at::randn({batch, time, 2 * channels}, at::kDouble);
  a.B = wide.narrow(2, 5, N).unflatten(2, {1, N}).detach().requires_grad_();
  a.C = wide.narrow(2, 5 + N, N).unflatten(2, {1, N}).detach().requires_grad_();
  a.u = halves.narrow(2, 0, channels).detach().requires_grad_();
  a.z = halves.narrow(2, channels, channels).detach().requires_grad_();
  a.delta =
      at::randn({batch, channels, time}, at::kDouble).transpose(1, 2).detach().requires_grad_();
  expect_equal_to_reference(a, 1e-12, at::randn({batch, time, channels}, at::kDouble),
                            at::randn_like(*a.initial_state));
}

void expect_cut_anywhere(const Arguments& a) {
  const auto whole = run(a);
  const at::Tensor weights = at::randn_like(a.u);
  const at::Tensor state_weights = at::randn_like(*a.initial_state);
  const auto expected = gradients(a, whole, weights, state_weights);
  for (const int64_t cut : {1, 64, 65, 129}) {
    Arguments first = a;
    Arguments second = a;
    for (auto member : {&Arguments::u, &Arguments::delta, &Arguments::B, &Arguments::C}) {
      first.*member = (a.*member).narrow(1, 0, cut);
      second.*member = (a.*member).narrow(1, cut, 130 - cut);
    }
    first.z = a.z->narrow(1, 0, cut);
    second.z = a.z->narrow(1, cut, 130 - cut);
    if (a.A.dim() == 3) {
      first.A = a.A.narrow(1, 0, cut);
      second.A = a.A.narrow(1, cut, 130 - cut);
    }
    const auto [y, state] = run(first);
    second.initial_state = state;
    const auto [rest, last] = run(second);
    const std::tuple joined{at::cat({y, rest}, 1), last};
    EXPECT_LE(worst_row_error(std::get<0>(joined), std::get<0>(whole)), 1e-12) << "cut at " << cut;
    for (const auto& [name, gradient] : gradients(a, joined, weights, state_weights))
      EXPECT_LE(worst_row_error(gradient, expected.at(name)), 1e-11)
          << "gradient of " << name << ", cut at " << cut;
  }
}

TEST(SelectiveScanOp, MayBeCutAnywhere) {
  expect_cut_anywhere(random_arguments(2, 130, 20, 2, 8));
  expect_cut_anywhere(with_token_decay(random_arguments(2, 130, 20, 1, 8)));
}

TEST(SelectiveScanOp, WithoutGradientGivesTheSameBits) {
  const Arguments a = random_arguments(2, 67, 24, 2, 16, at::kFloat, at::kFloat);
  const auto with = run(a);
  const torch::NoGradGuard guard;
  const auto without = run(a);
  EXPECT_TRUE(at::equal(std::get<0>(with), std::get<0>(without)));
  EXPECT_TRUE(at::equal(std::get<1>(with), std::get<1>(without)));
  EXPECT_FALSE(std::get<0>(without).requires_grad());
}

// The files hold [B, Dm, T], and B, C as [B, N, T] or [B, G, N, T].
TEST(SelectiveScanOp, EqualsTheGoldenFiles) {
  for (const auto& [name, softplus] : golden_cases<bool>({{"selective_scan_T128", true},
                                                          {"selective_scan_T65", true},
                                                          {"selective_scan_T65_groups", true},
                                                          {"selective_scan_T67_plain", false}})) {
    SCOPED_TRACE(name);
    auto golden = read_golden(golden_file(name));
    auto time_first = [](const at::Tensor& t) {
      return t.dim() == 4 ? t.permute({0, 3, 1, 2}) : t.transpose(1, 2);
    };
    for (const auto& [dtype, tolerance] : {std::pair{at::kDouble, 1e-12}, {at::kFloat, 1e-5}}) {
      std::map<std::string, at::Tensor> in;
      for (const std::string x : {"u", "delta", "z", "A", "B", "C", "D", "delta_bias"})
        if (golden.contains("in." + x))
          in[x] = golden["in." + x].clone().to(dtype).detach().requires_grad_();
      auto rows = [&](const std::string& x) -> Optional {
        return in.contains(x) ? Optional(time_first(in[x])) : Optional();
      };
      auto grouped = [&](const std::string& x) {
        return in[x].dim() == 3 ? rows(x)->unsqueeze(2) : *rows(x);
      };
      auto plain = [&](const std::string& x) {
        return in.contains(x) ? Optional(in[x]) : Optional();
      };
      const auto [y, state] =
          selective_scan(*rows("u"), *rows("delta"), in["A"], grouped("B"), grouped("C"),
                         plain("D"), rows("z"), plain("delta_bias"), softplus);
      EXPECT_LE(worst_row_error(y, time_first(golden["out.y"])), tolerance);
      EXPECT_LE(worst_row_error(state, golden["out.state"]), tolerance);
      (y * time_first(golden["cot.y"]).to(dtype)).sum().backward();
      for (const auto& [x, tensor] : in)
        EXPECT_LE(worst_row_error(tensor.grad(), golden["grad." + x]), tolerance)
            << "gradient of " << x << " " << dtype;
    }
  }
}

std::string message_of(const Arguments& a) {
  try {
    run(a);
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

TEST(SelectiveScanOp, NamesTheWrongArgument) {
  const Arguments good = random_arguments(2, 5, 12, 2, 4);
  auto with = [&](auto change) {
    Arguments bad = good;
    change(bad);
    return message_of(bad);
  };
  using A = Arguments&;
  EXPECT_EQ(message_of(good), "no error");
  EXPECT_EQ(with([](A a) { a.delta = a.delta.narrow(1, 0, 4); }),
            "selective_scan: delta has shape [2, 4, 12], expected [B, T, Dm] = [2, 5, 12]");
  EXPECT_THAT(with([](A a) { a.u = a.u[0]; }), testing::HasSubstr("u has shape"));
  EXPECT_THAT(with([](A a) { a.u = a.u.narrow(1, 0, 0); }), testing::HasSubstr("u has shape"));
  EXPECT_THAT(with([](A a) { a.A = a.A.narrow(0, 0, 11); }), testing::HasSubstr("A has shape"));
  EXPECT_THAT(with([](A a) { a.A = at::ones({12, 300}); }), testing::HasSubstr("at most 256"));
  EXPECT_THAT(with([](A a) { a.A = at::ones({2, 6, 4}, at::kDouble); }),
              testing::HasSubstr("[B, T, N] = [2, 5, 4]"));
  EXPECT_THAT(with([](A a) { a.A = at::ones({2, 5, 4}, at::kDouble); }),
              testing::HasSubstr("B has 2 groups"));
  EXPECT_THAT(with([](A a) { a.B = a.B.narrow(3, 0, 3); }), testing::HasSubstr("B has shape"));
  EXPECT_THAT(with([](A a) { a.B = a.C = at::ones({2, 5, 5, 4}, at::kDouble); }),
              testing::HasSubstr("B has 5 groups"));
  EXPECT_THAT(with([](A a) { a.C = a.C.narrow(2, 0, 1); }), testing::HasSubstr("C has shape"));
  EXPECT_THAT(with([](A a) { a.D = a.A; }), testing::HasSubstr("D has shape"));
  EXPECT_THAT(with([](A a) { a.z = a.z->unsqueeze(0); }), testing::HasSubstr("z has shape"));
  EXPECT_THAT(with([](A a) { a.delta_bias = a.A; }), testing::HasSubstr("delta_bias has shape"));
  EXPECT_THAT(with([](A a) { a.initial_state = a.A; }),
              testing::HasSubstr("initial_state has shape"));
  EXPECT_THAT(with([](A a) { a.z = a.z->to(at::kInt); }), testing::HasSubstr("z holds Int"));
  EXPECT_THAT(with([](A a) { a.C = a.C.to(at::kMeta); }), testing::HasSubstr("C is on meta"));
}

TEST(SelectiveScanOp, SaysWhichPathItTakes) {
  std::map<std::string, std::string> paths;
  for (const OpPath& path : op_paths()) paths[path.op + " " + path.device] = path.path;
  EXPECT_THAT(paths["selective_scan cpu"], testing::StartsWith("cpu kernel (Highway "));
  const std::string kernel =
      "cuda kernel sm_90a or compute_80 for float32 and bfloat16 and a state_size up to 64;";
  EXPECT_THAT(
      paths["selective_scan cuda"],
      testing::AnyOf(testing::StartsWith(kernel), testing::HasSubstr("built without CUDA")));
}

}  // namespace
}  // namespace assay::ops
