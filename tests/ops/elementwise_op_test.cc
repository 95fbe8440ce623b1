// The fused element-wise operators against their definitions, output and gradient, in every dtype.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "ops/cross_entropy/cross_entropy.h"
#include "ops/gated_norm/gated_norm.h"
#include "ops/glu/glu.h"
#include "ops/golden.h"
#include "ops/norm/norm.h"
#include "ops/rotary_qkv/rotary_qkv.h"
#include "ops/rwkv7_elements/rwkv7_elements.h"
#include "ops/squared_relu/squared_relu.h"
#include "ops/token_shift/token_shift.h"
#include "ops/unit_length/unit_length.h"

namespace assay::ops {
namespace {

double tolerance(at::ScalarType dtype) {
  return dtype == at::kDouble ? 1e-12 : dtype == at::kFloat ? 2e-6 : 1e-2;
}

// The largest ‖a_i − b_i‖ / ‖b_i‖ over rows of the last dimension.
void expect_rows(const at::Tensor& a, const at::Tensor& b, at::ScalarType dtype, const char* what) {
  ASSERT_EQ(a.sizes(), b.sizes()) << what;
  const at::Tensor x = a.detach().to(at::kCPU, at::kDouble),
                   y = b.detach().to(at::kCPU, at::kDouble);
  const double error = ((x - y).norm(2, -1) / y.norm(2, -1).clamp_min(1e-300)).max().item<double>();
  EXPECT_LE(error, tolerance(dtype)) << what;
}

// The same, but rows of less than the mean length count as rows of this length: a sum of a row that
// is nearly 0 has the absolute error of its terms.
void expect_summed_rows(const at::Tensor& a, const at::Tensor& b, at::ScalarType dtype,
                        const std::string& what) {
  ASSERT_EQ(a.sizes(), b.sizes()) << what;
  const at::Tensor x = a.detach().to(at::kCPU, at::kDouble), y = b.detach();
  const at::Tensor length = y.norm(2, -1), error = (x - y).norm(2, -1);
  EXPECT_LE((error / at::maximum(length, length.mean())).max().item<double>(), tolerance(dtype))
      << what;
}

void expect_glu(at::IntArrayRef shape, const char* activation, at::ScalarType dtype,
                at::Device device) {
  SCOPED_TRACE(c10::str(activation, " ", shape, " ", dtype, " on ", device));
  torch::manual_seed(shape.back());
  auto half = shape.vec();
  half.back() /= 2;
  const at::Tensor values = (torch::randn(shape, at::kDouble) * 3).to(dtype),
                   dy = torch::randn(half, at::kDouble).to(dtype);
  const at::Tensor h = values.to(device).detach().requires_grad_(),
                   exact = values.to(at::kDouble).detach().requires_grad_();
  const at::Tensor y = glu(h, activation), expected = glu_reference(exact, activation);
  expect_rows(y, expected, dtype, "y");
  expect_rows(torch::autograd::grad({y}, {h}, {dy.to(device)})[0],
              torch::autograd::grad({expected}, {exact}, {dy.to(at::kDouble)})[0], dtype, "dh");
}
void expect_glu_on(at::Device device) {
  for (const char* activation : {"silu", "gelu"})
    for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
      expect_glu({2}, activation, dtype, device);
      expect_glu({3, 5, 14}, activation, dtype, device);
      expect_glu({2, 7, 1792}, activation, dtype, device);
      expect_glu({700, 48}, activation, dtype, device);
    }
}
TEST(GluOp, EqualsItsDefinition) { expect_glu_on(at::kCPU); }
TEST(GluOp, OnCudaEqualsItsDefinition) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  expect_glu_on(at::kCUDA);
}
TEST(GluOp, BadArgumentsAreNamed) {
  EXPECT_THROW(glu(torch::randn({3, 5}), "silu"), c10::ValueError);
  EXPECT_THROW(glu(torch::randn({3, 4}), "relu"), c10::ValueError);
  EXPECT_THROW(glu(torch::zeros({3, 4}, at::kLong), "silu"), c10::Error);
}

