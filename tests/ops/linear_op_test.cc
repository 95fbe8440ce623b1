// Products of layers against float64, and the kernel for few rows on every instruction set.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "ops/asynchronous.h"
#include "ops/glu/glu.h"
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

// Shapes of models, and odd ones.
const std::vector<std::pair<int64_t, int64_t>> kCudaShapes = {
    {768, 2304}, {2048, 768}, {768, 4096}, {8, 1},     {40, 5},
    {1000, 258}, {3080, 34},  {33, 6},     {264, 2054}};

Product on_cuda(const Product& p) {
  return {p.x.to(at::kCUDA), p.weight.to(at::kCUDA), p.bias.to(at::kCUDA)};
}
// What is freed here is the memory of the next result of this size.
void poison(int64_t rows, int64_t out) {
  at::full({rows, out}, NAN, at::TensorOptions().device(at::kCUDA).dtype(at::kBFloat16));
}

TEST(LinearOp, OnCudaFewRowsEqualFloat64) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  const at::NoGradGuard no_grad;
  for (const int64_t rows : {1, 2, 7, 8, 9, 16, 33, 64, 65})
    for (const auto& [in, out] : kCudaShapes) {
      const Product host = product_of(rows, in, out, at::kBFloat16), p = on_cuda(host);
      for (const bool with_bias : {true, false}) {
        poison(rows, out);
        const at::Tensor bias = with_bias ? p.bias : at::Tensor();
        const at::Tensor y = ops::linear(p.x, p.weight, bias);
        expect_equals_float64(y.cpu(), host, with_bias);
        EXPECT_TRUE(y.equal(ops::linear(p.x, p.weight, bias, /*weight_at_rest=*/true)));
      }
    }
}

TEST(LinearOp, OnCudaARowOfFewHasTheSameBitsAlone) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  const at::NoGradGuard no_grad;
  for (const auto& [in, out] : kCudaShapes) {
    if (in % 8) continue;
    const Product p = on_cuda(product_of(64, in, out, at::kBFloat16));
    const at::Tensor all = ops::linear(p.x, p.weight, p.bias);
    for (const int64_t rows : {1, 5, 11, 30}) {
      const at::Tensor few = ops::linear(p.x.narrow(0, 20, rows), p.weight, p.bias);
      EXPECT_TRUE(few.equal(all.narrow(0, 20, rows))) << rows << " rows, " << p.weight.sizes();
    }
    p.x[21].fill_(NAN);
    const at::Tensor others = ops::linear(p.x, p.weight, p.bias);
    EXPECT_TRUE(others[21].isnan().all().item<bool>());
    EXPECT_TRUE(others.narrow(0, 0, 21).equal(all.narrow(0, 0, 21))) << p.weight.sizes();
    EXPECT_TRUE(others.narrow(0, 22, 42).equal(all.narrow(0, 22, 42))) << p.weight.sizes();
  }
}

void expect_glu_of_products_on(at::Device device) {
  const at::NoGradGuard no_grad;
  for (const int64_t rows : {1, 2, 7, 8, 9, 16, 33, 64, 65})
    for (const auto& [in, out] :
         {std::pair<int64_t, int64_t>{768, 4096}, {40, 6}, {1000, 260}, {264, 2054}})
      for (const char* activation : {"silu", "gelu"}) {
        const Product p = product_of(rows, in, out, at::kBFloat16);
        const at::Tensor x = p.x.to(device), bias = p.bias.to(device),
                         weight = (p.weight / std::sqrt(double(in))).to(device);
        const at::Tensor expected = glu(ops::linear(x, weight, bias), activation).to(at::kFloat);
        if (device.is_cuda()) poison(rows, out / 2);
        const at::Tensor y = ops::linear_glu(x, weight, bias, activation);
        ASSERT_EQ(y.sizes(), expected.sizes());
        const at::Tensor error = (y.to(at::kFloat) - expected).norm(2, -1);
        EXPECT_LE((error / expected.norm(2, -1)).max().item<double>(), 1e-3)
            << rows << " rows, " << weight.sizes() << ' ' << activation << " on " << device;
      }
}
TEST(LinearOp, WithGluEqualsTheTwoOperators) { expect_glu_of_products_on(at::kCPU); }
TEST(LinearOp, OnCudaWithGluEqualsTheTwoOperators) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  expect_glu_of_products_on(at::kCUDA);
}

// Each product may start before the one before it ends. Memory of results is used again.
TEST(LinearOp, OnCudaAChainOfProductsWaitsForEach) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  const at::NoGradGuard no_grad;
  for (const int64_t rows : {1, 9, 64}) {
    const Product p = on_cuda(product_of(rows, 768, 2048, at::kBFloat16));
    const at::Tensor up = p.weight / 28, down = up.t().contiguous() / 2;
    const auto chain = [&](bool at_rest) {
      at::Tensor x = p.x;
      for (int i = 0; i < 50; ++i)
        x = ops::linear(ops::linear(x, up, {}, at_rest), down, {}, at_rest);
      return x;
    };
    const at::Tensor expected = chain(false);
    EXPECT_TRUE(chain(true).equal(expected)) << rows << " rows";
    at::Tensor found;
    const auto replay = captured(at::kCUDA, [&] { found = chain(true); });
    for (int i = 0; i < 3; ++i) {
      replay();
      EXPECT_TRUE(found.equal(expected)) << rows << " rows, in a graph";
    }
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
