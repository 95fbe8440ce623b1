// The operator against its definition, on every path and instruction set of this machine; finite
// differences; windows, heads, slopes; wrong arguments.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <hwy/targets.h>
#include <torch/torch.h>

#include "ops/attention/window_attention/flash.h"
#include "ops/attention/window_attention/kernel.h"
#include "ops/attention/window_attention/window_attention.h"
#include "ops/buffers.h"
#include "ops/core/tensors.h"
#include "ops/golden.h"
#include "ops/simd_target.h"

namespace assay::ops {
namespace {

using Optional = std::optional<at::Tensor>;

struct Arguments {
  at::Tensor q;
  at::Tensor k;
  at::Tensor v;
  int64_t window;
  double scale;
  Optional slopes;
  Optional sinks = {};
  Optional decay_sums = {};

  std::vector<at::Tensor> tensors() const {
    std::vector<at::Tensor> all{q, k, v};
    if (slopes) all.push_back(*slopes);
    if (sinks) all.push_back(*sinks);
    if (decay_sums) all.push_back(*decay_sums);
    return all;
  }
  Arguments exact() const {  // in float64 on the CPU
    const auto copy = [](const at::Tensor& t) {
      return t.detach().to(at::kCPU, at::kDouble).requires_grad_();
    };
    const auto copy_if = [&](const Optional& t) { return t ? Optional(copy(*t)) : t; };
    return {copy(q), copy(k),         copy(v),        window,
            scale,   copy_if(slopes), copy_if(sinks), copy_if(decay_sums)};
  }
};

struct Shape {
  int64_t time;
  int64_t keys;
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;
  int64_t window;
  bool alibi = false;
};
std::ostream& operator<<(std::ostream& out, const Shape& s) {
  return out << "T " << s.time << " of " << s.keys << ", H " << s.heads << ", Hkv " << s.kv_heads
             << ", D " << s.head_dim << ", window " << s.window << (s.alibi ? ", ALiBi" : "")
             << ", seed 7";
}

Arguments random_arguments(const Shape& s, at::ScalarType dtype = at::kDouble,
                           at::Device device = at::kCPU) {
  torch::manual_seed(7);
  const auto normal = [&](at::IntArrayRef shape) {
    return at::randn(shape, at::kDouble).to(device, dtype).requires_grad_();
  };
  Arguments a{
      normal({2, s.time, s.heads, s.head_dim}),    normal({2, s.keys, s.kv_heads, s.head_dim}),
      normal({2, s.keys, s.kv_heads, s.head_dim}), s.window,
      0.7 / std::sqrt(double(s.head_dim)),         {}};
  if (s.alibi) {
    const at::Tensor slopes =
        at::exp2(-8.0 * at::arange(1, s.heads + 1, at::kDouble) / double(s.heads));
    a.slopes = slopes.to(device, dtype == at::kDouble ? at::kDouble : at::kFloat).requires_grad_();
  }
  return a;
}

at::Tensor run(const Arguments& a) {
  return window_attention(a.q, a.k, a.v, a.window, a.scale, a.slopes, a.sinks, a.decay_sums);
}
at::Tensor run_blocked(const Arguments& a) {
  return window_attention_blocked(a.q, a.k, a.v, a.window < 0 ? a.k.size(1) : a.window, a.scale,
                                  a.slopes, a.sinks, a.decay_sums);
}

// The worst row, like worst_row_error, but rows below 1 are measured against 1: where one key takes
// nearly all the weight, the gradients of q and k are small differences of terms of that size.
double error(const at::Tensor& actual, const at::Tensor& expected) {
  const at::Tensor x = actual.detach().to(at::kCPU, at::kDouble);
  const at::Tensor y = expected.detach();
  const at::Tensor rows = (x - y).norm(2, -1) / y.norm(2, -1).clamp_min(1);
  return rows.nan_to_num(INFINITY, INFINITY).max().item<double>();
}

template <class Run>
void expect_equal_to_reference(Run&& form, const Arguments& a, double tolerance) {
  const Arguments exact = a.exact();
  const at::Tensor out = form(a);
  const at::Tensor expected =
      window_attention_reference(exact.q, exact.k, exact.v, exact.window, exact.scale, exact.slopes,
                                 exact.sinks, exact.decay_sums);
  EXPECT_EQ(out.scalar_type(), a.q.scalar_type());
  EXPECT_LE(error(out, expected), tolerance);
  const at::Tensor weights = at::randn(out.sizes(), at::kDouble);
  const auto actual = torch::autograd::grad({(out * weights.to(out.options())).sum()}, a.tensors());
  const auto want = torch::autograd::grad(
      {(expected * weights.to(out.scalar_type()).to(at::kDouble)).sum()}, exact.tensors());
  for (size_t i = 0; i < want.size(); ++i) {
    EXPECT_LE(error(actual[i], want[i]), tolerance) << "gradient of tensor " << i;
    EXPECT_EQ(actual[i].scalar_type(), a.tensors()[i].scalar_type()) << "gradient of tensor " << i;
  }
}

const std::vector<Shape> kShapes = {
    {1, 1, 1, 1, 1, -1},        {1, 1, 2, 1, 8, 3, true},       {65, 65, 4, 2, 24, -1, true},
    {101, 101, 3, 3, 17, 1},    {101, 101, 6, 2, 16, 7},        {64, 64, 2, 2, 64, 64},
    {63, 63, 2, 1, 5, 500},     {130, 130, 2, 2, 40, 65, true}, {1, 97, 4, 1, 16, -1},
    {1, 97, 4, 4, 16, 5, true}, {31, 97, 4, 2, 8, -1},          {31, 97, 4, 2, 8, 40, true},
    {257, 257, 1, 1, 80, 130},  {70, 200, 2, 2, 12, 100},       {1, 4203, 2, 1, 64, -1, true},
    {1, 4203, 2, 2, 20, 4150},
};

TEST(WindowAttentionOp, EqualsItsReference) {
  for (const Shape& shape : kShapes) {
    SCOPED_TRACE(testing::Message() << shape);
    expect_equal_to_reference(run, random_arguments(shape), 1e-12);
    expect_equal_to_reference(run_blocked, random_arguments(shape), 1e-12);
  }
}

TEST(WindowAttentionOp, InBfloat16EqualsItsReferenceOnEveryInstructionSet) {
  for (const int64_t target : targets()) {
    const SimdTarget only(target);
    for (const Shape& shape : kShapes) {
      SCOPED_TRACE(testing::Message() << shape << ' ' << hwy::TargetName(target));
      expect_equal_to_reference(run, random_arguments(shape, at::kBFloat16), 2e-2);
    }
  }
}

TEST(WindowAttentionOp, OtherPrecisionsAndSlices) {
  const Shape shape{101, 130, 4, 2, 24, 33, true};
  expect_equal_to_reference(run, random_arguments(shape, at::kFloat), 1e-5);
  expect_equal_to_reference(run, random_arguments(shape, at::kBFloat16), 1e-2);
  expect_equal_to_reference(run_blocked, random_arguments(shape, at::kFloat), 1e-5);
  for (const int64_t head_dim : {24, 64}) {
    const Shape token{1, 130, 4, 2, head_dim, -1, true};
    expect_equal_to_reference(run, random_arguments(token, at::kFloat), 1e-5);
    expect_equal_to_reference(run, random_arguments(token, at::kBFloat16), 1e-2);
  }
  Arguments a = random_arguments({67, 67, 4, 4, 24, 9});
  const at::Tensor qkv = at::randn({2, 67, 12, 24}, at::kDouble);  // parts of one projection
  const auto parts = qkv.split(4, 2);
  a.q = parts[0].detach().requires_grad_();
  a.k = parts[1].detach().requires_grad_();
  a.v = parts[2].detach().requires_grad_();
  expect_equal_to_reference(run, a, 1e-12);
  a.v = at::randn({2, 4, 67, 24}, at::kDouble).transpose(1, 2).requires_grad_();
  expect_equal_to_reference(run, a, 1e-12);
}

// change(arguments) on a GPU, with the tolerances of float64, float32 and bfloat16.
void expect_equal_on_cuda(Arguments change(Arguments), double exact, double single,
                          double bf16_tolerance) {
  const auto check = [&](const Shape& shape, at::ScalarType dtype, double tolerance) {
    SCOPED_TRACE(testing::Message() << shape << ' ' << dtype);
    expect_equal_to_reference(run, change(random_arguments(shape, dtype, at::kCUDA)), tolerance);
  };
  for (const Shape& shape : kShapes) {
    check(shape, at::kDouble, exact);
    check(shape, at::kFloat, single);
    check(shape, at::kBFloat16, bf16_tolerance);
  }
  for (const Shape& shape : {Shape{520, 520, 6, 2, 64, -1}, Shape{300, 900, 8, 8, 128, 100}})
    check(shape, at::kBFloat16, bf16_tolerance);
}

// Scores of the sinks below, among and above those of the keys.
Arguments with_sinks(Arguments a) {
  const auto options = a.q.options().requires_grad(false);
  const auto dtype = a.q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  a.sinks = at::linspace(-3, 5, a.q.size(2), options.dtype(dtype)).requires_grad_();
  return a;
}

// In bf16 the output is rounded before and after the sink is added.
TEST(WindowAttentionOp, WithSinksEqualsItsReference) {
  for (const Shape& shape : kShapes) {
    SCOPED_TRACE(testing::Message() << shape);
    expect_equal_to_reference(run, with_sinks(random_arguments(shape)), 1e-12);
    expect_equal_to_reference(run_blocked, with_sinks(random_arguments(shape)), 1e-12);
    expect_equal_to_reference(run, with_sinks(random_arguments(shape, at::kFloat)), 1e-5);
    expect_equal_to_reference(run, with_sinks(random_arguments(shape, at::kBFloat16)), 4e-2);
  }
}

TEST(WindowAttentionOp, WithSinksOnCudaEqualsItsReference) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  expect_equal_on_cuda(with_sinks, 1e-12, 1e-5, 4e-2);
}

// A sink is a key with a score of its own and a value of zero. Here one more channel gives it this
// score, at a position that all queries see.
TEST(WindowAttentionOp, ASinkIsAKeyWithoutAValue) {
  const Arguments a = with_sinks(random_arguments({65, 65, 4, 4, 16, -1}));
  const at::Tensor of_q =
      (*a.sinks / a.scale).view({1, 1, 4, 1}).expand({a.q.size(0), a.q.size(1), 4, 1});
  const at::Tensor q = at::cat({a.q, of_q}, -1);
  at::Tensor first = at::zeros({a.k.size(0), 1, 4, 17}, at::kDouble);
  first.select(-1, 16).fill_(1);
  const auto with_first = [](const at::Tensor& x, const at::Tensor& of_first) {
    return at::cat({of_first, at::constant_pad_nd(x, {0, 1})}, 1);
  };
  const at::Tensor expected = window_attention(q, with_first(a.k, first),
                                               with_first(a.v, at::zeros_like(first)), -1, a.scale);
  EXPECT_LE(error(run(a), expected.narrow(-1, 0, 16)), 1e-12);
}

// The sums of log decays between exp(−0.05) and exp(−2).
Arguments with_decays(Arguments a) {
  const auto options = a.q.options().requires_grad(false);
  const auto dtype = a.q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor decays =
      at::rand({a.k.size(0), a.k.size(1), a.q.size(2)}, at::kDouble).mul_(-1.95).sub_(0.05);
  a.decay_sums = decays.cumsum(1).to(options.dtype(dtype)).requires_grad_();
  return a;
}

TEST(WindowAttentionOp, WithDecaysEqualsItsReference) {
  for (const Shape& shape : kShapes) {
    SCOPED_TRACE(testing::Message() << shape);
    expect_equal_to_reference(run, with_decays(random_arguments(shape)), 1e-11);
    expect_equal_to_reference(run_blocked, with_decays(random_arguments(shape)), 1e-11);
    expect_equal_to_reference(run, with_sinks(with_decays(random_arguments(shape))), 1e-11);
    expect_equal_to_reference(run, with_decays(random_arguments(shape, at::kFloat)), 1e-4);
    expect_equal_to_reference(run, with_decays(random_arguments(shape, at::kBFloat16)), 4e-2);
  }
}

TEST(WindowAttentionOp, WithDecaysOnCudaEqualsItsReference) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  // With decays, a query sees few keys, and the terms of its gradient nearly cancel.
  expect_equal_on_cuda(with_decays, 1e-11, 1e-4, 6e-2);
  expect_equal_on_cuda([](Arguments a) { return with_sinks(with_decays(a)); }, 1e-11, 1e-4, 6e-2);
}

