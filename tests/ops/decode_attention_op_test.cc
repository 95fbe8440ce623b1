// A decode step of sequences at positions of their own, against attention of each row alone.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "ops/decode_attention/decode_attention.h"
#include "ops/golden.h"
#include "ops/window_attention/window_attention.h"

namespace assay::ops {
namespace {

struct Shape {
  int64_t heads, kv_heads, head_dim;
  bool alibi = false;
};

// 65 rows need two launches; −1 stands for a row that is not used.
const std::vector<int64_t> kLengths = [] {
  std::vector<int64_t> lengths = {0, 1, 255, 256, 257, -1, 1023, 3000, 511, 512};
  for (int64_t b = int64_t(lengths.size()); b < 65; ++b) lengths.push_back(13 * b % 700);
  return lengths;
}();

struct Step {
  at::Tensor q, k, v, slopes;
  std::vector<CacheOfRow> caches;  // the last step of each is NaN

  Step(const Shape& s, at::ScalarType dtype) {
    torch::manual_seed(11);
    const auto options = at::TensorOptions(at::kCUDA).dtype(dtype);
    const auto rows = int64_t(kLengths.size());
    // Parts of one projection, as a layer makes them.
    const at::Tensor all = at::randn({rows, s.heads + 2 * s.kv_heads, s.head_dim}, options);
    q = all.slice(1, 0, s.heads) * 2;
    k = all.slice(1, s.heads, s.heads + s.kv_heads);
    v = all.slice(1, s.heads + s.kv_heads);
    if (s.alibi) slopes = at::rand({s.heads}, at::kCUDA) * 0.05;
    for (const int64_t length : kLengths) {
      CacheOfRow& row = caches.emplace_back();
      if (length < 0) continue;
      for (at::Tensor* cache : {&row.k, &row.v}) {
        *cache = at::randn({1, length + 1, s.kv_heads, s.head_dim}, options);
        cache->select(1, length).fill_(NAN);
      }
    }
  }
  at::Tensor run(double scale) {
    return decode_attention(q, k, v, caches, scale,
                            slopes.defined() ? std::optional(slopes) : std::nullopt);
  }
};

at::Tensor in_double(const at::Tensor& x) { return x.to(at::kCPU, at::kDouble); }

TEST(DecodeAttentionOp, OnCudaEqualsAttentionOfEachRow) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  const at::NoGradGuard no_grad;
  for (const Shape& shape :
       {Shape{12, 12, 64}, Shape{8, 2, 128, true}, Shape{6, 3, 40}, Shape{2, 1, 256},
        Shape{5, 5, 8, true}, Shape{12, 1, 24}, Shape{3, 3, 248}})
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      SCOPED_TRACE(testing::Message() << shape.heads << " heads of " << shape.head_dim << ", "
                                      << shape.kv_heads << " of k and v, " << dtype);
      Step step(shape, dtype);
      const double scale = 1 / std::sqrt(double(shape.head_dim));
      const at::Tensor out = step.run(scale);
      EXPECT_EQ(out.scalar_type(), dtype);
      EXPECT_TRUE(at::equal(step.run(scale), out)) << "not repeatable";
      for (size_t b = 0; b < kLengths.size(); ++b) {
        const auto row = int64_t(b);
        if (kLengths[b] < 0) {
          EXPECT_EQ(out[row].abs().max().item<float>(), 0);
          continue;
        }
        const CacheOfRow& cache = step.caches[b];
        EXPECT_TRUE(at::equal(cache.k[0][kLengths[b]], step.k[row]));
        EXPECT_TRUE(at::equal(cache.v[0][kLengths[b]], step.v[row]));
        const auto slopes =
            step.slopes.defined() ? std::optional(in_double(step.slopes)) : std::nullopt;
        const at::Tensor expected = window_attention_reference(
            in_double(step.q[row]).unsqueeze(0).unsqueeze(0), in_double(cache.k),
            in_double(cache.v), kLengths[b] + 1, scale, slopes)[0][0];
        const double error =
            (in_double(out[row]) - expected).norm().item<double>() / expected.norm().item<double>();
        EXPECT_LE(error, dtype == at::kFloat ? 2e-6 : 4e-3) << "row " << b;
      }
    }
}

TEST(DecodeAttentionOp, OnCudaBitsOfARowDoNotDependOnTheOtherRows) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  const at::NoGradGuard no_grad;
  Step step({12, 12, 64}, at::kBFloat16);
  const at::Tensor all = step.run(0.125);
  for (const int64_t b : {0, 4, 7, 64}) {
    const at::Tensor alone =
        decode_attention(step.q.slice(0, b, b + 1), step.k.slice(0, b, b + 1),
                         step.v.slice(0, b, b + 1), {&step.caches[size_t(b)], 1}, 0.125);
    EXPECT_TRUE(at::equal(alone[0], all[b])) << "row " << b;
  }
}

// Caches of a batch, with room for more tokens behind each sequence.
TEST(DecodeAttentionOp, OnCudaRowsOfOneLengthGiveTheSameBits) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  const at::NoGradGuard no_grad;
  const auto options = at::TensorOptions(at::kCUDA).dtype(at::kBFloat16);
  const auto random = [&](at::IntArrayRef sizes) { return at::randn(sizes, options); };
  const at::Tensor q = random({3, 4, 64}), k = random({3, 2, 64}), v = random({3, 2, 64});
  const at::Tensor keys = random({3, 900, 2, 64}).slice(1, 0, 700),
                   values = random({3, 900, 2, 64}).slice(1, 0, 700);
  std::vector<CacheOfRow> rows;
  for (int64_t b = 0; b < 3; ++b)
    rows.push_back({keys.slice(0, b, b + 1).clone(), values.slice(0, b, b + 1).clone()});
  const at::Tensor expected = decode_attention(q, k, v, rows, 0.125);
  EXPECT_TRUE(at::equal(decode_attention(q, k, v, keys, values, 0.125), expected));
  EXPECT_TRUE(at::equal(keys.select(1, 699), k));
  EXPECT_TRUE(at::equal(values.select(1, 699), v));
}

TEST(DecodeAttentionOp, OnCudaMisalignedTokensGiveTheSameBitsAndMisalignedCachesAreRejected) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  const at::NoGradGuard no_grad;
  Step step({4, 2, 64}, at::kBFloat16);
  const at::Tensor expected = step.run(0.125);
  for (at::Tensor* x : {&step.q, &step.k, &step.v}) *x = misaligned(*x);
  EXPECT_TRUE(at::equal(step.run(0.125), expected));
  step.caches[1].k = misaligned(step.caches[1].k);
  EXPECT_THROW(step.run(0.125), c10::ValueError);
}

TEST(DecodeAttentionOp, ServesNoTensorOfTheCpu) {
  const at::NoGradGuard no_grad;
  const at::Tensor q = at::zeros({1, 2, 8});
  const std::vector<CacheOfRow> caches(1);
  EXPECT_FALSE(decode_attention_serves(q));
  EXPECT_THROW(decode_attention(q, q, q, caches, 1), c10::ValueError);
  EXPECT_THROW(decode_attention(q, q, q, {}, 1), c10::ValueError);
}

}  // namespace
}  // namespace assay::ops
