// Mamba-3's rotation of B and C against its definition in float64, output and gradient.
#include "ops/rowwise/mamba3_elements/mamba3_elements.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>

namespace assay::ops {
namespace {

using Tensors = std::vector<at::Tensor>;

struct Sizes {
  int64_t batch;
  int64_t time;
  int64_t groups;
  int64_t heads;
  int64_t state_size;
  int64_t pairs;
};
constexpr const char* kNames[] = {"b", "c", "b_bias", "c_bias", "steps", "turns", "angle"};

// b, c, biases, steps, turns, angle: on the CPU, b and c in `dtype`, the others real.
Tensors random_inputs(const Sizes& s, at::ScalarType dtype) {
  torch::manual_seed(s.time * s.heads + s.pairs);
  const auto real = dtype == at::kDouble ? at::kDouble : at::kFloat;
  const auto normal = [](at::IntArrayRef shape) { return torch::randn(shape, at::kDouble); };
  return {normal({s.batch, s.time, s.groups, s.state_size}).to(dtype),
          normal({s.batch, s.time, s.groups, s.state_size}).to(dtype),
          normal({s.heads, s.state_size}).add(1).to(real),
          normal({s.heads, s.state_size}).add(1).to(real),
          normal({s.batch, s.time, s.heads}).sub(2).exp().to(real),
          normal({s.batch, s.time, s.pairs}).tanh().mul(M_PI).to(real),
          normal({s.batch, s.heads, s.pairs}).mul(3).to(real)};
}
// The angle has a period, so its cosine and its sine stand for it.
Tensors list_of(const Mamba3Rotated& r) { return {r.b, r.c, r.dot, r.angle.cos(), r.angle.sin()}; }
Tensors rotated(const Tensors& in) {
  return list_of(mamba3_rotate(in[0], in[1], in[2], in[3], in[4], in[5], in[6]));
}
Tensors rotated_reference(const Tensors& in) {
  return list_of(mamba3_rotate_reference(in[0], in[1], in[2], in[3], in[4], in[5], in[6]));
}

TEST(Mamba3Rotate, ReferenceIsTheFormula) {
  const Sizes s{2, 5, 2, 4, 6, 2};
  const Tensors in = random_inputs(s, at::kDouble);
  const auto found = rotated_reference(in);
  const auto b = in[0].accessor<double, 4>();
  const auto bias = in[2].accessor<double, 2>();
  const auto steps = in[4].accessor<double, 3>();
  const auto turns = in[5].accessor<double, 3>();
  const auto out = found[0].accessor<double, 4>();
  for (int64_t n = 0; n < s.batch; ++n)
    for (int64_t h = 0; h < s.heads; ++h)
      for (int64_t i = 0; i < s.state_size / 2; ++i) {
        double angle = i < s.pairs ? in[6][n][h][i].item<double>() : 0;
        for (int64_t t = 0; t < s.time; ++t) {
          if (i < s.pairs) angle += steps[n][t][h] * turns[n][t][i];
          const double x = b[n][t][h / 2][2 * i] + bias[h][2 * i];
          const double y = b[n][t][h / 2][2 * i + 1] + bias[h][2 * i + 1];
          EXPECT_NEAR(out[n][t][h][2 * i], x * std::cos(angle) - y * std::sin(angle), 1e-12);
          EXPECT_NEAR(out[n][t][h][2 * i + 1], x * std::sin(angle) + y * std::cos(angle), 1e-12);
        }
        if (i < s.pairs) EXPECT_NEAR(found[3][n][h][i].item<double>(), std::cos(angle), 1e-12);
      }
  EXPECT_TRUE(at::allclose(found[2], (found[0] * found[1]).sum(-1)));
}

void expect_rotation(const Sizes& s, at::ScalarType dtype, at::Device device) {
  SCOPED_TRACE(c10::str("B ", s.batch, " T ", s.time, " G ", s.groups, " H ", s.heads, " N ",
                        s.state_size, " P ", s.pairs, " ", dtype));
  const double tolerance = dtype == at::kDouble ? 1e-11 : dtype == at::kFloat ? 1e-5 : 2e-2;
  Tensors leaves;
  Tensors exact;
  for (const at::Tensor& x : random_inputs(s, dtype)) {
    leaves.push_back(x.to(device).detach().requires_grad_());
    exact.push_back(x.to(at::kDouble).detach().requires_grad_());
  }
  const Tensors expected = rotated_reference(exact);
  Tensors exact_dy;
  for (const at::Tensor& y : expected)
    exact_dy.push_back(torch::randn(y.sizes(), at::kDouble).to(dtype).to(at::kDouble));
  const auto wanted = torch::autograd::grad(expected, exact, exact_dy);
  const auto poison = [&] {
    Tensors freed;
    for (int n = 0; n < 8; ++n)
      freed.push_back(at::full({s.batch, s.time, s.heads, s.state_size}, NAN,
                               leaves[0].options().dtype(n % 2 ? at::kFloat : dtype)));
  };
  Tensors first;
  for (int call = 0; call < 2; ++call) {
    poison();
    Tensors found = rotated(leaves);
    Tensors dy;
    for (size_t n = 0; n < found.size(); ++n)
      dy.push_back(exact_dy[n].to(device, found[n].scalar_type()));
    poison();
    const auto gradients = torch::autograd::grad(found, leaves, dy);
    found.insert(found.end(), gradients.begin(), gradients.end());
    if (call == 0) first = found;
    for (size_t n = 0; n < found.size(); ++n)
      EXPECT_TRUE(at::equal(first[n], found[n])) << "result " << n << " of the second call";
  }
  const auto expect_close = [&](const at::Tensor& x, const at::Tensor& y, const std::string& what) {
    const at::Tensor error = x.detach().to(at::kCPU, at::kDouble) - y.detach();
    EXPECT_LE(error.norm().item<double>(), tolerance * y.norm().item<double>()) << what;
    EXPECT_LE(error.abs().max().item<double>(), 8 * tolerance * y.abs().max().item<double>())
        << what;
  };
  for (size_t n = 0; n < expected.size(); ++n)
    expect_close(first[n], expected[n], c10::str("output ", n));
  for (size_t n = 0; n < wanted.size(); ++n)
    expect_close(first[expected.size() + n], wanted[n], c10::str("gradient of ", kNames[n]));
}

void expect_rotation_on(at::Device device) {
  const Sizes all[] = {{2, 5, 1, 2, 8, 2},      {1, 33, 1, 3, 16, 8},    {2, 37, 2, 6, 24, 5},
                       {1, 70, 1, 24, 128, 32}, {1, 19, 3, 3, 256, 64},  {3, 16, 1, 40, 64, 16},
                       {1, 17, 1, 64, 128, 32}, {40, 130, 1, 3, 32, 16}, {1, 1, 1, 4, 128, 64},
                       {2, 6, 2, 4, 9, 3}};
  for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16})
    for (const Sizes& s : all) expect_rotation(s, dtype, device);
}
TEST(Mamba3Rotate, EqualsItsDefinition) { expect_rotation_on(at::kCPU); }
TEST(Mamba3Rotate, OnCudaEqualsItsDefinition) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  expect_rotation_on(at::kCUDA);
}