// A gate changes all later sums, whose gradients nearly cancel.
void expect_accurate_gradient_of_gates(at::Device device) {
  const int64_t time = 2048;
  const Arguments a = random_arguments({time, time, 2, 2, 64, -1}, at::kBFloat16, device);
  const at::Tensor log_decays = at::rand({2, time, 2}, at::kDouble).mul_(-0.1);
  const at::Tensor weights = at::randn(a.q.sizes(), at::kDouble);
  const auto gradient = [&](const Arguments& arguments, auto&& form) {
    const at::Tensor gates =
        log_decays.to(arguments.q.device(), real_dtype(arguments.q.scalar_type())).requires_grad_();
    const at::Tensor out = form(arguments.q, arguments.k, arguments.v, arguments.window,
                                arguments.scale, Optional(), Optional(), Optional(gates.cumsum(1)));
    return torch::autograd::grad({(out * weights.to(out.options())).sum()}, {gates})[0];
  };
  const at::Tensor expected = gradient(a.exact(), window_attention_reference);
  const at::Tensor actual = gradient(a, window_attention).to(at::kCPU, at::kDouble);
  EXPECT_LE(((actual - expected).norm() / expected.norm()).item<double>(), 0.02);
}
TEST(WindowAttentionOp, GradientsOfGatesAreAccurateInBfloat16) {
  expect_accurate_gradient_of_gates(at::kCPU);
}
TEST(WindowAttentionOp, GradientsOfGatesAreAccurateInBfloat16OnCuda) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  expect_accurate_gradient_of_gates(at::kCUDA);
}

