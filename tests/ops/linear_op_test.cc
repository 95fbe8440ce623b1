// Products of layers against float64, and the kernel for few rows on every instruction set.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "ops/core/asynchronous.h"
#include "ops/dense/linear/linear.h"
#include "ops/rowwise/glu/glu.h"
#include "ops/rowwise/norm/norm.h"
#include "ops/simd_target.h"

namespace assay::ops {
namespace {

struct Product {
  at::Tensor x;
  at::Tensor weight;
  at::Tensor bias;
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

// With as many rows as the kernel for many rows takes, sizes that its panels do not divide, one
// stretch of k and several, and an odd size, which the kernel does not take in bfloat16.
TEST(LinearOp, OfManyRowsAndItsGradientEqualFloat64OnEveryInstructionSet) {
  for (const int64_t target : targets()) {
    const SimdTarget only(target);
    for (const auto dtype : {at::kFloat, at::kBFloat16})
      for (const int64_t rows : {256, 261})
        for (const auto& [in, out] :
             {std::pair<int64_t, int64_t>{64, 32}, {390, 101}, {1000, 70}, {33, 900}}) {
          Product p = product_of(rows, in, out, dtype);
          p.x.requires_grad_();
          const at::Tensor y = ops::linear(p.x, p.weight, p.bias);
          expect_equals_float64(y.detach(), p, true);
          const at::Tensor dy = product_of(rows, out, 2, dtype).x;
          const at::Tensor dx = torch::autograd::grad({y}, {p.x}, {dy})[0];
          expect_equals_float64(dx, {dy, p.weight.t(), {}}, false);
        }
  }
}

TEST(LinearOp, ManyRowsHaveTheSameBitsForAnyNumberOfThreadsAndOtherRows) {
  const at::NoGradGuard no_grad;
  const int threads = at::get_num_threads();
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const Product p = product_of(700, 800, 200, dtype);
    at::set_num_threads(1);
    const at::Tensor expected = ops::linear(p.x, p.weight, p.bias);
    for (const int other : {2, 3, 64}) {
      at::set_num_threads(other);
      EXPECT_TRUE(expected.equal(ops::linear(p.x, p.weight, p.bias))) << other << " threads";
    }
    const at::Tensor part = ops::linear(p.x.narrow(0, 13, 300), p.weight, p.bias);
    EXPECT_TRUE(part.equal(expected.narrow(0, 13, 300))) << dtype;
  }
  at::set_num_threads(threads);
}

TEST(LinearOp, WeightGradientOfBfloat16InFloat32EqualsFloat64OnEveryInstructionSet) {
  const at::NoGradGuard no_grad;
  for (const int64_t target : targets()) {
    const SimdTarget only(target);
    for (const int64_t rows : {1, 7, 32, 771, 800, 1632})
      for (const auto& [in, out] : {std::pair<int64_t, int64_t>{1, 1}, {33, 13}, {320, 61}})
        for (const bool add : {false, true}) {
          const at::Tensor x = product_of(rows, in, 1, at::kBFloat16).x;
          const at::Tensor dy = product_of(rows, out, 2, at::kBFloat16).x;
          const at::Tensor before = product_of(1, in, out, at::kFloat).weight;
          at::Tensor found = add ? before.clone() : at::full({out, in}, NAN);
          ops::weight_gradient(dy, x, found, add);
          const at::Tensor exact = dy.to(at::kDouble).t().mm(x.to(at::kDouble)) +
                                   (add ? before.to(at::kDouble) : at::zeros({}));
          const at::Tensor summed =
              dy.abs().t().to(at::kFloat).mm(x.abs().to(at::kFloat)) + before.abs();
          const at::Tensor error = (found - exact).norm(2, -1) / summed.norm(2, -1);
          EXPECT_LE(error.max().item<double>(), 1e-6)
              << rows << " rows, " << in << " by " << out << (add ? ", added" : "");
        }
  }
}

// With more rows than a stretch of the kernel, and sizes that its panels do not divide.
TEST(LinearOp, WeightGradientEqualsFloat64OnEveryInstructionSet) {
  const at::NoGradGuard no_grad;
  for (const int64_t target : targets()) {
    const SimdTarget only(target);
    for (const int64_t rows : {1, 7, 384, 400, 800})
      for (const auto& [in, out] :
           {std::pair<int64_t, int64_t>{1, 1}, {7, 5}, {64, 6}, {33, 13}, {390, 100}, {320, 61}})
        for (const bool add : {false, true}) {
          const at::Tensor x = product_of(rows, in, 1, at::kFloat).x;
          const at::Tensor dy = product_of(rows, out, 2, at::kFloat).x;
          const at::Tensor before = product_of(1, in, out, at::kFloat).weight;
          // its rows do not begin on a vector
          at::Tensor found = at::full({out * in + 1}, NAN).slice(0, 1).view({out, in});
          if (add) found.copy_(before);
          ops::weight_gradient(dy, x, found, add);
          const at::Tensor exact = dy.to(at::kDouble).t().mm(x.to(at::kDouble)) +
                                   (add ? before.to(at::kDouble) : at::zeros({}));
          const at::Tensor summed = dy.abs().t().mm(x.abs()) + before.abs();  // without signs
          const at::Tensor error = (found - exact).norm(2, -1) / summed.norm(2, -1);
          EXPECT_LE(error.max().item<double>(), 1e-6)
              << rows << " rows, " << in << " by " << out << (add ? ", added" : "");
        }
  }
}

TEST(LinearOp, WeightGradientHasTheSameBitsForAnyNumberOfThreads) {
  const auto gradient = [](int threads, int64_t rows, at::ScalarType dtype) {
    at::set_num_threads(threads);
    const at::Tensor x = product_of(rows, 320, 1, dtype).x;
    const at::Tensor weight = product_of(1, 320, 200, at::kFloat).weight.requires_grad_();
    const at::Tensor y =
        dtype == at::kFloat ? ops::linear(x, weight, {}) : linear_of_master(x, weight, {});
    return torch::autograd::grad({y}, {weight}, {at::sin(y.detach())})[0];
  };
  const int threads = at::get_num_threads();
  for (const auto dtype : {at::kFloat, at::kBFloat16})
    for (const int64_t rows : {500, 512}) {
      const at::Tensor expected = gradient(1, rows, dtype);
      for (const int other : {2, 3, 5, 64})
        EXPECT_TRUE(expected.equal(gradient(other, rows, dtype)))
            << other << " threads, " << rows << " rows, " << dtype;
    }
  at::set_num_threads(threads);
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
// Frees memory that holds NaN. The next result of this size is in this memory.
void poison(int64_t rows, int64_t out) {
  at::full({rows, out}, NAN, at::TensorOptions().device(at::kCUDA).dtype(at::kBFloat16));
}

// Other products are cuBLAS's. They are tested apart, because racecheck ends with an internal error
// at its kernels in clusters.
bool has_kernel(int64_t rows, int64_t in, int64_t out) {
  return rows <= (out <= 8192 ? 64 : 16) && in % 8 == 0;
}
void expect_products_equal_float64_on_cuda(bool by_kernel) {
  const at::NoGradGuard no_grad;
  for (const int64_t rows : {1, 2, 7, 8, 9, 16, 33, 64, 65})
    for (const auto& [in, out] : kCudaShapes) {
      if (has_kernel(rows, in, out) != by_kernel) continue;
      const Product host = product_of(rows, in, out, at::kBFloat16);
      const Product p = on_cuda(host);
      for (const bool with_bias : {true, false}) {
        poison(rows, out);
        const at::Tensor bias = with_bias ? p.bias : at::Tensor();
        const at::Tensor y = ops::linear(p.x, p.weight, bias);
        expect_equals_float64(y.cpu(), host, with_bias);
        EXPECT_TRUE(y.equal(ops::linear(p.x, p.weight, bias, /*weight_at_rest=*/true)));
      }
    }
}
TEST(LinearOp, OnCudaFewRowsEqualFloat64) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  expect_products_equal_float64_on_cuda(true);
}
TEST(LinearOp, OnCudaOtherProductsEqualFloat64) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  expect_products_equal_float64_on_cuda(false);
}

// Numbers of columns that 8 divides and does not divide, with and without a bias.
void expect_products_of_masters_equal_float64(at::Device device) {
  for (const int64_t out : {12, 16, 2316})
    for (const bool with_bias : {true, false}) {
      const Product p = product_of(300, 64, out, at::kBFloat16);
      const auto leaf = [](const at::Tensor& t) { return t.detach().requires_grad_(); };
      const auto run = [&](at::TensorOptions x_options, at::TensorOptions options, bool master) {
        const at::Tensor x = leaf(p.x.to(x_options));
        const at::Tensor weight = leaf(p.weight.to(options));
        const at::Tensor bias = with_bias ? leaf(p.bias.to(options)) : at::Tensor();
        const at::Tensor y =
            master ? linear_of_master(x, weight, bias) : at::linear(x, weight, bias);
        std::vector<at::Tensor> inputs = {x, weight};
        if (with_bias) inputs.push_back(bias);
        std::vector<at::Tensor> results = {y.detach()};
        for (const at::Tensor& gradient : torch::autograd::grad({(y * y).sum()}, inputs))
          results.push_back(gradient);
        return results;
      };
      const at::TensorOptions on_device(device);
      const auto got = run(on_device.dtype(at::kBFloat16), on_device.dtype(at::kFloat), true);
      const auto expected = run(at::kDouble, at::kDouble, false);
      const at::Tensor bias = with_bias ? p.bias.to(device) : at::Tensor();
      const at::Tensor y = ops::linear(p.x.to(device), p.weight.to(device), bias);
      const at::Tensor difference = y.cpu().to(at::kDouble) - expected[0];
      EXPECT_LE((difference.norm() / expected[0].norm()).item<double>(), 5e-3)
          << out << " columns without gradients" << (with_bias ? ", bias" : "");
      for (size_t i = 0; i < got.size(); ++i) {
        const at::Tensor result = got[i].cpu().to(at::kDouble);
        ASSERT_EQ(result.sizes(), expected[i].sizes());
        EXPECT_LE(((result - expected[i]).norm() / expected[i].norm()).item<double>(), 5e-3)
            << out << " columns, result " << i << (with_bias ? ", bias" : "");
      }
    }
}

TEST(LinearOp, ProductsKeepARoundedWeightUntilItChanges) {
  const at::Tensor x = at::ones({4, 16}, at::kBFloat16);
  const at::Tensor weight = at::full({3, 16}, 1.003f).requires_grad_();
  const auto rounded = c10::make_intrusive<RoundedWeight>();
  const auto product = [&] { return linear_of_master(x, weight, {}, {}, rounded).detach(); };
  const at::Tensor first = product();
  const at::Tensor kept = rounded->value;
  EXPECT_TRUE(at::equal(first, linear_of_master(x, weight, {}).detach()));
  product();
  EXPECT_TRUE(rounded->value.is_same(kept));
  torch::NoGradGuard no_grad;
  weight.mul_(2);
  EXPECT_FALSE(rounded->is_of(weight));
  const at::AutoGradMode gradients(true);
  EXPECT_TRUE(at::equal(product(), 2 * first));
  EXPECT_TRUE(at::equal(kept, at::ones_like(kept))) << "a graph may still read it";
}
TEST(LinearOp, ProductsOfMastersEqualFloat64) {
  expect_products_of_masters_equal_float64(at::kCPU);
}
TEST(LinearOp, OnCudaProductsOfMastersEqualFloat64) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  expect_products_of_masters_equal_float64(at::kCUDA);
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

void expect_glu_of_products_on(at::Device device, const std::vector<int64_t>& numbers_of_rows) {
  const at::NoGradGuard no_grad;
  for (const int64_t rows : numbers_of_rows)
    for (const auto& [in, out] :
         {std::pair<int64_t, int64_t>{768, 4096}, {40, 6}, {1000, 260}, {264, 2054}})
      for (const char* activation : {"silu", "gelu"}) {
        const Product p = product_of(rows, in, out, at::kBFloat16);
        const at::Tensor x = p.x.to(device);
        const at::Tensor bias = p.bias.to(device);
        const at::Tensor weight = (p.weight / std::sqrt(double(in))).to(device);
        const at::Tensor expected = glu(ops::linear(x, weight, bias), activation).to(at::kFloat);
        if (device.is_cuda()) poison(rows, out / 2);
        const at::Tensor y = ops::linear_glu(x, weight, bias, activation);
        ASSERT_EQ(y.sizes(), expected.sizes());
        const at::Tensor error = (y.to(at::kFloat) - expected).norm(2, -1);
        EXPECT_LE((error / expected.norm(2, -1)).max().item<double>(), 1e-3)
            << rows << " rows, " << weight.sizes() << ' ' << activation << " on " << device;
      }
}
TEST(LinearOp, WithGluEqualsTheTwoOperators) {
  expect_glu_of_products_on(at::kCPU, {1, 2, 7, 8, 9, 16, 33, 64, 65});
}
TEST(LinearOp, OnCudaWithGluEqualsTheTwoOperators) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  expect_glu_of_products_on(at::kCUDA, {1, 2, 7, 8, 9, 16, 33, 64});
}
TEST(LinearOp, OnCudaWithGluOfManyRowsEqualsTheTwoOperators) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  expect_glu_of_products_on(at::kCUDA, {65});
}

