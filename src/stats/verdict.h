#pragma once
// From an estimate to an interval, a verdict, and what would settle it.
#include <string>

#include "stats/contrast.h"
#include "stats/ladder.h"

namespace assay::stats {

// estimate ± factor * t_v sqrt(V); the ends are NaN if the variance between seeds is unknown.
Interval interval_of(const Estimate& estimate, double level, double factor = 1);
bool has_width(const Interval& interval);

// In this order, `least` being the smallest difference that counts as one:
//   equivalent   the interval lies within ± margin
//   degraded     it lies above zero, and the estimate is at least `least`
//   better       it lies below zero, and the estimate is at most -least
//   not_worse    its upper end is below margin
//   not_settled  none of these
Verdict verdict_of(const Interval& interval, double margin, double least = 0);

// Do two verdicts about one architecture exclude each other: degraded and any other settled one?
bool contradict(Verdict a, Verdict b);
const char* verdict_name(Verdict verdict);  // "not worse"
std::string signed_nats(double value);      // "−0.012"

// Advice on how to settle an interval. The estimate comes from `runs` runs of the model.
std::string what_settles(const Estimate& estimate, int64_t runs, double seeds_of_rung,
                         double margin, double level, double factor);

}  // namespace assay::stats
