#include "report/ends.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "base/error.h"
#include "report/analysis.h"
#include "report/table.h"
#include "stats/prediction.h"
#include "stats/reference.h"

namespace assay::report {
namespace {

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

// Losses on a set at the end of a run.
const run::EndSet& set_of(const Run& run, const std::string& set) {
  const auto found = run.data.end.sets.find(set);
  if (found == run.data.end.sets.end())
    fail("The run {} has no losses of {} at its end. Run the plan again into another folder.",
         run.name, set);
  return found->second;
}

// The losses of one set by cluster; of a further domain without recall and bounded losses, which
// records do not have.
stats::EndLosses losses_of(const Run& run, const std::string& set, bool is_further) {
  const run::Clusters& clusters = set_of(run, set).clusters;
  const auto numbers = [](const std::vector<int64_t>& counts) {
    return std::vector<double>(counts.begin(), counts.end());
  };
  if (is_further) return {.nll = clusters.nll, .tokens = numbers(clusters.tokens)};
  if (clusters.recall_nll.size() != clusters.recall_tokens.size())
    fail(
        "The record of the run {} has no recall losses of {}: its study does not judge by them. "
        "Run the plan again into another folder without --reuse.",
        run.name, set);
  return {.nll = clusters.nll,
          .recall_nll = clusters.recall_nll,
          .tokens = numbers(clusters.tokens),
          .recall_tokens = numbers(clusters.recall_tokens),
          .bounded_nll = clusters.bounded_nll.value_or(std::vector<double>())};
}

// With the losses of `domains`, which are unseen ones.
stats::End end_of(const Run& run, const Setting& setting, const std::vector<std::string>& domains) {
  const double held_out = setting.mixed ? run.end.training_loss : run.end.held_out_loss;
  stats::End end{.seed = run.seed, .held_out = held_out, .training_loss = run.end.training_loss};
  for (const std::string& domain : domains)
    end.domains[domain] =
        losses_of(run, setting.set(domain), std::ranges::count(setting.further, domain) > 0);
  if (setting.mixed) return end;
  for (const std::string& domain : setting.train)
    end.held_out_domains[domain] = losses_of(run, setting.held_out_set(domain), false);
  return end;
}

stats::Budget budget_of(const std::vector<Run>& runs, const Setting& setting,
                        const std::vector<std::string>& domains) {
  const double tokens = double(runs.front().tokens);
  stats::Budget budget{.tokens = tokens};
  for (const Run& run : runs) budget.runs.push_back(end_of(run, setting, domains));
  if (const auto unique = runs.front().data.provenance.train_tokens)
    budget.epochs = tokens / double(*unique);
  return budget;
}

std::vector<stats::Budget> budgets_of(const Architecture& a, const Setting& setting,
                                      const std::vector<std::string>& domains) {
  std::vector<stats::Budget> out;
  for (const auto& [tokens, runs] : a.budgets) out.push_back(budget_of(runs, setting, domains));
  return out;
}

// Why the numbers of these runs must not be compared: other data, or another version of the
// numerics of an operation. Empty when they may.
std::string mixed_numerics(const std::vector<const Run*>& runs) {
  std::map<std::string, int64_t> seen;
  for (const Run* run : runs) {
    const run::Provenance& provenance = run->data.provenance;
    if (provenance.data != runs.front()->data.provenance.data)
      return "The runs were trained on different data or with another tokenizer. "
             "Run the older ones again.";
    for (const auto& [operation, version] : provenance.numerics) {
      const auto [first, fresh] = seen.emplace(operation, version);
      if (!fresh && first->second != version)
        return fmt::format(
            "The runs differ in the numerics version of {} ({} and {}). Run the older ones again.",
            operation, first->second, version);
    }
  }
  return "";
}

// Why the ends of these runs cannot be compared: other documents were evaluated. Empty when they
// can.
std::string other_documents(const std::vector<const Run*>& runs, const Setting& setting) {
  std::vector<std::string> sets;
  for (const std::string& domain : setting.unseen()) sets.push_back(setting.set(domain));
  if (!setting.mixed)
    for (const std::string& domain : setting.train) sets.push_back(setting.held_out_set(domain));
  for (const Run* run : runs)
    for (const std::string& set : sets) {
      const run::Clusters& first = set_of(*runs.front(), set).clusters;
      const run::Clusters& own = set_of(*run, set).clusters;
      if (own.tokens != first.tokens || own.recall_tokens != first.recall_tokens)
        return fmt::format(
            "The runs were evaluated on different documents of {} at their end. "
            "Give all models the same train.end_tokens and run the plan again.",
            set);
    }
  return "";
}

// "20_480_000".
std::string toml_number(int64_t value) {
  std::string digits = std::to_string(value);
  for (auto at = int64_t(digits.size()) - 3; at > 0; at -= 3) digits.insert(size_t(at), "_");
  return digits;
}

// The plan key that would give the study a ladder.
std::string ladder_advice(const Setting& setting) {
  const run::Outcome& outcome = setting.reference().runs().front().data.outcome;
  const int64_t step = outcome.tokens / std::max<int64_t>(1, outcome.steps);
  // No rung is below a step, of which every run has at least one
  const double top = double(std::max(setting.reference().tokens(), 8 * step));
  std::string rungs;
  for (const double share : {0.125, 0.25, 0.5, 1.0})
    rungs += (rungs.empty() ? "" : ", ") + toml_number(int64_t(share * top));
  return fmt::format(
      "Add `ladder = {{ tokens = [{}], seeds = [1, 2, 3, 4] }}` to the plan and run it again; "
      "finished runs are kept.",
      rungs);
}

void describe_clusters(Setting& setting) {
  const Run& run = setting.reference().runs().front();
  setting.ladder.clustered_by_source = true;
  for (const std::string& domain : setting.test) {
    const run::EndSet& set = set_of(run, setting.set(domain));
    setting.ladder.clusters.emplace_back(domain, set.clusters.tokens.size());
    if (set.clustered_by != run::EndSet::kBySource) setting.ladder.clustered_by_source = false;
  }
}

// Sets the numbers that need no ladder, so that a verdict of "not settled" has numbers next to it.
// All `runs` have one budget.
void set_final_losses(stats::EndResult& end, const std::vector<Run>& runs, const Setting& setting) {
  const int64_t tokens = runs.front().tokens;
  end.tokens = double(tokens);
  end.held_out = mean_over(runs, [&](const Run& run) {
    return setting.mixed ? run.end.training_loss : run.end.held_out_loss;
  });
  end.final_loss = mean_over(runs, [](const Run& run) { return run.end.test_loss; });
  end.reference_loss = kNone;
  if (!setting.has_reference()) return;
  const auto found = setting.reference().budgets.find(tokens);
  if (found == setting.reference().budgets.end()) return;
  end.reference_loss = mean_over(found->second, [](const Run& run) { return run.end.test_loss; });
}

struct Contenders {
  std::vector<stats::Contender> list;
  std::vector<stats::EndResult*> results;  // where each result goes
};

stats::LadderResult settle(Setting& setting, const Contenders& contenders) {
  stats::LadderResult found =
      stats::compare_ends(setting.ladder.budgets, contenders.list, setting.ladder.options);
  for (size_t i = 0; i < found.results.size(); ++i) {
    stats::EndResult& to = *contenders.results[i];
    const stats::EndResult before = to;
    to = found.results[i];
    if (to.has_delta) continue;
    to.tokens = before.tokens;
    to.held_out = before.held_out;
    to.final_loss = before.final_loss;
    to.reference_loss = before.reference_loss;
  }
  return found;
}

// The runs of one model at half and at twice its learning rate.
void add_checks(Architecture& a, const Setting& setting, Contenders& contenders) {
  for (const auto& [purpose, runs] : a.check_runs) {
    a.checks.push_back({.purpose = purpose, .learning_rate = runs.front().learning_rate});
    set_final_losses(a.checks.back().end, runs, setting);
    contenders.list.push_back({.name = fmt::format("{} at {}", a.name, purpose),
                               .budgets = {budget_of(runs, setting, setting.test)}});
  }
}

void set_reason(Setting& setting, const std::string& reason) {
  for (Architecture& a : setting.architectures) {
    if (a.style != 0 && a.end.reason.empty()) a.end.reason = reason;
    for (Check& check : a.checks)
      if (check.end.reason.empty()) check.end.reason = reason;
  }
}

// Whether it was compared with the ladder, whose data, numerics and documents it then has.
bool is_compared(const Architecture& a) {
  return a.style != 0 && a.comparable && !a.end.budgets.empty();
}

// The comparison with the further unseen domains included.
void compare_on_all_domains(Setting& setting) {
  const std::vector<std::string> domains = setting.unseen();
  Contenders contenders;
  for (Architecture& a : setting.architectures) {
    if (!is_compared(a)) continue;
    contenders.list.push_back({.name = a.name, .budgets = budgets_of(a, setting, domains)});
    contenders.results.push_back(&a.wide);
  }
  const auto ladder = budgets_of(setting.reference(), setting, domains);
  const stats::LadderResult found =
      stats::compare_ends(ladder, contenders.list, setting.ladder.options);
  for (size_t i = 0; i < found.results.size(); ++i) *contenders.results[i] = found.results[i];
}

void compare_with_ladder(Setting& setting) {
  Contenders contenders;
  Contenders checks;
  for (Architecture& a : setting.architectures) {
    if (a.style == 0) continue;
    std::vector<const Run*> both = setting.reference().all_runs();
    const auto own = a.all_runs();
    both.insert(both.end(), own.begin(), own.end());
    a.end.reason = mixed_numerics(both);
    a.comparable = a.end.reason.empty();
    if (a.comparable) a.end.reason = other_documents(both, setting);
    if (!a.end.reason.empty()) continue;
    contenders.list.push_back({.name = a.name, .budgets = budgets_of(a, setting, setting.test)});
    contenders.results.push_back(&a.end);
    add_checks(a, setting, checks);
  }
  const stats::LadderResult found = settle(setting, contenders);
  setting.ladder.problem = found.problem;
  setting.ladder.warnings = found.warnings;
  setting.ladder.critical = found.critical;
  setting.ladder.mature = found.mature;
  setting.ladder.recall = found.recall;
  if (!found.problem.empty()) return;
  for (Architecture& a : setting.architectures) {
    for (Check& check : a.checks) checks.results.push_back(&check.end);
    if (a.style == 0) continue;
    a.tokens_ratio = a.end.tokens / stats::ladder_tokens(setting.ladder.budgets, a.end.held_out);
  }
  if (!checks.list.empty()) settle(setting, checks);
  if (!setting.further.empty()) compare_on_all_domains(setting);
}

}  // namespace

void compare_ends(Setting& setting) {
  Ladder& ladder = setting.ladder;
  for (Architecture& a : setting.architectures) {
    a.end.name = a.name;
    set_final_losses(a.end, a.runs(), setting);
    a.tokens_ratio = kNone;
  }
  if (setting.architectures.empty()) return;
  if (!setting.has_reference()) {
    ladder.problem = "The reference has no finished run.";
    return set_reason(setting, ladder.problem);
  }
  describe_clusters(setting);
  ladder.budgets = budgets_of(setting.reference(), setting, setting.test);
  const auto reference = setting.reference().all_runs();
  ladder.problem = mixed_numerics(reference);
  if (!ladder.problem.empty())
    for (Architecture& a : setting.architectures) a.comparable = false;
  else ladder.problem = other_documents(reference, setting);
  if (!ladder.problem.empty()) return set_reason(setting, ladder.problem);
  try {
    compare_with_ladder(setting);
  } catch (const BadInput& error) {
    ladder.problem = error.what();
  }
  if (ladder.problem.empty()) return;
  if (ladder.budgets.size() < 2) {
    const std::string budget = show(ladder.budgets[0].tokens, Format::tokens);
    if (setting.has_planned_ladder) {
      ladder.problem = fmt::format(
          "Of the reference's ladder, one budget ({} tokens) has finished runs.", budget);
      ladder.advice = "The same `assay run` command trains the runs that are missing.";
    } else {
      ladder.problem =
          fmt::format("The reference was trained at one budget ({} tokens) only.", budget);
      ladder.advice = ladder_advice(setting);
    }
  }
  set_reason(setting, ladder.problem + (ladder.advice.empty() ? "" : " " + ladder.advice));
}

std::vector<study::VarianceRow> seed_variances(const Setting& setting) {
  if (!setting.ladder.problem.empty()) return {};
  std::vector<stats::Contender> contenders;
  for (const Architecture& a : setting.architectures)
    if (is_compared(a))
      contenders.push_back({.name = a.name, .budgets = budgets_of(a, setting, setting.test)});
  std::vector<study::VarianceRow> rows;
  for (const stats::SeedVariance& row :
       stats::seed_variances(setting.ladder.budgets, contenders, setting.ladder.options))
    rows.push_back({.study = row.study,
                    .model = row.model,
                    .tokens = row.tokens,
                    .seeds = row.seeds,
                    .variance = row.variance});
  return rows;
}

namespace {

double mean_loss(const stats::Budget& budget) {
  double sum = 0;
  for (const stats::End& end : budget.runs) sum += loss_of(end);
  return sum / double(budget.runs.size());
}
// The last rung before the reference overfits: up to it, the loss out of domain falls.
double last_useful_rung(const std::vector<stats::Budget>& ladder) {
  size_t last = 0;
  while (last + 1 < ladder.size() && mean_loss(ladder[last + 1]) < mean_loss(ladder[last])) ++last;
  return ladder[last].tokens;
}

}  // namespace

std::vector<Foretold> predictions(const Setting& setting) {
  std::vector<Foretold> out;
  if (!setting.ladder.problem.empty() || setting.ladder.budgets.empty()) return out;
  // All contenders, because they share one variance between seeds
  std::vector<stats::Contender> contenders;
  for (const Architecture& a : setting.architectures)
    if (is_compared(a))
      contenders.push_back({.name = a.name, .budgets = budgets_of(a, setting, setting.test)});
  std::map<std::pair<double, int64_t>, std::vector<stats::Prediction>> found;  // (tokens, seeds)
  const auto predict = [&](const Architecture& a, double tokens, int64_t seeds) {
    auto& all = found[{tokens, seeds}];
    if (all.empty())
      all = stats::predict_ends(setting.ladder.budgets, contenders,
                                {.below_tokens = tokens, .target_tokens = tokens, .seeds = seeds});
    const auto own = std::ranges::find(all, a.name, &stats::Prediction::name);
    if (own == all.end() || !own->problem.empty()) return false;
    out.push_back(
        {.name = a.name, .from = own->largest, .tokens = tokens, .predicted = own->delta});
    return true;
  };
  for (const Architecture& a : setting.architectures) {
    if (a.style == 0 || !a.comparable) continue;
    const auto judged =
        std::ranges::find(a.end.budgets, a.end.tokens, &stats::BudgetResult::tokens);
    if (judged == a.end.budgets.end() || judged == a.end.budgets.begin()) continue;
    if (!judged->problem.empty() || !judged->caveat.empty()) continue;
    if (predict(a, judged->tokens, judged->seeds)) out.back().measured = judged->delta;
  }
  const double last_rung = last_useful_rung(setting.ladder.budgets);
  for (const Architecture& a : setting.architectures) {
    if (!is_compared(a)) continue;
    const stats::BudgetResult& largest = a.end.budgets.back();
    if (largest.problem.empty() && 2 * largest.tokens <= last_rung)
      predict(a, 2 * largest.tokens, largest.seeds);
  }
  return out;
}

std::vector<stats::Budget> only_domain(const std::vector<stats::Budget>& budgets,
                                       const std::string& domain) {
  if (domain.empty()) return budgets;
  std::vector<stats::Budget> out = budgets;
  for (stats::Budget& budget : out)
    for (stats::End& end : budget.runs)
      std::erase_if(end.domains, [&](const auto& entry) { return entry.first != domain; });
  return out;
}

double loss_of(const stats::End& end, const std::string& domain) {
  double sum = 0;
  double count = 0;
  for (const auto& [name, losses] : end.domains) {
    if (!domain.empty() && name != domain) continue;
    double nll = 0;
    double tokens = 0;
    for (size_t c = 0; c < losses.nll.size(); ++c) {
      nll += losses.nll[c];
      tokens += losses.tokens[c];
    }
    sum += nll / tokens;
    count += 1;
  }
  return sum / count;
}

}  // namespace assay::report