// Arguments of norm_linear.
struct NormedProduct {
  at::Tensor x;
  at::Tensor y;
  at::Tensor norm_weight;
  at::Tensor weight;
  at::Tensor bias;
  std::pair<at::Tensor, at::Tensor> operator()(const char* activation, bool at_rest = false) const {
    return norm_linear(x, y, norm_weight, 1e-5, weight, bias, activation, at_rest);
  }
  // The results of the two operators that norm_linear joins.
  std::pair<at::Tensor, at::Tensor> separately(const std::string& activation) const {
    const auto [sum, normed] = y.defined() ? add_norm(x, y, norm_weight, std::nullopt, 1e-5)
                                           : std::pair(x, rms_norm(x, norm_weight, 1e-5));
    return {sum, activation.empty() ? ops::linear(normed, weight, bias)
                                    : linear_glu(normed, weight, bias, activation)};
  }
  NormedProduct rows(int64_t first, int64_t count) const {
    NormedProduct out = *this;
    out.x = x.narrow(0, first, count);
    if (y.defined()) out.y = y.narrow(0, first, count);
    return out;
  }
};
NormedProduct normed_product_of(int64_t rows, int64_t in, int64_t out, at::ScalarType dtype,
                                at::Device device) {
  torch::manual_seed(rows * in + out);
  const auto real = dtype == at::kDouble ? dtype : at::kFloat;
  const auto random = [&](at::IntArrayRef shape, at::ScalarType type) {
    return torch::randn(shape, at::TensorOptions(device).dtype(real)).to(type);
  };
  return {random({rows, in}, dtype), random({rows, in}, dtype), random({in}, real),
          random({out, in}, dtype), random({out}, dtype)};
}
void expect_same(const std::pair<at::Tensor, at::Tensor>& found,
                 const std::pair<at::Tensor, at::Tensor>& expected, const std::string& what) {
  EXPECT_TRUE(found.first.equal(expected.first)) << "sum of " << what;
  EXPECT_TRUE(found.second.equal(expected.second)) << "product of " << what;
}

