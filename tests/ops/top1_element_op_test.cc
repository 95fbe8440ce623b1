// The operator against its naive twin, the golden files, and wrong arguments.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "ops/attention/top1_element/composed.h"
#include "ops/attention/top1_element/top1_element.h"
#include "ops/attention_arguments.h"
#include "ops/core/dispatch.h"

namespace assay::ops {
namespace {

// The index in float32 may differ from float64's where two logits lie closer than this: 2 D
// rounding steps each.
double rounding_bound(at::ScalarType dtype, double scale, int64_t head_dim) {
  const double step = dtype == at::kDouble ? 1.1e-16 : 6e-8;
  return 4 * double(head_dim) * step * std::abs(scale);
}

// Each query's logit of `index` below its best logit, [B, H, T]; of unit queries and
// keys in float64.
at::Tensor regret(const Qkv& exact, const at::Tensor& index, double scale) {
  const at::NoGradGuard no_grad;
  const int64_t group = exact.q.size(2) / exact.k.size(2);
  const int64_t size = exact.k.size(1);
  const int64_t time = exact.q.size(1);
  const at::Tensor keys = exact.k.transpose(1, 2).repeat_interleave(group, 1);
  const at::Tensor later = at::ones({time, size}, at::kBool).triu(size - time + 1);
  const at::Tensor logits =
      (scale * exact.q.transpose(1, 2).matmul(keys.mT())).masked_fill(later, -INFINITY);
  return logits.amax(-1) - logits.gather(-1, index.cpu().unsqueeze(-1)).squeeze(-1);
}

void expect_equal_to_reference(const Qkv& arguments, at::ScalarType dtype, double tolerance,
                               double scale, at::Device device = at::kCPU) {
  const Qkv a = arguments.as(dtype, device);
  const Qkv exact = arguments.as(at::kDouble);
  const auto [out, index] = top1_element(a.q, a.k, a.v, scale);
  const auto [expected, expected_index] = top1_element_reference(exact.q, exact.k, exact.v, scale);
  EXPECT_EQ(out.scalar_type(), dtype);
  EXPECT_LE(regret(exact, index, scale).max().item<double>(),
            rounding_bound(dtype, scale, a.q.size(3)));
  ASSERT_TRUE(at::equal(index.cpu(), expected_index))
      << "two logits nearly equal: choose another seed";
  EXPECT_LE(worst_row_error(out.cpu(), expected), tolerance);
  const at::Tensor weights = at::randn_like(exact.q).to(at::kBFloat16);
  expect_close(a.gradients(out, weights), exact.gradients(expected, weights), tolerance);
}

const std::vector<Shape> kShapes = {{.time = 1},
                                    {},
                                    {.time = 130, .kv_heads = 4, .head_dim = 64},
                                    {.time = 31, .past = 70, .kv_heads = 1},
                                    {.batch = 1, .time = 1, .past = 100},
                                    {.time = 67, .head_dim = 1},
                                    {.time = 301, .head_dim = 5}};

TEST(Top1ElementOp, EqualsItsReference) {
  const PoisonedMemory poisoned;
  for (const Shape& shape : kShapes) {
    SCOPED_TRACE(testing::Message() << shape);
    if (shape.head_dim > 1) expect_equal_to_reference(random_qkv(shape), at::kDouble, 1e-12, 8);
    if (shape.head_dim > 1) expect_equal_to_reference(random_qkv(shape), at::kFloat, 1e-5, 8);
  }
  expect_equal_to_reference(random_qkv({}), at::kBFloat16, 1e-2, 8);
}

TEST(Top1ElementOp, OnCudaEqualsItsReference) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  const PoisonedMemory poisoned;
  // On other GPUs FlashAttention-2 rounds the weighted mean of the values to bfloat16.
  const double bf16_tolerance = on_hopper(at::Device(at::kCUDA, 0)) ? 1e-2 : 2e-2;
  for (const Shape& shape : {Shape{}, Shape{.time = 301}, Shape{.time = 31, .past = 70}})
    for (const auto& [dtype, tolerance] :
         {std::pair{at::kDouble, 1e-12}, {at::kFloat, 1e-5}, {at::kBFloat16, 1e-2}})
      expect_equal_to_reference(random_qkv(shape), dtype, tolerance, 8, at::kCUDA);
  for (int64_t head_dim : {64, 96, 128})  // these have a kernel
    for (Shape shape : {Shape{}, Shape{.time = 1}, Shape{.time = 301},
                        Shape{.time = 31, .past = 170, .kv_heads = 1}}) {
      shape.head_dim = head_dim;
      SCOPED_TRACE(testing::Message() << shape);
      expect_equal_to_reference(random_qkv(shape), at::kBFloat16, bf16_tolerance, 8, at::kCUDA);
    }
}

// Sequences that are parts of wider rows, and a gradient that is one number everywhere, are read
// as they lie.
TEST(Top1ElementOp, OnCudaReadsRowsApart) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  const Qkv a =
      random_qkv({.time = 200, .kv_heads = 4, .head_dim = 64}).as(at::kBFloat16, at::kCUDA);
  const at::Tensor fused = at::stack({a.q, a.k, a.v}, 2).detach().requires_grad_();
  const auto gradient_of = [](const at::Tensor& out, const at::Tensor& by) {
    return torch::autograd::grad({out.sum()}, {by})[0];
  };
  const at::Tensor out = std::get<0>(top1_element(a.q, a.k, a.v, 8));
  const at::Tensor apart =
      std::get<0>(top1_element(fused.select(2, 0), fused.select(2, 1), fused.select(2, 2), 8));
  EXPECT_TRUE(at::equal(out, apart));
  EXPECT_TRUE(at::equal(gradient_of(apart, fused).select(2, 2), gradient_of(out, a.v)));
}