TEST(WindowAttentionOp, EqualsTheGoldenFilesOfSinks) {
  for (const auto& [name, window] :
       golden_cases<int64_t>({{"attention_sinks_T65", -1}, {"attention_sinks_T128_w32", 32}})) {
    SCOPED_TRACE(name);
    auto golden = read_golden(golden_file(name));
    for (const auto& [dtype, tolerance] : {std::pair{at::kDouble, 1e-12}, {at::kFloat, 1e-5}}) {
      const auto input = [&](const char* of) {
        return golden[of].to(dtype).clone().requires_grad_();
      };
      const Arguments a{input("in.q"),    input("in.k"), input("in.v"), window, 0.25, {},
                        input("in.sinks")};
      for (const bool blocked : {false, true}) {
        const at::Tensor out = blocked ? run_blocked(a) : run(a);
        EXPECT_LE(error(out, golden["out.o"]), tolerance);
        const auto found =
            torch::autograd::grad({(out * golden["cot.o"].to(dtype)).sum()}, a.tensors());
        const char* const names[] = {"grad.q", "grad.k", "grad.v", "grad.sinks"};
        for (size_t i = 0; i < found.size(); ++i)
          if (golden.contains(names[i]))
            EXPECT_LE(error(found[i], golden[names[i]]), tolerance) << names[i];
      }
    }
  }
}