TEST(LinearOp, WithNormHasTheBitsOfBothOperators) {
  const at::NoGradGuard no_grad;
  for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16})
    for (const char* activation : {"", "silu"}) {
      NormedProduct p = normed_product_of(3, 72, 10, dtype, at::kCPU);
      expect_same(p(activation), p.separately(activation), c10::str(dtype, activation));
      p.y = at::Tensor();
      expect_same(p(activation), p.separately(activation), c10::str(dtype, activation, " alone"));
    }
}

// Sizes of each path: one or two rows, up to 16, and those that take two kernels. The widths give
// even and odd numbers of warps and parts, and steps past the end of a row.
void expect_norms_in_products_on_cuda(bool by_kernel) {
  const at::NoGradGuard no_grad;
  for (const int64_t rows : {1, 2, 3, 7, 8, 9, 15, 16, 17, 33, 64})
    for (const auto& [in, out] : {std::pair<int64_t, int64_t>{768, 2304},
                                  {768, 4096},
                                  {2048, 768},
                                  {64, 128},
                                  {8, 2},
                                  {40, 6},
                                  {264, 2054},
                                  {320, 960},
                                  {640, 98},
                                  {1000, 258},
                                  {1288, 34},
                                  {1912, 18},
                                  {2056, 34},
                                  {33, 6},
                                  {768, 32000}})
      for (const char* activation : {"", "silu", "gelu"}) {
        if (has_kernel(rows, in, out) != by_kernel) continue;
        NormedProduct p = normed_product_of(rows, in, out, at::kBFloat16, at::kCUDA);
        const std::string what = c10::str(rows, " rows, ", p.weight.sizes(), ' ', activation);
        const auto expected = p.separately(activation);
        ASSERT_TRUE(expected.second.isfinite().all().item<bool>()) << what;
        for (const bool at_rest : {false, true}) {
          poison(rows, in);
          poison(rows, *activation ? out / 2 : out);
          expect_same(p(activation, at_rest), expected, what);
        }
        p.y = at::Tensor();
        p.bias = at::Tensor();
        expect_same(p(activation), p.separately(activation), what + " of x alone");
      }
}
TEST(LinearOp, OnCudaWithNormHasTheBitsOfBothOperators) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  expect_norms_in_products_on_cuda(true);
}
TEST(LinearOp, OnCudaWithNormOtherProductsHaveTheBitsOfBothOperators) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  expect_norms_in_products_on_cuda(false);
}

