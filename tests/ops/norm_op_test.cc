// Norms and the operators that hold a sum over a row or a head, against their definitions: output
// and gradient, in every dtype.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "ops/rows.h"
#include "ops/rowwise/delta_inputs/delta_inputs.h"
#include "ops/rowwise/gated_norm/gated_norm.h"
#include "ops/rowwise/mamba3_elements/mamba3_elements.h"
#include "ops/rowwise/norm/norm.h"
#include "ops/rowwise/rwkv7_elements/rwkv7_elements.h"
#include "ops/rowwise/unit_length/unit_length.h"

namespace assay::ops {
namespace {

void expect_norm(at::IntArrayRef shape, int64_t groups, bool layer, at::ScalarType dtype,
                 at::Device device) {
  SCOPED_TRACE(c10::str(layer ? "layer norm " : "", shape, " in ", groups, " groups ", dtype,
                        " on ", device));
  torch::manual_seed(shape.back());
  const auto real = dtype == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor dy = torch::randn(shape, at::kDouble).to(dtype);
  // x, weight, bias
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> exact;
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
void expect_norms_on(at::Device device, at::ScalarType dtype) {
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
    // so many rows that a block of the CUDA kernel has several; one to eight vectors per lane
    for (const int64_t width : {33, 101, 128, 203, 256, 512, 1280})
      expect_norm({300, width}, 1, layer, dtype, device);
    if (device.is_cpu()) continue;
    // the borders of the numbers of vectors per lane in the gradient, 16 bytes of f32 or bf16 each
    for (const int64_t width : {132, 196, 264, 384, 388, 392, 768, 776, 1536, 1544, 2048})
      expect_norm({301, width}, 1, layer, dtype, device);
    expect_norm({2500, 528}, 2, layer, dtype, device);
    expect_norm({2500, 776}, 1, layer, dtype, device);
  }
}
class NormsOfType : public testing::TestWithParam<at::ScalarType> {};
INSTANTIATE_TEST_SUITE_P(, NormsOfType, testing::Values(at::kDouble, at::kFloat, at::kBFloat16),
                         [](const auto& info) { return c10::toString(info.param); });
TEST_P(NormsOfType, EqualTheirDefinitions) { expect_norms_on(at::kCPU, GetParam()); }
TEST_P(NormsOfType, OnCudaEqualTheirDefinitions) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  expect_norms_on(at::kCUDA, GetParam());
}
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
        const at::Tensor x = torch::randn(shape).to(device, dtype).requires_grad_();
        const at::Tensor y = torch::randn(shape).to(device, dtype).requires_grad_();
        const at::Tensor weight = torch::randn({shape.back()}, real).to(device);
        const at::Tensor bias = torch::randn({shape.back()}, real).to(device);
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
TEST(NormOps, ReferencesAreTorchs) {
  const at::Tensor x = torch::randn({3, 7, 12}, at::kDouble);
  const at::Tensor w = torch::randn({12}, at::kDouble);
  const at::Tensor b = torch::randn({12}, at::kDouble);
  EXPECT_TRUE(at::allclose(layer_norm_reference(x, w, b, 1e-5), at::layer_norm(x, {12}, w, b, 1e-5),
                           1e-12, 1e-12));
  EXPECT_TRUE(
      at::allclose(rms_norm_reference(x, w, 1e-5), at::rms_norm(x, {12}, w, 1e-5), 1e-12, 1e-12));
}
TEST(NormOps, BadArgumentsAreNamed) {
  const at::Tensor x = torch::randn({3, 6});
  const at::Tensor w = torch::ones({6});
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
  Tensors inputs;
  Tensors exact;
  Tensors leaves;
  Tensors exact_leaves;
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
  Tensors dy;
  Tensors exact_dy;
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
// The borders of the numbers of lanes and of vectors per lane, 16 bytes of f32 or bf16 each, in a
// part; so many rows that the threads of the CUDA kernels have one or several.
const std::vector<RowsCase> kLongRowsCases = {{{301, 132}, 1},  {{301, 196}, 1},  {{301, 264}, 1},
                                              {{301, 384}, 1},  {{301, 388}, 1},  {{301, 392}, 1},
                                              {{301, 768}, 1},  {{301, 776}, 1},  {{301, 1544}, 1},
                                              {{301, 2048}, 1}, {{2500, 528}, 2}, {{2500, 776}, 1}};
template <class F, class Reference>
void expect_rowwise_on(at::Device device, int sequences, int parameters, F f, Reference reference,
                       const std::vector<RowsCase>& cases = kRowsCases) {
  for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16})
    for (const RowsCase& c : cases)
      expect_rowwise(
          c, sequences, parameters, [&](const Tensors& in) { return f(in, c.groups); },
          [&](const Tensors& in) { return reference(in, c.groups); }, dtype, device);
}
Tensors list_of(const Rwkv7Prepared& p) { return {p.log_decay, p.k, p.minus_removed, p.added}; }
Tensors list_of(const Mamba3Written& p) { return {p.written, p.x}; }
Tensors list_of(const DeltaRuleInputs& p) { return {p.log_decay, p.q, p.written, p.removed}; }
// One number per head from numbers per channel.
at::Tensor per_head(const at::Tensor& x, int64_t heads) {
  return x.unflatten(-1, {heads, -1}).select(-1, 0);
}
// The numbers that the rate is made of are in the bias too: the gradient of a rate alone is one sum
// over all rows and channels, and may be nearly 0.
Tensors kda_inputs_of(const Tensors& in, double bound, int64_t heads, bool reference = false) {
  const at::Tensor rate = per_head(in[5], heads).exp();
  const auto f = reference ? kda_inputs_reference : kda_inputs;
  return list_of(f(in[0], in[1], in[2], per_head(in[3], heads), in[4] + in[5], rate, bound, heads));
}
Tensors gdn2_inputs_of(const Tensors& in, double scale, int64_t heads, bool reference = false) {
  const at::Tensor rate = per_head(in[5], heads).exp();
  const auto f = reference ? gdn2_inputs_reference : gdn2_inputs;
  return list_of(f(in[0], in[1], in[2], in[3], in[4] + in[5], rate, scale, heads));
}
template <auto kInputsOf>
void expect_delta_inputs_on(at::Device device, double constant) {
  auto cases = kRowsCases;
  for (const int64_t width : {32, 64, 96, 128, 256}) cases.push_back({{3, 67, 3 * width}, 3});
  expect_rowwise_on(
      device, 4, 2,
      [&](const Tensors& in, int64_t heads) { return kInputsOf(in, constant, heads, false); },
      [&](const Tensors& in, int64_t heads) { return kInputsOf(in, constant, heads, true); },
      cases);
}
void expect_gated_norm_on(at::Device device, bool gate_first, const char* gate = "silu") {
  for (const auto& cases :
       {kRowsCases, device.is_cuda() ? kLongRowsCases : std::vector<RowsCase>()})
    expect_rowwise_on(
        device, 2, 1,
        [&](const Tensors& in, int64_t groups) -> Tensors {
          return {gated_rms_norm(in[0], in[1], in[2], 1e-3, gate_first, groups, gate)};
        },
        [&](const Tensors& in, int64_t groups) -> Tensors {
          return {gated_rms_norm_reference(in[0], in[1], in[2], 1e-3, gate_first, groups, gate)};
        },
        cases);
}
struct RowwiseOp {
  const char* name;
  void (*expect_on)(at::Device);
};
const RowwiseOp kRowwiseOps[] = {
    {"gate_after_norm", [](at::Device device) { expect_gated_norm_on(device, false); }},
    {"sigmoid_after_norm",
     [](at::Device device) { expect_gated_norm_on(device, false, "sigmoid"); }},
    {"kda_inputs",
     [](at::Device device) { expect_delta_inputs_on<kda_inputs_of>(device, /*bound=*/0); }},
    {"kda_inputs_bounded",
     [](at::Device device) { expect_delta_inputs_on<kda_inputs_of>(device, /*bound=*/-5); }},
    {"gdn2_inputs",
     [](at::Device device) { expect_delta_inputs_on<gdn2_inputs_of>(device, /*scale=*/2); }},
    {"gate_before_norm", [](at::Device device) { expect_gated_norm_on(device, true); }},
    {"unit_length",
     [](at::Device device) {
       expect_rowwise_on(
           device, 1, 0,
           [](const Tensors& in, int64_t groups) -> Tensors {
             return {unit_length(in[0], 1e-6, groups)};
           },
           [](const Tensors& in, int64_t groups) -> Tensors {
             return {unit_length_reference(in[0], 1e-6, groups)};
           });
     }},
    {"rwkv7_prepare",
     [](at::Device device) {
       expect_rowwise_on(
           device, 3, 2,
           [](const Tensors& in, int64_t heads) {
             return list_of(rwkv7_prepare(in[0], in[1], in[2], in[3], in[4], heads));
           },
           [](const Tensors& in, int64_t heads) {
             return list_of(rwkv7_prepare_reference(in[0], in[1], in[2], in[3], in[4], heads));
           });
     }},
    {"mamba3_write",
     [](at::Device device) {
       expect_rowwise_on(
           device, 2, 0,
           [](const Tensors& in, int64_t heads) -> Tensors {
             return list_of(mamba3_write(in[0], per_head(in[1], heads)));
           },
           [](const Tensors& in, int64_t heads) -> Tensors {
             return list_of(mamba3_write_reference(in[0], per_head(in[1], heads)));
           });
     }},
    {"mamba3_output",
     [](at::Device device) {
       expect_rowwise_on(
           device, 4, 0,
           [](const Tensors& in, int64_t heads) -> Tensors {
             return {mamba3_output(in[0], in[1], in[2], per_head(in[3], heads))};
           },
           [](const Tensors& in, int64_t heads) -> Tensors {
             return {mamba3_output_reference(in[0], in[1], in[2], per_head(in[3], heads))};
           });
     }},
    {"rwkv7_values",
     [](at::Device device) {
       expect_rowwise_on(
           device, 3, 0,
           [](const Tensors& in, int64_t) -> Tensors {
             return {rwkv7_values(in[0], in[1], in[2])};
           },
           [](const Tensors& in, int64_t) -> Tensors {
             return {rwkv7_values_reference(in[0], in[1], in[2])};
           });
     }},
    {"rwkv7_output",
     [](at::Device device) {
       expect_rowwise_on(
           device, 5, 1,
           [](const Tensors& in, int64_t heads) -> Tensors {
             return {rwkv7_output(in[0], in[1], in[2], in[3], in[4], in[5], heads)};
           },
           [](const Tensors& in, int64_t heads) -> Tensors {
             return {rwkv7_output_reference(in[0], in[1], in[2], in[3], in[4], in[5], heads)};
           });
     }},
};
class RowwiseOps : public testing::TestWithParam<RowwiseOp> {};
INSTANTIATE_TEST_SUITE_P(, RowwiseOps, testing::ValuesIn(kRowwiseOps),
                         [](const auto& info) { return info.param.name; });