void expect_squared_relu(at::IntArrayRef shape, at::ScalarType dtype, at::Device device) {
  SCOPED_TRACE(c10::str(shape, " ", dtype, " on ", device));
  torch::manual_seed(shape.back());
  const at::Tensor values = torch::randn(shape, at::kDouble).to(dtype);
  const at::Tensor dy = torch::randn(shape, at::kDouble).to(dtype);
  const at::Tensor x = values.to(device).detach().requires_grad_();
  const at::Tensor exact = values.to(at::kDouble).detach().requires_grad_();
  const at::Tensor y = squared_relu(x), expected = squared_relu_reference(exact);
  expect_rows(y, expected, dtype, "y");
  expect_rows(torch::autograd::grad({y}, {x}, {dy.to(device)})[0],
              torch::autograd::grad({expected}, {exact}, {dy.to(at::kDouble)})[0], dtype, "dx");
}
void expect_squared_relu_on(at::Device device) {
  for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16})
    for (const auto& shape :
         std::vector<std::vector<int64_t>>{{1}, {3, 5, 7}, {2, 257}, {130, 1792}})
      expect_squared_relu(shape, dtype, device);
}
TEST(ElementwiseSquaredReluOp, EqualsItsReference) { expect_squared_relu_on(at::kCPU); }
TEST(ElementwiseSquaredReluOp, OnCudaEqualsItsReference) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  expect_squared_relu_on(at::kCUDA);
}
TEST(ElementwiseSquaredReluOp, HasTheBitsOfTheComposedOperators) {
  for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    torch::manual_seed(1);
    const at::Tensor x = torch::randn({7, 300}).to(dtype).requires_grad_();
    const at::Tensor dy = torch::randn({7, 300}).to(dtype);
    const at::Tensor y = squared_relu(x), composed = squared_relu_reference(x);
    EXPECT_TRUE(at::equal(y, composed)) << dtype;
    EXPECT_TRUE(at::equal(torch::autograd::grad({y}, {x}, {dy})[0],
                          torch::autograd::grad({composed}, {x}, {dy})[0]))
        << dtype;
  }
}
TEST(ElementwiseSquaredReluOp, NanStaysNan) {
  const at::Tensor x = torch::tensor({-1.0f, NAN, 2.0f}).requires_grad_();
  const at::Tensor y = squared_relu(x);
  EXPECT_EQ(y[0].item<float>(), 0);
  EXPECT_TRUE(std::isnan(y[1].item<float>()));
  EXPECT_EQ(y[2].item<float>(), 4);
  const at::Tensor dx = torch::autograd::grad({y.sum()}, {x})[0];
  EXPECT_EQ(dx[0].item<float>(), 0);
  EXPECT_TRUE(std::isnan(dx[1].item<float>()));
}
TEST(ElementwiseSquaredReluOp, TakesStridedInputAndEmptyInput) {
  const at::Tensor x = torch::randn({6, 10});
  EXPECT_TRUE(at::equal(squared_relu(x.t()), squared_relu_reference(x.t())));
  EXPECT_EQ(squared_relu(torch::zeros({0, 3})).numel(), 0);
}
TEST(ElementwiseSquaredReluOp, RejectsIntegers) {
  EXPECT_THROW(squared_relu(torch::zeros({3}, at::kLong)), c10::ValueError);
}

