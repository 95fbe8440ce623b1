#include "stats/degradation.h"

#include <gtest/gtest.h>

#include <chrono>
#include <limits>

#include "base/error.h"
#include "percentile_bootstrap.h"

namespace assay::stats {
namespace {

// A run at the pre-training losses given, whose OOD loss is p + `above` on two documents of 10
// and 30 tokens.
Run run(double above, const std::vector<double>& losses = {5, 4, 3}, double difference = 0) {
  Run run{int64_t(above * 100), {}};
  for (size_t k = 0; k < losses.size(); ++k) {
    const double loss = losses[k] + above;
    run.curve.push_back(
        {double(k + 1),
         losses[k],
         {{"code", {{10 * (loss + 3 * difference), 30 * (loss - difference)}, {10, 30}}}}});
  }
  return run;
}

std::string message_of(const Runs& a, const Runs& b) {
  try {
    degradation(a, b);
  } catch (const BadInput& error) {
    return error.what();
  }
  return "";
}

TEST(Degradation, ByHandFromSeeds) {
  // Means 0.2 and 0 above; squares 0.02 + 0.02 with 2 degrees of freedom; the documents agree, so
  // they add nothing.
  const Degradation d = degradation({run(0.1), run(0.3)}, {run(-0.1), run(0.1)});
  EXPECT_EQ(d.problem, "");
  EXPECT_EQ(d.loss_low, 3);
  EXPECT_EQ(d.loss_high, 5);
  EXPECT_NEAR(d.average.estimate, 0.2, 1e-12);
  EXPECT_NEAR(d.average.high - 0.2, 4.30265273 * std::sqrt(0.02), 1e-8);
  EXPECT_NEAR(d.domains.at("code").low, d.average.low, 1e-12);
  EXPECT_EQ(d.seed_freedom, 2);
  EXPECT_NEAR(d.seed_error, std::sqrt(0.02), 1e-12);
  EXPECT_NEAR(d.document_error, 0, 1e-12);
}

TEST(Degradation, OneSeedCountsDocumentsOnlyAndSaysSo) {
  // Δ of the documents 0.5 and 0.1 a token, ratio 0.2; residuals ±3/40, weights ¼ and ¾.
  const Degradation d = degradation({run(0.2, {5, 4, 3}, 0.1)}, {run(0)});
  EXPECT_EQ(d.seed_freedom, 0);
  EXPECT_NEAR(d.average.estimate, 0.2, 1e-12);
  const double concentration = 1.0 / 16 + 9.0 / 16;
  const double variance =
      9.0 / 1600 * (1 / (1 - 0.5 + concentration) + 1 / (1 - 1.5 + concentration));
  EXPECT_NEAR(d.document_error, std::sqrt(variance), 1e-12);
  EXPECT_NEAR(d.average.high, 0.2 + 12.7062047 * std::sqrt(variance), 1e-6)
      << "1.6 effective documents: 1 degree";
}

TEST(Degradation, DomainsAreAveraged) {
  auto a = run(0.3);
  auto b = run(0);
  for (auto* r : {&a, &b})
    for (Point& point : r->curve) point.out_of_domain["prose"] = {{100, 100}, {50, 50}};
  const Degradation d = degradation({a}, {b});
  EXPECT_NEAR(d.domains.at("code").estimate, 0.3, 1e-12);
  EXPECT_NEAR(d.domains.at("prose").estimate, 0, 1e-12);
  EXPECT_NEAR(d.average.estimate, 0.15, 1e-12);
}

TEST(Degradation, IsReadAtEqualPretrainingLoss) {
  // Both lie on one line; the faster one is lower at every evaluation, yet nothing is degraded.
  EXPECT_NEAR(degradation({run(0, {4.5, 3.5, 2.5})}, {run(0)}).average.estimate, 0, 1e-12);
  EXPECT_NEAR(degradation({run(0.1, {4.5, 3.5, 2.5})}, {run(0)}).average.estimate, 0.1, 1e-12);
}

TEST(Degradation, ACopyIsNotDegraded) {
  const Study study = Simulation({.architecture_document = 0.2, .seed_document = 0.1}, 0).study();
  const Degradation d = degradation(study.architecture, study.architecture);
  EXPECT_EQ(d.average.estimate, 0);
  EXPECT_TRUE(d.average.low <= 0 && 0 <= d.average.high);
}

TEST(Degradation, ThePoolAddsDegreesOfFreedomOnce) {
  const Runs a{run(0.1), run(0.3)};
  const Runs b{run(-0.1), run(0.1)};
  const Runs c{run(1), run(1.2)};
  const Runs elsewhere{run(0, {9, 8, 7})};
  const Runs one{run(3)};
  const std::vector<const Runs*> pair{&a, &b};
  const std::vector<const Runs*> study{&a, &b, &c, &elsewhere, &one};
  EXPECT_EQ(degradation(a, b, {}, pair).seed_freedom, 2);
  EXPECT_EQ(degradation(a, b, {}, study).seed_freedom, 3);
  EXPECT_NEAR(degradation(a, b, {}, study).seed_error, std::sqrt(0.02), 1e-12);
}

TEST(Degradation, ProblemsAreSaidNotGuessed) {
  auto nothing = run(0);
  auto single = run(0);
  auto infinite = run(0);
  infinite.curve[0].out_of_domain["code"].nll[1] = std::numeric_limits<double>::infinity();
  const auto problem = [](const Runs& a, const Runs& b) { return degradation(a, b).problem; };
  EXPECT_EQ(problem({}, {run(0)}), "the architecture has no runs");
  EXPECT_EQ(problem({run(0)}, {{4, {}}}), "seed 4 of the reference has no evaluations");
  EXPECT_NE(problem({run(0, {9, 8, 7})}, {run(0)}).find("share no range"), std::string::npos);
  EXPECT_EQ(problem({run(0, {5, std::nan(""), 3})}, {run(0)}),
            "seed 0 of the architecture has a pre-training loss of nan at 2 tokens");
  EXPECT_EQ(problem({infinite}, {run(0)}),
            "seed 0 of the architecture has a loss of inf on domain 'code' at 1 tokens");
  for (Point& point : nothing.curve) point.out_of_domain.clear();
  for (Point& point : single.curve) point.out_of_domain["code"] = {{0, 0}, {0, 0}};
  EXPECT_EQ(problem({nothing}, {nothing}), "the runs were evaluated on no out-of-domain documents");
  EXPECT_EQ(problem({single}, {single}), "domain 'code' has no document with tokens to predict");
}

TEST(Degradation, OtherDocumentsAreRefusedByDomain) {
  auto extra = run(0);
  auto missing = run(0);
  auto shorter = run(0);
  auto other = run(0);
  extra.curve[0].out_of_domain["prose"];
  EXPECT_NE(message_of({run(0)}, {extra}).find("domain 'prose' is present at 1 tokens"),
            std::string::npos);
  missing.curve[1].out_of_domain.erase("code");
  shorter.curve[2].out_of_domain["code"] = {{1}, {1}};
  other.curve[0].out_of_domain["code"].tokens[0] = 11;
  EXPECT_NE(message_of({run(0)}, {missing}).find("domain 'code' is missing at 2 tokens"),
            std::string::npos);
  for (const auto& wrong : {shorter, other})
    EXPECT_NE(message_of({run(0)}, {wrong}).find("domain 'code'"), std::string::npos);
  EXPECT_THROW(degradation({run(0)}, {run(0)}, {.level = 95}), BadInput);
}

TEST(Degradation, VarianceIsThatOfTheHierarchicalBootstrap) {
  constexpr int seeds = 12;
  constexpr int resamples = 400;
  const Setting setting{.seeds = seeds,
                        .reference_seeds = seeds,
                        .documents = 60,
                        .evaluations = 6,
                        .architecture_document = 0.05,
                        .length_spread = 0.5};
  for (uint64_t r = 0; r < 3; ++r) {
    const Study study = Simulation(setting, r).study();
    const auto draws = percentile_bootstrap(study, resamples, r);
    const double centre = mean(draws);
    double square = 0;
    for (const double x : draws) square += (x - centre) * (x - centre) / (resamples - 1);
    const Degradation d = degradation(study.architecture, study.reference);
    const double unbiased =
        d.seed_error * d.seed_error * (seeds - 1) / seeds + d.document_error * d.document_error;
    // 400 resamples: 3.5 % error
    EXPECT_NEAR(std::sqrt(square / unbiased), 1, 0.12) << "replication " << r;
  }
}

TEST(Convergence, ByHand) {
  // The lowest loss that all reach is 3. The reference needs 3 tokens, the architecture 1.5
  // (logarithms: √(1·2) at 3.5).
  const Convergence c = convergence({run(0, {4, 3, 2})}, {run(0, {5, 4, 3})});
  EXPECT_EQ(c.loss, 3);
  EXPECT_NEAR(c.tokens.estimate, 2, 1e-12);
  EXPECT_NEAR(c.ratio.estimate, 2.0 / 3, 1e-12);
  EXPECT_EQ(c.seed_freedom, 0);
  EXPECT_EQ(c.ratio.low, c.ratio.high);
}

TEST(Convergence, IntervalsAreThoseOfLogarithms) {
  // At 3.5 the seeds need 2 and √6 tokens or √6 and √6: squares ½ (log √6/2)² with 2
  // degrees of freedom.
  const Convergence c = convergence({run(0, {5, 3.5, 3}), run(0, {5, 4, 3})},
                                    {run(0, {5, 4, 3}), run(0, {6, 4, 3.5})});
  EXPECT_EQ(c.loss, 3.5);
  const double a = std::log(2.0);
  const double b = std::log(6.0) / 2;
  const double r = std::log(3.0);
  const double variance = ((a - b) * (a - b) / 2 + (b - r) * (b - r) / 2) / 2;
  EXPECT_NEAR(std::log(c.ratio.estimate), (a + b) / 2 - (b + r) / 2, 1e-12);
  EXPECT_NEAR(std::log(c.ratio.high / c.ratio.estimate), 4.30265273 * std::sqrt(variance), 1e-7);
  EXPECT_NEAR(std::log(c.tokens.high / c.tokens.estimate), 4.30265273 * std::sqrt(variance / 2),
              1e-7);
  EXPECT_EQ(c.seed_freedom, 2);
}

TEST(Convergence, SaysWhenNothingIsShared) {
  EXPECT_NE(convergence({run(0, {9, 8, 7})}, {run(0)}).problem.find("share no range"),
            std::string::npos);
}

TEST(Degradation, AStudyOfUsualSizeTakesMilliseconds) {
  Simulation simulation(
      {.seeds = 3, .reference_seeds = 3, .documents = 500, .evaluations = 20, .domains = 3}, 0);
  const Study study = simulation.study();
  std::vector<Runs> rest;
  for (int a = 0; a < 5; ++a) rest.push_back(simulation.runs(3, 0));
  std::vector<const Runs*> pool;
  for (const Runs& runs : rest) pool.push_back(&runs);
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(degradation(study.architecture, study.reference, {}, pool).seed_freedom, 14);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  fmt::print("7 architectures × 3 seeds × 20 evaluations × 3 domains × 500 documents: {:.1f} ms\n",
             1e3 * seconds.count());
  EXPECT_LT(seconds.count(), 1);
}

}  // namespace
}  // namespace assay::stats
