// Nominal 95 % intervals hold the truth in 93 to 97 % of studies. 4000 studies a setting: the error
// of a share is 0.35 points, so a true coverage outside 92 … 98 cannot pass.
#include "coverage.h"

namespace assay::stats {
namespace {

constexpr int kStudies = 4000;

TEST(Coverage, TwoSeedsWhereSeedsDominate) {
  expect_nominal({.name = "2 seeds, 30 documents, seeds"}, kStudies);
}
TEST(Coverage, TwoSeedsWhereBothLevelsMatter) {
  expect_nominal(
      {.name = "2 seeds, 30 documents, both", .architecture_document = 0.1, .seed_document = 0.03},
      kStudies);
}
TEST(Coverage, TwoSeedsWhereDocumentsDominate) {
  expect_nominal({.name = "2 seeds, 30 documents, documents",
                  .seed_spread = 0.001,
                  .noise = 0.001,
                  .architecture_document = 0.2},
                 kStudies);
}
TEST(Coverage, ThreeSeedsAndEightDocuments) {
  expect_nominal({.name = "3 seeds, 8 documents, both",
                  .seeds = 3,
                  .reference_seeds = 3,
                  .documents = 8,
                  .architecture_document = 0.05,
                  .seed_document = 0.03},
                 kStudies);
}
TEST(Coverage, FiveSeedsAndTwoHundredDocuments) {
  expect_nominal({.name = "5 seeds, 200 documents, both",
                  .seeds = 5,
                  .reference_seeds = 5,
                  .documents = 200,
                  .evaluations = 8,
                  .architecture_document = 0.3,
                  .seed_document = 0.1},
                 kStudies / 2);
}
TEST(Coverage, TwinsHoldZeroAtTheNominalRate) {
  expect_nominal(
      {.name = "twins, 2 seeds, 30 documents", .effect = 0, .speed = 0, .seed_document = 0.05},
      kStudies);
  expect_nominal({.name = "twins, 3 seeds, 30 documents",
                  .seeds = 3,
                  .reference_seeds = 3,
                  .effect = 0,
                  .speed = 0,
                  .seed_document = 0.2},
                 kStudies);
}
TEST(Coverage, SeedsPooledOverFiveArchitectures) {
  expect_nominal({.name = "2 seeds, 5 architectures pooled", .architecture_document = 0.1},
                 kStudies, 3);
}

TEST(Coverage, OfSpeed) {
  for (const int seeds : {2, 3, 5}) {
    const Setting setting{
        .name = "", .seeds = seeds, .reference_seeds = seeds, .documents = 2, .speed = 0.05};
    int held = 0;
    for (uint64_t r = 0; r < kStudies; ++r) {
      const Study study = Simulation(setting, r).study();
      const Convergence speed = convergence(study.architecture, study.reference);
      ASSERT_EQ(speed.problem, "");
      held += holds(speed.ratio, Simulation::truth_of_speed(setting, speed.loss));
    }
    fmt::print("speed, {} seeds: {:.1f} %\n", seeds, 100.0 * held / kStudies);
    EXPECT_GE(held, 0.93 * kStudies) << seeds << " seeds";
    EXPECT_LE(held, 0.97 * kStudies) << seeds << " seeds";
  }
}

// The pilot's size: window 256 against full attention, Δ about 0.15 with seeds 0.02 apart.
TEST(Power, TheEffectOfAWindowIsFound) {
  const Setting pilot{.name = "",
                      .documents = 100,
                      .domains = 3,
                      .effect = 0.15,
                      .architecture_document = 0.15,
                      .seed_document = 0.05};
  int found = 0;
  int pooled = 0;
  for (uint64_t r = 0; r < 500; ++r) {
    Simulation simulation(pilot, r);
    const Study study = simulation.study();
    const std::vector<Runs> rest{simulation.runs(2, 0), simulation.runs(2, 0)};
    const std::vector<const Runs*> pool{&rest[0], &rest[1]};
    found += degradation(study.architecture, study.reference).average.low > 0;
    pooled += degradation(study.architecture, study.reference, {}, pool).average.low > 0;
  }
  fmt::print("found {} of 500, with four architectures pooled {}\n", found, pooled);
  EXPECT_GT(found, 450);
  EXPECT_GT(pooled, 490);
}

}  // namespace
}  // namespace assay::stats
