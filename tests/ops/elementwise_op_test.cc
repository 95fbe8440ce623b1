// The fused element-wise operators against their definitions, output and gradient, in every dtype.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "ops/attention/rotary_qkv/rotary_qkv.h"
#include "ops/dense/cross_entropy/cross_entropy.h"
#include "ops/golden.h"
#include "ops/recurrence/token_shift/token_shift.h"
#include "ops/rows.h"
#include "ops/rowwise/glu/glu.h"
#include "ops/rowwise/norm/norm.h"
#include "ops/rowwise/squared_relu/squared_relu.h"

namespace assay::ops {
namespace {

void expect_glu(at::IntArrayRef shape, const char* activation, at::ScalarType dtype,
                at::Device device) {
  SCOPED_TRACE(c10::str(activation, " ", shape, " ", dtype, " on ", device));
  torch::manual_seed(shape.back());
  auto half = shape.vec();
  half.back() /= 2;
  const at::Tensor values = (torch::randn(shape, at::kDouble) * 3).to(dtype);
  const at::Tensor dy = torch::randn(half, at::kDouble).to(dtype);
  const at::Tensor h = values.to(device).detach().requires_grad_();
  const at::Tensor exact = values.to(at::kDouble).detach().requires_grad_();
  const at::Tensor y = glu(h, activation);
  const at::Tensor expected = glu_reference(exact, activation);
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
  const at::Tensor y = squared_relu(x);
  const at::Tensor expected = squared_relu_reference(exact);
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
    const at::Tensor y = squared_relu(x);
    const at::Tensor composed = squared_relu_reference(x);
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

struct Heads {
  int64_t batch;
  int64_t time;
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;
};
// In memory of its own, or as a part of wider rows whose other part is v.
enum class Layout { own, part };
void expect_rotary(const Heads& s, bool norm, Layout layout, at::ScalarType dtype,
                   at::Device device) {
  SCOPED_TRACE(c10::str(norm ? "QK-norm " : "", layout == Layout::part ? "parts " : "", "B ",
                        s.batch, " T ", s.time, " H ", s.heads, " Hk ", s.kv_heads, " D ",
                        s.head_dim, " ", dtype, " on ", device));
  torch::manual_seed(s.time);
  const int64_t turned = s.heads + s.kv_heads;
  const int64_t all = turned + s.kv_heads;
  const at::Tensor values =
      torch::randn({s.batch, s.time, all * s.head_dim}, at::kDouble).to(dtype);
  const at::Tensor angle = torch::rand({s.time, s.head_dim / 2}, at::kDouble) * 6;
  const auto real = dtype == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor cos = angle.cos().to(real);
  const at::Tensor sin = angle.sin().to(real);
  const at::Tensor qkv = values.to(device).detach().requires_grad_();
  const at::Tensor exact = values.to(at::kDouble).detach().requires_grad_();
  std::vector<at::Tensor> inputs = {qkv};
  std::vector<at::Tensor> exact_inputs = {exact};
  std::vector<at::Tensor> gradients;
  std::vector<at::Tensor> exact_gradients;
  std::optional<at::Tensor> scale;
  std::optional<at::Tensor> exact_scale;
  if (norm) {
    scale = (1 + torch::rand({s.heads}, at::kDouble)).to(real).to(device).requires_grad_();
    exact_scale = scale->detach().to(at::kCPU, at::kDouble).requires_grad_();
    inputs.push_back(*scale);
    exact_inputs.push_back(*exact_scale);
  }
  const auto heads = [&](const at::Tensor& x) { return x.unflatten(-1, {-1, s.head_dim}); };
  const auto own = [&] {
    const at::Tensor x = heads(qkv);
    const auto [q, k] =
        rotary_qk(x.narrow(2, 0, turned), s.kv_heads, cos.to(device), sin.to(device), scale);
    return std::array{q, k, x.narrow(2, turned, s.kv_heads)};
  };
  // as the output of a layer, because a leaf may not be overwritten
  const auto parts = layout == Layout::own ? own()
                                           : rotary_qkv_(qkv * 1, s.heads, s.kv_heads,
                                                         cos.to(device), sin.to(device), scale);
  const at::Tensor x = heads(exact);
  const auto [q, k] = rotary_qk_reference(x.narrow(2, 0, turned), s.kv_heads, cos.to(at::kDouble),
                                          sin.to(at::kDouble), exact_scale);
  const std::array expected = {q, k, x.narrow(2, turned, s.kv_heads)};
  for (size_t i = 0; i < 3; ++i) {
    expect_rows(parts[i], expected[i], dtype, i == 0 ? "q" : i == 1 ? "k" : "v");
    gradients.push_back(torch::randn(expected[i].sizes(), at::kDouble).to(dtype).to(device));
    exact_gradients.push_back(gradients.back().to(at::kCPU, at::kDouble));
  }
  const auto found = torch::autograd::grad({parts[0], parts[1], parts[2]}, inputs, gradients);
  const auto wanted = torch::autograd::grad({q, k, expected[2]}, exact_inputs, exact_gradients);
  expect_rows(heads(found[0]), heads(wanted[0]), dtype, "dqkv");
  if (norm) expect_rows(found[1], wanted[1], dtype, "dscale");
}
// Heads of 10 numbers are not aligned, those of 640 are longer than a warp holds, and 3 or 5 heads
// are no multiple of those of a thread.
void expect_rotary_on(at::Device device) {
  for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16})
    for (const Heads& s : {Heads{1, 1, 1, 1, 2},
                           {2, 5, 3, 1, 6},
                           {2, 67, 4, 2, 64},
                           {2, 33, 3, 2, 96},
                           {1, 65, 6, 6, 128},
                           {1, 130, 2, 2, 80},
                           {2, 31, 4, 1, 10},
                           {1, 3, 2, 1, 256},
                           {1, 3, 2, 1, 640}})
      for (const bool norm : {false, true})
        for (const Layout layout : {Layout::own, Layout::part})
          expect_rotary(s, norm, layout, dtype, device);
}
TEST(RotaryQkvOp, EqualsItsDefinition) { expect_rotary_on(at::kCPU); }
TEST(RotaryQkvOp, OnCudaEqualsItsDefinition) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  expect_rotary_on(at::kCUDA);
}
// Turned in place, q and k have the bits of those in memory of their own, and so have gradients.
void expect_in_place_on(at::Device device) {
  for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16})
    for (const int64_t time : {1, 67}) {
      SCOPED_TRACE(c10::str("T ", time, " ", dtype));
      torch::manual_seed(4);
      const auto real = dtype == at::kDouble ? at::kDouble : at::kFloat;
      const at::Tensor qkv = torch::randn({2, time, 7 * 16}).to(device, dtype).requires_grad_();
      const at::Tensor angle = torch::rand({time, 8}).to(device, real) * 6;
      const at::Tensor layer = qkv * 1;
      const auto own =
          rotary_qk(qkv.unflatten(-1, {7, 16}).narrow(2, 0, 5), 2, angle.cos(), angle.sin());
      const auto parts = rotary_qkv_(layer, 3, 2, angle.cos(), angle.sin());
      EXPECT_EQ(parts[0].data_ptr(), layer.data_ptr());
      EXPECT_TRUE(at::equal(layer, at::cat({own[0], own[1], parts[2]}, 2).flatten(2)));
      for (size_t i = 0; i < 2; ++i) {
        const at::Tensor dy = torch::randn(own[i].sizes()).to(device, dtype);
        const auto gradient = [&](const at::Tensor& y) {
          return torch::autograd::grad({y}, {qkv}, {dy}, /*retain_graph=*/true)[0];
        };
        EXPECT_TRUE(at::equal(parts[i], own[i]));
        EXPECT_TRUE(at::equal(gradient(parts[i]), gradient(own[i])));
        EXPECT_TRUE(at::equal(gradient(parts[i]), gradient(own[i]))) << "a second time";
      }
    }
}
TEST(RotaryQkvOp, InPlaceHasTheSameBits) { expect_in_place_on(at::kCPU); }
TEST(RotaryQkvOp, OnCudaInPlaceHasTheSameBits) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  expect_in_place_on(at::kCUDA);
}
TEST(RotaryQkvOp, QkNormLeavesTheProjection) {
  const at::Tensor angle = torch::rand({3, 4});
  const at::Tensor x = torch::randn({2, 3, 6 * 8});
  const at::Tensor kept = x.clone();
  rotary_qkv_(x, 2, 2, angle.cos(), angle.sin(), torch::ones({2}));
  EXPECT_TRUE(at::equal(x, kept));
}
// exp() keeps its result for its gradient.
TEST(RotaryQkvOp, OverwritingWhatAGradientReadsIsRejected) {
  const at::Tensor angle = torch::rand({3, 4});
  const at::Tensor x = torch::randn({2, 3, 6 * 8}).requires_grad_();
  const auto parts = rotary_qkv_(x.exp(), 2, 2, angle.cos(), angle.sin());
  EXPECT_THROW(parts[0].sum().backward(), c10::Error);
}
// A layer whose output is a view of what it computed: autograd does not let such a view change.
struct LayerWithView : torch::autograd::Function<LayerWithView> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return (x * 2).view(x.sizes());
  }
  static std::vector<at::Tensor> backward(torch::autograd::AutogradContext*,
                                          const std::vector<at::Tensor>& gradients) {
    return {gradients[0] * 2};
  }
};
TEST(RotaryQkvOp, TakesTheOutputOfALayerWithAGradientOfItsOwn) {
  const at::Tensor angle = torch::rand({3, 4});
  const at::Tensor cos = angle.cos();
  const at::Tensor sin = angle.sin();
  const at::Tensor x = torch::randn({2, 3, 6 * 8}).requires_grad_();
  const auto expected = rotary_qk((x * 2).unflatten(-1, {6, 8}).narrow(2, 0, 4), 2, cos, sin);
  const auto parts = rotary_qkv_(LayerWithView::apply(x), 2, 2, cos, sin);
  EXPECT_TRUE(at::equal(parts[0], expected[0]));
  const auto gradient = [&](const at::Tensor& q) {
    return torch::autograd::grad({q.square().sum()}, {x})[0];
  };
  EXPECT_TRUE(at::equal(gradient(parts[0]), gradient(expected[0])));
}
// Where split() gives views, q and k have memory of their own.
TEST(RotaryQkvOp, MisalignedProjectionKeepsItsGradient) {
  const at::Tensor angle = torch::rand({3, 4});
  const at::Tensor cos = angle.cos();
  const at::Tensor sin = angle.sin();
  const at::Tensor memory = torch::randn({2 * 3 * 48 + 1}).requires_grad_();
  const at::Tensor x = (memory * 1).slice(0, 1).view({2, 3, 6 * 8});
  const auto expected = rotary_qk(x.unflatten(-1, {6, 8}).narrow(2, 0, 4), 2, cos, sin);
  const auto parts = rotary_qkv_(x, 2, 2, cos, sin);
  EXPECT_TRUE(at::equal(parts[1], expected[1]));
  const auto gradient = [&](const at::Tensor& k) {
    return torch::autograd::grad({k.square().sum()}, {memory}, {}, /*retain_graph=*/true)[0];
  };
  EXPECT_TRUE(at::equal(gradient(parts[1]), gradient(expected[1])));
}
TEST(RotaryQkvOp, BadArgumentsAreNamed) {
  const at::Tensor qk = torch::randn({1, 3, 6, 4});
  const at::Tensor angle = torch::zeros({3, 2});
  EXPECT_THROW(rotary_qk(qk, 6, angle, angle), c10::ValueError);
  EXPECT_THROW(rotary_qk(qk, 0, angle, angle), c10::ValueError);
  EXPECT_THROW(rotary_qk(qk, 2, angle.slice(0, 1), angle), c10::ValueError);
  EXPECT_THROW(rotary_qk(torch::randn({1, 3, 6, 5}), 2, angle, angle), c10::ValueError);
  EXPECT_THROW(rotary_qk(qk, 2, angle, angle, torch::ones({3})), c10::ValueError);
  EXPECT_THROW(rotary_qkv_(qk.flatten(2), 3, 2, angle, angle), c10::ValueError);
  EXPECT_THROW(rotary_qkv_(qk, 2, 2, angle, angle), c10::ValueError);
}

