// E and R, the rules for repeated text, the table of variances, and a test for every constant of
// LadderOptions that decides a verdict.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "ladder_examples.h"
#include "stats/student.h"

namespace assay::stats {
namespace {

constexpr double kTokens[] = {10e6, 20e6, 40e6, 80e6};
constexpr double kHeldOut[] = {4.0, 3.6, 3.3, 3.1};

// Gives the runs of a budget held-out text with these losses per recall target.
Budget with_recall(Budget budget, double recall, double spread = 0.004) {
  for (size_t run = 0; run < budget.runs.size(); ++run) {
    End& end = budget.runs[run];
    const double loss = recall + (run == 0 ? spread : -spread) + end.held_out - 3;
    EndLosses losses;
    for (const double shift : {-0.02, 0.01, 0.03, -0.02}) {
      losses.tokens.push_back(100);
      losses.recall_tokens.push_back(20);
      losses.nll.push_back(100 * (end.held_out + shift));
      losses.recall_nll.push_back(20 * (loss + shift));
    }
    end.held_out_domains = {{"c4", losses}, {"cc", losses}};
  }
  return budget;
}

// r(h) = h - 2, so that a contender's recall is the R that it is given.
std::vector<Budget> ladder_with_recall(double spread = 0.004) {
  auto ladder = straight_ladder();
  for (Budget& rung : ladder) rung = with_recall(rung, 1, spread);
  return ladder;
}

// The reference's losses out of domain and per recall target, by rung.
std::vector<Budget> ladder_of(const std::vector<double>& losses,
                              const std::vector<double>& recall = {2, 2, 2, 2}) {
  std::vector<Budget> ladder;
  for (size_t b = 0; b < losses.size(); ++b)
    ladder.push_back(budget(kTokens[b], kHeldOut[b], losses[b], 0.01, recall[b]));
  return ladder;
}

void set_epochs(Budget& budget, double epochs, double gap) {
  budget.epochs = epochs;
  for (End& end : budget.runs) end.training_loss = end.held_out - gap;
}

// A straight reference that reads its text 0.5 to 4 times and memorises it at the last rung.
std::vector<Budget> repeated_ladder(double gap = 0.139) {
  auto ladder = straight_ladder();
  for (size_t b = 0; b < 4; ++b)
    set_epochs(ladder[b], std::exp2(double(b) - 1), b == 3 ? gap : 0.03);
  return ladder;
}

EndResult compare(const std::vector<Budget>& ladder, const Contender& one,
                  const LadderOptions& options = {}) {
  return only(compare_ends(ladder, {one}, options));
}

TEST(EqualTokens, AreComparedInsideAndOutsideTheLadder) {
  for (const double h : {3.5, 3.3, 2.5}) {
    const EndResult x = compare(straight_ladder(0.0005), contender(h, 0.2, 0.0005));
    EXPECT_NEAR(x.equal_tokens.value.estimate, 0.2, 1e-9) << h;
    EXPECT_NEAR(x.budgets[0].slope, 1, 1e-9);
    EXPECT_NEAR(x.equal_tokens.slope_error, 0, 1e-9);
    EXPECT_EQ(x.verdict, Verdict::degraded);
    EXPECT_EQ(x.judged_by, h < 3 ? "equal_tokens" : "delta_end");
    EXPECT_EQ(x.note, h < 3 ? x.not_judged : "");
    EXPECT_EQ(x.note.empty(), h > 3);
  }
}

// The ladder is from 3.09 to 4.01. A model that reads the next token ends far below, and losses in
// another unit are far above.
TEST(EqualTokens, ImplausibleLossesGetNoNumberAndNoAdviceToTrain) {
  for (const auto& [h, question] :
       {std::pair(0.2, "Does the model read the tokens that it predicts"),
        {5.0, "in the same unit?"}}) {
    const EndResult x = compare(straight_ladder(0.0005), contender(h, -0.2, 0.0005));
    EXPECT_EQ(x.verdict, Verdict::not_settled) << h;
    EXPECT_TRUE(contains(x.equal_tokens.problem, "No line of the reference reaches so far"))
        << x.equal_tokens.problem;
    EXPECT_TRUE(contains(x.reason, question)) << x.reason;
    EXPECT_FALSE(contains(x.reason, "rung")) << x.reason;
  }
}

TEST(EqualTokens, ChangeOfTheSlopeIsItsError) {
  const auto ladder = ladder_of({5, 4.2, 3.9, 3.8});  // slopes 2, 1, 0.5; 0.7 at the third rung
  const EndResult middle = compare(ladder, {"x", {budget(40e6, 3.5, 4.24)}});
  EXPECT_NEAR(middle.budgets[0].slope, 0.7, 1e-9);
  EXPECT_NEAR(middle.equal_tokens.value.estimate, 0.2, 1e-9);
  EXPECT_NEAR(middle.equal_tokens.slope_error, 0.3 / 2 * 0.2, 1e-9);
  const EndResult last = compare(ladder, {"x", {budget(80e6, 3.0, 3.95)}});
  EXPECT_NEAR(last.budgets[0].slope, 0.5, 1e-9);
  EXPECT_NEAR(last.equal_tokens.value.estimate, 0.2, 1e-9);
  EXPECT_NEAR(last.equal_tokens.slope_error, 0.5 / 2 * 0.1, 1e-9);
}

TEST(EqualTokens, OneSegmentCountsHalfOfItsSlope) {
  auto ladder = straight_ladder();
  ladder.erase(ladder.begin(), ladder.begin() + 2);
  const LadderResult result = compare_ends(ladder, {contender(3.2, 0.2)});
  EXPECT_NEAR(only(result).equal_tokens.slope_error, 0.05, 1e-9);
  EXPECT_TRUE(std::ranges::any_of(result.warnings, [](const std::string& warning) {
    return contains(warning, "Only one segment of the ladder gives a slope at 40M tokens");
  }));
}

TEST(EqualTokens, NumberIsTheMeanOverBudgetsWeightedByRuns) {
  Contender both = contender(3.4, 0.1);
  both.budgets.push_back(budget(80e6, 3.0, 3.9));
  both.budgets[1].runs.push_back(end(3, 3.0, 3.9));
  both.budgets[1].runs.push_back(end(4, 3.0, 3.9));
  const EndResult x = compare(straight_ladder(), both);
  EXPECT_NEAR(x.budgets[0].equal_tokens.estimate, 0.1, 1e-9);
  EXPECT_NEAR(x.budgets[1].equal_tokens.estimate, 0.4, 1e-9);
  EXPECT_NEAR(x.equal_tokens.value.estimate, (2 * 0.1 + 4 * 0.4) / 6, 1e-9);
  EXPECT_EQ(x.equal_tokens.runs, 6);
}

TEST(EqualTokens, BudgetWithoutARungHasNoNumber) {
  const EndResult x = compare(straight_ladder(), contender(3.3, 0.2, 0.01, 45e6));
  EXPECT_EQ(x.equal_tokens.problem, "The ladder has no rung of 45M tokens.");
  EXPECT_EQ(compare(straight_ladder(), contender(3.3, 0.2, 0.01, 40.3e6)).equal_tokens.problem, "");
  const LadderOptions strict{.tokens_tolerance = 0.005};
  EXPECT_NE(
      compare(straight_ladder(), contender(3.3, 0.2, 0.01, 40.3e6), strict).equal_tokens.problem,
      "");
}

TEST(EqualTokens, RecallInDomainIsComparedAtEqualTokens) {
  const EndResult x =
      compare(ladder_with_recall(), {"x", {with_recall(budget(40e6, 2.9, 3.4), 1.12)}});
  EXPECT_NEAR(x.recall.value.estimate, 0.12, 1e-9);
  EXPECT_NEAR(x.recall.domains.at("cc").estimate, 0.12, 1e-9);
  EXPECT_EQ(x.recall.verdict, Verdict::degraded) << x.recall.value.low;
}

TEST(EqualTokens, SmallDifferencesOfRecallCarryNoVerdict) {
  const auto verdict = [](double difference, double spread, double margin = 0.05) {
    const Contender x{"x", {with_recall(budget(40e6, 3.3, 3.8), 1 + difference, spread)}};
    auto ladder = straight_ladder();
    for (Budget& rung : ladder) rung = with_recall(rung, 1, 0.0005);
    return compare(ladder, x, {.recall_margin = margin}).recall.verdict;
  };
  EXPECT_EQ(verdict(0.02, 0.0005), Verdict::equivalent);
  EXPECT_EQ(verdict(0.02, 0.0005, 0.01), Verdict::degraded);
  EXPECT_EQ(verdict(0.048, 0.002), Verdict::not_settled);
  EXPECT_EQ(verdict(0.08, 0.002), Verdict::degraded);
  EXPECT_EQ(verdict(-0.048, 0.002), Verdict::not_worse);
  EXPECT_EQ(verdict(-0.08, 0.002), Verdict::better);
}

TEST(EqualTokens, RunsWithoutRecallTargetsHaveNoRecallNumber) {
  const LadderResult result = compare_ends(straight_ladder(), {contender(3.3, 0.2)});
  EXPECT_TRUE(std::isnan(only(result).recall.value.estimate));
  EXPECT_TRUE(contains(only(result).recall.problem, "no recall targets"));
  auto ladder = straight_ladder();
  Contender one = contender(3.3, 0.2);
  const auto strip = [](Budget& budget) {
    for (End& end : budget.runs)
      for (auto& [name, losses] : end.domains) {
        losses.recall_nll.clear();
        losses.recall_tokens.clear();
      }
  };
  for (Budget& rung : ladder) strip(rung);
  strip(one.budgets[0]);
  EXPECT_TRUE(std::ranges::any_of(
      compare_ends(ladder, {one}).warnings,
      [](const std::string& warning) { return contains(warning, "Maturity is not checked"); }));
}

TEST(EqualTokens, DocumentsOfTheHeldOutTextAreCounted) {
  const auto document_error = [](double shift) {
    Contender one{"x", {with_recall(budget(40e6, 3.3, 4.0), 1.1)}};
    for (End& end : one.budgets[0].runs)
      for (auto& [name, losses] : end.held_out_domains) {
        losses.nll[0] += shift;
        losses.nll[1] -= shift;
      }
    return compare(ladder_with_recall(), one);
  };
  EXPECT_NEAR(document_error(0).document_error, 0, 1e-9);
  // Residuals of 20 on 100 targets, two of four clusters, two domains, slope 1
  const double expected = std::sqrt(2 * 2 * std::pow(20.0 / 400 / 2, 2) / (1 - 0.5 + 0.25));
  EXPECT_NEAR(document_error(20).document_error, expected, 1e-6);
  EXPECT_NEAR(document_error(20).equal_tokens.document_error, expected, 1e-6);
  EXPECT_NEAR(document_error(20).recall.document_error, expected, 1e-6);
}

TEST(EqualTokens, OtherHeldOutTextIsRefused) {
  Contender one{"x", {with_recall(budget(40e6, 3.3, 4.0), 1.1)}};
  one.budgets[0].runs[1].held_out_domains.erase("cc");
  const std::string message = message_of([&] { compare_ends(ladder_with_recall(), {one}); });
  EXPECT_TRUE(contains(message, "seed 2 of 'x' has no losses of the domain 'cc'")) << message;
}

TEST(Repetition, UnequalEpochsOfAMemorisingReferenceGiveNoVerdict) {
  Contender fast = contender(3.15, 0.2, 0.01, 45e6);
  set_epochs(fast.budgets[0], 1.1, 0.03);
  const EndResult x = compare(repeated_ladder(), fast);
  EXPECT_FALSE(x.judged);
  EXPECT_NEAR(x.delta.estimate, 0.2, 1e-9) << "the number is still given";
  EXPECT_NEAR(x.reference_epochs, 3.3, 0.2);
  EXPECT_TRUE(contains(x.not_judged, "read its text 1.1 times, the reference 3.")) << x.not_judged;
  EXPECT_TRUE(contains(x.not_judged, "0.14 nats above its training loss, and the limit is 0.10"));
  EXPECT_TRUE(compare(repeated_ladder(), fast, {.epochs_ratio = 4}).judged);
  EXPECT_TRUE(compare(repeated_ladder(), fast, {.memorising_gap = 0.15}).judged);
  EXPECT_TRUE(compare(repeated_ladder(0.09), fast).judged);
  EXPECT_FALSE(compare(repeated_ladder(kUnknown), fast).judged) << "the gap is unknown";
  fast.budgets[0].epochs = 3.0;
  EXPECT_TRUE(compare(repeated_ladder(), fast).judged);
}

TEST(Repetition, SlopesOfMemorisedTextAreNotUsed) {
  Contender one = contender(3.0, 0.2, 0.01, 80e6);
  set_epochs(one.budgets[0], 4, 0.1);
  const EndResult x = compare(repeated_ladder(), one);
  EXPECT_TRUE(contains(x.equal_tokens.problem, "It memorises from 40M tokens to 80M tokens"))
      << x.equal_tokens.problem;
  EXPECT_EQ(compare(repeated_ladder(), one, {.memorising_gap = 0.15}).equal_tokens.problem, "");
  EXPECT_EQ(compare(repeated_ladder(), one, {.epochs_ratio = 2.1}).equal_tokens.problem, "");
  one.budgets[0].epochs = 2;
  EXPECT_TRUE(contains(compare(repeated_ladder(0.05), one).equal_tokens.problem,
                       "has read its text 2.0 times and the reference 4.0 times"));
}

TEST(Repetition, LeastRepeatedBudgetIsJudged) {
  Contender both = contender(3.5, 0.2, 0.01, 25e6);
  both.budgets.push_back(budget(70e6, 3.35, 4.0));
  set_epochs(both.budgets[0], 1.2, 0.03);
  set_epochs(both.budgets[1], 3.5, 0.03);
  const EndResult x = compare(straight_ladder(), both);
  EXPECT_EQ(x.tokens, 25e6);
  EXPECT_TRUE(contains(x.note, "not at 70M tokens. It reads its text 3.5 times there")) << x.note;
  EXPECT_EQ(compare(straight_ladder(), both, {.epochs_tolerance = 2}).tokens, 70e6);
  both.budgets[0].epochs = 0.3;
  both.budgets[1].epochs = 0.9;
  EXPECT_EQ(compare(straight_ladder(), both).tokens, 70e6) << "neither is repeated";
}

// A fifth of the targets are recall targets, so the loss on the others is the same at the last
// three rungs.
TEST(Constants, MaturityFallDecidesTheVerdict) {
  const auto judged = [](double fall, double limit) {
    const auto ladder = ladder_of({4.5, 3.8 + 0.2 * 0.365, 3.8, 3.8 - 0.2 * fall},
                                  {3, 2.5, 2.5 - 0.365, 2.5 - 0.365 - fall});
    const EndResult x = compare(ladder, contender(3.2, 0.2, 0.01, 80e6), {.maturity_fall = limit});
    EXPECT_EQ(x.judged, x.equal_tokens.problem.empty()) << x.equal_tokens.problem;
    return x.judged;
  };
  for (const double fall : {0.063, 0.08}) {
    EXPECT_TRUE(judged(fall, 0.1)) << fall;
    EXPECT_FALSE(judged(fall, 0.05)) << fall;
  }
  EXPECT_FALSE(judged(0.365, 0.1));
  EXPECT_TRUE(judged(0.365, 0.4));
  EXPECT_TRUE(judged(0.04, 0.05));
}

TEST(Constants, RecallLeadDecidesTheVerdict) {
  const auto easy = ladder_of({4.5, 4.1, 3.8, 3.6}, {3.3, 3.3, 3.3, 3.3});  // leads 1 to 0.375
  EXPECT_TRUE(compare(easy, contender(3.2, 0.2)).judged);
  const EndResult x = compare(easy, contender(3.2, 0.2), {.recall_lead = 0.5});
  EXPECT_FALSE(x.judged);
  EXPECT_TRUE(contains(x.not_judged, "nats; 0.50 are needed")) << x.not_judged;
}

TEST(Constants, OverfitRiseDecidesTheVerdict) {
  const auto ladder = ladder_of({4.5, 4.1, 3.8, 3.82});
  EXPECT_TRUE(compare(ladder, contender(3.15, 0.3)).judged);
  const EndResult x = compare(ladder, contender(3.15, 0.3), {.overfit_rise = 0.015});
  EXPECT_FALSE(x.judged);
  EXPECT_TRUE(contains(x.not_judged, "rises by 0.020 nats")) << x.not_judged;
}

TEST(Constants, MarginDecidesTheVerdict) {
  const auto verdict = [](double delta, double margin) {
    return compare(straight_ladder(0.0003), contender(3.3, delta, 0.0005, 45e6), {.margin = margin})
        .verdict;
  };
  EXPECT_EQ(verdict(-0.002, 0.2), Verdict::equivalent);
  EXPECT_EQ(verdict(-0.002, 0.001), Verdict::not_settled);
  const auto one_sided = [](double margin) {
    return compare(straight_ladder(0.0003), contender(3.3, -0.03, 0.003, 45e6), {.margin = margin});
  };
  const EndResult x = one_sided(0.03);
  EXPECT_LT(x.delta.low, -0.03);
  EXPECT_GT(x.delta.high, -0.001);
  EXPECT_LT(x.delta.high, 0.03);
  EXPECT_EQ(x.verdict, Verdict::not_worse) << x.delta.low << " " << x.delta.high;
  EXPECT_EQ(one_sided(x.delta.high / 2).verdict, Verdict::not_settled);
}

// Every default is pinned by two studies, one on each side of it.
TEST(Defaults, MaturityFallIsOneTenth) {
  const auto judged = [](double fall) {
    const auto ladder = ladder_of({4.5, 4.1, 3.8, 3.8 - 0.2 * fall}, {2, 2, 2, 2 - fall});
    return compare(ladder, contender(3.2, 0.2, 0.01, 80e6)).judged;
  };
  EXPECT_TRUE(judged(0.098));
  EXPECT_FALSE(judged(0.102));
}

// A rung is reached 5 % of the distance to the rung before it: recall is learned until 3.3.
TEST(Defaults, RungIsReachedOneTwentiethBeforeIt) {
  const auto ladder = ladder_of({4.5, 4.1, 3.8, 3.6}, {2.6, 2.6, 2, 2});
  EXPECT_TRUE(compare(ladder, contender(3.3 + 0.048 * 0.3, 0.2)).judged);
  EXPECT_FALSE(compare(ladder, contender(3.3 + 0.052 * 0.3, 0.2)).judged);
}

// A fifth of the targets are recall targets, so the lead is (loss - recall loss) / 0.8.
TEST(Defaults, RecallLeadIsOneFifth) {
  const auto judged = [](double lead) {
    const double recall = 3.6 - 0.8 * lead;
    const auto ladder = ladder_of({4.5, 4.1, 3.8, 3.6}, {recall, recall, recall, recall});
    return compare(ladder, contender(3.2, 0.2)).judged;
  };
  EXPECT_TRUE(judged(0.203));
  EXPECT_FALSE(judged(0.197));
}

TEST(Defaults, OverfitRiseIsThreeHundredths) {
  const auto judged = [](double rise, double held_out) {
    return compare(ladder_of({4.5, 4.1, 3.8, 3.8 + rise}), contender(held_out, 0.3)).judged;
  };
  EXPECT_TRUE(judged(0.0298, 3.1));
  EXPECT_FALSE(judged(0.0302, 3.1));
  // A third of the limit is allowed at the held-out loss itself. The curve is flat at both rungs,
  // so a quarter of the way it has risen by 5/32.
  EXPECT_TRUE(judged(0.0098 * 32 / 5, 3.25));
  EXPECT_FALSE(judged(0.0102 * 32 / 5, 3.25));
}

TEST(Defaults, MarginIsThreeHundredths) {
  const auto result = [](double delta) {
    return compare(straight_ladder(0.0003), contender(3.3, delta, 0.0005, 45e6));
  };
  const double half = result(0).delta.high - result(0).delta.estimate;
  EXPECT_LT(half, 0.01);
  EXPECT_EQ(result(0.0298 - half).verdict, Verdict::equivalent);
  EXPECT_EQ(result(0.0302 - half).verdict, Verdict::degraded);
  EXPECT_EQ(result(half - 0.0298).verdict, Verdict::equivalent);
  EXPECT_EQ(result(half - 0.0302).verdict, Verdict::better);
}

TEST(Defaults, RecallMarginIsOneTwentieth) {
  const auto verdict = [](double recall) {
    Contender one{"x", {with_recall(budget(40e6, 3.3, 4.0), 1 + recall, 0.0001)}};
    return compare(ladder_with_recall(0.0001), one).recall.verdict;
  };
  EXPECT_EQ(verdict(0.051), Verdict::degraded);
  EXPECT_EQ(verdict(-0.051), Verdict::better);
  EXPECT_EQ(verdict(0.047), Verdict::equivalent);
}

TEST(Defaults, EpochsRatioIsFiveQuarters) {
  Contender fast = contender(3.15, 0.2, 0.01, 45e6);
  set_epochs(fast.budgets[0], 1.1, 0.03);
  const double reference = compare(repeated_ladder(), fast).reference_epochs;
  fast.budgets[0].epochs = reference / 1.24;
  EXPECT_TRUE(compare(repeated_ladder(), fast).judged);
  fast.budgets[0].epochs = reference / 1.26;
  EXPECT_FALSE(compare(repeated_ladder(), fast).judged);
}

TEST(Defaults, MemorisingGapOfEitherSideIsOneTenth) {
  Contender fast = contender(3.15, 0.2, 0.01, 45e6);
  const auto judged = [&](double gap_of_reference, double gap_of_contender) {
    set_epochs(fast.budgets[0], 1.1, gap_of_contender);
    return compare(repeated_ladder(gap_of_reference), fast).judged;
  };
  EXPECT_TRUE(judged(0.099, 0.099));
  EXPECT_FALSE(judged(0.101, 0.03));
  EXPECT_FALSE(judged(0.03, 0.101));
  EXPECT_FALSE(judged(0.03, kUnknown));
}

TEST(Defaults, BudgetsWithinOneTwentiethAreRepeatedEqually) {
  Contender both = contender(3.5, 0.2, 0.01, 25e6);
  both.budgets.push_back(budget(70e6, 3.35, 4.0));
  const auto judged_at = [&](double ratio) {
    set_epochs(both.budgets[0], 2, 0.03);
    set_epochs(both.budgets[1], 2 * ratio, 0.03);
    return compare(straight_ladder(), both).tokens;
  };
  EXPECT_EQ(judged_at(1.049), 70e6);
  EXPECT_EQ(judged_at(1.051), 25e6);
}

TEST(Defaults, EqualTokensDifferByOnePercent) {
  const auto problem = [](double ratio) {
    return compare(straight_ladder(), contender(3.3, 0.2, 0.01, 40e6 * ratio)).equal_tokens.problem;
  };
  EXPECT_EQ(problem(1.0099), "");
  EXPECT_NE(problem(1.0101), "");
}

TEST(Defaults, LevelIs95Percent) {
  const EndResult x = compare(straight_ladder(), contender(3.3, 0.2));
  EXPECT_NEAR(x.document_error, 0, 1e-9);
  const double error = std::hypot(x.seed_error, x.reference_error);
  EXPECT_NEAR((x.delta.high - x.delta.estimate) / error, student_quantile(0.95, x.seed_freedom),
              1e-6);
}

// Delta_end at 45M tokens is +0.3; E at 80M tokens, where h is outside the ladder, is 0.
TEST(Agreement, ContradictionIsNotSettled) {
  Contender one = contender(3.3, 0.3, 0.0002, 45e6);
  one.budgets.push_back(budget(80e6, 2.9, 3.4, 0.0002));
  const EndResult x = compare(straight_ladder(0.0002), one);
  EXPECT_EQ(x.judged_by, "delta_end");
  EXPECT_GT(x.delta.low, 0);
  EXPECT_EQ(x.equal_tokens.verdict, Verdict::equivalent) << x.equal_tokens.value.high;
  EXPECT_EQ(x.verdict, Verdict::not_settled);
  EXPECT_TRUE(contains(x.agreement, "Δ_end is +0.300 and E is −0.000: degraded by Δ_end") ||
              contains(x.agreement, "Δ_end is +0.300 and E is +0.000: degraded by Δ_end"))
      << x.agreement;
  EXPECT_EQ(x.reason, x.agreement);
  one.budgets[1] = budget(80e6, 2.9, 3.6, 0.0002);
  const EndResult same_sign = compare(straight_ladder(0.0002), one);
  EXPECT_EQ(same_sign.verdict, Verdict::degraded);
  EXPECT_TRUE(contains(same_sign.agreement, "larger than its error")) << same_sign.agreement;
  one.budgets[1] = budget(80e6, 2.9, 3.7, 0.0002);
  EXPECT_EQ(compare(straight_ladder(0.0002), one).agreement, "");
}

TEST(SeedTable, JoinsTheContendersAndTheReferenceDoesNot) {
  const auto with = [](std::vector<SeedVariance> rows, double rung_spread = 0.01) {
    return compare(straight_ladder(rung_spread), contender(3.3, 0.2, 0.02),
                   {.variances = std::move(rows), .study = "own"});
  };
  // Two residuals of ± 0.02
  const double own = 2 * std::pow(0.02, 2);
  EXPECT_NEAR(with({}).seed_error, std::sqrt(own / 2), 1e-9);
  EXPECT_NEAR(with({}, 0.1).seed_error, std::sqrt(own / 2), 1e-9);
  SeedVariance row{.study = "other", .model = "x", .seeds = 4, .variance = {{"all", 0.0002}}};
  EXPECT_NEAR(with({row}).seed_error, std::sqrt((own + 3 * 0.0002) / 4 / 2), 1e-9);
  EXPECT_NEAR(with({row}).equal_tokens.seed_error, std::sqrt(own / 2), 1e-9) << "not in the table";
  row.variance["equal_tokens"] = 0.0002;
  EXPECT_NEAR(with({row}).equal_tokens.seed_error, std::sqrt((own + 3 * 0.0002) / 4 / 2), 1e-9);
  row.study = "own";
  EXPECT_NEAR(with({row}).seed_error, std::sqrt(own / 2), 1e-9) << "counted by its own runs";
  row.model = "left out of this call";
  EXPECT_LT(with({row}).seed_error, std::sqrt(own / 2));
}

TEST(SeedTable, RowsOfAStudyReplaceItsRuns) {
  const Contender x = contender(3.3, 0.2, 0.02);
  const Contender y = contender(3.5, 0.1, 0.015);
  Contender other = y;
  other.name = "y";
  const LadderOptions options{.study = "own"};
  const auto rows = seed_variances(straight_ladder(), {x, other}, options);
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[1].model, "y");
  EXPECT_EQ(rows[1].seeds, 2);
  for (const char* measure : {"all", "recall", "other", "domain:arxiv", "equal_tokens"})
    EXPECT_EQ(rows[0].variance.count(measure), 1u) << measure;
  const auto both = compare_ends(straight_ladder(), {x, other}, options).results[0];
  const auto alone = compare(straight_ladder(), x, {.variances = rows, .study = "own"});
  EXPECT_NEAR(alone.seed_error, both.seed_error, 1e-12);
  EXPECT_NEAR(alone.equal_tokens.seed_error, both.equal_tokens.seed_error, 1e-12);
}

// An immature budget varies more than the budget that is judged.
TEST(SeedTable, OnlyUsableBudgetsArePooled) {
  const auto ladder = ladder_of({4.5, 4.1, 3.8, 3.6}, {4, 3, 2, 2});
  Contender both = contender(3.2, 0.2, 0.0105, 45e6);
  both.budgets.push_back(budget(15e6, 3.7, 4.4, 0.05));
  EXPECT_NEAR(compare(ladder, both).seed_error, 0.0105, 1e-6);
}

TEST(Domains, AreASampleInOneInterval) {
  Contender one = contender(3.3, 0.2, 0.0001);
  for (End& run : one.budgets[0].runs)
    for (double& nll : run.domains.at("arxiv").nll) nll += 10;  // 0.3 and 0.2
  const EndResult x = compare(straight_ladder(0.0001), one);
  EXPECT_NEAR(x.over_domains.estimate, 0.25, 1e-9);
  EXPECT_NEAR((x.over_domains.high - x.over_domains.low) / 2, 12.706 * 0.05, 0.02);
  EXPECT_NEAR(x.equal_tokens.over_domains.low, x.over_domains.low, 0.01);
  for (End& run : one.budgets[0].runs) run.domains.erase("github");
  auto ladder = straight_ladder();
  for (Budget& rung : ladder)
    for (End& run : rung.runs) run.domains.erase("github");
  const LadderResult single = compare_ends(ladder, {one});
  EXPECT_TRUE(std::isnan(only(single).over_domains.low));
  EXPECT_TRUE(std::ranges::any_of(single.warnings, [](const std::string& warning) {
    return contains(warning, "have one domain, so no interval treats the domains as a sample");
  }));
}

TEST(Domains, BoundedLossHasItsOwnDifference) {
  auto ladder = straight_ladder();
  Contender one = contender(3.3, 0.2);
  const auto bound = [](Budget& budget, double factor) {
    for (End& run : budget.runs)
      for (auto& [name, losses] : run.domains) {
        losses.bounded_nll = losses.nll;
        for (double& nll : losses.bounded_nll) nll *= factor;
      }
  };
  EXPECT_TRUE(std::isnan(compare(ladder, one).bounded.estimate));
  for (Budget& rung : ladder) bound(rung, 0.5);
  bound(one.budgets[0], 0.5);
  EXPECT_NEAR(compare(ladder, one).bounded.estimate, 0.1, 1e-9);
  one.budgets[0].runs[1].domains.at("arxiv").bounded_nll.clear();
  EXPECT_THROW(compare(ladder, one), BadInput);
}

}  // namespace
}  // namespace assay::stats