// The normalised rows are rounded to bfloat16, as the result is.
TEST(LinearOp, OnCudaWithNormEqualsFloat64) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  const at::NoGradGuard no_grad;
  for (const int64_t rows : {1, 2, 7, 16, 33})
    for (const auto& [in, out] :
         {std::pair<int64_t, int64_t>{768, 2304}, {2048, 768}, {64, 128}, {1000, 258}}) {
      const NormedProduct p = normed_product_of(rows, in, out, at::kBFloat16, at::kCUDA);
      const at::Tensor exact_sum = p.x.to(at::kDouble) + p.y.to(at::kDouble);
      const auto [sum, found] = p("");
      EXPECT_TRUE(sum.equal(exact_sum.to(at::kFloat).to(at::kBFloat16)));
      const at::Tensor normed =
          rms_norm_reference(sum.to(at::kDouble), p.norm_weight.to(at::kDouble), 1e-5);
      const at::Tensor exact = at::linear(normed, p.weight.to(at::kDouble), p.bias.to(at::kDouble));
      const at::Tensor error = (found.to(at::kDouble) - exact).norm(2, -1) / exact.norm(2, -1);
      EXPECT_LE(error.max().item<double>(), 6e-3) << rows << " rows, " << p.weight.sizes();
    }
}

TEST(LinearOp, OnCudaWithNormARowHasTheSameBitsAlone) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  const at::NoGradGuard no_grad;
  for (const auto& [in, out] :
       {std::pair<int64_t, int64_t>{768, 2304}, {2048, 768}, {64, 128}, {320, 960}, {1000, 258}})
    for (const char* activation : {"", "silu"}) {
      const NormedProduct p = normed_product_of(64, in, out, at::kBFloat16, at::kCUDA);
      const std::string what = c10::str(p.weight.sizes(), ' ', activation);
      const auto all = p(activation);
      const auto part = [](const auto& both, int64_t first, int64_t count) {
        return std::pair(both.first.narrow(0, first, count), both.second.narrow(0, first, count));
      };
      for (const int64_t count : {1, 2, 3, 8, 9, 16, 17, 33})
        expect_same(p.rows(20, count)(activation), part(all, 20, count),
                    c10::str(count, " rows, ", what));
      p.x[21].fill_(NAN);
      const auto others = p.rows(16, 16)(activation);
      EXPECT_TRUE(others.second[5].isnan().all().item<bool>()) << what;
      expect_same(part(others, 0, 5), part(all, 16, 5), "rows before NaN, " + what);
      expect_same(part(others, 6, 10), part(all, 22, 10), "rows after NaN, " + what);
    }
}