TEST(WindowAttentionOp, OnCudaEqualsItsReference) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  for (const Shape& shape : kShapes) {
    SCOPED_TRACE(testing::Message() << shape);
    expect_equal_to_reference(run, random_arguments(shape, at::kDouble, at::kCUDA), 1e-12);
    expect_equal_to_reference(run, random_arguments(shape, at::kFloat, at::kCUDA), 1e-5);
    expect_equal_to_reference(run, random_arguments(shape, at::kBFloat16, at::kCUDA), 2e-2);
  }
}

WindowInputs inputs_of(const Arguments& a) {
  const auto constant = [](const Optional& x) { return x ? x->detach() : at::Tensor(); };
  return {a.q, a.k, a.v, constant(a.slopes), constant(a.decay_sums), a.window, a.scale};
}
// The attention of inputs with additional columns against the reference implementation.
void expect_columns_equal_biases(const Arguments& a) {
  const int64_t head_dim = a.q.size(3);
  const Arguments exact = a.exact();
  const WindowInputs in = append_biases(inputs_of(a));
  const int64_t columns = in.q.size(3) - head_dim;
  EXPECT_EQ(columns % 8, 0);
  const at::Tensor out = window_attention(in.q, in.k, in.v, a.window, a.scale);
  const at::Tensor expected = window_attention_reference(
      exact.q, exact.k, exact.v, exact.window, exact.scale, exact.slopes, {}, exact.decay_sums);
  EXPECT_LE(error(out.narrow(-1, 0, head_dim), expected), 1e-11);
  EXPECT_EQ(out.narrow(-1, head_dim, columns).abs().max().item<double>(), 0);
  const at::Tensor weights = at::randn(expected.sizes(), at::kDouble);
  const auto actual =
      torch::autograd::grad({(out.narrow(-1, 0, head_dim) * weights).sum()}, {a.q, a.k, a.v});
  const auto want =
      torch::autograd::grad({(expected * weights).sum()}, {exact.q, exact.k, exact.v});
  for (size_t i = 0; i < want.size(); ++i) EXPECT_LE(error(actual[i], want[i]), 1e-11) << i;
}

