// taylor_exp_attention against its naive twin, golden files, and itself cut in two.
#include <gmock/gmock.h>

#include <cmath>

#include "ops/recurrence/taylor_exp/taylor_exp.h"
#include "ops/recurrences.h"

namespace assay::ops {
namespace {

Operator with(double scale, bool normalize, double eps = 1e-6) {
  return [=](Named a) {
    return taylor_exp_attention(a["q"], a["k"], a["v"], scale, normalize, eps,
                                find(a, "initial_state"));
  };
}
Operator twin(double scale, bool normalize) {
  return [=](Named a) {
    return taylor_exp_attention_reference(a["q"], a["k"], a["v"], scale, normalize, 1e-6,
                                          find(a, "initial_state"));
  };
}

Named random_arguments(int64_t batch, int64_t time, int64_t heads, int64_t key_dim,
                       int64_t value_dim, int64_t key_heads, at::ScalarType dtype = at::kDouble) {
  torch::manual_seed(7);
  auto normal = [&](int64_t h, int64_t dim) {
    return at::randn({batch, time, h, dim}, at::kDouble).to(dtype);
  };
  const int64_t features = 1 + key_dim + key_dim * (key_dim + 1) / 2;
  at::Tensor state = at::randn({batch, heads, features, value_dim + 1}, at::kDouble);
  // Twenty steps of key 0: denominators stay positive
  state.select(-1, value_dim).zero_().select(-1, 0).fill_(20);
  return {{"q", normal(heads, key_dim)},
          {"k", normal(key_heads, key_dim)},
          {"v", normal(key_heads, value_dim)},
          {"initial_state", state.to(dtype == at::kDouble ? at::kDouble : at::kFloat)}};
}

TEST(TaylorExpOp, EqualsItsTwin) {
  for (const bool normalize : {false, true})
    for (const auto& [batch, time, heads, K, V, key_heads] : {std::tuple{2, 1, 2, 3, 4, 2},
                                                              {1, 33, 4, 4, 5, 2},
                                                              {2, 65, 1, 5, 7, 1},
                                                              {1, 101, 2, 6, 66, 2}}) {
      SCOPED_TRACE(testing::Message()
                   << "B " << batch << " T " << time << " H " << heads << " K " << K << " V " << V
                   << " heads of k, v " << key_heads << " seed 7");
      expect_equal_to_twin(with(0.4, normalize), twin(0.4, normalize),
                           random_arguments(batch, time, heads, K, V, key_heads), 1e-11);
    }
}

TEST(TaylorExpOp, SingleAndHalfPrecision) {
  for (const auto& [dtype, tolerance] : {std::pair{at::kFloat, 1e-5}, {at::kBFloat16, 1e-2}})
    expect_equal_to_twin(with(0.4, true), twin(0.4, true),
                         random_arguments(2, 67, 2, 8, 12, 2, dtype), tolerance);
}

TEST(TaylorExpOp, OnCudaEqualsItsTwin) {
  expect_equal_to_twin_on_cuda(with(0.4, true), twin(0.4, true),
                               random_arguments(2, 67, 2, 8, 12, 2));
  expect_equal_to_twin_on_cuda(with(0.25, true), twin(0.25, true),
                               random_arguments(1, 210, 4, 16, 64, 2));
}

TEST(TaylorExpOp, MayBeCutAnywhere) {
  expect_cut_anywhere(with(0.4, true), random_arguments(2, 101, 2, 4, 5, 2), {"q", "k", "v"},
                      {1, 32, 65, 100}, 1e-11);
}

// softmax's weights but for the series: w = 1 + s + s²/2.
TEST(TaylorExpOp, IsAttentionWithTheSeries) {
  Named a = random_arguments(2, 21, 3, 4, 5, 3);
  const auto [out, state] = taylor_exp_attention(a["q"], a["k"], a["v"], 0.3, true, 0);
  const at::Tensor s = 0.3 * at::einsum("bthk,bjhk->bhtj", {a["q"], a["k"]});
  const at::Tensor w = (1 + s + s.square() / 2).tril();
  EXPECT_LE(worst_row_error(out, at::einsum("bhtj,bjhv->bthv", {w / w.sum(-1, true), a["v"]})),
            1e-12);
}

TEST(TaylorExpOp, EqualsTheGoldenFiles) {
  struct Based {
    double scale;
    bool normalize;
    double single;
  };
  // The gradient of a query through a quotient of two sums alike is a difference of
  // nearly equal numbers.
  for (const auto& [name, based] :
       golden_cases<Based>({{"based_T128", {0.25, true, 1e-4}},
                            {"based_T65", {std::pow(8, -0.5), true, 1e-4}},
                            {"based_T65_nonorm", {std::pow(8, -0.5), false, 1e-5}}}))
    expect_equal_to_golden(name, with(based.scale, based.normalize), "o", based.single);
}

// The file has all K² products, each over √2 √K, and x over K^¼: ours has each pair once.
TEST(TaylorExpOp, FeaturesEqualTheGoldenFile) {
  const Named golden = read_golden(golden_file("taylor_exp_d16"));
  const at::Tensor features = taylor_exp_features(golden.at("in.x"));
  const at::Tensor phi = golden.at("out.phi");
  EXPECT_LE(
      worst_row_error(features.narrow(-1, 0, 17) *
                          at::cat({at::ones({1}, at::kDouble), at::full({16}, 0.5, at::kDouble)}),
                      phi.narrow(-1, 0, 17)),
      1e-12);
  const at::Tensor pair = at::triu_indices(16, 16, 0, at::kLong);
  const at::Tensor products = phi.narrow(-1, 17, 256).index_select(-1, pair[0] * 16 + pair[1]);
  EXPECT_LE(worst_row_error(features.narrow(-1, 17, 136) / (std::sqrt(2.0) * 4), products), 1e-12);
  const at::Tensor weights = taylor_exp_weights(16, 0.25, features.options());
  const at::Tensor kernel = at::matmul(features * weights, features.transpose(-1, -2));
  EXPECT_LE(worst_row_error(kernel, at::matmul(phi, phi.transpose(-1, -2))), 1e-12);
}

TEST(TaylorExpOp, NamesTheWrongArgument) {
  const Named good = random_arguments(2, 5, 4, 3, 6, 2);
  auto changed = [&](const std::string& name, auto change) {
    Named bad = good;
    bad[name] = change(bad[name]);
    return message_of(with(1, true), bad);
  };
  EXPECT_EQ(message_of(with(1, true), good), "no error");
  for (const auto& [name, tensor] : good) {
    EXPECT_THAT(changed(name, [](auto t) { return t[0]; }),
                testing::HasSubstr(name + " has shape"));
    EXPECT_THAT(changed(name, [](auto t) { return t.to(at::kInt); }),
                testing::HasSubstr(name + " holds Int"));
  }
  EXPECT_THAT(changed("q", [](auto t) { return t.narrow(1, 0, 0); }),
              testing::HasSubstr("q has shape"));
  for (const double eps : {-1.0, std::nan(""), HUGE_VAL})
    EXPECT_THAT(message_of(with(1, true, eps), good), testing::HasSubstr("eps is "));
}

}  // namespace
}  // namespace assay::ops
