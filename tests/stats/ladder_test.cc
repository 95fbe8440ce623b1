#include "stats/ladder.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "ladder_examples.h"
#include "stats/reference.h"

namespace assay::stats {
namespace {

TEST(Ladder, StraightReferenceIsReadExactly) {
  for (const double h : {4.0, 3.9, 3.45, 3.3, 3.15, 3.1})
    EXPECT_NEAR(ladder_loss(straight_ladder(), h), h + 0.5, 1e-9) << h;
  EXPECT_TRUE(std::isnan(ladder_loss(straight_ladder(), 3.0)));
  EXPECT_TRUE(std::isnan(ladder_loss(straight_ladder(), 4.2)));
  EXPECT_TRUE(std::isnan(ladder_loss({}, 3.3)));
}

TEST(Ladder, DifferenceIsTheLossAboveTheCurve) {
  const EndResult x = only(compare_ends(straight_ladder(), {contender(3.4, 0.2)}));
  ASSERT_TRUE(x.has_delta);
  EXPECT_NEAR(x.delta.estimate, 0.2, 1e-9);
  EXPECT_NEAR(x.domains.at("arxiv").estimate, 0.2, 1e-9);
  EXPECT_NEAR(x.held_out, 3.4, 1e-12);
  EXPECT_NEAR(x.final_loss, 4.1, 1e-12);
  EXPECT_NEAR(x.reference_loss, 3.8, 1e-12);
  EXPECT_EQ(x.tokens, 40e6);
  EXPECT_EQ(x.verdict, Verdict::degraded) << x.delta.low << " " << x.delta.high;
  EXPECT_EQ(x.reason, "");
}

TEST(Ladder, ResidualsAlongTheCurveAreNotCounted) {
  // Spread 0: both seeds of every group lie on the reference's line, whatever their held-out loss.
  const EndResult x = only(compare_ends(straight_ladder(0), {contender(3.3, 0.1, 0)}));
  EXPECT_NEAR(x.seed_error, 0, 1e-9);
  EXPECT_NEAR(x.reference_error, 0, 1e-6);
}

TEST(Ladder, PartsAddUp) {
  Contender one = contender(3.4, 0.2);
  for (End& run : one.budgets[0].runs)
    for (auto& [name, losses] : run.domains)
      for (double& nll : losses.recall_nll) nll += 7;
  const EndResult x = only(compare_ends(straight_ladder(), {one}));
  EXPECT_NEAR(x.recall_part.estimate, 0.07, 1e-9);
  EXPECT_NEAR(x.recall_part.estimate + x.other_part.estimate, x.delta.estimate, 1e-12);
  const double mean = (x.domains.at("arxiv").estimate + x.domains.at("github").estimate) / 2;
  EXPECT_NEAR(mean, x.delta.estimate, 1e-12);
}

TEST(Ladder, SmallSignificantDifferenceIsEquivalent) {
  const EndResult x = only(compare_ends(straight_ladder(0.0005), {contender(3.3, 0.01, 0.0005)}));
  EXPECT_GT(x.delta.low, 0);
  EXPECT_LT(x.delta.high, 0.03);
  EXPECT_EQ(x.verdict, Verdict::equivalent);
}

TEST(Ladder, LowerLossIsBetter) {
  const EndResult x = only(compare_ends(straight_ladder(), {contender(3.3, -0.2)}));
  EXPECT_EQ(x.verdict, Verdict::better);
}

TEST(Ladder, WideIntervalIsNotSettledAndNamesSeeds) {
  const EndResult x = only(compare_ends(straight_ladder(0.02), {contender(3.3, 0.05, 0.04)}));
  EXPECT_EQ(x.verdict, Verdict::not_settled);
  EXPECT_TRUE(contains(x.reason, "seeds of this model")) << x.reason;
}

TEST(Ladder, NoisyReferenceNeedsSeedsOfTheReference) {
  const EndResult x = only(compare_ends(straight_ladder(0.04), {contender(3.3, 0.05, 0.001)}));
  EXPECT_EQ(x.verdict, Verdict::not_settled);
  EXPECT_TRUE(contains(x.reason, "times as many seeds of the reference")) << x.reason;
}

TEST(Ladder, VerdictLimitedByDocumentsSaysSo) {
  Contender one = contender(3.3, 0.05, 0.001);
  for (End& run : one.budgets[0].runs)
    for (auto& [name, losses] : run.domains) {
      losses.nll[0] += 40;
      losses.nll[1] -= 40;
    }
  const EndResult x = only(compare_ends(straight_ladder(0.001), {one}));
  EXPECT_EQ(x.verdict, Verdict::not_settled);
  EXPECT_TRUE(contains(x.reason, "documents from more sources")) << x.reason;
}

TEST(Ladder, FasterContenderIsComparedAtASmallerBudget) {
  Contender one = contender(3.2, 0.2);
  one.budgets.push_back(budget(80e6, 2.9, 3.6));
  const LadderResult result = compare_ends(straight_ladder(), {one});
  const EndResult x = only(result);
  EXPECT_EQ(x.tokens, 40e6);
  EXPECT_EQ(x.verdict, Verdict::degraded);
  ASSERT_EQ(x.budgets.size(), 2u);
  EXPECT_EQ(x.budgets[0].problem, "");
  EXPECT_TRUE(contains(x.budgets[1].problem, "add a rung of the reference at about 160M"))
      << x.budgets[1].problem;
  EXPECT_TRUE(contains(x.note, "It is judged at 40M tokens")) << x.note;
  EXPECT_FALSE(x.has_trend);
}

// A line through the last two rungs says nothing about tokens that are far beyond them.
TEST(Ladder, ContenderFarBelowTheLadderGetsNoNumberOfTokens) {
  Contender one = contender(3.2, 0.2);
  one.budgets.push_back(budget(80e6, 2.2, 3.2));
  const EndResult x = only(compare_ends(straight_ladder(), {one}));
  ASSERT_EQ(x.budgets.size(), 2u);
  EXPECT_TRUE(contains(x.budgets[1].problem, "add rungs of the reference above "))
      << x.budgets[1].problem;
  EXPECT_FALSE(contains(x.budgets[1].problem, "about")) << x.budgets[1].problem;
}

TEST(Ladder, ContenderOutsideTheLadderHasNoDifference) {
  const EndResult slow = only(compare_ends(straight_ladder(), {contender(4.2, 0, 0.01, 45e6)}));
  EXPECT_FALSE(slow.has_delta);
  EXPECT_EQ(slow.verdict, Verdict::not_settled);
  EXPECT_TRUE(contains(slow.reason, "train longer or add a smaller rung")) << slow.reason;
  const EndResult fast = only(compare_ends(straight_ladder(), {contender(2.8, 0, 0.01, 45e6)}));
  EXPECT_FALSE(fast.has_delta);
  EXPECT_TRUE(contains(fast.reason, "320M tokens")) << fast.reason;
}

TEST(Ladder, OfTwoRungsWarnsThatItsCurveIsALine) {
  auto ladder = straight_ladder();
  const auto warns = [&] {
    const LadderResult result = compare_ends(ladder, {contender(3.2, 0)});
    return std::ranges::any_of(result.warnings, [](const std::string& warning) {
      return contains(warning, "a straight line");
    });
  };
  EXPECT_FALSE(warns());
  ladder.erase(ladder.begin(), ladder.begin() + 2);
  EXPECT_TRUE(warns());
}

TEST(Ladder, TwinOfTheLastRungIsInside) {
  const EndResult x = only(compare_ends(straight_ladder(), {contender(3.092, 0)}));
  ASSERT_TRUE(x.has_delta);
  EXPECT_NEAR(x.delta.estimate, 0, 1e-9);
}

TEST(Ladder, TrendIsTheSlopePerDoubling) {
  Contender one = contender(3.8, 0.1, 0.01, 20e6);
  one.budgets.push_back(budget(80e6, 3.2, 3.9));  // difference 0.2 after two doublings
  const EndResult x = only(compare_ends(straight_ladder(), {one}));
  ASSERT_TRUE(x.has_trend);
  EXPECT_NEAR(x.trend.estimate, 0.05, 1e-9);
  EXPECT_NEAR(x.delta.estimate, 0.2, 1e-9);
}

TEST(Ladder, ImmatureReferenceGivesNoVerdict) {
  auto ladder = straight_ladder();
  const double recall[] = {4, 3, 1.9, 1.85};
  for (size_t b = 0; b < ladder.size(); ++b)
    for (End& run : ladder[b].runs)
      for (auto& [name, losses] : run.domains)
        for (double& nll : losses.recall_nll) nll = 20 * recall[b];
  const LadderResult early = compare_ends(ladder, {contender(3.5, 0.3, 0.01, 45e6)});
  EXPECT_TRUE(early.mature);
  EXPECT_NEAR(early.recall.at(1), 3, 1e-12);
  EXPECT_EQ(only(early).verdict, Verdict::not_settled);
  EXPECT_TRUE(contains(only(early).reason,
                       "to 40M tokens, its loss on recall targets falls by 1.00 nats more"))
      << only(early).reason;
  EXPECT_TRUE(contains(only(early).reason, "mature from 40M tokens on"));
  EXPECT_NEAR(only(early).delta.estimate, 0.3, 1e-9) << "the number is still given";
  // At the third rung the question is what the reference learns after it.
  EXPECT_EQ(only(compare_ends(ladder, {contender(3.305, 0.3)})).verdict, Verdict::degraded);
  // One slow run of that rung does not make the contender mature.
  auto spread = ladder;
  spread[2].runs[0].held_out -= 0.15;
  spread[2].runs[1].held_out += 0.15;
  EXPECT_EQ(only(compare_ends(spread, {contender(3.4, 0.3, 0.01, 45e6)})).verdict,
            Verdict::not_settled);
  EXPECT_EQ(only(compare_ends(ladder, {contender(3.2, 0.3)})).verdict, Verdict::degraded);
  ladder.pop_back();
  const LadderResult never = compare_ends(ladder, {contender(3.4, 0.3, 0.01, 45e6)});
  EXPECT_FALSE(never.mature);
  EXPECT_TRUE(contains(only(never).reason, "Train the reference and the contender to about"));
}

// The reference of the previous test stays immature when rungs divide its last doubling of tokens.
TEST(Ladder, AdditionalRungsDoNotMakeAReferenceMature) {
  auto ladder = straight_ladder();
  const double tokens[] = {40e6, 53e6, 64e6, 80e6};
  const double recall[] = {2.16, 2.10, 2.05, 2.0};
  for (size_t b = 0; b < ladder.size(); ++b) {
    ladder[b].tokens = tokens[b];
    for (End& run : ladder[b].runs)
      for (auto& [name, losses] : run.domains)
        for (size_t c = 0; c < losses.nll.size(); ++c) {
          losses.recall_nll[c] = 20 * recall[b];
          losses.nll[c] = losses.recall_nll[c] + 80 * 4.0;  // the other targets learn nothing
        }
  }
  const LadderResult result = compare_ends(ladder, {contender(3.2, 0.3)});
  EXPECT_FALSE(result.mature);
  EXPECT_EQ(only(result).verdict, Verdict::not_settled);
  EXPECT_TRUE(contains(only(result).reason, "0.16 nats per doubling of the tokens more than that"))
      << only(result).reason;
}

// The rise is the same when rungs divide it.
TEST(Ladder, AdditionalRungsDoNotHideOverfitting) {
  auto ladder = straight_ladder();
  ladder.push_back(budget(100e6, 3.03, 3.625));
  ladder.push_back(budget(127e6, 2.96, 3.65));
  ladder.push_back(budget(160e6, 2.9, 3.675));
  for (const double h : {3.0, 2.93}) {
    const EndResult x = only(compare_ends(ladder, {contender(h, 0.3, 0.01, 90e6)}));
    EXPECT_EQ(x.verdict, Verdict::not_settled) << h;
    EXPECT_TRUE(contains(x.reason, "from 80M tokens to 1")) << x.reason;
  }
}

// A run that is counted twice says nothing about the spread of seeds.
TEST(Ladder, CopiesOfARunAreACautionAndGiveNoCertainty) {
  Contender copies = contender(3.3, 0.2);
  copies.budgets[0].runs[1] = copies.budgets[0].runs[0];
  copies.budgets[0].runs[1].seed = 2;
  const LadderResult found = compare_ends(straight_ladder(), {copies});
  EXPECT_TRUE(std::ranges::any_of(found.warnings, [](const std::string& warning) {
    return contains(warning, "Seeds 1 and 2 of 'x' at 40M tokens have exactly the same losses");
  }));
  auto ladder = straight_ladder();
  for (Budget& rung : ladder) rung.runs[1] = rung.runs[0];
  copies.budgets[0].runs = {end(1, 3.3, 4.0)};
  const EndResult x = only(compare_ends(ladder, {copies}));
  EXPECT_EQ(x.verdict, Verdict::not_settled);
  EXPECT_TRUE(contains(x.reason, "the error is unknown")) << x.reason;
}

// Rungs with one seed share one estimated variance, so its degrees of freedom count once.
TEST(Ladder, RungsWithOneSeedShareTheirDegreesOfFreedom) {
  auto ladder = straight_ladder();
  for (const size_t b : {0u, 1u, 2u}) ladder[b].runs.resize(1);
  const SeedVariance steady{.study = "a", .model = "y", .seeds = 100, .variance = {{"all", 1e-8}}};
  const LadderResult found =
      compare_ends(ladder, {{"x", {{40e6, {end(1, 3.45, 4.15)}}}}}, {.variances = {steady}});
  EXPECT_NEAR(only(found).seed_freedom, 1, 0.05);
}

// The reference's losses at tokens without a rung follow a curve and no chords.
TEST(Ladder, ReferenceIsReadBetweenRungsInLogTokens) {
  std::vector<Budget> ladder;
  const auto loss = [](double tokens) { return 3 + 40 / std::sqrt(tokens / 1e4); };
  for (const double tokens : {10e6, 20e6, 40e6, 80e6, 160e6})
    ladder.push_back(budget(tokens, loss(tokens), loss(tokens) + 0.5, 0.0101));
  for (const double tokens : {28e6, 56e6}) {
    EXPECT_NEAR(ladder_tokens(ladder, loss(tokens)) / tokens, 1, 0.005);
    const EndResult x = only(compare_ends(ladder, {contender(loss(tokens), 0.1, 0.0101, tokens)}));
    EXPECT_NEAR(x.reference_loss, loss(tokens) + 0.5, 0.003);
  }
  EXPECT_TRUE(std::isnan(ladder_tokens(ladder, loss(170e6))));
}

// An untrained reference is equally bad at all targets, and no loss of it falls fast.
TEST(Ladder, ReferenceThatDoesNotRecallYetGivesNoVerdict) {
  auto ladder = straight_ladder();
  for (Budget& rung : ladder)
    for (End& run : rung.runs)
      for (auto& [name, losses] : run.domains)
        for (size_t c = 0; c < losses.nll.size(); ++c)
          losses.recall_nll[c] = 20 * (losses.nll[c] / 100 - 0.1);
  for (size_t b = 0; b + 1 < ladder.size(); ++b) ladder[b].runs = ladder.back().runs;
  for (size_t b = 0; b < ladder.size(); ++b)
    for (End& run : ladder[b].runs) run.held_out = 4 - 0.03 * double(b);
  const LadderResult early = compare_ends(ladder, {contender(3.95, 0.3)});
  EXPECT_FALSE(early.mature);
  EXPECT_EQ(only(early).verdict, Verdict::not_settled);
  EXPECT_FALSE(only(early).judged);
  EXPECT_TRUE(contains(only(early).reason, "does not recall yet at this held-out loss (3.950)"))
      << only(early).reason;
}

TEST(Ladder, OverfittedReferenceGivesNoVerdict) {
  auto ladder = straight_ladder();
  ladder.push_back(budget(160e6, 2.9, 3.7));  // out of domain 0.1 above the rung before
  const EndResult inside = only(compare_ends(ladder, {contender(3.0, 0.3, 0.01, 90e6)}));
  EXPECT_EQ(inside.verdict, Verdict::not_settled);
  EXPECT_FALSE(inside.judged);
  EXPECT_TRUE(std::isfinite(inside.budgets.at(0).delta.estimate)) << "the number is still given";
  EXPECT_TRUE(contains(inside.reason, "rises by 0.100 nats from 80M tokens to 160M tokens"))
      << inside.reason;
  EXPECT_TRUE(contains(inside.reason, "held-out loss of 3.100 or more")) << inside.reason;
  // Close to the rung before, the reference does not overfit yet.
  EXPECT_EQ(only(compare_ends(ladder, {contender(3.095, 0.3)})).verdict, Verdict::degraded);
  const EndResult below = only(compare_ends(ladder, {contender(2.8, 0.3, 0.01, 45e6)}));
  EXPECT_TRUE(contains(below.reason, "overfits the training domains before it gets there"))
      << below.reason;
  // A smaller budget of the contender that ends before the rise is judged instead.
  Contender both = contender(3.2, 0.2, 0.01, 40e6);
  both.budgets.push_back(budget(80e6, 3.0, 3.6));
  const LadderResult result = compare_ends(ladder, {both});
  EXPECT_EQ(only(result).tokens, 40e6);
  EXPECT_EQ(only(result).verdict, Verdict::degraded);
  EXPECT_FALSE(only(result).has_trend) << "the other budget is not comparable";
  EXPECT_TRUE(contains(only(result).note, "not at 80M tokens. The reference overfits"))
      << only(result).note;
}

TEST(Ladder, BudgetsOnBothSidesOfTheMatureSegmentAskForOneBetween) {
  auto ladder = straight_ladder();
  const double recall[] = {4, 3, 1.9, 1.85};
  for (size_t b = 0; b < ladder.size(); ++b)
    ladder[b] =
        budget(ladder[b].tokens, 4.0 - 0.3 * double(b), 4.5 - 0.3 * double(b), 0.01, recall[b]);
  ladder.push_back(budget(160e6, 2.9, 3.7));
  Contender both = contender(3.6, 0.2, 0.01, 20e6);
  both.budgets.push_back(budget(60e6, 3.0, 3.6));
  const EndResult x = only(compare_ends(ladder, {both}));
  EXPECT_FALSE(x.judged);
  EXPECT_EQ(x.reason,
            "At 20M tokens the held-out loss is too high for a comparison (3.600), "
            "at 60M tokens too low (3.000). Train it with a number of tokens between them.");
}

TEST(Ladder, ProblemsOfTheLadderAreNamed) {
  const auto problem = [](std::vector<Budget> ladder) {
    return compare_ends(ladder, {contender(3.3, 0)}).problem;
  };
  auto one_seed = straight_ladder();
  for (Budget& rung : one_seed) rung.runs.resize(1);
  EXPECT_TRUE(contains(problem(one_seed), "No rung of the reference has two seeds"));
  EXPECT_TRUE(contains(problem({budget(1e6, 4, 5)}), "The reference has 1 rung"));
  auto diverged = straight_ladder();
  diverged[1].runs[0].held_out = kNaN;
  EXPECT_EQ(problem(diverged),
            "Seed 1 of the reference at 20M tokens ends with a held-out loss of nan; "
            "train it again or leave it out.");
  auto rising = straight_ladder();
  rising[3] = budget(80e6, 3.4, 3.9);
  EXPECT_TRUE(contains(problem(rising), "does not fall from 40M tokens (3.300) to 80M tokens"));
  auto nothing = straight_ladder();
  for (Budget& rung : nothing)
    for (End& run : rung.runs) run.domains.clear();
  EXPECT_TRUE(contains(problem(nothing), "no losses out of domain"));
}

TEST(Ladder, DivergedContenderDoesNotStopTheOthers) {
  Contender bad = contender(3.3, 0.2);
  bad.budgets[0].runs[1].domains.at("arxiv").nll[2] = kNaN;
  const LadderResult result = compare_ends(straight_ladder(), {bad, contender(3.3, 0.2)});
  EXPECT_EQ(result.problem, "");
  EXPECT_FALSE(result.results[0].has_delta);
  EXPECT_TRUE(contains(result.results[0].reason, "Seed 2 of 'x' at 40M tokens"));
  EXPECT_TRUE(result.results[1].has_delta);
}

TEST(Ladder, RungWithOneSeedBorrowsTheVarianceAndWarns) {
  auto ladder = straight_ladder();
  ladder[2].runs = {end(1, 3.3, 3.8)};
  const LadderResult result = compare_ends(ladder, {contender(3.3, 0.2)});
  EXPECT_TRUE(contains(result.warnings.at(0), "The rung of 40M tokens has one seed"));
  EXPECT_GT(only(result).reference_error, 0.005);
}

TEST(Ladder, ContendersWithOneSeedHaveNoIntervalWithoutATable) {
  Contender one = contender(3.3, 0.2);
  one.budgets[0].runs.resize(1);
  const EndResult x = only(compare_ends(straight_ladder(), {one}));
  EXPECT_NEAR(x.delta.estimate, 0.2, 0.02);
  EXPECT_TRUE(std::isnan(x.delta.low));
  EXPECT_TRUE(std::isnan(x.equal_tokens.value.high));
  EXPECT_FALSE(x.judged);
  EXPECT_EQ(x.verdict, Verdict::not_settled);
  EXPECT_TRUE(contains(x.reason, "second seed of one model or name a table")) << x.reason;
}

TEST(Ladder, OtherClustersAreRefused) {
  Contender other = contender(3.3, 0);
  other.budgets[0].runs[1].domains.at("arxiv").tokens[0] = 99;
  const auto compare = [](const Contender& c) {
    return message_of([&] { compare_ends(straight_ladder(), {c}); });
  };
  EXPECT_TRUE(contains(compare(other), "seed 2 of 'x'")) << compare(other);
  Contender missing = contender(3.3, 0);
  missing.budgets[0].runs[0].domains.erase("github");
  EXPECT_TRUE(contains(compare(missing), "no losses of the domain 'github'"));
  Contender extra = contender(3.3, 0);
  extra.budgets[0].runs[0].domains["book"];
  EXPECT_TRUE(contains(compare(extra), "has the domain 'book'"));
  EXPECT_THROW(compare_ends(straight_ladder(), {}, {.level = 95}), BadInput);
}

TEST(Ladder, OrderOfBudgetsDoesNotMatter) {
  auto ladder = straight_ladder();
  std::swap(ladder[0], ladder[3]);
  const EndResult x = only(compare_ends(ladder, {contender(3.4, 0.2)}));
  EXPECT_NEAR(x.delta.estimate, 0.2, 1e-9);
}

TEST(Ladder, MoreContendersWidenTheSimultaneousInterval) {
  const Contender x = contender(3.3, 0.2);
  const Contender y = contender(3.5, 0.1);
  const LadderResult one = compare_ends(straight_ladder(), {x});
  const LadderResult two = compare_ends(straight_ladder(), {x, y});
  EXPECT_EQ(one.critical, 1);
  EXPECT_GT(two.critical, 1.02);
  const EndResult& first = two.results[0];
  EXPECT_NEAR(
      (first.delta.high - first.delta.low) / (first.delta_single.high - first.delta_single.low),
      two.critical, 1e-9);
  EXPECT_EQ(two.critical, compare_ends(straight_ladder(), {x, y}).critical) << "deterministic";
}

TEST(Ladder, NoContendersGivesTheMaturityOnly) {
  const LadderResult result = compare_ends(straight_ladder(), {});
  EXPECT_EQ(result.problem, "");
  EXPECT_TRUE(result.results.empty());
  EXPECT_EQ(result.recall.size(), 4u);
}

}  // namespace
}  // namespace assay::stats