void expect_norm(at::IntArrayRef shape, int64_t groups, bool layer, at::ScalarType dtype,
                 at::Device device) {
  SCOPED_TRACE(c10::str(layer ? "layer norm " : "", shape, " in ", groups, " groups ", dtype,
                        " on ", device));
  torch::manual_seed(shape.back());
  const auto real = dtype == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor dy = torch::randn(shape, at::kDouble).to(dtype);
  std::vector<at::Tensor> inputs, exact;  // x, weight, bias
  const auto input = [&](const at::Tensor& values, at::ScalarType type) {
    inputs.push_back(values.to(type).to(device).detach().requires_grad_());
    exact.push_back(values.to(type).to(at::kDouble).detach().requires_grad_());
  };
  input(torch::randn(shape, at::kDouble) + 0.5, dtype);
  input(1 + torch::randn({shape.back()}, at::kDouble), real);
  if (layer) input(torch::randn({shape.back()}, at::kDouble), real);
  const auto& in = inputs;
  const at::Tensor y =
      layer ? layer_norm(in[0], in[1], in[2], 1e-3, groups) : rms_norm(in[0], in[1], 1e-3, groups);
  const at::Tensor expected = layer
                                  ? layer_norm_reference(exact[0], exact[1], exact[2], 1e-3, groups)
                                  : rms_norm_reference(exact[0], exact[1], 1e-3, groups);
  expect_rows(y, expected, dtype, "y");
  const auto found = torch::autograd::grad({y}, inputs, {dy.to(device)});
  const auto wanted = torch::autograd::grad({expected}, exact, {dy.to(at::kDouble)});
  const char* names[] = {"dx", "dweight", "dbias"};
  for (size_t i = 0; i < found.size(); ++i)
    expect_rows(found[i], wanted[i], i == 0 ? dtype : real, names[i]);
}
void expect_norms_on(at::Device device) {
  for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16})
    for (const bool layer : {false, true}) {
      expect_norm({5}, 1, layer, dtype, device);
      expect_norm({2, 65, 24}, 1, layer, dtype, device);
      expect_norm({1, 130, 77}, 1, layer, dtype, device);
      expect_norm({9000, 768}, 1, layer, dtype, device);
      expect_norm({3, 9001}, 1, layer, dtype, device);
      expect_norm({900, 4096}, 1, layer, dtype, device);
      expect_norm({2, 130, 192}, 3, layer, dtype, device);
      expect_norm({3, 67, 35}, 5, layer, dtype, device);
      expect_norm({7, 640}, 2, layer, dtype, device);
    }
}
TEST(NormOps, EqualTheirDefinitions) { expect_norms_on(at::kCPU); }
// add_norm has the bits of the sum and of its norm. Its gradient is rounded once.
void expect_add_norm_on(at::Device device) {
  for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16})
    for (const auto& shape :
         std::vector<std::vector<int64_t>>{{1, 768}, {64, 1, 768}, {3, 7, 33}, {2, 2048}})
      for (const bool centred : {false, true}) {
        SCOPED_TRACE(c10::str(at::IntArrayRef(shape), " ", dtype, " on ", device));
        torch::manual_seed(shape.back());
        const auto real =
            at::TensorOptions().dtype(dtype == at::kDouble ? at::kDouble : at::kFloat);
        const at::Tensor x = torch::randn(shape).to(device, dtype).requires_grad_(),
                         y = torch::randn(shape).to(device, dtype).requires_grad_(),
                         weight = torch::randn({shape.back()}, real).to(device),
                         bias = torch::randn({shape.back()}, real).to(device);
        const at::Tensor expected_sum = x + y;
        const auto norm_of_sum = [&] {
          return centred ? layer_norm(expected_sum, weight, bias, 1e-5)
                         : rms_norm(expected_sum, weight, 1e-5);
        };
        const auto found = [&] {
          return add_norm(x, y, weight, centred ? std::optional(bias) : std::nullopt, 1e-5);
        };
        {
          const at::NoGradGuard no_grad;
          const auto [sum, normed] = found();
          EXPECT_TRUE(sum.equal(expected_sum));
          EXPECT_TRUE(normed.equal(norm_of_sum()));
        }
        const auto [sum, normed] = found();
        const at::Tensor dy = torch::randn(shape).to(device, dtype);
        const auto gradients = torch::autograd::grad({sum, normed}, {x, y}, {dy, dy});
        const auto wanted = torch::autograd::grad({expected_sum, norm_of_sum()}, {x, y}, {dy, dy});
        expect_rows(gradients[0], wanted[0], dtype, "dx");
        expect_rows(gradients[1], wanted[1], dtype, "dy");
        EXPECT_TRUE(torch::autograd::grad({found().first}, {x}, {dy})[0].equal(dy)) << "sum alone";
        EXPECT_TRUE(
            torch::autograd::grad({found().second}, {x}, {dy})[0].equal(torch::autograd::grad(
                {centred ? layer_norm(x + y, weight, bias, 1e-5) : rms_norm(x + y, weight, 1e-5)},
                {x}, {dy})[0]))
            << "norm alone";
      }
}
TEST(NormOps, OfASumHasTheBitsOfBothOperators) { expect_add_norm_on(at::kCPU); }
TEST(NormOps, OnCudaOfASumHasTheBitsOfBothOperators) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  expect_add_norm_on(at::kCUDA);
}
TEST(NormOps, OnCudaEqualTheirDefinitions) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  expect_norms_on(at::kCUDA);
}
TEST(NormOps, ReferencesAreTorchs) {
  const at::Tensor x = torch::randn({3, 7, 12}, at::kDouble), w = torch::randn({12}, at::kDouble),
                   b = torch::randn({12}, at::kDouble);
  EXPECT_TRUE(at::allclose(layer_norm_reference(x, w, b, 1e-5), at::layer_norm(x, {12}, w, b, 1e-5),
                           1e-12, 1e-12));
  EXPECT_TRUE(
      at::allclose(rms_norm_reference(x, w, 1e-5), at::rms_norm(x, {12}, w, 1e-5), 1e-12, 1e-12));
}
TEST(NormOps, BadArgumentsAreNamed) {
  const at::Tensor x = torch::randn({3, 6}), w = torch::ones({6});
  EXPECT_THROW(rms_norm(x, torch::ones({4}), 1e-5), c10::ValueError);
  EXPECT_THROW(rms_norm(torch::randn({3, 0}), torch::ones({0}), 1e-5), c10::ValueError);
  EXPECT_THROW(rms_norm(x, w, 1e-5, 4), c10::ValueError);
  EXPECT_THROW(rms_norm(x, w, 1e-5, 0), c10::ValueError);
  EXPECT_THROW(layer_norm(x, w, torch::ones({4}), 1e-5), c10::ValueError);
}

