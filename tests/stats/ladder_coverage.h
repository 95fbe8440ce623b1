#pragma once
// Bias of the ladder's estimates and coverage of its intervals over simulated studies.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "ladder_simulation.h"

namespace assay::stats {

struct LadderCoverage {
  double bias = 0;        // of Delta_end, mean over the contenders, nats per token
  double worst_bias = 0;  // the largest of one contender, in absolute value
  double single = 0, family = 0, domain = 0, trend = 0, recall = 0;  // per cent
  double half_width = 0;
  double outside = 0;  // per cent of the contenders
};

inline bool covers(const Interval& x, double truth) { return x.low <= truth && truth <= x.high; }

inline LadderCoverage ladder_coverage(const LadderSetting& s, int studies) {
  LadderCoverage found;
  std::vector<double> errors(size_t(s.contenders));
  std::vector<double> counts(size_t(s.contenders));
  double intervals = 0;
  double trends = 0;
  for (int r = 0; r < studies; ++r) {
    const LadderStudy study(s, uint64_t(r));
    const LadderResult result = compare_ends(study.ladder, study.contenders, {.draws = 4096});
    EXPECT_EQ(result.problem, "") << s.name;
    bool all = true;
    for (int a = 0; a < s.contenders; ++a) {
      const EndResult& one = result.results[size_t(a)];
      found.outside += 100.0 / studies / s.contenders * !one.has_delta;
      if (!one.has_delta) continue;
      const double rung = std::log2(one.tokens / LadderStudy::tokens_at(0));
      const double truth = LadderStudy::effect_at(s, a, rung);
      errors[size_t(a)] += one.delta.estimate - truth;
      counts[size_t(a)] += 1;
      intervals += 1;
      found.single += covers(one.delta_single, truth);
      found.domain += covers(one.domains.at("domain 0"), truth * LadderStudy::domain_factor(s, 0));
      found.recall += covers(one.recall_part, truth / 2);
      found.half_width += (one.delta_single.high - one.delta_single.low) / 2;
      all = all && covers(one.delta, truth);
      if (!one.has_trend) continue;
      trends += 1;
      found.trend += covers(one.trend, s.growth);
    }
    found.family += 100.0 / studies * all;
  }
  found.single *= 100 / intervals;
  found.domain *= 100 / intervals;
  found.recall *= 100 / intervals;
  found.half_width /= intervals;
  found.trend *= 100 / std::max(1.0, trends);
  for (size_t a = 0; a < errors.size(); ++a) {
    const double bias = errors[a] / counts[a];
    found.bias += bias / s.contenders;
    found.worst_bias = std::max(found.worst_bias, std::abs(bias));
  }
  fmt::print("| {} | {:+.4f} | {:.4f} | {:.1f} | {:.1f} | {:.1f} | {:.1f} | {:.1f} | {:.3f} |\n",
             s.name, found.bias, found.worst_bias, found.single, found.family, found.domain,
             found.trend, found.recall, found.half_width);
  std::fflush(stdout);
  return found;
}

inline void print_coverage_header() {
  fmt::print("| setting | bias | largest bias | single % | family % | domain % |");
  fmt::print(" trend % | recall part % | half-width |\n|---|---|---|---|---|---|---|---|---|\n");
}

// `error` is what the number of studies leaves open, in points.
inline void expect_nominal_ends(const LadderSetting& s, int studies, double error) {
  const LadderCoverage found = ladder_coverage(s, studies);
  EXPECT_LT(found.worst_bias, 0.005) << s.name;
  for (const double share : {found.single, found.family, found.domain, found.trend, found.recall}) {
    EXPECT_GE(share, 93 - error) << s.name;
    EXPECT_LE(share, 97 + error) << s.name;
  }
}

}  // namespace assay::stats
