// The operator against its naive twin, itself cut in two, and wrong arguments.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "ops/golden.h"
#include "ops/recurrence/causal_conv1d/causal_conv1d.h"

namespace assay::ops {
namespace {

using Optional = std::optional<at::Tensor>;

at::Tensor normal(at::IntArrayRef shape, at::ScalarType dtype = at::kDouble,
                  at::Device device = at::kCPU) {
  return at::randn(shape, at::kDouble).to(device, dtype).requires_grad_();
}

struct Arguments {
  at::Tensor x;
  at::Tensor weight;
  Optional bias;
  std::string activation = "silu";
  Optional initial_state;

  std::vector<at::Tensor> tensors() const {
    std::vector<at::Tensor> all{x, weight};
    if (bias) all.push_back(*bias);
    if (initial_state) all.push_back(*initial_state);
    return all;
  }
  Arguments exact() const {
    auto copy = [](const at::Tensor& t) { return t.detach().to(at::kDouble).requires_grad_(); };
    return {copy(x), copy(weight), bias ? Optional(copy(*bias)) : bias, activation,
            initial_state ? Optional(copy(*initial_state)) : initial_state};
  }
};
auto run(const Arguments& a) {
  return causal_conv1d(a.x, a.weight, a.bias, a.activation, a.initial_state);
}

Arguments random_arguments(int64_t batch, int64_t time, int64_t channels, int64_t width,
                           at::ScalarType dtype = at::kDouble, at::ScalarType real = at::kDouble,
                           at::Device device = at::kCPU) {
  torch::manual_seed(7);
  return {normal({batch, time, channels}, dtype, device), normal({channels, width}, real, device),
          normal({channels}, real, device), "silu",
          normal({batch, channels, width - 1}, real, device)};
}

std::vector<at::Tensor> gradients(const Arguments& a, const std::tuple<at::Tensor, at::Tensor>& out,
                                  const at::Tensor& weights, const at::Tensor& state_weights) {
  const at::Tensor loss =
      (std::get<0>(out) * weights).sum() + (std::get<1>(out) * state_weights).sum();
  return torch::autograd::grad({loss}, a.tensors(), {}, /*retain_graph=*/true, false,
                               /*allow_unused=*/true);
}

void expect_equal_to_reference(const Arguments& a, double tolerance) {
  const Arguments exact = a.exact();
  const auto out = run(a);
  const auto expected = causal_conv1d_reference(exact.x, exact.weight, exact.bias, exact.activation,
                                                exact.initial_state);
  EXPECT_LE(worst_row_error(std::get<0>(out), std::get<0>(expected)), tolerance);
  EXPECT_LE(worst_row_error(std::get<1>(out), std::get<1>(expected)), tolerance);
  const at::Tensor weights = at::randn_like(a.x);
  const at::Tensor state_weights = at::randn_like(std::get<1>(out));
  const auto actual = gradients(a, out, weights, state_weights);
  const auto want = gradients(exact, expected, weights, state_weights);
  for (size_t i = 0; i < want.size(); ++i) {
    EXPECT_LE(worst_row_error(actual[i], want[i]), tolerance) << "gradient of tensor " << i;
    EXPECT_EQ(actual[i].scalar_type(), a.tensors()[i].scalar_type()) << "gradient of tensor " << i;
  }
}

// The parts of y, whose gradients come from different memory, are those of the whole.
void expect_parts(at::ScalarType dtype, at::Device device) {
  for (const std::vector<int64_t>& sizes :
       {std::vector<int64_t>{24}, {16, 8}, {8, 4, 12}, {3, 2, 19}, {8, 4, 4, 8}}) {
    SCOPED_TRACE(testing::Message() << "parts " << sizes << " on " << device);
    const Arguments a = random_arguments(2, 67, 24, 4, dtype, at::kFloat, device);
    const auto [parts, last] =
        causal_conv1d_parts(a.x, a.weight, a.bias, a.activation, a.initial_state, sizes);
    const auto [y, whole_last] = run(a);
    EXPECT_TRUE(at::cat(parts, -1).equal(y));
    EXPECT_TRUE(last.equal(whole_last));
    const at::Tensor dy = at::randn_like(y);
    const auto expected = torch::autograd::grad({y}, a.tensors(), {dy});
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& part : dy.split_with_sizes(sizes, -1))
      gradients.push_back(part.contiguous());
    const auto actual = torch::autograd::grad(parts, a.tensors(), gradients);
    for (size_t i = 0; i < actual.size(); ++i) EXPECT_TRUE(actual[i].equal(expected[i])) << i;
  }
}
TEST(CausalConv1dOp, PartsEqualTheWhole) { expect_parts(at::kFloat, at::kCPU); }
TEST(CausalConv1dOp, OnCudaPartsEqualTheWhole) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  expect_parts(at::kFloat, at::kCUDA);
  expect_parts(at::kBFloat16, at::kCUDA);
}