// The slopes of 6 heads are not powers of two, so they need both parts.
TEST(WindowAttentionOp, AdditionalColumnsAreAlibi) {
  for (const int64_t window : {-1, 65})
    expect_columns_equal_biases(random_arguments({70, 900, 6, 2, 12, window, true}));
}
TEST(WindowAttentionOp, AdditionalColumnsAreDecays) {
  for (const int64_t kv_heads : {6, 3, 1})
    expect_columns_equal_biases(with_decays(random_arguments({70, 200, 6, kv_heads, 16, 65})));
}

TEST(WindowAttentionOp, ColumnsOfAlibiAreExactInBfloat16) {
  const int64_t keys = (1 << 17) + 300;
  const int64_t heads = 12;
  const at::Tensor slopes = at::exp2(-8.0 * at::arange(1, heads + 1, at::kFloat) / double(heads));
  const at::Tensor q = at::zeros({1, 1, heads, 16}, at::kBFloat16);
  const at::Tensor k = at::zeros({1, keys, 1, 16}, at::kBFloat16);
  const WindowInputs in = append_biases({q, k, k, slopes, {}, keys, 0.25});
  const at::Tensor digits = in.k[0].narrow(-1, 16, 8).squeeze(1).to(at::kDouble);
  const at::Tensor twice = 2 * at::arange(keys, at::kDouble);  // once for each part of a slope
  EXPECT_EQ((digits.sum(-1) - twice).abs().max().item<double>(), 0);
  const at::Tensor bias = in.q[0][0].narrow(-1, 16, 8).to(at::kDouble);
  const at::Tensor parts = bias.narrow(-1, 0, 2).sum(-1) * 0.25;
  EXPECT_LE(((parts - slopes).abs() / slopes).max().item<double>(), std::exp2(-16));
}
TEST(WindowAttentionOp, ColumnsOfDecaysHave24BitsInBfloat16) {
  const at::Tensor sums = (-at::rand({1, 5000, 4}, at::kFloat)).cumsum(1);
  const at::Tensor q = at::zeros({1, 1, 4, 16}, at::kBFloat16);
  const at::Tensor k = at::zeros({1, 5000, 2, 16}, at::kBFloat16);
  const WindowInputs in = append_biases({q, k, k, {}, sums, 5000, 0.3});
  const at::Tensor parts = in.k.narrow(-1, 16, 6).unflatten(-1, {3, 2}).to(at::kDouble);
  const at::Tensor exact = sums.to(at::kDouble);
  const at::Tensor apart = parts.sum(3).flatten(2) * -0.3 - exact;
  EXPECT_LE((apart / exact).abs().max().item<double>(), std::exp2(-22));
}

void expect_constant_slopes_equal_reference_on_cuda(bool sinks) {
  for (const Shape& shape : {Shape{1, 700, 4, 2, 16, -1, true}, Shape{520, 520, 6, 2, 64, -1, true},
                             Shape{300, 900, 8, 8, 64, 100, true}}) {
    SCOPED_TRACE(testing::Message() << shape << (sinks ? ", sinks" : ""));
    Arguments a = random_arguments(shape, at::kBFloat16, at::kCUDA);
    if (sinks) a = with_sinks(a);
    a.slopes = a.slopes->detach();
    const Arguments exact = a.exact();
    const at::Tensor expected = window_attention_reference(exact.q, exact.k, exact.v, exact.window,
                                                           exact.scale, exact.slopes, exact.sinks);
    const at::Tensor out = run(a);
    // A sink rounds the output once more.
    const double tolerance = sinks ? 4e-2 : 2e-2;
    EXPECT_LE(error(out, expected), tolerance);
    std::vector<at::Tensor> by{a.q, a.k, a.v};
    std::vector<at::Tensor> exactly{exact.q, exact.k, exact.v};
    if (sinks) {
      by.push_back(*a.sinks);
      exactly.push_back(*exact.sinks);
    }
    const at::Tensor weights = at::randn(out.sizes(), at::kDouble);
    const auto actual = torch::autograd::grad({(out * weights.to(out.options())).sum()}, by);
    const at::Tensor rounded = weights.to(at::kBFloat16).to(at::kDouble);
    const auto want = torch::autograd::grad({(expected * rounded).sum()}, exactly);
    for (size_t i = 0; i < want.size(); ++i) EXPECT_LE(error(actual[i], want[i]), tolerance) << i;
  }
}
TEST(WindowAttentionOp, AlibiWithConstantSlopesOnCudaEqualsItsReference) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  expect_constant_slopes_equal_reference_on_cuda(/*sinks=*/false);
  expect_constant_slopes_equal_reference_on_cuda(/*sinks=*/true);
}

