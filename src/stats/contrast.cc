#include "stats/contrast.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/error.h"

namespace assay::stats {
namespace {

constexpr std::array kTargets{Targets::all, Targets::recall, Targets::other, Targets::bounded};
constexpr std::array kTexts{Text::test, Text::held_out};
constexpr double kKnown = 1e9;  // degrees of freedom of a variance that is not estimated

size_t index(Targets targets) { return size_t(targets); }
size_t index(Text text) { return size_t(text); }

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

std::vector<double> minus(std::vector<double> a, const std::vector<double>& b) {
  add(a, b, -1);
  return a;
}

std::vector<double> influence_of(const std::vector<double>& nll, const std::vector<double>& count) {
  if (!(total(count) > 0)) return std::vector<double>(nll.size());
  return document_influence(nll, count);
}

}  // namespace

std::vector<SeedVariance> rows_of_others(const LadderOptions& options,
                                         const std::vector<Contender>& contenders) {
  std::vector<SeedVariance> rows = options.variances;
  std::erase_if(rows, [&](const SeedVariance& row) {
    return row.seeds < 2 || (row.study == options.study &&
                             std::ranges::count(contenders, row.model, &Contender::name) > 0);
  });
  return rows;
}

Contrast combine(const std::vector<Contrast>& contrasts, const std::vector<double>& weights) {
  Contrast sum;
  for (size_t j = 0; j < contrasts.size(); ++j) {
    add(sum.on_loss, contrasts[j].on_loss, weights[j]);
    add(sum.on_held_out, contrasts[j].on_held_out, weights[j]);
    sum.slope_error += weights[j] * contrasts[j].slope_error;
  }
  return sum;
}

Ends::Ends(const std::vector<Budget>& rungs) : rungs_(rungs.size()) {
  const End& first = rungs[0].runs[0];
  texts_ = {read(first.domains), read(first.held_out_domains)};
  bounded_ = std::ranges::none_of(first.domains,
                                  [](const auto& one) { return one.second.bounded_nll.empty(); });
  for (const Budget& rung : rungs) groups_.push_back(read(rung, "the reference"));
  std::vector<double> held_out;
  for (const Group& group : groups_) held_out.push_back(group.held_out);
  curve_.emplace(held_out, rung_losses({}));
  for (Group& group : groups_) group.curve_slope = curve_->read(group.held_out).slope;
}

size_t Ends::add(const Budget& budget, const std::string& name) {
  groups_.push_back(read(budget, "'" + name + "'"));
  groups_.back().curve_slope = curve_->read(groups_.back().held_out).slope;
  return groups_.size() - 1;
}

Ends::Texts Ends::read(const std::map<std::string, EndLosses>& domains) const {
  Texts texts;
  for (const auto& [name, losses] : domains) {
    texts.names.push_back(name);
    texts.tokens.push_back(losses.tokens);
    texts.recall_tokens.push_back(losses.recall_tokens);
    texts.recall_tokens.back().resize(losses.tokens.size());
  }
  return texts;
}

std::vector<Ends::Domain> Ends::read(const End& end, Text text, const std::string& name) const {
  const Texts& texts = texts_[index(text)];
  const auto& domains = text == Text::test ? end.domains : end.held_out_domains;
  for (const auto& [domain, losses] : domains)
    if (std::ranges::find(texts.names, domain) == texts.names.end())
      fail(
          "seed {} of {} has the domain '{}', which the first rung of the ladder does not have; "
          "evaluate every run on the same domains",
          end.seed, name, domain);
  std::vector<Domain> out;
  for (size_t d = 0; d < texts.names.size(); ++d) {
    const auto found = domains.find(texts.names[d]);
    if (found == domains.end())
      fail("seed {} of {} has no losses of the domain '{}'; evaluate every run on every domain",
           end.seed, name, texts.names[d]);
    const EndLosses& losses = found->second;
    const size_t clusters = texts.tokens[d].size();
    std::vector<double> recall_tokens = losses.recall_tokens;
    recall_tokens.resize(clusters);
    if (losses.tokens != texts.tokens[d] || losses.nll.size() != clusters ||
        recall_tokens != texts.recall_tokens[d] ||
        losses.recall_nll.size() != losses.recall_tokens.size() ||
        (text == Text::test && bounded_ && losses.bounded_nll.size() != clusters))
      fail(
          "seed {} of {}: "
          "the {} clusters of the domain '{}' are not the {} of the first rung's first run; "
          "paired statistics need the same documents in the same order in every run",
          end.seed, name, losses.tokens.size(), texts.names[d], clusters);
    Domain domain{.loss = {}, .nll = {losses.nll, losses.recall_nll, {}, losses.bounded_nll}};
    for (auto& values : domain.nll) values.resize(clusters);
    domain.nll[index(Targets::other)] = minus(losses.nll, domain.nll[index(Targets::recall)]);
    for (const Targets t : kTargets)
      domain.loss[index(t)] = total(domain.nll[index(t)]) / total(targets_of(text, d, t));
    out.push_back(std::move(domain));
  }
  return out;
}

Ends::Run Ends::read(const End& end, const std::string& name) const {
  return {end.held_out, {read(end, Text::test, name), read(end, Text::held_out, name)}};
}

Ends::Group Ends::read(const Budget& budget, const std::string& name) const {
  Group group;
  for (const End& end : budget.runs) group.runs.push_back(read(end, name));
  const double share = 1 / double(group.runs.size());
  for (const Text text : kTexts) {
    auto& mean = group.mean[index(text)];
    mean.resize(domains(text).size());
    for (const Run& run : group.runs)
      for (size_t d = 0; d < mean.size(); ++d)
        for (const Targets t : kTargets) {
          const Domain& own = run.domains[index(text)][d];
          mean[d].loss[index(t)] += share * own.loss[index(t)];
          stats::add(mean[d].nll[index(t)], own.nll[index(t)], share);
        }
  }
  for (const Run& run : group.runs) group.held_out += share * run.held_out;
  add_luck(group);
  return group;
}

void Ends::add_luck(Group& group) const {
  for (const Text text : kTexts) {
    auto& luck = group.luck[index(text)];
    luck.resize(domains(text).size());
    if (group.runs.size() < 2) continue;
    for (const Run& run : group.runs)
      for (size_t d = 0; d < luck.size(); ++d) {
        std::array<std::vector<double>, 4> deviation;
        for (const Targets t : kTargets)
          deviation[index(t)] = influence_of(minus(run.domains[index(text)][d].nll[index(t)],
                                                   group.mean[index(text)][d].nll[index(t)]),
                                             targets_of(text, d, t));
        for (const Targets t : kTargets) {
          luck[d][index(t)].own += weighted_sum(deviation[index(t)], deviation[index(t)]);
          luck[d][index(t)].with_all += weighted_sum(deviation[index(t)], deviation[0]);
        }
      }
  }
}

const std::vector<double>& Ends::targets_of(Text text, size_t domain, Targets targets) const {
  const Texts& texts = texts_[index(text)];
  const bool recall = text == Text::held_out && targets == Targets::recall;
  return recall ? texts.recall_tokens[domain] : texts.tokens[domain];
}

const std::vector<std::string>& Ends::domains(Text text) const { return texts_[index(text)].names; }

size_t Ends::clusters(Text text, size_t domain) const {
  return size_t(
      std::ranges::count_if(texts_[index(text)].tokens[domain], [](double t) { return t > 0; }));
}

bool Ends::has_recall(Text text) const {
  return std::ranges::any_of(texts_[index(text)].recall_tokens,
                             [](const auto& tokens) { return total(tokens) > 0; });
}

// Domains without such targets are left out.
double Ends::loss(const Domains& domains, Measure measure) const {
  double sum = 0;
  const auto& of_text = domains[index(measure.text)];
  for (size_t d = 0; d < of_text.size(); ++d)
    if (const double share = share_of(measure, measure.text, d).outcome; share > 0)
      sum += share * of_text[d].loss[index(measure.targets)];
  return sum;
}

double Ends::loss(size_t group, Measure measure) const {
  return loss(groups_[group].mean, measure);
}

double Ends::loss_per_target(size_t group, Targets targets) const {
  const Texts& texts = texts_[index(Text::test)];
  double sum = 0;
  int domains = 0;
  for (size_t d = 0; d < texts.names.size(); ++d) {
    const double recall = total(texts.recall_tokens[d]);
    const double count = targets == Targets::recall ? recall : total(texts.tokens[d]) - recall;
    if (!(count > 0)) continue;
    sum += total(groups_[group].mean[index(Text::test)][d].nll[index(targets)]) / count;
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

double Ends::slope(size_t group, Measure measure, Line line) const {
  const Group& own = groups_[group];
  if (line == Line::curve) return weighted_sum(own.curve_slope, rung_losses(measure));
  const Tangent& at = *own.tangent[size_t(line)];
  return weighted_sum(curve_->rung_slope(at.rung, at.before, at.after).weights,
                      rung_losses(measure));
}

Contrast Ends::difference(size_t group, Measure measure) const {
  const auto losses = rung_losses(measure);
  const auto reading = curve_->read(held_out(group));
  Contrast contrast{std::vector<double>(groups_.size()), std::vector<double>(groups_.size()), 0};
  contrast.on_loss[group] = 1;
  contrast.on_held_out[group] = -weighted_sum(reading.slope, losses);
  for (size_t b = 0; b < rungs_; ++b) {
    contrast.on_loss[b] = -reading.weights[b];
    contrast.on_held_out[b] = -weighted_sum(reading.by_rung[b], losses);
  }
  return contrast;
}

Contrast Ends::equal_tokens(size_t group, Measure measure, Line line) const {
  const Tangent& at = *groups_[group].tangent[size_t(line)];
  const auto losses = rung_losses(measure);
  const auto tangent = curve_->rung_slope(at.rung, at.before, at.after);
  const double slope = weighted_sum(tangent.weights, losses);
  const double distance = held_out(group) - held_out(at.rung);
  Contrast contrast{std::vector<double>(groups_.size()), std::vector<double>(groups_.size()), 0};
  for (size_t b = 0; b < rungs_; ++b) {
    contrast.on_loss[b] = -distance * tangent.weights[b];
    contrast.on_held_out[b] = -distance * weighted_sum(tangent.by_rung[b], losses);
  }
  contrast.on_loss[group] = 1;
  contrast.on_held_out[group] = -slope;
  contrast.on_loss[at.rung] -= 1;
  contrast.on_held_out[at.rung] += slope;
  double change = at.others.empty() ? std::abs(slope) : 0;
  for (const size_t segment : at.others)
    change = std::max(change, std::abs(slope - weighted_sum(curve_->secant(segment), losses)));
  contrast.slope_error = change / 2 * distance;
  return contrast;
}

std::vector<size_t> Ends::pool(Line line) const {
  std::vector<size_t> all;
  std::vector<size_t> chosen;
  double freedom = 0;
  for (size_t g = rungs_; g < groups_.size(); ++g) {
    all.push_back(g);
    if (!usable(g, line)) continue;
    chosen.push_back(g);
    freedom += double(seeds(g)) - 1;
  }
  return line == Line::curve && freedom == 0 && table_.empty() ? all : chosen;
}

std::string Ends::key(Measure measure, Line line) const {
  static constexpr std::array kNames{"all", "recall", "other", "bounded"};
  const std::string domain =
      measure.domain < 0 ? "" : domains(measure.text)[size_t(measure.domain)];
  if (measure.text == Text::held_out)
    return "recall_in_domain" + (domain.empty() ? "" : ":" + domain);
  const std::string part = domain.empty() ? kNames[index(measure.targets)] : "domain:" + domain;
  if (line == Line::curve) return part;
  return part == "all" ? "equal_tokens" : "equal_tokens:" + part;
}

std::vector<double> Ends::residuals(size_t group, Measure measure, Line line) const {
  const double along = slope(group, measure, line);
  std::vector<double> residuals;
  for (const Run& run : groups_[group].runs)
    residuals.push_back(loss(run.domains, measure) - along * run.held_out);
  return residuals;
}

Variance Ends::group_variance(size_t group, Measure measure, Line line) const {
  return stats::seed_variance(ByRun{residuals(group, measure, line)});
}

Variance Ends::contender_variance(Measure measure, Line line) const {
  ByRun runs;
  for (const size_t g : pool(line)) runs.push_back(residuals(g, measure, line));
  Variance pooled = stats::seed_variance(runs);
  const std::string name = key(measure, line);
  for (const SeedVariance& row : table_) {
    const auto found = row.variance.find(name);
    if (found == row.variance.end()) continue;
    const double freedom = pooled.freedom + double(row.seeds) - 1;
    pooled.value += (found->second - pooled.value) * double(row.seeds - 1) / freedom;
    pooled.freedom = freedom;
  }
  return pooled;
}

Variance Ends::held_out_variance(Line line) const {
  ByRun runs;
  for (const size_t g : pool(line)) {
    runs.emplace_back();
    for (const Run& run : groups_[g].runs) runs.back().push_back(run.held_out);
  }
  return stats::seed_variance(runs);
}

// The variance that a rung's seeds give to the contrast. One seed: pooled over the rungs.
Variance Ends::rung_variance(size_t rung, const Contrast& contrast, Measure measure) const {
  const double on_loss = contrast.on_loss[rung];
  if (seeds(rung) < 2) {
    ByRun runs;
    for (size_t b = 0; b < rungs_; ++b) runs.push_back(residuals(b, measure, Line::curve));
    const Variance pooled = stats::seed_variance(runs);
    return {pooled.value * on_loss * on_loss, pooled.freedom};
  }
  std::vector<double> z;
  for (const Run& run : groups_[rung].runs)
    z.push_back(on_loss * loss(run.domains, measure) + contrast.on_held_out[rung] * run.held_out);
  const Variance one = stats::seed_variance(ByRun{z});
  return {one.value / double(z.size()), one.freedom};
}

Ends::Share Ends::share_of(Measure measure, Text text, size_t domain) const {
  const double axis = text == Text::held_out ? 1 / double(domains(text).size()) : 0;
  if (text != measure.text) return {0, axis};
  if (measure.domain >= 0) return {double(domain == size_t(measure.domain)), axis};
  int counted = 0;
  for (size_t d = 0; d < domains(text).size(); ++d)
    counted += total(targets_of(text, d, measure.targets)) > 0;
  const bool own = total(targets_of(text, domain, measure.targets)) > 0;
  return {own ? 1.0 / counted : 0, axis};
}

// The part of the sum of squares that comes from the runs' own noise on single documents. The
// variance of the seeds already contains it.
double Ends::luck(size_t group, Line line, Text text, size_t domain, Targets targets,
                  Share weight) const {
  std::vector<size_t> groups{group};
  if (group >= rungs_) groups = pool(line);
  for (size_t b = 0; group < rungs_ && seeds(group) < 2 && b < rungs_; ++b) groups.push_back(b);
  double squares = 0;
  double freedom = 0;
  for (const size_t g : groups) {
    const auto& luck = groups_[g].luck[index(text)][domain];
    const Luck& own = luck[index(targets)];
    squares += weight.outcome * weight.outcome * own.own +
               2 * weight.outcome * weight.axis * own.with_all +
               weight.axis * weight.axis * luck[index(Targets::all)].own;
    freedom += double(seeds(g)) - 1;
  }
  return freedom > 0 ? squares / freedom / double(seeds(group)) : 0;
}

void Ends::add_documents(const Contrast& contrast, Measure measure, Line line,
                         Estimate& estimate) const {
  std::vector<Variance> parts;
  std::vector<Variance> axis;
  double shared = 0;
  for (const Text text : kTexts)
    for (size_t d = 0; d < domains(text).size(); ++d) {
      const Share share = share_of(measure, text, d);
      if (share.outcome == 0 && share.axis == 0) continue;
      const auto& tokens = texts_[index(text)].tokens[d];
      std::vector<double> outcome(tokens.size());
      std::vector<double> held_out(tokens.size());
      for (size_t g = 0; g < contrast.on_loss.size(); ++g) {
        const Share own{share.outcome * contrast.on_loss[g], share.axis * contrast.on_held_out[g]};
        if (own.outcome == 0 && own.axis == 0) continue;
        const Domain& mean = groups_[g].mean[index(text)][d];
        stats::add(outcome, mean.nll[index(measure.targets)], own.outcome);
        stats::add(held_out, mean.nll[index(Targets::all)], own.axis);
        shared += luck(g, line, text, d, measure.targets, own);
      }
      auto influence = influence_of(outcome, targets_of(text, d, measure.targets));
      stats::add(influence, influence_of(held_out, tokens), 1);
      parts.push_back({weighted_sum(influence, influence), cluster_freedom(tokens)});
      if (text == Text::held_out) axis.push_back(parts.back());
      estimate.influence.push_back(std::move(influence));
    }
  const Variance all = sum(parts);
  estimate.noise.documents = {std::max(0.0, all.value - shared), all.freedom};
  estimate.axis_documents = sum(axis);
}

// The estimators of variance: one per rung, then that of the contenders, then that of rungs with
// one seed, then that of the slope's model error, which is taken as known.
void Ends::add_rungs(const Contrast& contrast, Measure measure, Estimate& estimate) const {
  for (size_t b = 0; b < rungs_; ++b) {
    estimate.value += contrast.on_loss[b] * loss(b, measure);
    const Variance variance = rung_variance(b, contrast, measure);
    const size_t estimator = seeds(b) > 1 ? b : rungs_ + 1;
    estimate.freedom[estimator] = variance.freedom;
    estimate.reference_error += variance.value;
    const double sign = contrast.on_loss[b] < 0 ? -1 : 1;
    estimate.noise.seeds.push_back({b, estimator, sign * std::sqrt(variance.value)});
  }
  estimate.reference_error = std::sqrt(estimate.reference_error);
}

// Along its line, a run's residual has the pooled variance. What a contrast of two lines leaves on
// the held-out loss is counted with the variance of this loss.
void Ends::add_contenders(const Contrast& contrast, Measure measure, Line line,
                          Estimate& estimate) const {
  const Variance one = contender_variance(measure, line);
  const double held_out = held_out_variance(line).value;
  estimate.freedom[rungs_] = std::max(1.0, one.freedom);
  for (size_t g = rungs_; g < contrast.on_loss.size(); ++g) {
    const double on_loss = contrast.on_loss[g];
    if (on_loss == 0 && contrast.on_held_out[g] == 0) continue;
    estimate.known = estimate.known && one.freedom > 0;
    estimate.value += on_loss * loss(g, measure);
    const double rest = contrast.on_held_out[g] + on_loss * slope(g, measure, line);
    const double variance =
        (on_loss * on_loss * one.value + rest * rest * held_out) / double(seeds(g));
    estimate.noise.seeds.push_back(
        {g, rungs_, on_loss < 0 ? -std::sqrt(variance) : std::sqrt(variance)});
    estimate.contender_error += variance;
  }
  estimate.contender_error = std::sqrt(estimate.contender_error);
}

Estimate Ends::estimate(const Contrast& contrast, Measure measure, Line line) const {
  Estimate estimate;
  estimate.freedom.assign(rungs_ + 3, 1);
  add_rungs(contrast, measure, estimate);
  add_contenders(contrast, measure, line, estimate);
  estimate.freedom[rungs_ + 2] = kKnown;
  if (contrast.slope_error != 0) {
    estimate.noise.seeds.push_back({groups_.size(), rungs_ + 2, contrast.slope_error});
    estimate.slope_error = std::abs(contrast.slope_error);
  }
  add_documents(contrast, measure, line, estimate);
  return estimate;
}

}  // namespace assay::stats
