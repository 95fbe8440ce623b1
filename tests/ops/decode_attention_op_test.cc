// A decode step of sequences at positions of their own, against attention of each row alone.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "ops/attention/decode_attention/decode_attention.h"
#include "ops/attention/rotary_qkv/rotary_qkv.h"
#include "ops/attention/window_attention/window_attention.h"
#include "ops/core/asynchronous.h"
#include "ops/golden.h"

namespace assay::ops {
namespace {

struct Shape {
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;
  bool alibi = false;
  bool rotary = false;
  bool norm = false;
};

// `kRoom`: steps past the new token
constexpr int64_t kLongest = 3000;
constexpr int64_t kRoom = 40;
// Positions of the new tokens; −1 for a row that is not used.
const std::vector<int64_t> kPositions = [] {
  std::vector<int64_t> positions = {0, 1, 7, 8, 255, 256, 257, -1, 1023, 3000, 511, 512};
  for (int64_t b = int64_t(positions.size()); b < 65; ++b) positions.push_back(13 * b % 700);
  return positions;
}();

at::Tensor in_double(const at::Tensor& x) { return x.to(at::kCPU, at::kDouble); }
std::optional<at::Tensor> in_double(const std::optional<at::Tensor>& x) {
  return x ? std::optional(in_double(*x)) : std::nullopt;
}

struct Step {
  at::Tensor q;
  at::Tensor k;
  at::Tensor v;
  at::Tensor positions;
  at::Tensor addresses;
  // NaN from the new token on
  std::vector<at::Tensor> keys;
  std::vector<at::Tensor> values;
  DecodeOptions options;

  Step(const Shape& s, at::ScalarType dtype) {
    torch::manual_seed(11);
    const auto like = at::TensorOptions(at::kCUDA).dtype(dtype);
    const auto rows = int64_t(kPositions.size());
    // Parts of one projection, as a layer makes them.
    const at::Tensor all = at::randn({rows, s.heads + 2 * s.kv_heads, s.head_dim}, like);
    q = all.slice(1, 0, s.heads);
    k = all.slice(1, s.heads, s.heads + s.kv_heads);
    v = all.slice(1, s.heads + s.kv_heads);
    options.scale = 2 / std::sqrt(double(s.head_dim));
    if (s.alibi) options.alibi_slopes = at::rand({s.heads}, at::kCUDA) * 0.05;
    if (s.norm) options.norm_scale = 10 * at::rand({s.heads}, at::kCUDA);
    if (s.rotary) {
      const at::Tensor angles = at::randn({kLongest + 1, s.head_dim / 2}, at::kCUDA);
      options.cos = angles.cos();
      options.sin = angles.sin();
    }
    at::Tensor places = at::zeros({rows, 2}, at::kLong);
    for (int64_t b = 0; b < rows; ++b)
      for (auto* caches : {&keys, &values}) {
        const int64_t position = std::max<int64_t>(kPositions[size_t(b)], 0);
        caches->push_back(at::randn({position + kRoom, s.kv_heads, s.head_dim}, like));
        caches->back().slice(0, position).fill_(NAN);
        places[b][caches == &values] = reinterpret_cast<int64_t>(caches->back().data_ptr());
      }
    positions = at::tensor(kPositions, at::kLong).to(at::kCUDA);
    addresses = places.to(at::kCUDA);
  }
  at::Tensor run() const { return decode_attention(q, k, v, positions, addresses, options); }

  // q, k and v [1, 1, heads, D] of a row, rotated and divided by their length, in float64.
  std::array<at::Tensor, 3> new_token(int64_t b) const {
    const auto row = [](const at::Tensor& x) { return in_double(x).unsqueeze(0).unsqueeze(0); };
    const int64_t position = kPositions[size_t(b)];
    const at::Tensor none = at::zeros({1, q.size(2) / 2}, at::kDouble);
    const auto angle = [&](const std::optional<at::Tensor>& table, const at::Tensor& otherwise) {
      return table ? in_double(table->slice(0, position, position + 1)) : otherwise;
    };
    const auto [turned, key] =
        rotary_qk_reference(row(at::cat({q[b], k[b]})), k.size(1), angle(options.cos, none + 1),
                            angle(options.sin, none), in_double(options.norm_scale));
    return {turned, key, row(v[b])};
  }
};

TEST(DecodeAttentionOp, OnCudaEqualsAttentionOfEachRow) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  const at::NoGradGuard no_grad;
  for (const Shape& shape :
       {Shape{12, 12, 64, false, true}, Shape{8, 2, 128, true}, Shape{6, 3, 40},
        Shape{2, 1, 256, false, true, true}, Shape{5, 5, 8, true}, Shape{12, 1, 24},
        Shape{3, 3, 248}, Shape{6, 2, 48, true, true, true}, Shape{4, 4, 16, false, true},
        Shape{2, 2, 40, false, false, true}})
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      SCOPED_TRACE(testing::Message() << shape.heads << " heads of " << shape.head_dim << ", "
                                      << shape.kv_heads << " of k and v, rotary " << shape.rotary
                                      << ", norm " << shape.norm << ", " << dtype);
      const Step step(shape, dtype);
      const at::Tensor out = step.run();
      EXPECT_EQ(out.scalar_type(), dtype);
      EXPECT_TRUE(at::equal(step.run(), out)) << "not repeatable";
      for (size_t b = 0; b < kPositions.size(); ++b) {
        const auto row = int64_t(b);
        const int64_t position = kPositions[b];
        if (position < 0) {
          EXPECT_EQ(out[row].abs().max().item<float>(), 0);
          EXPECT_TRUE(step.keys[b].isnan().all().item<bool>());
          continue;
        }
        const auto [q, k, v] = step.new_token(row);
        const double limit = dtype == at::kFloat ? 3e-6 : 5e-3;
        const auto error = [](const at::Tensor& x, const at::Tensor& expected) {
          return ((in_double(x) - expected).norm() / expected.norm()).item<double>();
        };
        EXPECT_LE(error(step.keys[b][position], k[0][0]), limit) << "key of row " << b;
        EXPECT_TRUE(at::equal(step.values[b][position], step.v[row])) << "row " << b;
        EXPECT_TRUE(step.keys[b].slice(0, position + 1).isnan().all().item<bool>());
        const auto cache = [&](const at::Tensor& x) {
          return in_double(x.slice(0, 0, position + 1)).unsqueeze(0);
        };
        // The kernel rounds the query to its dtype, too.
        const at::Tensor expected = window_attention_reference(
            in_double(q.to(dtype)), cache(step.keys[b]), cache(step.values[b]), position + 1,
            step.options.scale, in_double(step.options.alibi_slopes))[0][0];
        EXPECT_LE(error(out[row], expected), limit) << "row " << b;
      }
    }
}

