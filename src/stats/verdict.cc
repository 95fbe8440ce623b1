#include "stats/verdict.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/error.h"

namespace assay::stats {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kMostSeeds = 64;

// The half-width that remains with any number of seeds.
double fixed_half_width(const Estimate& e, double level) {
  const Variance slope{e.slope_error * e.slope_error, 1e9};
  return interval(0, slope, e.noise.documents, level).high;
}

// The half-width if the model had `own` runs in place of `runs`, and every rung `more` times as
// many seeds.
double half_width_with(const Estimate& e, double runs, double own, double more, double level) {
  const size_t of_contenders = e.freedom.size() - 3;  // see Ends::add_rungs
  Member planned = e.noise;
  std::vector<double> freedom = e.freedom;
  for (Noise& noise : planned.seeds) {
    if (noise.estimator == of_contenders + 2) continue;  // no number of seeds changes it
    noise.amplitude /= std::sqrt(noise.estimator == of_contenders ? own / runs : more);
  }
  freedom[of_contenders] += own - runs;
  // A rung with n seeds has n − 1 degrees of freedom
  for (size_t i = 0; i < freedom.size() - 1; ++i)
    if (i != of_contenders) freedom[i] = more * (freedom[i] + 1) - 1;
  return interval(0, seed_variance(planned, freedom), e.noise.documents, level).high;
}

// The cheapest numbers: runs of this model, and those of every rung as a multiple of today's.
struct Plan {
  double own = 0;
  double other = 1;
};

Plan cheapest(const Estimate& e, double runs, double seeds_of_rung, double level, double wanted) {
  const size_t of_contenders = e.freedom.size() - 3;  // see Ends::add_rungs
  const double rungs = double(std::ranges::count_if(e.noise.seeds, [&](const Noise& noise) {
    return noise.amplitude != 0 && noise.estimator != of_contenders &&
           noise.estimator != of_contenders + 2;
  }));
  double fewest = std::numeric_limits<double>::infinity();
  Plan plan;
  for (double more = 1; more * seeds_of_rung <= kMostSeeds; ++more)
    for (double wide = runs; wide <= kMostSeeds; ++wide) {
      const double all = wide + more * rungs * seeds_of_rung;
      if (all >= fewest || (wide == runs && more == 1)) continue;
      if (!(half_width_with(e, runs, wide, more, level) < wanted)) continue;
      fewest = all;
      plan = {wide, more};
    }
  return plan;
}

}  // namespace

Interval interval_of(const Estimate& e, double level, double factor) {
  if (!e.known) return {e.value, kNaN, kNaN};
  Interval x = interval(e.value, e.seeds(), e.noise.documents, level);
  x.low = e.value - factor * (e.value - x.low);
  x.high = e.value + factor * (x.high - e.value);
  return x;
}

bool has_width(const Interval& interval) { return interval.high > interval.low; }

Verdict verdict_of(const Interval& x, double margin, double least) {
  if (x.low >= -margin && x.high <= margin) return Verdict::equivalent;
  if (x.low > 0 && x.estimate >= least) return Verdict::degraded;
  if (x.high < 0 && x.estimate <= -least) return Verdict::better;
  if (x.high < margin) return Verdict::not_worse;
  return Verdict::not_settled;
}

bool contradict(Verdict a, Verdict b) {
  const auto clears = [](Verdict v) {
    return v == Verdict::better || v == Verdict::equivalent || v == Verdict::not_worse;
  };
  return (a == Verdict::degraded && clears(b)) || (b == Verdict::degraded && clears(a));
}

const char* verdict_name(Verdict verdict) {
  switch (verdict) {
    case Verdict::degraded:
      return "degraded";
    case Verdict::better:
      return "better";
    case Verdict::equivalent:
      return "equivalent";
    case Verdict::not_worse:
      return "not worse";
    case Verdict::not_settled:
      break;
  }
  return "not settled";
}

std::string signed_nats(double value) {
  return fmt::format("{}{:.3f}", value < 0 ? "−" : "+", std::abs(value));
}

std::string what_settles(const Estimate& e, int64_t runs, double seeds_of_rung, double margin,
                         double level, double factor) {
  if (!e.known)
    return "No model has two seeds at a budget that can be compared, so the error is unknown. "
           "Train a second seed of one model or name a table of variances.";
  const double wanted = std::max(std::abs(e.value), margin - e.value) / factor;
  const std::string open =
      fmt::format("The interval reaches across zero and beyond the margin of {:.3g} nats.", margin);
  if (const double fixed = fixed_half_width(e, level); fixed >= wanted)
    return open + fmt::format(
                      " The documents{} alone leave an error of {:.3f} nats, "
                      "so more seeds cannot settle it; evaluate on documents from more sources{}.",
                      e.slope_error > 0 ? " and the reference's slope" : "", factor * fixed,
                      e.slope_error > 0 ? " and add rungs near this budget" : "");
  const Plan plan = cheapest(e, double(runs), seeds_of_rung, level, wanted);
  const std::string stays = signed_nats(e.value);
  if (plan.own > 0 && plan.other == 1)
    return fmt::format(
        "{} About {:.0f} seeds of this model would settle it if the difference stays at {}.", open,
        plan.own, stays);
  if (plan.own == double(runs))
    return fmt::format(
        "{} About {:.0f} times as many seeds of the reference as now, at every rung, "
        "would settle it if the difference stays at {}.",
        open, plan.other, stays);
  if (plan.own > 0)
    return fmt::format(
        "{} About {:.0f} seeds of this model and {:.0f} times as many of the reference as now, "
        "at every rung, would settle it if the difference stays at {}.",
        open, plan.own, plan.other, stays);
  return open + fmt::format(" No practical number of seeds settles a difference of {}.", stays);
}

}  // namespace assay::stats