TEST(WindowAttentionOp, GradientsAreFiniteDifferences) {
  const Arguments a = with_sinks(random_arguments({5, 7, 2, 1, 3, 4, true}));
  const at::Tensor weights = at::randn({2, 5, 2, 3}, at::kDouble);
  const auto loss = [&] { return (run(a) * weights).sum(); };
  const auto gradients = torch::autograd::grad({loss()}, a.tensors());
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < gradients.size(); ++i) {
    double* numbers = a.tensors()[i].data_ptr<double>();
    for (int64_t n = 0; n < gradients[i].numel(); ++n) {
      const double before = numbers[n];
      const double step = 1e-5;
      numbers[n] = before + step;
      const double above = loss().item<double>();
      numbers[n] = before - step;
      const double below = loss().item<double>();
      numbers[n] = before;
      EXPECT_NEAR(gradients[i].flatten()[n].item<double>(), (above - below) / (2 * step), 1e-8)
          << "tensor " << i << ", " << n;
    }
  }
}

// Large scores of either sign, and keys far below the maximum, overflow nothing.
TEST(WindowAttentionOp, LargeScoresStayFinite) {
  Arguments a = random_arguments({97, 97, 2, 2, 8, 30}, at::kFloat);
  for (const double factor : {40.0, -40.0}) {
    a.scale = factor;
    const Arguments exact = a.exact();
    const at::Tensor out = run(a);
    const at::Tensor want =
        window_attention_reference(exact.q, exact.k, exact.v, a.window, a.scale);
    EXPECT_LE(error(out, want), 1e-3) << "scores are of size 10³, rounded to 10⁻⁴";
    for (const at::Tensor& gradient : torch::autograd::grad({out.sum()}, a.tensors()))
      EXPECT_TRUE(at::isfinite(gradient).all().item<bool>());
  }
}

// Twelve gates behind the heads move the rows of a projection off the boundaries of the kernels.
TEST(WindowAttentionOp, OnCudaMisalignedRowsGiveTheSameBits) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  const auto options = at::TensorOptions(at::kCUDA).dtype(at::kBFloat16);
  const at::Tensor projected = at::randn({2, 130, 3 * 12 * 64 + 12}, options);
  const auto heads = [&](int64_t i) {
    return projected.narrow(-1, i * 768, 768).unflatten(-1, {12, 64});
  };
  const at::Tensor sums = -at::rand({2, 130, 12}, options.dtype(at::kFloat)).cumsum(1);
  const auto attend = [&](auto&& rows) {
    return window_attention(rows(heads(0)), rows(heads(1)), rows(heads(2)), -1, 0.125, {}, {},
                            sums);
  };
  const at::Tensor copied = attend([](const at::Tensor& x) { return x.contiguous(); });
  EXPECT_TRUE(at::equal(attend([](const at::Tensor& x) { return x; }), copied));
}

struct Kernel {
  at::Tensor out;
  at::Tensor dq;
  at::Tensor dk;
  at::Tensor dv;
  at::Tensor dslopes;
  at::Tensor ddecay_sums;
};
Kernel run_kernel(const Arguments& a, const at::Tensor& dout, int threads) {
  const auto poisoned = [](const at::Tensor& like) { return at::full_like(like.detach(), NAN); };
  Kernel r{poisoned(a.q), poisoned(a.q),       poisoned(a.k),
           poisoned(a.v), poisoned(*a.slopes), poisoned(*a.decay_sums)};
  at::Tensor logsumexp =
      at::full({a.q.size(0), a.q.size(2), a.q.size(1)}, NAN, a.q.options().requires_grad(false));
  const auto view = [](const at::Tensor& t) {
    return View{t.data_ptr(), t.stride(0), t.stride(1)};
  };
  const WindowAttentionForward p{a.q.scalar_type() == at::kDouble ? DType::f64 : DType::f32,
                                 a.q.size(0),
                                 a.q.size(1),
                                 a.k.size(1),
                                 a.q.size(2),
                                 a.k.size(2),
                                 a.q.size(3),
                                 a.window,
                                 a.scale,
                                 view(a.q),
                                 view(a.k),
                                 view(a.v),
                                 a.slopes->data_ptr(),
                                 a.decay_sums->data_ptr(),
                                 view(r.out),
                                 logsumexp.data_ptr()};
  Workspace forward(cpu::workspace_bytes(p));
  cpu::window_attention(p, forward.data(), pool(threads));
  const WindowAttentionBackward q{p,
                                  view(dout),
                                  view(r.dq),
                                  view(r.dk),
                                  view(r.dv),
                                  r.dslopes.data_ptr(),
                                  r.ddecay_sums.data_ptr()};
  Workspace backward(cpu::workspace_bytes(q));
  cpu::window_attention(q, backward.data(), pool(threads));
  return r;
}