struct Shifted {
  int64_t batch;
  int64_t time;
  int64_t width;
  int64_t count;
  bool before;
  bool own;
};
void expect_token_shift(const Shifted& s, at::ScalarType dtype, at::Device device) {
  SCOPED_TRACE(c10::str("B ", s.batch, " T ", s.time, " D ", s.width, " n ", s.count,
                        s.before ? " before" : "", s.own ? " own" : "", " ", dtype, " on ",
                        device));
  torch::manual_seed(s.time);
  const auto real = dtype == at::kDouble ? at::kDouble : at::kFloat;
  // x, mix, before, own…
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> exact;
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
  const auto y = shift(token_shift, inputs);
  const auto expected = shift(token_shift_reference, exact);
  std::vector<at::Tensor> gradients;
  std::vector<at::Tensor> exact_gradients;
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
  const at::Tensor x = torch::randn({2, 3, 4});
  const at::Tensor mix = torch::zeros({2, 4});
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
  const at::Tensor weight = at::rand({4224}, at::kCUDA) + 0.5;
  const at::Tensor rows = last(x);
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
      const at::Tensor x = torch::randn(shape, at::kCUDA).to(dtype).requires_grad_();
      const at::Tensor other = misaligned(x.detach()).requires_grad_();
      const at::Tensor expected = op(x);
      const at::Tensor y = op(other);
      const at::Tensor dy = at::randn_like(expected);
      expect_rows(y, expected, dtype, what);
      expect_rows(torch::autograd::grad({y}, {other}, {misaligned(dy)})[0],
                  torch::autograd::grad({expected}, {x}, {dy})[0], dtype, what);
    }
  };
  const at::Tensor weight = at::rand({64}, at::kCUDA) + 0.5;
  const at::Tensor mix = at::rand({1, 64}, at::kCUDA);
  const at::Tensor angle = at::rand({67, 32}, at::kCUDA) * 6;
  compare({3, 67, 64}, "glu", [](const at::Tensor& x) { return glu(x, "silu"); });
  compare({3, 67, 64}, "squared_relu", [](const at::Tensor& x) { return squared_relu(x); });
  compare({3, 67, 64}, "rms_norm", [&](const at::Tensor& x) { return rms_norm(x, weight, 1e-5); });
  compare({3, 67, 64}, "token_shift",
          [&](const at::Tensor& x) { return token_shift(x, {}, mix)[0]; });
  compare({3, 67, 6, 64}, "rotary_qk", [&](const at::Tensor& x) {
    const auto parts = rotary_qk(x, 2, angle.cos(), angle.sin());
    return at::cat({parts[0], parts[1]}, 2);
  });
}

}  // namespace
}  // namespace assay::ops
