#include "stats/contrast.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/error.h"

namespace assay::stats {
namespace {

constexpr std::array kTargets{Targets::all, Targets::recall, Targets::other};

size_t index(Targets targets) { return size_t(targets); }

// Degrees of freedom of a sum of squared residuals u_i whose variances are proportional to
// w_i^1.5, where w_i is the share of cluster i in the tokens: v = (sum w^1.5)^2 / sum w^3 - 1.
// The exponent is 1 for independent documents and 2 for clusters without differences inside;
// real sources are between. This is n - 1 for clusters of one size.
double cluster_freedom(const std::vector<double>& tokens) {
  double variances = 0;
  double squares = 0;
  for (const double t : tokens) {
    variances += std::pow(t, 1.5);
    squares += t * t * t;
  }
  return std::max(1.0, variances * variances / squares - 1);
}

double total(const std::vector<double>& x) {
  double sum = 0;
  for (const double value : x) sum += value;
  return sum;
}

void add(std::vector<double>& sum, const std::vector<double>& x, double factor) {
  sum.resize(x.size());
  for (size_t i = 0; i < x.size(); ++i) sum[i] += factor * x[i];
}

std::vector<double> minus(std::vector<double> a, const std::vector<double>& b) {
  add(a, b, -1);
  return a;
}

}  // namespace

Contrast combine(const std::vector<Contrast>& contrasts, const std::vector<double>& weights) {
  Contrast sum;
  for (size_t j = 0; j < contrasts.size(); ++j) {
    add(sum.on_loss, contrasts[j].on_loss, weights[j]);
    add(sum.on_held_out, contrasts[j].on_held_out, weights[j]);
  }
  return sum;
}

Ends::Ends(const std::vector<Budget>& rungs) : rungs_(rungs.size()) {
  for (const auto& [name, losses] : rungs[0].runs[0].domains) {
    names_.push_back(name);
    tokens_.push_back(losses.tokens);
    recall_tokens_.push_back(losses.recall_tokens);
  }
  for (const Budget& rung : rungs) groups_.push_back(read(rung, "the reference"));
  std::vector<double> held_out;
  for (const Group& group : groups_) held_out.push_back(group.held_out);
  curve_.emplace(held_out, rung_losses({}));
}

size_t Ends::add(const Budget& budget, const std::string& name) {
  groups_.push_back(read(budget, "'" + name + "'"));
  return groups_.size() - 1;
}

Ends::Run Ends::read(const End& end, const std::string& name) const {
  for (const auto& [domain, losses] : end.domains)
    if (std::ranges::find(names_, domain) == names_.end())
      fail(
          "seed {} of {} has the domain '{}', which the first rung of the ladder does not have; "
          "evaluate every run on the same domains",
          end.seed, name, domain);
  Run run{end.held_out, {}};
  for (size_t d = 0; d < names_.size(); ++d) {
    const auto found = end.domains.find(names_[d]);
    if (found == end.domains.end())
      fail("seed {} of {} has no losses of the domain '{}'; evaluate every run on every domain",
           end.seed, name, names_[d]);
    const EndLosses& losses = found->second;
    const size_t clusters = tokens_[d].size();
    const size_t recall = recall_tokens_[d].size();
    if (losses.tokens != tokens_[d] || losses.nll.size() != clusters ||
        losses.recall_tokens != recall_tokens_[d] || losses.recall_nll.size() != recall ||
        (recall != 0 && recall != clusters))
      fail(
          "seed {} of {}: "
          "the {} clusters of the domain '{}' are not the {} of the first rung's first run; "
          "paired statistics need the same documents in the same order in every run",
          end.seed, name, losses.tokens.size(), names_[d], clusters);
    Domain domain;
    domain.nll[index(Targets::all)] = losses.nll;
    domain.nll[index(Targets::recall)] = losses.recall_nll;
    domain.nll[index(Targets::recall)].resize(clusters);
    domain.nll[index(Targets::other)] = minus(losses.nll, domain.nll[index(Targets::recall)]);
    for (const Targets t : kTargets)
      domain.loss[index(t)] = total(domain.nll[index(t)]) / total(tokens_[d]);
    run.domains.push_back(std::move(domain));
  }
  return run;
}

Ends::Group Ends::read(const Budget& budget, const std::string& name) const {
  Group group;
  for (const End& end : budget.runs) group.runs.push_back(read(end, name));
  const double share = 1 / double(group.runs.size());
  group.mean.resize(names_.size());
  group.luck.resize(names_.size());
  for (const Run& run : group.runs) {
    group.held_out += share * run.held_out;
    for (size_t d = 0; d < names_.size(); ++d)
      for (const Targets t : kTargets) {
        group.mean[d].loss[index(t)] += share * run.domains[d].loss[index(t)];
        stats::add(group.mean[d].nll[index(t)], run.domains[d].nll[index(t)], share);
      }
  }
  if (group.runs.size() < 2) return group;
  for (const Run& run : group.runs)
    for (size_t d = 0; d < names_.size(); ++d)
      for (const Targets t : kTargets) {
        const auto deviation = minus(run.domains[d].nll[index(t)], group.mean[d].nll[index(t)]);
        group.luck[d][index(t)] += document_variance(deviation, tokens_[d]).value;
      }
  return group;
}

size_t Ends::clusters(size_t domain) const {
  return size_t(std::ranges::count_if(tokens_[domain], [](double t) { return t > 0; }));
}

double Ends::loss(const std::vector<Domain>& domains, Measure measure) {
  if (measure.domain >= 0) return domains[size_t(measure.domain)].loss[index(measure.targets)];
  double sum = 0;
  for (const Domain& domain : domains) sum += domain.loss[index(measure.targets)];
  return sum / double(domains.size());
}

double Ends::loss(size_t group, Measure measure) const {
  return loss(groups_[group].mean, measure);
}

double Ends::loss_per_target(size_t group, Targets targets) const {
  double sum = 0;
  int domains = 0;
  for (size_t d = 0; d < names_.size(); ++d) {
    const double recall = total(recall_tokens_[d]);
    const double count = targets == Targets::recall ? recall : total(tokens_[d]) - recall;
    if (!(count > 0)) continue;
    sum += total(groups_[group].mean[d].nll[index(targets)]) / count;
    ++domains;
  }
  return domains > 0 ? sum / domains : std::numeric_limits<double>::quiet_NaN();
}

double Ends::recall_loss(size_t group) const { return loss_per_target(group, Targets::recall); }

double Ends::recall_lead(size_t group) const {
  return loss_per_target(group, Targets::other) - recall_loss(group);
}

std::vector<double> Ends::rung_losses(Measure measure) const {
  std::vector<double> losses;
  for (size_t b = 0; b < rungs_; ++b) losses.push_back(loss(b, measure));
  return losses;
}

double Ends::reference_loss(double held_out) const { return curve_->at(held_out, rung_losses({})); }

double Ends::slope_at(double held_out, Measure measure) const {
  return weighted_sum(curve_->read(held_out).slope, rung_losses(measure));
}

Contrast Ends::difference(size_t group, Measure measure) const {
  const auto losses = rung_losses(measure);
  const auto reading = curve_->read(held_out(group));
  Contrast contrast{std::vector<double>(groups_.size()), std::vector<double>(groups_.size())};
  contrast.on_loss[group] = 1;
  contrast.on_held_out[group] = -weighted_sum(reading.slope, losses);
  for (size_t b = 0; b < rungs_; ++b) {
    contrast.on_loss[b] = -reading.weights[b];
    contrast.on_held_out[b] = -weighted_sum(reading.by_rung[b], losses);
  }
  return contrast;
}

// Pooled over the groups [first, last), each along the curve's slope at its own held-out loss.
Variance Ends::residual_variance(size_t first, size_t last, Measure measure) const {
  ByRun residuals;
  for (size_t g = first; g < last; ++g) {
    const double slope = slope_at(held_out(g), measure);
    residuals.emplace_back();
    for (const Run& run : groups_[g].runs)
      residuals.back().push_back(loss(run.domains, measure) - slope * run.held_out);
  }
  return stats::seed_variance(residuals);
}

double Ends::contender_freedom() const {
  double freedom = 0;
  for (size_t g = rungs_; g < groups_.size(); ++g) freedom += double(seeds(g)) - 1;
  return freedom;
}

Variance Ends::contender_variance(Measure measure) const {
  return residual_variance(reference_joins() ? 0 : rungs_, groups_.size(), measure);
}

// The variance that a rung's seeds give to the contrast.
Variance Ends::rung_variance(size_t rung, const Contrast& contrast, Measure measure) const {
  const double on_loss = contrast.on_loss[rung];
  if (seeds(rung) < 2) {
    const size_t last = reference_joins() ? groups_.size() : rungs_;
    const Variance one = residual_variance(0, last, measure);
    return {one.value * on_loss * on_loss, one.freedom};
  }
  std::vector<double> z;
  for (const Run& run : groups_[rung].runs)
    z.push_back(on_loss * loss(run.domains, measure) + contrast.on_held_out[rung] * run.held_out);
  const Variance one = stats::seed_variance({z});
  return {one.value / double(z.size()), one.freedom};
}

// Per degree of freedom, over the groups [first, last).
double Ends::luck(size_t first, size_t last, size_t domain, Targets targets) const {
  double squares = 0;
  double freedom = 0;
  for (size_t g = first; g < last; ++g) {
    squares += groups_[g].luck[domain][index(targets)];
    freedom += double(seeds(g)) - 1;
  }
  return freedom > 0 ? squares / freedom : 0;
}

// The runs' own noise on single documents is part of the seeds' variance. It is subtracted here.
Variance Ends::documents(const Contrast& contrast, Measure measure,
                         std::vector<std::vector<double>>& influence) const {
  const bool average = measure.domain < 0;
  const double share = average ? 1 / double(names_.size()) : 1;
  std::vector<Variance> parts;
  double shared = 0;
  for (size_t d = 0; d < names_.size(); ++d) {
    if (!average && d != size_t(measure.domain)) continue;
    const size_t t = index(measure.targets);
    std::vector<double> y(tokens_[d].size());
    for (size_t g = 0; g < groups_.size(); ++g) {
      const double on_loss = contrast.on_loss[g];
      if (on_loss == 0) continue;
      stats::add(y, groups_[g].mean[d].nll[t], share * on_loss);
      const size_t first = g >= rungs_ ? (reference_joins() ? 0 : rungs_) : seeds(g) > 1 ? g : 0;
      const size_t last = g >= rungs_ ? groups_.size() : seeds(g) > 1 ? g + 1 : rungs_;
      shared += share * share * on_loss * on_loss / double(seeds(g)) *
                luck(first, last, d, measure.targets);
    }
    influence.push_back(document_influence(y, tokens_[d]));
    const double value = document_variance(y, tokens_[d]).value;
    parts.push_back({value, cluster_freedom(tokens_[d])});
  }
  const Variance all = sum(parts);
  return {std::max(0.0, all.value - shared), all.freedom};
}

// The estimators of variance: one per rung, then that of the contenders, then that of rungs with
// one seed, which is the contenders' if the reference joins their pool.
Estimate Ends::estimate(const Contrast& contrast, Measure measure) const {
  Estimate estimate;
  estimate.freedom.assign(rungs_ + 2, 1);
  for (size_t b = 0; b < rungs_; ++b) {
    estimate.value += contrast.on_loss[b] * loss(b, measure);
    const Variance variance = rung_variance(b, contrast, measure);
    const size_t estimator = seeds(b) > 1 ? b : reference_joins() ? rungs_ : rungs_ + 1;
    estimate.freedom[estimator] = variance.freedom;
    estimate.reference_error += variance.value;
    const double sign = contrast.on_loss[b] < 0 ? -1 : 1;
    estimate.noise.seeds.push_back({b, estimator, sign * std::sqrt(variance.value)});
  }
  const Variance one = contender_variance(measure);
  estimate.freedom[rungs_] = one.freedom;
  for (size_t g = rungs_; g < groups_.size(); ++g) {
    const double on_loss = contrast.on_loss[g];
    if (on_loss == 0) continue;
    estimate.value += on_loss * loss(g, measure);
    const double error = std::sqrt(one.value / double(seeds(g)));
    estimate.noise.seeds.push_back({g, rungs_, on_loss * error});
    estimate.contender_error += on_loss * on_loss * error * error;
  }
  estimate.contender_error = std::sqrt(estimate.contender_error);
  estimate.reference_error = std::sqrt(estimate.reference_error);
  estimate.noise.documents = documents(contrast, measure, estimate.influence);
  return estimate;
}

}  // namespace assay::stats