// The angle that the first piece leaves continues the sequence, with its gradient.
void expect_pieces_on(at::Device device) {
  Tensors in = random_inputs({2, 45, 1, 3, 16, 8}, at::kDouble);
  for (at::Tensor& x : in) x = x.to(device).requires_grad_();
  const auto weighted = [](const at::Tensor& y) {
    return (y * at::arange(y.numel(), y.options()).view_as(y).sin()).sum();
  };
  const auto whole = mamba3_rotate(in[0], in[1], in[2], in[3], in[4], in[5], in[6]);
  const auto piece = [&](int64_t begin, int64_t end, const at::Tensor& angle) {
    const auto part = [&](size_t n) { return in[n].slice(1, begin, end); };
    return mamba3_rotate(part(0), part(1), in[2], in[3], part(4), part(5), angle);
  };
  const auto one = piece(0, 21, in[6]);
  const auto two = piece(21, 45, one.angle);
  const at::Tensor joined = at::cat({one.b, two.b}, 1);
  EXPECT_TRUE(at::allclose(joined, whole.b, 1e-10, 1e-10));
  const auto expected = torch::autograd::grad({weighted(whole.b)}, {in[4], in[5], in[6]});
  const auto found = torch::autograd::grad({weighted(joined)}, {in[4], in[5], in[6]});
  for (size_t n = 0; n < found.size(); ++n)
    EXPECT_TRUE(at::allclose(found[n], expected[n], 1e-9, 1e-9)) << n;
}
TEST(Mamba3Rotate, PiecesAreTheWholeSequence) { expect_pieces_on(at::kCPU); }
TEST(Mamba3Rotate, OnCudaPiecesAreTheWholeSequence) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  expect_pieces_on(at::kCUDA);
}

TEST(Mamba3Rotate, BadArgumentsAreNamed) {
  const Tensors good = random_inputs({2, 5, 2, 4, 6, 2}, at::kFloat);
  const auto expect_error = [&](size_t n, const at::Tensor& bad, const std::string& what) {
    Tensors in = good;
    in[n] = bad;
    try {
      rotated(in);
      FAIL() << "no error for " << kNames[n];
    } catch (const c10::ValueError& error) {
      EXPECT_NE(std::string(error.what_without_backtrace()).find(what), std::string::npos)
          << error.what_without_backtrace();
    }
  };
  expect_error(0, good[0].select(1, 0), "b has shape");
  expect_error(0, torch::randn({2, 5, 3, 6}), "b has 3 groups, which do not divide 4 heads");
  expect_error(1, good[1].slice(1, 1), "c has shape");
  expect_error(2, torch::ones({4, 5}), "b_bias has shape");
  expect_error(4, good[4].slice(0, 1), "steps has shape");
  expect_error(5, torch::randn({2, 5, 4}), "turns has 4 pairs, but b has 6 channels");
  expect_error(6, torch::randn({2, 4, 3}), "angle has shape");
  expect_error(6, good[6].to(at::kDouble), "angle");
}

}  // namespace
}  // namespace assay::ops
