#pragma once
// Bias of the ladder's estimates and coverage of its intervals over simulated studies.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "ladder_simulation.h"

namespace assay::stats {

// One of the three numbers over all studies. Shares are in per cent.
struct NumberCoverage {
  double bias = 0;        // mean over the contenders, nats
  double worst_bias = 0;  // the largest of one contender, in absolute value
  double single = 0;
  double family = 0;
  double half_width = 0;
  double given = 0;  // share of the contenders that have the number
};

struct LadderCoverage {
  NumberCoverage delta;
  NumberCoverage equal_tokens;
  NumberCoverage recall;
  double domain = 0;
  double trend = 0;
  double recall_part = 0;
  double over_domains = 0;
};

// Options of one simulated study, for example a table of variances.
using StudyOptions = std::function<LadderOptions(const LadderStudy&, uint64_t replication)>;

inline bool covers(const Interval& x, double truth) { return x.low <= truth && truth <= x.high; }

// Adds up one number.
class Tally {
 public:
  explicit Tally(int contenders) : errors_(size_t(contenders)), counts_(size_t(contenders)) {}

  void add(size_t contender, const Interval& family, const Interval& single, double truth) {
    errors_[contender] += single.estimate - truth;
    counts_[contender] += 1;
    singles_ += covers(single, truth);
    half_widths_ += (single.high - single.low) / 2;
    all_ = all_ && covers(family, truth);
  }
  void end_study() {
    families_ += all_;
    studies_ += 1;
    all_ = true;
  }
  NumberCoverage coverage() const {
    NumberCoverage found;
    double all = 0;
    for (const double count : counts_) all += count;
    for (size_t a = 0; a < errors_.size(); ++a) {
      const double bias = errors_[a] / std::max(1.0, counts_[a]);
      found.bias += bias / double(errors_.size());
      found.worst_bias = std::max(found.worst_bias, std::abs(bias));
    }
    found.single = 100 * singles_ / std::max(1.0, all);
    found.half_width = half_widths_ / std::max(1.0, all);
    found.family = 100 * families_ / studies_;
    found.given = 100 * all / studies_ / double(errors_.size());
    return found;
  }

 private:
  std::vector<double> errors_;
  std::vector<double> counts_;
  double singles_ = 0;
  double families_ = 0;
  double studies_ = 0;
  double half_widths_ = 0;
  bool all_ = true;
};

inline double rung_of(double tokens) { return std::log2(tokens / LadderStudy::tokens_at(0)); }

inline void print(const std::string& name, const LadderCoverage& x) {
  fmt::print("| {} ", name);
  for (const NumberCoverage& one : {x.delta, x.equal_tokens, x.recall})
    fmt::print("| {:+.4f} | {:.1f} | {:.1f} | {:.3f} ", one.bias, one.single, one.family,
               one.half_width);
  fmt::print("| {:.1f} | {:.1f} | {:.1f} | {:.1f} | {:.0f} |\n", x.domain, x.trend, x.recall_part,
             x.over_domains, x.delta.given);
  std::fflush(stdout);
}

inline void print_coverage_header() {
  fmt::print("| setting | Δ bias | single % | family % | half-width ");
  fmt::print("| E bias | single % | family % | half-width ");
  fmt::print("| R bias | single % | family % | half-width ");
  fmt::print("| domain % | trend % | recall part % | domains as a sample % | Δ given % |\n|");
  for (int column = 0; column < 18; ++column) fmt::print("---|");
  fmt::print("\n");
}

inline LadderCoverage ladder_coverage(const LadderSetting& s, int studies,
                                      const StudyOptions& options = {}) {
  Tally delta(s.contenders);
  Tally equal_tokens(s.contenders);
  Tally recall(s.contenders);
  LadderCoverage found;
  double intervals = 0;
  double trends = 0;
  for (int r = 0; r < studies; ++r) {
    const LadderStudy study(s, uint64_t(r));
    LadderOptions own = options ? options(study, uint64_t(r)) : LadderOptions{};
    own.draws = 4096;
    const LadderResult result = compare_ends(study.ladder, study.contenders, own);
    EXPECT_EQ(result.problem, "") << s.name;
    for (int a = 0; a < s.contenders; ++a) {
      const EndResult& one = result.results[size_t(a)];
      const double shift = study.domain_shifts[size_t(a)];
      double e = 0;
      double e_budgets = 0;
      double recall_loss = 0;
      double recall_budgets = 0;
      for (const BudgetResult& budget : one.budgets) {
        const double rung = rung_of(budget.tokens);
        e += budget.no_equal_tokens.empty() ? LadderStudy::equal_tokens_of(s, a, rung) : 0;
        e_budgets += budget.no_equal_tokens.empty();
        recall_loss += budget.no_recall.empty() ? LadderStudy::recall_of(s, a, rung) : 0;
        recall_budgets += budget.no_recall.empty();
      }
      if (one.equal_tokens.problem.empty())
        equal_tokens.add(size_t(a), one.equal_tokens.value, one.equal_tokens.single,
                         e / e_budgets + shift);
      if (one.recall.problem.empty())
        recall.add(size_t(a), one.recall.value, one.recall.single, recall_loss / recall_budgets);
      if (!one.judged) continue;
      const double effect = LadderStudy::effect_at(s, a, rung_of(one.tokens));
      delta.add(size_t(a), one.delta, one.delta_single, effect + shift);
      intervals += 1;
      found.domain += covers(one.domains.at("domain 0"), effect * LadderStudy::domain_factor(s, 0));
      found.recall_part += covers(one.recall_part, effect / 2);
      found.over_domains += covers(one.over_domains, effect);
      trends += one.has_trend;
      found.trend += one.has_trend && covers(one.trend, s.growth);
    }
    for (Tally* tally : {&delta, &equal_tokens, &recall}) tally->end_study();
  }
  found.delta = delta.coverage();
  found.equal_tokens = equal_tokens.coverage();
  found.recall = recall.coverage();
  for (double* share : {&found.domain, &found.recall_part, &found.over_domains})
    *share *= 100 / std::max(1.0, intervals);
  found.trend *= 100 / std::max(1.0, trends);
  print(s.name, found);
  return found;
}

// `error` is what the number of studies leaves open, in points. 500 studies leave 1.5 points, and a
// bias of 0.005 nats.
inline void expect_nominal(const NumberCoverage& x, double error, const std::string& name) {
  EXPECT_LT(x.worst_bias, 0.005 * error / 1.5) << name;
  for (const double share : {x.single, x.family}) {
    EXPECT_GE(share, 93 - error) << name;
    EXPECT_LE(share, 97 + error) << name;
  }
}

inline void expect_nominal_ends(const LadderSetting& s, int studies, double error,
                                const StudyOptions& options = {}) {
  const LadderCoverage found = ladder_coverage(s, studies, options);
  expect_nominal(found.delta, error, s.name + ": delta");
  expect_nominal(found.equal_tokens, error, s.name + ": equal tokens");
  expect_nominal(found.recall, error, s.name + ": recall");
  for (const double share : {found.domain, found.trend, found.recall_part}) {
    if (s.budgets < 2 && share == found.trend) continue;
    EXPECT_GE(share, 93 - error) << s.name;
    EXPECT_LE(share, 97 + error) << s.name;
  }
}

}  // namespace assay::stats