TEST(WindowAttentionKernel, EveryInstructionSetAndTheSameBitsForAnyNumberOfThreads) {
  for (const int64_t target : targets()) {
    const SimdTarget only(target);
    for (const auto dtype : {at::kDouble, at::kFloat}) {
      SCOPED_TRACE(testing::Message() << hwy::TargetName(target) << " " << dtype);
      Arguments a = random_arguments({101, 133, 6, 2, 20, 45, true}, dtype);
      a.slopes = a.slopes->detach().to(dtype).requires_grad_();
      expect_equal_to_reference(run, a, dtype == at::kDouble ? 1e-12 : 1e-5);
      a = with_decays(a);
      expect_equal_to_reference(run, a, dtype == at::kDouble ? 1e-11 : 1e-4);
      const at::Tensor dout = at::randn_like(a.q);
      const Kernel one = run_kernel(a, dout, 1);
      const Kernel three = run_kernel(a, dout, 3);
      EXPECT_TRUE(at::equal(one.out, three.out));
      for (const auto part :
           {&Kernel::dq, &Kernel::dk, &Kernel::dv, &Kernel::dslopes, &Kernel::ddecay_sums})
        EXPECT_TRUE(at::equal(one.*part, three.*part));
    }
  }
}

TEST(WindowAttentionOp, MayBeCutAnywhere) {
  const Arguments a = random_arguments({67, 67, 4, 2, 8, 20, true});
  const at::Tensor whole = run(a);
  for (const int64_t cut : {1, 2, 33, 66}) {
    Arguments second = a;
    second.q = a.q.narrow(1, cut, 67 - cut);
    EXPECT_LE(worst_row_error(run(second), whole.narrow(1, cut, 67 - cut)), 1e-12)
        << "cut at " << cut;
  }
}

TEST(WindowAttentionOp, NamesTheWrongArgument) {
  const auto message = [](auto change) -> std::string {
    Arguments a = random_arguments({5, 7, 4, 2, 6, 3, true});
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
  EXPECT_THAT(message([](A a) { a.q = a.q[0]; }), testing::HasSubstr("q has shape"));
  EXPECT_THAT(message([](A a) { a.q = a.q.narrow(3, 0, 5); }),
              testing::HasSubstr("k has shape [2, 7, 2, 6], expected"));
  EXPECT_THAT(message([](A a) {
                a.k = a.k.narrow(1, 0, 4);
                a.v = a.k;
              }),
              testing::HasSubstr("k has 4 positions (its size 1), fewer than the 5 queries of q"));
  EXPECT_THAT(message([](A a) { a.q = a.q.narrow(2, 0, 3); }),
              testing::HasSubstr("do not divide the 3 heads of q"));
  EXPECT_THAT(message([](A a) { a.v = a.v.narrow(1, 0, 6); }), testing::HasSubstr("v has shape"));
  EXPECT_THAT(message([](A a) { a.slopes = a.slopes->narrow(0, 0, 2); }),
              testing::HasSubstr("alibi_slopes has shape"));
  EXPECT_THAT(message([](A a) { a.window = 0; }),
              testing::HasSubstr("window is 0, expected at least 1, or -1 for all"));
  EXPECT_THAT(message([](A a) { a.scale = NAN; }), testing::HasSubstr("scale is nan"));
  EXPECT_THAT(message([](A a) { a.k = a.k.to(at::kLong); }), testing::HasSubstr("k holds Long"));
}

}  // namespace
}  // namespace assay::ops