// The operators on rows: f(inputs) and their gradients against reference(inputs) in float64.
// Sequences are parts of wider rows, and freed memory, which outputs get, holds NaN. Two calls give
// the same bits.
struct RowsCase {
  std::vector<int64_t> shape;
  int64_t groups;
};
using Tensors = std::vector<at::Tensor>;
template <class F, class Reference>
void expect_rowwise(const RowsCase& c, int sequences, int parameters, F f, Reference reference,
                    at::ScalarType dtype, at::Device device) {
  SCOPED_TRACE(
      c10::str(at::IntArrayRef(c.shape), " in ", c.groups, " groups ", dtype, " on ", device));
  torch::manual_seed(c.shape.back());
  const auto real = dtype == at::kDouble ? at::kDouble : at::kFloat;
  const int64_t width = c.shape.back();
  Tensors inputs, exact, leaves, exact_leaves;
  const auto add = [&](const at::Tensor& values, int64_t margin) {
    auto shape = values.sizes().vec();
    shape.back() += margin;
    const at::Tensor rows = at::zeros(shape, values.options().device(device));
    rows.narrow(-1, margin, width).copy_(values);
    leaves.push_back(rows.requires_grad_());
    inputs.push_back(rows.narrow(-1, margin, width));
    exact_leaves.push_back(values.to(at::kDouble).requires_grad_());
    exact.push_back(exact_leaves.back());
  };
  for (int n = 0; n < sequences; ++n)
    add(torch::randn(c.shape, at::kDouble).add(0.3).to(dtype), n % 2 ? 16 : 0);
  for (int n = 0; n < parameters; ++n) add(torch::randn({width}, at::kDouble).add(1).to(real), 0);
  const Tensors expected = reference(exact);
  Tensors dy, exact_dy;
  for (const at::Tensor& y : expected)
    exact_dy.push_back(torch::randn(y.sizes(), at::kDouble).to(dtype).to(at::kDouble));
  const auto poison = [&] {
    Tensors freed;
    for (int n = 0; n < 12; ++n)
      freed.push_back(
          at::full_like(inputs[0], NAN, inputs[0].options().dtype(n % 2 ? real : dtype)));
  };
  Tensors first;
  for (int call = 0; call < 2; ++call) {
    poison();
    Tensors found = f(inputs);
    dy.clear();
    for (size_t n = 0; n < found.size(); ++n)
      dy.push_back(exact_dy[n].to(found[n].scalar_type()).to(device));
    poison();
    const Tensors gradients = torch::autograd::grad(found, leaves, dy);
    found.insert(found.end(), gradients.begin(), gradients.end());
    if (call == 0) first = found;
    for (size_t n = 0; n < found.size(); ++n)
      EXPECT_TRUE(at::equal(first[n], found[n])) << "result " << n << " of call " << call;
  }
  const auto wanted = torch::autograd::grad(expected, exact_leaves, exact_dy);
  for (size_t n = 0; n < expected.size(); ++n)
    expect_summed_rows(first[n], expected[n], dtype, c10::str("output ", n));
  for (size_t n = 0; n < wanted.size(); ++n) {
    const at::Tensor gradient =
        first[expected.size() + n].narrow(-1, leaves[n].size(-1) - width, width);
    expect_summed_rows(gradient, wanted[n], dtype, c10::str("gradient ", n));
  }
}
const std::vector<RowsCase> kRowsCases = {{{5}, 1},         {{2, 65, 24}, 1},   {{1, 130, 77}, 1},
                                          {{2, 1, 256}, 2}, {{2, 130, 192}, 3}, {{3, 67, 35}, 5},
                                          {{7, 640}, 2},    {{1100, 768}, 12},  {{700, 1536}, 4},
                                          {{700, 1536}, 1}, {{3, 4608}, 1}};