// A gradient that begins three numbers into its memory, as a part of a larger one does.
void expect_misaligned_gradient(at::Device device) {
  const Qkv a = random_qkv({.time = 130, .head_dim = 64}).as(at::kBFloat16, device);
  const at::Tensor out = std::get<0>(top1_element(a.q, a.k, a.v, 8));
  const at::Tensor dout = at::randn_like(out);
  const auto gradients = [&](const at::Tensor& of_out) {
    return torch::autograd::grad({out}, {a.q, a.k, a.v}, {of_out}, /*retain_graph=*/true);
  };
  const auto found = gradients(misaligned(dout));
  const auto expected = gradients(dout);
  for (size_t i = 0; i < 3; ++i)
    EXPECT_TRUE(at::equal(found[i], expected[i])) << "gradient of "
                                                  << "qkv"[i];
}
TEST(Top1ElementOp, MisalignedGradientGivesTheSameBits) { expect_misaligned_gradient(at::kCPU); }
TEST(Top1ElementOp, OnCudaMisalignedGradientGivesTheSameBits) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  expect_misaligned_gradient(at::kCUDA);
}

// The path of devices without a kernel, here on the CPU.
TEST(Top1ElementOp, ComposedEqualsItsReference) {
  for (const Shape& shape :
       {Shape{}, Shape{.time = 300}, Shape{.time = 31, .past = 70}, Shape{.time = 1}}) {
    SCOPED_TRACE(testing::Message() << shape);
    const Qkv a = random_qkv(shape).as(at::kDouble);
    const auto [expected, index] = top1_element_reference(a.q, a.k, a.v, 8);
    const at::Tensor weights = at::randn_like(a.q);
    const auto gradients = a.gradients(expected, weights);
    const at::NoGradGuard no_grad;
    const Top1ElementOutputs o = top1_element_composed(a.q, a.k, a.v, 8, true);
    EXPECT_TRUE(at::equal(o.index, index));
    EXPECT_LE(worst_row_error(o.out, expected), 1e-12);
    const auto [dq, dk, dv] = top1_element_composed_backward(a.q, a.k, a.v, 8, o, weights);
    expect_close({dq, dk, dv}, gradients, 1e-12);
  }
}