TEST(CausalConv1dOp, EqualsItsReference) {
  for (const auto& [time, channels, width] :
       {std::tuple{1, 12, 4}, {65, 20, 3}, {67, 24, 4}, {3, 70, 8}, {40, 5, 32}}) {
    SCOPED_TRACE(testing::Message()
                 << "T " << time << " Dm " << channels << " K " << width << " seed 7");
    Arguments a = random_arguments(2, time, channels, width);
    expect_equal_to_reference(a, 1e-12);
    a.bias = a.initial_state = std::nullopt;
    a.activation = "none";
    expect_equal_to_reference(a, 1e-12);
  }
}

TEST(CausalConv1dOp, OtherPrecisionsAndSlices) {
  expect_equal_to_reference(random_arguments(2, 67, 24, 4, at::kFloat, at::kFloat), 1e-5);
  expect_equal_to_reference(random_arguments(2, 67, 24, 4, at::kBFloat16, at::kFloat), 1e-2);
  Arguments a = random_arguments(2, 67, 24, 4);
  a.x = normal({2, 67, 48}).detach().narrow(2, 24, 24).requires_grad_();  // half of a projection
  expect_equal_to_reference(a, 1e-12);
  a.x = normal({2, 24, 67}).detach().transpose(1, 2).requires_grad_();
  expect_equal_to_reference(a, 1e-12);
}

TEST(CausalConv1dOp, OnCudaEqualsItsReference) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  expect_equal_to_reference(random_arguments(2, 131, 24, 4, at::kDouble, at::kDouble, at::kCUDA),
                            1e-12);
  expect_equal_to_reference(random_arguments(2, 131, 24, 4, at::kFloat, at::kFloat, at::kCUDA),
                            1e-5);
  expect_equal_to_reference(random_arguments(2, 131, 24, 4, at::kBFloat16, at::kFloat, at::kCUDA),
                            1e-2);
}

TEST(CausalConv1dOp, MayBeCutAnywhere) {
  const Arguments a = random_arguments(2, 67, 20, 4);
  const auto [whole, last] = run(a);
  for (const int64_t cut : {1, 2, 33, 66}) {
    Arguments first = a;
    Arguments second = a;
    first.x = a.x.narrow(1, 0, cut);
    second.x = a.x.narrow(1, cut, 67 - cut);
    const auto [y, state] = run(first);
    second.initial_state = state;
    const auto [rest, end] = run(second);
    EXPECT_LE(worst_row_error(at::cat({y, rest}, 1), whole), 1e-12) << "cut at " << cut;
    EXPECT_LE(worst_row_error(end, last), 1e-12) << "cut at " << cut;
  }
}

TEST(CausalConv1dOp, NamesTheWrongArgument) {
  auto message = [](auto change) -> std::string {
    Arguments a = random_arguments(2, 5, 12, 4);
    change(a);
    try {
      run(a);
    } catch (const c10::ValueError& error) {
      return error.what_without_backtrace();
    }
    return "no error";
  };
  using A = Arguments&;
  EXPECT_EQ(message([](A) {}), "no error");
  EXPECT_EQ(message([](A a) { a.bias = a.weight; }),
            "causal_conv1d: bias has shape [12, 4], expected [Dm] = [12]");
  EXPECT_THAT(message([](A a) { a.x = a.x[0]; }), testing::HasSubstr("x has shape"));
  EXPECT_THAT(message([](A a) { a.weight = a.weight.narrow(0, 0, 3); }),
              testing::HasSubstr("weight has shape"));
  EXPECT_THAT(message([](A a) { a.weight = at::ones({12, 33}, at::kDouble); }),
              testing::HasSubstr("at most 32"));
  EXPECT_THAT(message([](A a) { a.activation = "swish"; }),
              testing::HasSubstr("'swish', expected 'none' or 'silu'"));
  EXPECT_THAT(message([](A a) { a.initial_state = a.x; }),
              testing::HasSubstr("initial_state has shape"));
  EXPECT_THAT(message([](A a) { a.weight = a.weight.to(at::kLong); }),
              testing::HasSubstr("weight holds Long"));
}

}  // namespace
}  // namespace assay::ops