template <class F, class Reference>
void expect_rowwise_on(at::Device device, int sequences, int parameters, F f, Reference reference) {
  for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16})
    for (const RowsCase& c : kRowsCases)
      expect_rowwise(
          c, sequences, parameters, [&](const Tensors& in) { return f(in, c.groups); },
          [&](const Tensors& in) { return reference(in, c.groups); }, dtype, device);
}
void expect_rowwise_ops_on(at::Device device) {
  for (const bool gate_first : {false, true})
    expect_rowwise_on(
        device, 2, 1,
        [&](const Tensors& in, int64_t groups) -> Tensors {
          return {gated_rms_norm(in[0], in[1], in[2], 1e-3, gate_first, groups)};
        },
        [&](const Tensors& in, int64_t groups) -> Tensors {
          return {gated_rms_norm_reference(in[0], in[1], in[2], 1e-3, gate_first, groups)};
        });
  expect_rowwise_on(
      device, 1, 0,
      [](const Tensors& in, int64_t groups) -> Tensors {
        return {unit_length(in[0], 1e-6, groups)};
      },
      [](const Tensors& in, int64_t groups) -> Tensors {
        return {unit_length_reference(in[0], 1e-6, groups)};
      });
  const auto list = [](const Rwkv7Prepared& p) -> Tensors {
    return {p.log_decay, p.k, p.minus_removed, p.added};
  };
  expect_rowwise_on(
      device, 3, 2,
      [&](const Tensors& in, int64_t heads) {
        return list(rwkv7_prepare(in[0], in[1], in[2], in[3], in[4], heads));
      },
      [&](const Tensors& in, int64_t heads) {
        return list(rwkv7_prepare_reference(in[0], in[1], in[2], in[3], in[4], heads));
      });
  expect_rowwise_on(
      device, 3, 0,
      [](const Tensors& in, int64_t) -> Tensors { return {rwkv7_values(in[0], in[1], in[2])}; },
      [](const Tensors& in, int64_t) -> Tensors {
        return {rwkv7_values_reference(in[0], in[1], in[2])};
      });
  expect_rowwise_on(
      device, 5, 1,
      [](const Tensors& in, int64_t heads) -> Tensors {
        return {rwkv7_output(in[0], in[1], in[2], in[3], in[4], in[5], heads)};
      },
      [](const Tensors& in, int64_t heads) -> Tensors {
        return {rwkv7_output_reference(in[0], in[1], in[2], in[3], in[4], in[5], heads)};
      });
}
TEST(RowwiseOps, EqualTheirDefinitions) { expect_rowwise_ops_on(at::kCPU); }
TEST(RowwiseOps, OnCudaEqualTheirDefinitions) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  expect_rowwise_ops_on(at::kCUDA);
}
TEST(RowwiseOps, GradientsEqualFiniteDifferences) {
  torch::manual_seed(3);
  const auto check = [](const char* what, Tensors in, const auto& f) {
    for (at::Tensor& x : in) x = x.to(at::kDouble).requires_grad_();
    const at::Tensor weights = torch::randn(f(in).sizes(), at::kDouble);
    const auto gradients = torch::autograd::grad({(f(in) * weights).sum()}, in);
    for (size_t n = 0; n < in.size(); ++n) {
      const at::Tensor direction = torch::randn(in[n].sizes(), at::kDouble);
      const auto moved = [&](double step) {
        Tensors other = in;
        other[n] = in[n].detach() + step * direction;
        return (f(other) * weights).sum().template item<double>();
      };
      const double slope = (moved(1e-5) - moved(-1e-5)) / 2e-5,
                   found = (gradients[n] * direction).sum().template item<double>();
      EXPECT_NEAR(found, slope, 1e-7 * (1 + std::abs(slope))) << what << ", input " << n;
    }
  };
  const auto rows = [] { return torch::randn({3, 12}); };
  const auto row = [] { return torch::randn({12}); };
  for (const bool gate_first : {false, true})
    check("gated_rms_norm", {rows(), rows(), row()}, [&](const Tensors& in) {
      return gated_rms_norm(in[0], in[1], in[2], 1e-3, gate_first, 2);
    });
  check("unit_length", {rows()}, [](const Tensors& in) { return unit_length(in[0], 1e-6, 2); });
  check("rwkv7_prepare", {rows(), rows(), rows(), row(), row()}, [](const Tensors& in) {
    const auto p = rwkv7_prepare(in[0], in[1], in[2], in[3], in[4], 2);
    return at::cat({p.log_decay, p.k, p.minus_removed, p.added}, 1);
  });
  check("rwkv7_values", {rows(), rows(), rows()},
        [](const Tensors& in) { return rwkv7_values(in[0], in[1], in[2]); });
  check("rwkv7_output", {rows(), rows(), rows(), rows(), rows(), row()}, [](const Tensors& in) {
    return rwkv7_output(in[0], in[1], in[2], in[3], in[4], in[5], 2);
  });
}
TEST(RowwiseOps, BadArgumentsAreNamed) {
  const at::Tensor x = torch::randn({3, 6}), w = torch::ones({6});
  EXPECT_THROW(gated_rms_norm(x, x.slice(0, 1), w, 1e-5, true), c10::ValueError);
  EXPECT_THROW(gated_rms_norm(x, x, torch::ones({4}), 1e-5, true), c10::ValueError);
  EXPECT_THROW(gated_rms_norm(x, x, w, 1e-5, false, 4), c10::ValueError);
  EXPECT_THROW(unit_length(torch::zeros({3}, at::kLong), 1e-6), c10::ValueError);
  EXPECT_THROW(unit_length(x, 1e-6, 4), c10::ValueError);
  EXPECT_THROW(rwkv7_prepare(x, x, x, w, torch::ones({5}), 2), c10::ValueError);
  EXPECT_THROW(rwkv7_prepare(x, x, x, w, w, 4), c10::ValueError);
  EXPECT_THROW(rwkv7_values(x, x, x[0]), c10::ValueError);
  EXPECT_THROW(rwkv7_output(x, x, x, x, x.slice(1, 1), w, 2), c10::ValueError);
}
TEST(RowwiseOps, ZerosOfUnitLengthHaveFiniteGradients) {
  const at::Tensor zeros = torch::zeros({2, 8}), ones = torch::ones({8});
  const at::Tensor x = zeros.clone().requires_grad_(), k = zeros.clone().requires_grad_();
  const at::Tensor y = unit_length(x, 1e-6);
  EXPECT_TRUE(torch::autograd::grad({y.sum()}, {x})[0].isfinite().all().item<bool>());
  const auto p = rwkv7_prepare(zeros, zeros, k, ones, ones, 2);
  EXPECT_TRUE(p.minus_removed.isfinite().all().item<bool>());
  EXPECT_TRUE(torch::autograd::grad({p.added.sum()}, {k})[0].isfinite().all().item<bool>());
}