TEST(Top1ElementOp, EqualsTheGoldenFiles) {
  for (const auto& [name, scale] : golden_cases<double>(
           {{"top1_element_T128", 8}, {"top1_element_T65", 1 / std::sqrt(32.0)}})) {
    SCOPED_TRACE(name);
    auto golden = read_golden(golden_file(name));
    for (const auto& [dtype, tolerance] : {std::pair{at::kDouble, 1e-12}, {at::kFloat, 1e-5}}) {
      const Qkv a = Qkv{golden["in.q"], golden["in.k"], golden["in.v"]}.as(dtype);
      const auto [out, index] = top1_element(a.q, a.k, a.v, scale);
      EXPECT_LE(worst_row_error(out, golden["out.o"]), tolerance) << dtype;
      EXPECT_TRUE(at::equal(index, golden["out.index"].to(at::kLong))) << dtype;
      expect_close(a.gradients(out, golden["cot.o"]),
                   {golden["grad.q"], golden["grad.k"], golden["grad.v"]}, tolerance);
    }
  }
}

TEST(Top1ElementOp, GivesTheSameBitsForAnyNumberOfThreads) {
  const Qkv a = random_qkv({.time = 301}).as(at::kFloat);
  expect_same_bits_for_any_threads([&] {
    const auto [out, index] = top1_element(a.q, a.k, a.v, 8);
    auto all = a.gradients(out, at::ones_like(out));
    all.insert(all.end(), {out.detach(), index});
    return all;
  });
}

TEST(Top1ElementOp, EqualKeysGiveTheFirst) {
  const Qkv a = random_qkv({.time = 70});
  const auto index = std::get<1>(top1_element(a.q, at::ones_like(a.k), a.v, 1.0));
  EXPECT_EQ(index.abs().max().item<int64_t>(), 0);
}

TEST(Top1ElementOp, LargeScalesStayFinite) {
  const Qkv a = random_qkv({.time = 100}).as(at::kFloat);
  const auto out = std::get<0>(top1_element(a.q, a.k, a.v, 1e4));
  for (const at::Tensor& gradient : a.gradients(out, at::ones_like(out)))
    EXPECT_TRUE(at::isfinite(gradient).all().item<bool>());
}

TEST(Top1ElementOp, NanGivesNanRows) {
  Qkv a = random_qkv({.time = 70});
  a.q.select(1, 40).fill_(NAN);
  const auto [out, index] = top1_element(a.q, a.k, a.v, 8.0);
  EXPECT_TRUE(out.select(1, 40).isnan().all().item<bool>());
  EXPECT_FALSE(at::cat({out.slice(1, 0, 40), out.slice(1, 41)}, 1).isnan().any().item<bool>());
  EXPECT_TRUE(((index >= 0) & (index <= at::arange(70))).all().item<bool>());
}

TEST(Top1ElementOp, NamesTheWrongArgument) {
  auto message = [](auto change, double scale = 1) {
    Qkv a = random_qkv({.time = 5});
    change(a);
    return error_of([&] { top1_element(a.q, a.k, a.v, scale); });
  };
  using A = Qkv&;
  EXPECT_EQ(message([](A) {}), "no error");
  EXPECT_EQ(message([](A a) { a.v = a.v.narrow(1, 0, 4); }),
            "top1_element: v has shape [2, 4, 2, 20], expected [B, S, Hk, D] = [2, 5, 2, 20]");
  EXPECT_THAT(message([](A a) { a.q = a.q[0]; }), testing::HasSubstr("q has shape"));
  EXPECT_THAT(message([](A a) { a.q = at::cat({a.q, a.q}, 1); }),
              testing::HasSubstr("k has 5 positions"));
  EXPECT_THAT(message([](A a) { a.q = a.q.narrow(2, 0, 3); }), testing::HasSubstr("k has 2 heads"));
  EXPECT_THAT(message([](A a) { a.k = a.k.to(at::kHalf); }), testing::HasSubstr("k holds Half"));
  EXPECT_THAT(message([](A a) { a.v = a.v.to(at::kLong); }), testing::HasSubstr("v holds Long"));
  EXPECT_THAT(message([](A) {}, NAN), testing::HasSubstr("scale is nan"));
}

}  // namespace
}  // namespace assay::ops
