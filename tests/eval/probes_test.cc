// Probes on mixers whose truth is known, and on every mixer of the registry.
#include "eval/probes.h"

#include <torch/torch.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "data/folder.h"
#include "data/store_writer.h"
#include "nn/testing.h"

namespace assay::eval {
namespace {

constexpr int64_t kTime = 41;
constexpr int64_t kModel = 12;
using data::Folder, data::message_of;

at::Tensor input(int64_t time = kTime) {
  return at::randn({2, time, kModel}, nn::generator("input"), at::kDouble);
}

// y = A x with a matrix A [T, T] that nothing in x changes.
struct Fixed final : nn::Mixer {
  explicit Fixed(at::Tensor matrix) : A(std::move(matrix)) {}
  at::Tensor forward(const at::Tensor& x, nn::State&) override { return A.matmul(x); }
  double mixing_flops(int64_t) const override { return 0; }
  at::Tensor A;
};
// A[t, j] = f(t − j), f(n) = 0 for n < 0.
template <class F>
Fixed by_distance(F f) {
  at::Tensor A = at::zeros({kTime, kTime}, at::kDouble);
  for (int64_t t = 0; t < kTime; ++t)
    for (int64_t j = 0; j <= t; ++j) A[t][j] = f(t - j);
  return Fixed(A);
}

std::shared_ptr<nn::Mixer> registered(const std::string& name, const std::string& table,
                                      double size = 1) {
  const auto mixer = nn::mixers().at(name).make(ConfigNode::parse(table), kModel);
  const at::NoGradGuard no_grad;
  mixer->to(at::kDouble);
  mixer->initialise(1);
  at::Generator noise = nn::generator(table);
  for (at::Tensor& parameter : mixer->parameters())
    parameter.add_(at::randn(parameter.sizes(), noise, parameter.options()),
                   size / std::sqrt(double(kModel)));
  return mixer;
}

// The queries of the default options: positions 20, 23, … 40.
std::vector<int64_t> queries() { return {20, 23, 26, 29, 31, 34, 37, 40}; }
template <class F>
double mean_over_queries(F f) {
  double sum = 0;
  for (const int64_t t : queries()) sum += f(double(t));
  return sum / double(queries().size());
}

TEST(Probes, AMeanOfAllPositionsSeesAllAlike) {
  Fixed mean = by_distance([](int64_t) { return 1.0; });
  const Influence found = probe(mean, input());
  EXPECT_DOUBLE_EQ(found.visibility, 1);
  EXPECT_NEAR(found.uniformity, 1, 1e-12);
  EXPECT_TRUE(std::isnan(found.real_relation)) << "nothing tells positions apart";
}

TEST(Probes, AConvolutionSeesItsTapsAndNoContent) {
  Fixed convolution = by_distance([](int64_t n) { return n < 4 ? 1.0 / double(n + 1) : 0; });
  const Influence found = probe(convolution, input());
  EXPECT_NEAR(found.visibility, mean_over_queries([](double t) { return 3 / t; }), 1e-12);
  const double sum = 1 / 2. + 1 / 3. + 1 / 4.;
  double entropy = 0;
  for (const double w : {1 / 2. / sum, 1 / 3. / sum, 1 / 4. / sum}) entropy -= w * std::log(w);
  EXPECT_NEAR(found.uniformity, mean_over_queries([&](double t) { return entropy / std::log(t); }),
              1e-12);
  EXPECT_NEAR(found.real_relation, 0, 1e-12);
}

TEST(Probes, AFixedDecayIsForgottenAtTheThreshold) {
  Fixed decay = by_distance([](int64_t n) { return std::pow(0.5, double(n)); });
  // 2⁻⁶ > 0.01 > 2⁻⁷ of the nearest
  const Influence found = probe(decay, input(), {.threshold = 1e-2});
  EXPECT_NEAR(found.visibility, mean_over_queries([](double t) { return 7 / t; }), 1e-12);
  EXPECT_NEAR(found.real_relation, 0, 1e-12);
}

TEST(Probes, AttentionFollowsTheContent) {
  const auto attention = registered("attention", "num_heads = 1\nposition = \"none\"", 0.5);
  const Influence found = probe(*attention, input());
  EXPECT_GT(found.visibility, 0.99);
  EXPECT_NEAR(found.real_relation, 1, 1e-9);
  const Influence rotary = probe(*registered("attention", "num_heads = 1\n"), input());
  EXPECT_GT(rotary.real_relation, 0.5);
  EXPECT_GT(rotary.visibility, 0.9);
}

TEST(Probes, AttentionToConstantKeysDoesNot) {
  for (const char* constants : {"keys", "queries_and_keys"}) {
    const std::string table =
        fmt::format("num_heads = 1\nmax_positions = 41\nconstants = \"{}\"", constants);
    const auto attention = registered("attention", table);
    const Influence found = probe(*attention, input());
    EXPECT_GT(found.visibility, 0.9) << constants;
    EXPECT_NEAR(found.real_relation, 0, 1e-9) << constants;
    // One head: the influence of j is the weight of j times a matrix, so uniformity is the entropy
    // of the weights.
    const at::Tensor weights = attention->attention_weights(input())[0][0];
    double uniformity = 0;
    for (const int64_t t : queries()) {
      const at::Tensor w = weights[t].slice(0, 0, t) / weights[t].slice(0, 0, t).sum();
      uniformity -=
          at::xlogy(w, w).sum().item<double>() / std::log(double(t)) / double(queries().size());
    }
    if (std::string(constants) == "queries_and_keys")
      EXPECT_NEAR(found.uniformity, uniformity, 1e-9);
  }
}

TEST(Probes, AWindowIsSeenAndNothingBefore) {
  const Influence found = probe(
      *registered("attention", "num_heads = 1\nwindow = 8\nposition = \"none\"", 0.5), input());
  EXPECT_NEAR(found.visibility, mean_over_queries([](double t) { return 7 / t; }), 1e-12);
  EXPECT_GT(found.real_relation, 0.5);
  const Influence none = probe(*registered("attention", "num_heads = 1\nwindow = 1"), input());
  EXPECT_EQ(none.visibility, 0);
  EXPECT_EQ(none.uniformity, 0);
  EXPECT_TRUE(std::isnan(none.real_relation));
}

TEST(Probes, ALowerTemperatureIsLessUniform) {
  double last = 1;
  for (const double temperature : {1.0, 0.3, 0.1, 0.03}) {
    const auto attention = registered(
        "attention", fmt::format("num_heads = 1\nqk_norm = true\ntemperature = {}", temperature));
    const double entropy = attention_entropy(attention->attention_weights(input()))[0];
    EXPECT_LT(entropy, last) << "temperature " << temperature;
    EXPECT_GT(entropy, 0);
    last = entropy;
  }
  EXPECT_NEAR(attention_entropy(at::ones({1, 2, kTime, kTime}).tril() /
                                (at::arange(kTime) + 1).unsqueeze(1))[1],
              1, 1e-6);
}

TEST(Probes, EveryMixerOfTheRegistryCanBeAsked) {
  for (const std::string& name : nn::mixers().names()) {
    const auto mixer =
        nn::mixers().at(name).make(ConfigNode::parse(nn::mixers().at(name).examples.at(0)), 48);
    const at::NoGradGuard no_grad;
    mixer->initialise(1);
    at::Generator noise = nn::generator(name);
    for (at::Tensor& parameter : mixer->parameters())  // an output projection may begin as zero
      parameter.add_(at::randn(parameter.sizes(), noise), 0.2);
    const at::Tensor x = at::randn({1, 33, 48}, noise);
    const Influence found = probe(*mixer, x, {.queries = 4, .cotangents = 2});
    const Influence again = probe(*mixer, x, {.queries = 4, .cotangents = 2});
    EXPECT_GT(found.visibility, 0) << name;
    EXPECT_LE(found.visibility, 1) << name;
    EXPECT_GE(found.uniformity, 0) << name;
    EXPECT_LE(found.uniformity, 1 + 1e-9) << name;
    EXPECT_GE(found.real_relation, 0) << name;
    EXPECT_EQ(found.uniformity, again.uniformity) << name << ": the same numbers every time";
  }
}

TEST(Probes, AModelIsProbedLayerByLayer) {
  const auto model = nn::random_model(
      "[model]\nvocab_size = 16\nd_model = 16\nnum_layers = 3\npattern = ['attention', "
      "'mamba1']\n[model.attention]\nnum_heads = 2\nwindow = 3\n");
  const auto found = probe(*model, nn::random_tokens(2, 32, 16, "tokens"));
  ASSERT_EQ(found.layers.size(), 3u);
  EXPECT_EQ(found.layers[1].mixer, "mamba1");
  EXPECT_EQ(found.layers[0].attention_entropy.size(), 2u) << "a head an entry";
  EXPECT_TRUE(found.layers[1].attention_entropy.empty());
  EXPECT_LT(found.layers[2].visibility, 0.2) << "two positions of at least sixteen";
  EXPECT_GT(found.layers[1].visibility, 0.2);
  const double mean =
      (found.layers[0].visibility + found.layers[1].visibility + found.layers[2].visibility) / 3;
  EXPECT_NEAR(found.mean.visibility, mean, 1e-12);
  const auto entropy = attention_entropy(*model, nn::random_tokens(2, 32, 16, "tokens"));
  ASSERT_EQ(entropy.size(), 3u);
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(entropy[i], found.layers[i].attention_entropy) << i;
  const auto recurrent =
      nn::random_model("[model]\nvocab_size = 16\nd_model = 16\npattern = ['mamba1']\n");
  EXPECT_TRUE(attention_entropy(*recurrent, nn::random_tokens(1, 32, 16, "tokens")).empty());
}

TEST(Probes, TokensAreTheBeginningsOfTheLongestTexts) {
  const Folder folder;
  data::StoreWriter writer(folder / "s", {"none", "", 16, 0});
  for (const std::vector<int32_t>& document : {std::vector<int32_t>{1, 2},
                                               {3, 4, 5, 6, 7, 8, 9},
                                               {9, 8, 7, 6, 5},
                                               {1, 1, 1, 1, 1, 1, 1, 1, 1, 1}})
    writer.add("a", "test", document, 1);
  writer.commit();
  const data::TokenStore store(folder / "s");
  const at::Tensor tokens = probe_tokens(store, "a.test", 8, 2);
  const std::vector<int64_t> expected = {0, 3, 4, 5, 6, 7, 8, 9, 0, 1, 1, 1, 1, 1, 1, 1};
  EXPECT_TRUE(at::equal(tokens.flatten(), at::tensor(expected))) << tokens;
  EXPECT_EQ(probe_tokens(store, "a.test", 8, 4).sizes(), (std::vector<int64_t>{3, 6}))
      << "as long as the shortest, and that is not below half of the longest";
  Fixed mean(at::ones({3, 3}, at::kDouble));
  EXPECT_NE(message_of([&] { probe(mean, input(3)); }).find("at least 4 positions, got 3"),
            std::string::npos);
}

}  // namespace
}  // namespace assay::eval
