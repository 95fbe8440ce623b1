#include "stats/degradation.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "base/error.h"
#include "stats/curves.h"

namespace assay::stats {
namespace {

using Losses = std::vector<double>;  // by document

struct Architecture {
  const Runs* runs;
  std::vector<Curve> curves;  // one a run
};

// The architectures of a comparison and their shared range: the pair first, then those that only
// show how much seeds differ.
struct Comparison {
  std::string problem;
  std::vector<Architecture> architectures;
  Range range;
};

Architecture read(const Runs& runs, const Options& options) {
  Architecture read{&runs, {}};
  for (const Run& run : runs) read.curves.push_back(curve_of(run, options.after_tokens));
  return read;
}

// The first loss of an evaluation that is no number, "" when all are.
std::string not_finite(const Point& point) {
  if (!std::isfinite(point.pretraining_loss))
    return fmt::format("a pre-training loss of {}", point.pretraining_loss);
  for (const auto& [domain, losses] : point.out_of_domain)
    for (const double nll : losses.nll)
      if (!std::isfinite(nll)) return fmt::format("a loss of {} on domain '{}'", nll, domain);
  return "";
}

std::string problem_of(const Architecture& a, const Options& options, const char* name) {
  if (a.runs->empty()) return fmt::format("the {} has no runs", name);
  for (size_t s = 0; s < a.curves.size(); ++s) {
    const Run& run = (*a.runs)[s];
    if (a.curves[s].empty())
      return fmt::format("seed {} of the {} has no evaluations", run.seed, name);
    for (const Point& point : run.curve)
      if (const auto what = not_finite(point);
          !what.empty() && point.tokens_seen > options.after_tokens)
        return fmt::format("seed {} of the {} has {} at {} tokens", run.seed, name, what,
                           point.tokens_seen);
  }
  return "";
}

Range overlap(Range a, Range b) { return {std::max(a.low, b.low), std::min(a.high, b.high)}; }

Comparison compare(const Runs& architecture, const Runs& reference, const Options& options,
                   Pool pool) {
  if (!(options.level > 0 && options.level < 1))
    fail("level is {}; expected a number between 0 and 1", options.level);
  Comparison c{"", {read(architecture, options), read(reference, options)}, {}};
  const Architecture& a = c.architectures[0];
  const Architecture& b = c.architectures[1];
  if (c.problem = problem_of(a, options, "architecture"); c.problem.empty())
    c.problem = problem_of(b, options, "reference");
  if (c.problem.empty()) c.problem = range_problem(a.curves, b.curves);
  if (!c.problem.empty()) return c;
  c.range = overlap(shared_range(a.curves), shared_range(b.curves));
  for (const Runs* runs : pool) {
    if (runs == &architecture || runs == &reference) continue;
    Architecture other = read(*runs, options);
    if (!problem_of(other, options, "").empty()) continue;
    if (overlap(c.range, shared_range(other.curves)).width() >= c.range.width() / 2)
      c.architectures.push_back(other);
  }
  return c;
}

void expect_same_documents(const Point& point, int64_t seed,
                           const std::map<std::string, DomainLosses>& domains) {
  for (const auto& [name, losses] : point.out_of_domain)
    if (!domains.contains(name))
      fail(
          "domain '{}' is present at {} tokens of seed {} but not in every evaluation; "
          "every evaluation needs every domain",
          name, point.tokens_seen, seed);
  for (const auto& [name, expected] : domains) {
    const auto found = point.out_of_domain.find(name);
    if (found == point.out_of_domain.end())
      fail("domain '{}' is missing at {} tokens of seed {}; every evaluation needs every domain",
           name, point.tokens_seen, seed);
    const auto& [nll, tokens] = found->second;
    if (nll.size() != tokens.size() || tokens != expected.tokens)
      fail(
          "domain '{}' at {} tokens of seed {}: "
          "its {} documents are not the {} of the first evaluation; "
          "paired statistics need the same documents, tokenized alike, in the same order",
          name, point.tokens_seen, seed, nll.size(), expected.tokens.size());
  }
}

// The losses of the documents, averaged over the range: Σ_k weight_k nll_k.
Losses averaged(const Run& run, const Curve& curve, Range range, const std::string& domain) {
  const auto weights = mean_weights(curve, run.curve.size(), range);
  Losses losses(run.curve[0].out_of_domain.at(domain).nll.size());
  for (size_t k = 0; k < weights.size(); ++k) {
    if (weights[k] == 0) continue;  // such an evaluation may hold anything, even NaN
    const auto& nll = run.curve[k].out_of_domain.at(domain).nll;
    for (size_t i = 0; i < losses.size(); ++i) losses[i] += weights[k] * nll[i];
  }
  return losses;
}

Losses minus(Losses a, const Losses& b) {
  std::ranges::transform(a, b, a.begin(), std::minus<>());
  return a;
}

Losses mean_over(const std::vector<Losses>& runs) {
  Losses mean(runs[0].size());
  for (const Losses& run : runs)
    for (size_t i = 0; i < mean.size(); ++i) mean[i] += run[i] / double(runs.size());
  return mean;
}

// A domain, or the average of several: the difference, and what its variance is made of.
struct Estimate {
  ByRun losses;        // of every run
  Variance documents;  // of the difference of the two means
  double shared = 0;   // the part of it that the spread between seeds contains already
};

Interval interval_of(const Estimate& e, double level) {
  const Variance documents{std::max(0.0, e.documents.value - e.shared), e.documents.freedom};
  return interval(mean(e.losses[0]) - mean(e.losses[1]), seed_variance_of_difference(e.losses),
                  documents, level);
}

Estimate estimate(const Comparison& c, const std::string& domain, const Losses& tokens) {
  Estimate e;
  std::vector<Losses> means;
  double deviation = 0;
  for (const Architecture& a : c.architectures) {
    std::vector<Losses> runs;
    const Range range = overlap(c.range, shared_range(a.curves));
    for (size_t s = 0; s < a.curves.size(); ++s)
      runs.push_back(averaged((*a.runs)[s], a.curves[s], range, domain));
    means.push_back(mean_over(runs));
    e.losses.emplace_back();
    for (const Losses& run : runs) {
      e.losses.back().push_back(ratio(run, tokens));
      deviation += document_variance(minus(run, means.back()), tokens).value;
    }
  }
  e.documents = document_variance(minus(means[0], means[1]), tokens);
  if (const double freedom = seed_variance(e.losses).freedom; freedom > 0)
    e.shared =
        deviation / freedom * (1.0 / double(e.losses[0].size()) + 1.0 / double(e.losses[1].size()));
  return e;
}

Estimate average(const std::vector<Estimate>& domains) {
  const double n = double(domains.size());
  Estimate average{domains[0].losses, {}, 0};
  std::vector<Variance> documents;
  for (auto& runs : average.losses) std::ranges::fill(runs, 0.0);
  for (const Estimate& domain : domains) {
    for (size_t a = 0; a < domain.losses.size(); ++a)
      for (size_t s = 0; s < domain.losses[a].size(); ++s)
        average.losses[a][s] += domain.losses[a][s] / n;
    documents.push_back({domain.documents.value / (n * n), domain.documents.freedom});
    average.shared += domain.shared / (n * n);
  }
  average.documents = sum(documents);
  return average;
}

std::string problem_of(const std::map<std::string, DomainLosses>& domains) {
  if (domains.empty()) return "the runs were evaluated on no out-of-domain documents";
  for (const auto& [name, documents] : domains)
    if (std::ranges::none_of(documents.tokens, [](double t) { return t > 0; }))
      return fmt::format("domain '{}' has no document with tokens to predict", name);
  return "";
}

}  // namespace

Degradation degradation(const Runs& architecture, const Runs& reference, const Options& options,
                        Pool pool) {
  const Comparison c = compare(architecture, reference, options, pool);
  if (!c.problem.empty()) return {.problem = c.problem};
  const auto& domains = architecture[0].curve[0].out_of_domain;
  if (const auto problem = problem_of(domains); !problem.empty()) return {.problem = problem};
  for (const Architecture& a : c.architectures)
    for (const Run& run : *a.runs)
      for (const Point& point : run.curve) expect_same_documents(point, run.seed, domains);

  Degradation result{.loss_low = c.range.low, .loss_high = c.range.high};
  std::vector<Estimate> estimates;
  for (const auto& [name, documents] : domains) {
    estimates.push_back(estimate(c, name, documents.tokens));
    result.domains[name] = interval_of(estimates.back(), options.level);
  }
  const Estimate all = average(estimates);
  const Variance seeds = seed_variance_of_difference(all.losses);
  result.average = interval_of(all, options.level);
  result.seed_freedom = seeds.freedom;
  result.seed_error = std::sqrt(seeds.value);
  result.document_error = std::sqrt(std::max(0.0, all.documents.value - all.shared));
  return result;
}

namespace {

Interval exponential(Interval x) {
  return {std::exp(x.estimate), std::exp(x.low), std::exp(x.high)};
}

}  // namespace

Convergence convergence(const Runs& architecture, const Runs& reference, const Options& options,
                        Pool pool) {
  const Comparison c = compare(architecture, reference, options, pool);
  if (!c.problem.empty()) return {.problem = c.problem};
  ByRun log_tokens;
  for (const Architecture& a : c.architectures) {
    const Range reached = shared_range(a.curves);
    // Only one of the pool can fail to reach it
    if (c.range.low < reached.low || c.range.low > reached.high) continue;
    log_tokens.emplace_back();
    for (const Curve& curve : a.curves)
      log_tokens.back().push_back(log_tokens_at(curve, c.range.low));
  }
  const double own = mean(log_tokens[0]);
  const double other = mean(log_tokens[1]);
  const Variance one = seed_variance(log_tokens);
  const Variance none;
  const Variance seeds{one.value / double(log_tokens[0].size()), one.freedom};
  return {"", c.range.low, exponential(interval(own, seeds, none, options.level)),
          exponential(
              interval(own - other, seed_variance_of_difference(log_tokens), none, options.level)),
          one.freedom};
}

}  // namespace assay::stats