struct Heads {
  int64_t batch, time, heads, kv_heads, head_dim;
};
void expect_rotary(const Heads& s, bool norm, at::ScalarType dtype, at::Device device) {
  SCOPED_TRACE(c10::str(norm ? "QK-norm " : "", "B ", s.batch, " T ", s.time, " H ", s.heads,
                        " Hk ", s.kv_heads, " D ", s.head_dim, " ", dtype, " on ", device));
  torch::manual_seed(s.time);
  const at::Tensor values =
      torch::randn({s.batch, s.time, s.heads + 2 * s.kv_heads, s.head_dim}, at::kDouble).to(dtype);
  const at::Tensor angle = torch::rand({s.time, s.head_dim / 2}, at::kDouble) * 6;
  const auto real = dtype == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor cos = angle.cos().to(real), sin = angle.sin().to(real);
  const at::Tensor qkv = values.to(device).detach().requires_grad_(),
                   exact = values.to(at::kDouble).detach().requires_grad_();
  std::vector<at::Tensor> inputs = {qkv}, exact_inputs = {exact}, gradients, exact_gradients;
  std::optional<at::Tensor> scale, exact_scale;
  if (norm) {
    scale = (1 + torch::rand({s.heads}, at::kDouble)).to(real).to(device).requires_grad_();
    exact_scale = scale->detach().to(at::kCPU, at::kDouble).requires_grad_();
    inputs.push_back(*scale);
    exact_inputs.push_back(*exact_scale);
  }
  const auto parts = rotary_qkv(qkv, s.kv_heads, cos.to(device), sin.to(device), scale);
  const auto expected = rotary_qkv_reference(exact, s.kv_heads, cos.to(at::kDouble),
                                             sin.to(at::kDouble), exact_scale);
  for (size_t i = 0; i < 3; ++i) {
    expect_rows(parts[i], expected[i], dtype, i == 0 ? "q" : i == 1 ? "k" : "v");
    gradients.push_back(torch::randn(expected[i].sizes(), at::kDouble).to(dtype).to(device));
    exact_gradients.push_back(gradients.back().to(at::kCPU, at::kDouble));
  }
  const auto found = torch::autograd::grad({parts[0], parts[1], parts[2]}, inputs, gradients);
  const auto wanted =
      torch::autograd::grad({expected[0], expected[1], expected[2]}, exact_inputs, exact_gradients);
  for (size_t i = 0; i < found.size(); ++i)
    expect_rows(found[i], wanted[i], dtype, i == 0 ? "dqkv" : "dscale");
}
void expect_rotary_on(at::Device device) {
  for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16})
    for (const Heads& s : {Heads{1, 1, 1, 1, 2},
                           {2, 5, 3, 1, 6},
                           {2, 67, 4, 2, 64},
                           {1, 130, 2, 2, 80},
                           {1, 3, 2, 1, 640}})
      for (const bool norm : {false, true}) expect_rotary(s, norm, dtype, device);
}
TEST(RotaryQkvOp, EqualsItsDefinition) { expect_rotary_on(at::kCPU); }
TEST(RotaryQkvOp, OnCudaEqualsItsDefinition) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  expect_rotary_on(at::kCUDA);
}
// q and k of a part of wider rows have the bits of a call with values.
void expect_rotary_qk_on(at::Device device) {
  for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16})
    for (const int64_t time : {1, 67}) {
      SCOPED_TRACE(c10::str("T ", time, " ", dtype));
      torch::manual_seed(4);
      const auto real = dtype == at::kDouble ? at::kDouble : at::kFloat;
      const at::Tensor qkv = torch::randn({2, time, 7, 16}).to(device, dtype).requires_grad_();
      const at::Tensor angle = torch::rand({time, 8}).to(device, real) * 6;
      const auto whole = rotary_qkv(qkv, 2, angle.cos(), angle.sin());
      const auto parts = rotary_qk(qkv.narrow(2, 0, 5), 2, angle.cos(), angle.sin());
      for (size_t i = 0; i < 2; ++i) {
        const at::Tensor dy = torch::randn(parts[i].sizes()).to(device, dtype);
        const auto gradient = [&](const at::Tensor& y) {
          return torch::autograd::grad({y}, {qkv}, {dy}, /*retain_graph=*/true)[0];
        };
        EXPECT_TRUE(at::equal(parts[i], whole[i]));
        EXPECT_TRUE(at::equal(gradient(parts[i]), gradient(whole[i])));
      }
    }
}
TEST(RotaryQkvOp, WithoutValuesHasTheSameBits) { expect_rotary_qk_on(at::kCPU); }
TEST(RotaryQkvOp, OnCudaWithoutValuesHasTheSameBits) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  expect_rotary_qk_on(at::kCUDA);
}
TEST(RotaryQkvOp, BadArgumentsAreNamed) {
  const at::Tensor qkv = torch::randn({1, 3, 6, 4}), angle = torch::zeros({3, 2});
  EXPECT_THROW(rotary_qkv(qkv, 3, angle, angle), c10::ValueError);
  EXPECT_THROW(rotary_qkv(qkv, 0, angle, angle), c10::ValueError);
  EXPECT_THROW(rotary_qkv(qkv, 2, angle.slice(0, 1), angle), c10::ValueError);
  EXPECT_THROW(rotary_qkv(torch::randn({1, 3, 6, 5}), 2, angle, angle), c10::ValueError);
  EXPECT_THROW(rotary_qkv(qkv, 2, angle, angle, torch::ones({3})), c10::ValueError);
}