TEST_P(RowwiseOps, EqualTheirDefinitions) { GetParam().expect_on(at::kCPU); }
TEST_P(RowwiseOps, OnCudaEqualTheirDefinitions) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  GetParam().expect_on(at::kCUDA);
}
TEST(RowwiseOp, GradientsEqualFiniteDifferences) {
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
      const double slope = (moved(1e-5) - moved(-1e-5)) / 2e-5;
      const double found = (gradients[n] * direction).sum().template item<double>();
      EXPECT_NEAR(found, slope, 1e-7 * (1 + std::abs(slope))) << what << ", input " << n;
    }
  };
  const auto rows = [] { return torch::randn({3, 12}); };
  const auto row = [] { return torch::randn({12}); };
  for (const bool gate_first : {false, true})
    check("gated_rms_norm", {rows(), rows(), row()}, [&](const Tensors& in) {
      return gated_rms_norm(in[0], in[1], in[2], 1e-3, gate_first, 2);
    });
  check("gated_rms_norm by σ", {rows(), rows(), row()}, [&](const Tensors& in) {
    return gated_rms_norm(in[0], in[1], in[2], 1e-3, false, 2, "sigmoid");
  });
  const auto six = [&] { return Tensors{rows(), rows(), rows(), rows(), row(), row()}; };
  for (const double bound : {0, -5})
    check("kda_inputs", six(),
          [&](const Tensors& in) { return at::cat(kda_inputs_of(in, bound, 2), 1); });
  check("gdn2_inputs", six(),
        [](const Tensors& in) { return at::cat(gdn2_inputs_of(in, 2, 2), 1); });
  check("unit_length", {rows()}, [](const Tensors& in) { return unit_length(in[0], 1e-6, 2); });
  check("rwkv7_prepare", {rows(), rows(), rows(), row(), row()}, [](const Tensors& in) {
    const auto p = rwkv7_prepare(in[0], in[1], in[2], in[3], in[4], 2);
    return at::cat({p.log_decay, p.k, p.minus_removed, p.added}, 1);
  });
  check("mamba3_write", {rows(), rows()}, [](const Tensors& in) {
    return at::cat(list_of(mamba3_write(in[0], per_head(in[1], 2))), 1);
  });
  check("mamba3_output", {rows(), rows(), rows(), rows()},
        [](const Tensors& in) { return mamba3_output(in[0], in[1], in[2], per_head(in[3], 2)); });
  check("rwkv7_values", {rows(), rows(), rows()},
        [](const Tensors& in) { return rwkv7_values(in[0], in[1], in[2]); });
  check("rwkv7_output", {rows(), rows(), rows(), rows(), rows(), row()}, [](const Tensors& in) {
    return rwkv7_output(in[0], in[1], in[2], in[3], in[4], in[5], 2);
  });
}
TEST(RowwiseOp, BadArgumentsAreNamed) {
  const at::Tensor x = torch::randn({3, 6});
  const at::Tensor w = torch::ones({6});
  EXPECT_THROW(gated_rms_norm(x, x.slice(0, 1), w, 1e-5, true), c10::ValueError);
  EXPECT_THROW(gated_rms_norm(x, x, torch::ones({4}), 1e-5, true), c10::ValueError);
  EXPECT_THROW(gated_rms_norm(x, x, w, 1e-5, false, 4), c10::ValueError);
  EXPECT_THROW(gated_rms_norm(x, x, w, 1e-5, true, 1, "sigmoid"), c10::ValueError);
  EXPECT_THROW(gated_rms_norm(x, x, w, 1e-5, false, 1, "gelu"), c10::ValueError);
  const at::Tensor two = torch::ones({2});
  const at::Tensor beta = torch::ones({3, 2});
  EXPECT_THROW(kda_inputs(x, x[0], x, beta, w, two, 0, 2), c10::ValueError);
  EXPECT_THROW(kda_inputs(x, x, x, x, w, two, 0, 2), c10::ValueError);
  EXPECT_THROW(kda_inputs(x, x, x, beta, two, two, 0, 2), c10::ValueError);
  EXPECT_THROW(kda_inputs(x, x, x, beta, w, w, 0, 2), c10::ValueError);
  EXPECT_THROW(kda_inputs(x, x, x, beta, w, two, 0, 4), c10::ValueError);
  EXPECT_THROW(gdn2_inputs(x, x, x, beta, w, two, 1, 2), c10::ValueError);
  EXPECT_THROW(unit_length(torch::zeros({3}, at::kLong), 1e-6), c10::ValueError);
  EXPECT_THROW(unit_length(x, 1e-6, 4), c10::ValueError);
  EXPECT_THROW(rwkv7_prepare(x, x, x, w, torch::ones({5}), 2), c10::ValueError);
  EXPECT_THROW(rwkv7_prepare(x, x, x, w, w, 4), c10::ValueError);
  EXPECT_THROW(mamba3_write(x, torch::ones({3, 4})), c10::ValueError);
  EXPECT_THROW(mamba3_write(x, torch::ones({2})), c10::ValueError);
  EXPECT_THROW(mamba3_output(x, x, x, torch::ones({2, 2})), c10::ValueError);
  EXPECT_THROW(mamba3_output(x, x.slice(0, 1), x, beta), c10::ValueError);
  EXPECT_THROW(rwkv7_values(x, x, x[0]), c10::ValueError);
  EXPECT_THROW(rwkv7_output(x, x, x, x, x.slice(1, 1), w, 2), c10::ValueError);
}
TEST(RowwiseOp, ZerosOfUnitLengthHaveFiniteGradients) {
  const at::Tensor zeros = torch::zeros({2, 8});
  const at::Tensor ones = torch::ones({8});
  const at::Tensor x = zeros.clone().requires_grad_();
  const at::Tensor k = zeros.clone().requires_grad_();
  const at::Tensor y = unit_length(x, 1e-6);
  EXPECT_TRUE(torch::autograd::grad({y.sum()}, {x})[0].isfinite().all().item<bool>());
  const auto p = rwkv7_prepare(zeros, zeros, k, ones, ones, 2);
  EXPECT_TRUE(p.minus_removed.isfinite().all().item<bool>());
  EXPECT_TRUE(torch::autograd::grad({p.added.sum()}, {k})[0].isfinite().all().item<bool>());
}

}  // namespace
}  // namespace assay::ops