TEST(LinearOp, OnCudaWithNormMisalignedOrOddArgumentsTakeBothOperators) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  const at::NoGradGuard no_grad;
  const NormedProduct p = normed_product_of(2, 64, 32, at::kBFloat16, at::kCUDA);
  const auto shifted = [](const at::Tensor& tensor) {  // by one element
    return at::cat({tensor.flatten().narrow(0, 0, 1), tensor.flatten()})
        .narrow(0, 1, tensor.numel())
        .view(tensor.sizes());
  };
  for (const auto member : {&NormedProduct::x, &NormedProduct::y, &NormedProduct::norm_weight,
                            &NormedProduct::weight}) {
    NormedProduct other = p;
    other.*member = shifted(p.*member);
    expect_same(other(""), other.separately(""), "a misaligned argument");
  }
  NormedProduct other = p;
  other.y = p.y.narrow(0, 0, 1);
  expect_same(other(""), other.separately(""), "y of one row");
}

// Each kernel may start before the one before it ends, which writes what it reads.
TEST(LinearOp, OnCudaAChainOfProductsWithNormsWaitsForEach) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  const at::NoGradGuard no_grad;
  for (const int64_t rows : {1, 9, 16}) {
    const NormedProduct p = normed_product_of(rows, 768, 2048, at::kBFloat16, at::kCUDA);
    const at::Tensor up = p.weight / 28;
    const at::Tensor down = torch::randn({768, 1024}, at::kCUDA).to(at::kBFloat16) / 32;
    const auto chain = [&](bool at_rest, bool separately) {
      at::Tensor x = p.x;
      at::Tensor y = p.y;
      for (int i = 0; i < 50; ++i) {
        const NormedProduct layer{x, y, p.norm_weight, up, {}};
        const auto [sum, h] = separately ? layer.separately("silu") : layer("silu", at_rest);
        x = sum;
        y = ops::linear(h, down, {}, at_rest);
      }
      return at::cat({x, y});
    };
    const at::Tensor expected = chain(false, true);
    EXPECT_TRUE(expected.isfinite().all().item<bool>());
    EXPECT_TRUE(chain(true, false).equal(expected)) << rows << " rows";
    at::Tensor found;
    const auto replay = captured(at::kCUDA, [&] { found = chain(true, false); });
    for (int i = 0; i < 3; ++i) {
      replay();
      EXPECT_TRUE(found.equal(expected)) << rows << " rows, in a graph";
    }
  }
}

