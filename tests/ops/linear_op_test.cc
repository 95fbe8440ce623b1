// Products of layers against float64, and the kernel for few rows on every instruction set.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "ops/linear/linear.h"
#include "ops/simd_target.h"

namespace assay::ops {
namespace {

struct Product {
  at::Tensor x, weight, bias;
};
Product product_of(int64_t rows, int64_t in, int64_t out, at::ScalarType dtype) {
  torch::manual_seed(rows * in + out);
  return {torch::randn({rows, in}, at::kDouble).to(dtype),
          torch::randn({out, in}, at::kDouble).to(dtype),
          torch::randn({out}, at::kDouble).to(dtype)};
}

// The error of each row relative to its norm: that of summing in float32, and of rounding the
// result once in bfloat16.
void expect_equals_float64(const at::Tensor& y, const Product& p, bool with_bias) {
  const at::Tensor exact = at::linear(p.x.to(at::kDouble), p.weight.to(at::kDouble),
                                      with_bias ? p.bias.to(at::kDouble) : at::Tensor());
  ASSERT_EQ(y.sizes(), exact.sizes());
  ASSERT_EQ(y.scalar_type(), p.x.scalar_type());
  const at::Tensor error = (y.to(at::kDouble) - exact).norm(2, -1) / exact.norm(2, -1);
  EXPECT_LE(error.max().item<double>(), y.scalar_type() == at::kFloat ? 1e-6 : 4e-3)
      << p.x.sizes() << " by " << p.weight.sizes() << ' ' << y.scalar_type();
}

TEST(LinearOp, EqualsFloat64OnEveryInstructionSet) {
  const at::NoGradGuard no_grad;
  for (const int64_t target : targets()) {
    const SimdTarget only(target);
    for (const auto dtype : {at::kFloat, at::kBFloat16})
      for (const int64_t rows : {1, 2, 3, 4, 5, 8, 9, 16, 17})
        for (const auto& [in, out] : {std::pair<int64_t, int64_t>{1, 1},
                                      {7, 5},
                                      {32, 4},
                                      {33, 3},
                                      {100, 259},
                                      {320, 1030}}) {
          const Product p = product_of(rows, in, out, dtype);
          expect_equals_float64(ops::linear(p.x, p.weight, p.bias), p, true);
          expect_equals_float64(ops::linear(p.x, p.weight, {}), p, false);
        }
  }
}

TEST(LinearOp, ARowOfFewHasTheSameBitsAlone) {
  const at::NoGradGuard no_grad;
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const Product p = product_of(8, 200, 3000, dtype);
    const at::Tensor all = ops::linear(p.x, p.weight, p.bias);
    for (int64_t row = 0; row < 8; ++row)
      EXPECT_TRUE(all[row].equal(ops::linear(p.x.narrow(0, row, 1), p.weight, p.bias)[0])) << row;
    const int threads = at::get_num_threads();
    at::set_num_threads(1);
    EXPECT_TRUE(all.equal(ops::linear(p.x, p.weight, p.bias))) << "with one thread";
    at::set_num_threads(threads);
  }
}

TEST(LinearOp, ReadsSequencesAndViews) {
  const at::NoGradGuard no_grad;
  const Product p = product_of(6, 64, 40, at::kFloat);
  const at::Tensor y = ops::linear(p.x, p.weight, p.bias);
  EXPECT_TRUE(y.equal(ops::linear(p.x.view({2, 3, 64}), p.weight, p.bias).view({6, 40})));
  const at::Tensor columns = p.x.t().contiguous().t();
  ASSERT_FALSE(columns.is_contiguous());
  EXPECT_TRUE(y.equal(ops::linear(columns, p.weight, p.bias)));
  const at::Tensor transposed = p.weight.t().contiguous().t();
  EXPECT_TRUE(at::allclose(y, ops::linear(p.x, transposed, p.bias), 1e-5, 1e-4));
  EXPECT_EQ(ops::linear(torch::empty({0, 64}), p.weight, p.bias).sizes(), at::IntArrayRef({0, 40}));
  EXPECT_THROW(ops::linear(p.x, torch::randn({40, 63}), {}), c10::ValueError);
}

TEST(LinearOp, HasTheGradientsOfTheDefinition) {
  for (const auto dtype : {at::kFloat, at::kBFloat16})
    for (const int64_t rows : {1, 20}) {
      Product p = product_of(rows, 48, 24, dtype);
      const at::Tensor dy = torch::randn({rows, 24}, at::kDouble).to(dtype);
      std::vector<at::Tensor> inputs, exact_inputs;
      for (at::Tensor* input : {&p.x, &p.weight, &p.bias}) {
        inputs.push_back(input->requires_grad_());
        exact_inputs.push_back(input->detach().to(at::kDouble).requires_grad_());
      }
      const auto gradients =
          torch::autograd::grad({ops::linear(p.x, p.weight, p.bias)}, inputs, {dy});
      const auto exact =
          torch::autograd::grad({at::linear(exact_inputs[0], exact_inputs[1], exact_inputs[2])},
                                exact_inputs, {dy.to(at::kDouble)});
      for (size_t i = 0; i < 3; ++i) {
        const at::Tensor error = gradients[i].to(at::kDouble) - exact[i];
        EXPECT_LE((error.norm() / exact[i].norm()).item<double>(),
                  dtype == at::kFloat ? 1e-6 : 4e-3)
            << "gradient " << i << " with " << rows << " rows in " << dtype;
      }
    }
}

}  // namespace
}  // namespace assay::ops