// Positions and addresses are those at the time of the replay.
TEST(DecodeAttentionOp, OnCudaCapturedStepFollowsPositionsAndAddresses) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  const at::NoGradGuard no_grad;
  Step step({12, 4, 64, false, true}, at::kBFloat16);
  const at::Tensor expected = step.run();
  at::Tensor out;
  const auto replay = captured(at::kCUDA, [&] { out = step.run(); });
  replay();
  EXPECT_TRUE(at::equal(out, expected));
  const at::Tensor positions = step.positions.clone();
  const at::Tensor addresses = step.addresses.clone();
  step.positions.copy_(positions.flip(0));
  step.addresses.copy_(addresses.flip(0));
  replay();
  const at::Tensor flipped = out.clone();
  EXPECT_TRUE(at::equal(step.run(), flipped));
  EXPECT_FALSE(at::equal(flipped, expected));
}

TEST(DecodeAttentionOp, OnCudaBitsOfARowDoNotDependOnTheOtherRows) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  const at::NoGradGuard no_grad;
  const Step step({12, 12, 64, false, true}, at::kBFloat16);
  const at::Tensor all = step.run();
  for (const int64_t b : {0, 4, 9, 64}) {
    const auto row = [b](const at::Tensor& x) { return x.slice(0, b, b + 1); };
    const at::Tensor alone =
        decode_attention(row(step.q), row(step.k), row(step.v), row(step.positions),
                         row(step.addresses), step.options);
    EXPECT_TRUE(at::equal(alone[0], all[b])) << "row " << b;
  }
}

// Caches of a batch, with room for more tokens after each sequence.
TEST(DecodeAttentionOp, OnCudaRowsOfOneLengthGiveTheSameBits) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  const at::NoGradGuard no_grad;
  const auto options = at::TensorOptions(at::kCUDA).dtype(at::kBFloat16);
  const auto random = [&](at::IntArrayRef sizes) { return at::randn(sizes, options); };
  const at::Tensor q = random({3, 4, 64});
  const at::Tensor k = random({3, 2, 64});
  const at::Tensor v = random({3, 2, 64});
  const at::Tensor keys = random({3, 900, 2, 64}).slice(1, 0, 700);
  const at::Tensor values = random({3, 900, 2, 64}).slice(1, 0, 700);
  std::vector<at::Tensor> own;
  at::Tensor addresses = at::zeros({3, 2}, at::kLong);
  for (int64_t b = 0; b < 3; ++b)
    for (const at::Tensor& cache : {keys, values}) {
      own.push_back(cache[b].clone());
      addresses[b][int64_t(own.size() + 1) % 2] = reinterpret_cast<int64_t>(own.back().data_ptr());
    }
  const at::Tensor angles = at::randn({800, 32}, at::kCUDA);
  const DecodeOptions rotary{.scale = 0.125, .cos = angles.cos(), .sin = angles.sin()};
  const at::Tensor expected = decode_attention(
      q, k, v, at::full({3}, 699, options.dtype(at::kLong)), addresses.to(at::kCUDA), rotary);
  EXPECT_TRUE(at::equal(decode_attention(q, k, v, keys, values, 699, rotary), expected));
  EXPECT_TRUE(at::equal(keys[2], own[4]));
  EXPECT_TRUE(at::equal(values.select(1, 699), v));
}

TEST(DecodeAttentionOp, OnCudaMisalignedTokensGiveTheSameBitsAndMisalignedCachesAreRejected) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  const at::NoGradGuard no_grad;
  Step step({4, 2, 64}, at::kBFloat16);
  const at::Tensor expected = step.run();
  for (at::Tensor* x : {&step.q, &step.k, &step.v}) *x = misaligned(*x);
  EXPECT_TRUE(at::equal(step.run(), expected));
  const at::Tensor cache = at::zeros({65, 9, 2, 64}, step.q.options());
  EXPECT_THROW(decode_attention(step.q, step.k, step.v, cache, misaligned(cache), 8, {}),
               c10::ValueError);
}

TEST(DecodeAttentionOp, ServesNoTensorOfTheCpu) {
  const at::NoGradGuard no_grad;
  const at::Tensor q = at::zeros({1, 2, 8});
  const at::Tensor cache = at::zeros({1, 1, 2, 8});
  EXPECT_FALSE(decode_attention_serves(q.options(), 8));
  EXPECT_THROW(decode_attention(q, q, q, cache, cache, 0, {}), c10::ValueError);
}

}  // namespace
}  // namespace assay::ops
