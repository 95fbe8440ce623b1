// Proofs that a shortlist's choice is Exact's, and Exact's choice where there is none.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "ops/attention_arguments.h"
#include "ops/top1_chunk/top1_chunk.h"

namespace assay::ops {
namespace {

constexpr int64_t kChunk = 16;
using Result = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

Result run(const Qkv& a, double scale, const std::string& selection, int64_t top_k,
           bool fall_back = false, const std::optional<at::Tensor>& summaries = {}) {
  return top1_chunk(a.q, a.k, a.v, kChunk, scale, selection, top_k, {}, /*shortlist=*/top_k,
                    /*rank=*/0, summaries, fall_back);
}
// Keys that keep to their chunk's centre, the more the smaller `spread` is.
Qkv clustered(const Shape& shape, double spread) {
  Qkv a = random_qkv(shape);
  const int64_t size = a.k.size(1);
  const at::Tensor centre = a.k.index_select(1, at::arange(size).floor_divide(kChunk) * kChunk);
  return {a.q, centre + spread * a.k, a.v};
}

TEST(Top1Certified, WhatIsProvedIsExact) {
  for (const double spread : {0.0, 0.03, 0.1, 1.0})
    for (const int64_t top_k : {1, 2})
      for (const auto dtype : {at::kDouble, at::kFloat}) {
        SCOPED_TRACE(testing::Message()
                     << "spread " << spread << " top_k " << top_k << " " << dtype << " seed 7");
        const Qkv a = clustered({.time = 333}, spread).as(dtype);
        const at::Tensor listed = std::get<2>(run(a, 8, "shortlist", top_k)),
                         proved = top1_certified(a.q, a.k, listed, kChunk, 8, top_k);
        const at::Tensor same = (listed == std::get<2>(run(a, 8, "exact", top_k))).all(-1);
        EXPECT_FALSE((proved & ~same).any().item<bool>());
        const double share =
            proved.slice(2, (top_k + 1) * kChunk).to(at::kDouble).mean().item<double>();
        EXPECT_TRUE(proved.slice(2, 0, (top_k + 1) * kChunk).all().item<bool>())
            << "no candidate is left out";
        if (spread == 0) EXPECT_GT(share, 0.9) << "a chunk of equal keys scores what its mean does";
        else if (spread == 1) EXPECT_EQ(share, 0) << "keys lie everywhere";
        else EXPECT_TRUE(share > 0.02 && share < 0.98) << share;
      }
}

// The bound holds for every chunk, and is not far off where keys are close.
TEST(Top1Certified, NothingThatLosesIsProved) {
  const Qkv a = clustered({.time = 200}, 0.05);
  const at::Tensor exact = std::get<2>(run(a, 8, "exact", 1)),
                   wrong = at::where(exact > 0, exact - 1, exact + 1);
  const at::Tensor own = at::arange(200).floor_divide(kChunk),
                   chosen = at::where(wrong < own.unsqueeze(1), wrong, -1);
  const at::Tensor proved = top1_certified(a.q, a.k, chosen, kChunk, 8, /*shortlist=*/1);
  EXPECT_FALSE((proved.slice(2, 2 * kChunk) & (chosen.slice(2, 2 * kChunk).squeeze(-1) >= 0))
                   .any()
                   .item<bool>());
}

TEST(Top1Certified, DependsOnCandidatesAlone) {
  const Qkv a = clustered({.time = 200}, 0);
  const at::Tensor exact = std::get<2>(run(a, 8, "exact", 1));
  const auto proved = [&](const at::Tensor& k, const at::Tensor& chosen) {
    return top1_certified(a.q, k, chosen, kChunk, 8, /*shortlist=*/1).slice(2, 2 * kChunk, 150);
  };
  for (const int64_t none : {int64_t{-1}, int64_t{9999}, int64_t{12}})
    EXPECT_FALSE(proved(a.k, at::full_like(exact, none)).any().item<bool>()) << none;
  at::Tensor later = a.k.clone();
  later.slice(1, 160) *= 1e6;
  EXPECT_TRUE(at::equal(proved(later, exact), proved(a.k, exact)));
}

TEST(Top1Certified, TheRestFallsBackToExact) {
  for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16})
    for (const double spread : {0.05, 1.0}) {
      SCOPED_TRACE(testing::Message() << dtype << " spread " << spread << " seed 7");
      const Qkv a = clustered({.time = 150}, spread).as(dtype);
      const auto [out, logsumexp, selected] = run(a, 8, "shortlist", 2, true);
      const auto [expected, expected_logsumexp, exact] = run(a, 8, "exact", 2);
      EXPECT_TRUE(at::equal(selected, exact));
      EXPECT_TRUE(at::equal(out, expected) && at::equal(logsumexp, expected_logsumexp));
      const at::Tensor weights = at::randn_like(out);
      const auto found = a.gradients(out, weights), wanted = a.gradients(expected, weights);
      for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(at::equal(found[i], wanted[i])) << "qkv"[i];
    }
  EXPECT_FALSE(at::equal(std::get<2>(run(random_qkv({.time = 150}), 8, "shortlist", 1)),
                         std::get<2>(run(random_qkv({.time = 150}), 8, "exact", 1))));
}