struct Shifted {
  int64_t batch, time, width, count;
  bool before, own;
};
void expect_token_shift(const Shifted& s, at::ScalarType dtype, at::Device device) {
  SCOPED_TRACE(c10::str("B ", s.batch, " T ", s.time, " D ", s.width, " n ", s.count,
                        s.before ? " before" : "", s.own ? " own" : "", " ", dtype, " on ",
                        device));
  torch::manual_seed(s.time);
  const auto real = dtype == at::kDouble ? at::kDouble : at::kFloat;
  std::vector<at::Tensor> inputs, exact;  // x, mix, before, own…
  const auto input = [&](at::IntArrayRef shape, at::ScalarType type) {
    const at::Tensor values = torch::randn(shape, at::kDouble).to(type);
    inputs.push_back(values.to(device).detach().requires_grad_());
    exact.push_back(values.to(at::kDouble).detach().requires_grad_());
  };
  input({s.batch, s.time, s.width}, dtype);
  input({s.count, s.width}, real);
  if (s.before) input({s.batch, s.width}, dtype);
  for (int64_t i = 0; i < s.count && s.own; ++i) input({s.batch, s.time, s.width}, dtype);
  const auto shift = [&](auto op, const std::vector<at::Tensor>& in) {
    const auto own = in.begin() + 2 + s.before;
    return op(in[0], s.before ? std::optional(in[2]) : std::nullopt, in[1],
              std::vector<at::Tensor>(own, in.end()));
  };
  const auto y = shift(token_shift, inputs), expected = shift(token_shift_reference, exact);
  std::vector<at::Tensor> gradients, exact_gradients;
  for (size_t i = 0; i < y.size(); ++i) {
    expect_rows(y[i], expected[i], dtype, "y");
    gradients.push_back(torch::randn(expected[i].sizes(), at::kDouble).to(dtype).to(device));
    exact_gradients.push_back(gradients.back().to(at::kCPU, at::kDouble));
  }
  const auto found = torch::autograd::grad(y, inputs, gradients);
  const auto wanted = torch::autograd::grad(expected, exact, exact_gradients);
  const char* names[] = {"dx", "dmix", s.before ? "dbefore" : "down"};
  for (size_t i = 0; i < found.size(); ++i)
    expect_rows(found[i], wanted[i], dtype, i < 3 ? names[i] : "down");
}
void expect_token_shift_on(at::Device device) {
  for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16})
    for (const Shifted& s : {Shifted{1, 1, 3, 1, false, false},
                             {2, 1, 8, 6, true, false},
                             {3, 32, 40, 5, true, true},
                             {2, 33, 24, 6, false, false},
                             {1, 101, 64, 2, true, false},
                             {2, 70, 9, 4, false, true}})
      expect_token_shift(s, dtype, device);
}
TEST(TokenShiftOp, EqualsItsDefinition) { expect_token_shift_on(at::kCPU); }
TEST(TokenShiftOp, OnCudaEqualsItsDefinition) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  expect_token_shift_on(at::kCUDA);
}
TEST(TokenShiftOp, BadArgumentsAreNamed) {
  const at::Tensor x = torch::randn({2, 3, 4}), mix = torch::zeros({2, 4});
  EXPECT_THROW(token_shift(x[0], {}, mix), c10::ValueError);
  EXPECT_THROW(token_shift(x, {}, torch::zeros({2, 5})), c10::ValueError);
  EXPECT_THROW(token_shift(x, {}, torch::zeros({7, 4})), c10::ValueError);
  EXPECT_THROW(token_shift(x, torch::zeros({1, 4}), mix), c10::ValueError);
  EXPECT_THROW(token_shift(x, {}, mix, {x}), c10::ValueError);
  EXPECT_THROW(token_shift(x, {}, mix, {x, x[0]}), c10::ValueError);
}