// Each product may start before the one before it ends. Memory of results is used again.
TEST(LinearOp, OnCudaAChainOfProductsWaitsForEach) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  const at::NoGradGuard no_grad;
  for (const int64_t rows : {1, 9, 64}) {
    const Product p = on_cuda(product_of(rows, 768, 2048, at::kBFloat16));
    const at::Tensor up = p.weight / 28;
    const at::Tensor down = up.t().contiguous() / 2;
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
  for (const int64_t rows : {4, 300}) {
    const at::Tensor x = torch::randn({rows, 64});
    const at::Tensor weight = torch::randn({40, 64});
    EXPECT_THROW(ops::linear(x, weight, torch::randn({39})), c10::ValueError) << rows;
    EXPECT_THROW(ops::product(x, torch::randn({40, 63})), c10::Error) << rows;
    at::Tensor dweight = torch::zeros({40, 64});
    EXPECT_THROW(ops::weight_gradient(torch::randn({rows + 1, 40}), x, dweight, false), c10::Error);
  }
}

TEST(LinearOp, HasTheGradientsOfTheDefinition) {
  for (const auto dtype : {at::kFloat, at::kBFloat16})
    for (const int64_t rows : {1, 20}) {
      Product p = product_of(rows, 48, 24, dtype);
      const at::Tensor dy = torch::randn({rows, 24}, at::kDouble).to(dtype);
      std::vector<at::Tensor> inputs;
      std::vector<at::Tensor> exact_inputs;
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