// With a margin, a list may lack candidates though they are fewer than the shortlist.
TEST(Top1Certified, WhatAMarginLeavesOutFallsBackToExact) {
  const Qkv a = random_qkv({.time = 60});
  const auto choice = [&](const std::string& selection, bool fall_back) {
    return std::get<2>(top1_chunk(a.q, a.k, a.v, kChunk, 8, selection, 1, {}, /*shortlist=*/4,
                                  /*rank=*/0, {}, fall_back, /*margin=*/1e-9));
  };
  EXPECT_TRUE(at::equal(choice("shortlist", true), choice("exact", false)));
  EXPECT_FALSE(at::equal(choice("shortlist", false), choice("exact", false)));
}

TEST(Top1Certified, FallsBackWhileDecodingToo) {
  const at::NoGradGuard no_grad;
  for (const int64_t time : {1, 5, 40}) {
    const Qkv a = random_qkv({.time = time, .past = 100});
    const auto found = run(a, 8, "shortlist", 1, true, chunk_summaries(a.k, kChunk)),
               wanted = run(a, 8, "exact", 1);
    EXPECT_TRUE(at::equal(std::get<2>(found), std::get<2>(wanted))) << time;
    EXPECT_LE(worst_row_error(std::get<0>(found), std::get<0>(wanted)), 1e-12) << time;
  }
}

TEST(Top1Certified, OnCudaTheRestFallsBackToExact) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
  const at::NoGradGuard no_grad;
  const Qkv a = random_qkv({.time = 1000, .head_dim = 64}).as(at::kBFloat16, at::kCUDA);
  const auto chosen = [&](const char* selection, bool fall_back) {
    return std::get<2>(top1_chunk(a.q, a.k, a.v, 64, 8, selection, 1, {}, 2, 1, {}, fall_back));
  };
  EXPECT_TRUE(at::equal(chosen("shortlist", true), chosen("exact", false)));
  EXPECT_FALSE(at::equal(chosen("shortlist", false), chosen("exact", false)));
}

TEST(Top1Certified, NamesTheWrongArgument) {
  const Qkv a = random_qkv({.time = 40});
  const auto message = [&](const at::Tensor& selected, int64_t chunk_size) {
    try {
      top1_certified(a.q, a.k, selected, chunk_size, 8, 1);
    } catch (const c10::ValueError& error) {
      return std::string(error.what_without_backtrace());
    }
    return std::string("no error");
  };
  const at::Tensor none = at::full({2, 4, 40, 1}, -1, at::kLong);
  EXPECT_EQ(message(none, 16), "no error");
  EXPECT_THAT(message(none.squeeze(-1), 16), testing::HasSubstr("selected has shape [2, 4, 40]"));
  EXPECT_THAT(message(none.slice(2, 1), 16),
              testing::HasSubstr("selected has shape [2, 4, 39, 1]"));
  EXPECT_THAT(message(none.to(at::kFloat), 16), testing::HasSubstr("selected holds Float"));
  EXPECT_THAT(message(none, 0), testing::HasSubstr("chunk_size is 0"));
}

}  // namespace
}  // namespace assay::ops