// Rows past 2^31 numbers give the bits of a call on these rows alone.
TEST(ElementwiseOps, OnCudaTakeMoreNumbersThan32BitsCount) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  const at::NoGradGuard no_grad;
  const auto options = at::TensorOptions(at::kCUDA).dtype(at::kBFloat16);
  at::Tensor x;
  try {
    const at::Tensor room = at::empty({int64_t{24} << 30}, options.dtype(at::kByte));
    x = at::empty({(1 << 19) + 1, 4224}, options).normal_();
  } catch (const c10::OutOfMemoryError&) {
    GTEST_SKIP() << "needs 30 GB of free GPU memory";
  }
  const auto last = [](const at::Tensor& y) { return y.slice(0, -5).clone(); };
  const at::Tensor weight = at::rand({4224}, at::kCUDA) + 0.5, rows = last(x);
  EXPECT_TRUE(at::equal(last(rms_norm(x, weight, 1e-5)), rms_norm(rows, weight, 1e-5)));
  EXPECT_TRUE(at::equal(last(glu(x, "silu")), glu(rows, "silu")));
  EXPECT_TRUE(at::equal(last(squared_relu(x)), squared_relu(rows)));
  const at::Tensor targets = at::arange(x.size(0), options.dtype(at::kLong)).remainder(4224);
  const at::Tensor losses = cross_entropy_(rows, last(targets), 0.5);
  EXPECT_TRUE(at::equal(last(cross_entropy_(x, targets, 0.5)), losses));
  EXPECT_TRUE(at::equal(last(x), rows));
}

// Tensors that do not begin at a multiple of 16 bytes are read one number at a time.
TEST(ElementwiseOps, OnCudaTakeMisalignedTensors) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  const auto compare = [](at::IntArrayRef shape, const char* what, const auto& op) {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      SCOPED_TRACE(c10::str(dtype));
      const at::Tensor x = torch::randn(shape, at::kCUDA).to(dtype).requires_grad_(),
                       other = misaligned(x.detach()).requires_grad_();
      const at::Tensor expected = op(x), y = op(other), dy = at::randn_like(expected);
      expect_rows(y, expected, dtype, what);
      expect_rows(torch::autograd::grad({y}, {other}, {misaligned(dy)})[0],
                  torch::autograd::grad({expected}, {x}, {dy})[0], dtype, what);
    }
  };
  const at::Tensor weight = at::rand({64}, at::kCUDA) + 0.5, mix = at::rand({1, 64}, at::kCUDA),
                   angle = at::rand({67, 32}, at::kCUDA) * 6;
  compare({3, 67, 64}, "glu", [](const at::Tensor& x) { return glu(x, "silu"); });
  compare({3, 67, 64}, "squared_relu", [](const at::Tensor& x) { return squared_relu(x); });
  compare({3, 67, 64}, "rms_norm", [&](const at::Tensor& x) { return rms_norm(x, weight, 1e-5); });
  compare({3, 67, 64}, "token_shift",
          [&](const at::Tensor& x) { return token_shift(x, {}, mix)[0]; });
  compare({3, 67, 6, 64}, "rotary_qkv", [&](const at::Tensor& x) {
    const auto parts = rotary_qkv(x, 2, angle.cos(), angle.sin());
    return at::cat({parts[0], parts[1], parts[2]}, 2);
  });
}

}  // namespace
}  // namespace assay::ops
