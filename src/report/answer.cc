#include "report/answer.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "report/table.h"

namespace assay::report {
namespace {

using stats::Verdict;

constexpr size_t kMostMissing = 5;  // runs that are named one by one

std::string nats(const stats::Interval& interval) { return show(interval, Format::change); }
std::string nats(double value) { return show(value, Format::change); }

// Is the final loss of this architecture the lowest of all that were trained on as many tokens?
bool is_lowest(const Architecture& a, const Setting& setting) {
  return std::ranges::all_of(setting.architectures, [&](const Architecture& other) {
    const auto found = other.budgets.find(int64_t(a.end.tokens));
    if (&other == &a || found == other.budgets.end()) return true;
    const double loss = mean_over(found->second, [](const Run& run) { return run.end.test_loss; });
    return loss > a.end.final_loss;
  });
}

// The verdict and the final loss may point in opposite directions. Both are facts.
std::string both_facts(const Architecture& a, const Setting& setting) {
  const double difference = a.end.final_loss - a.end.reference_loss;
  if (!a.end.judged || !std::isfinite(difference)) return "";
  const std::string tokens = show(a.end.tokens, Format::tokens);
  const char* where = setting.mixed ? "on held-out text" : "out of domain";
  if (a.end.verdict == Verdict::degraded && difference < 0)
    return fmt::format(
        "It has {} final loss {} at {} tokens ({} nats against the reference), "
        "and is still degraded: its loss there is higher than its {} predicts.",
        is_lowest(a, setting) ? "the lowest" : "a lower", where, tokens, nats(difference),
        setting.pretraining_name());
  if (a.end.verdict == Verdict::better && difference > 0)
    return fmt::format(
        "It has a higher final loss {} at {} tokens ({} nats against the reference), "
        "and is still better: its loss there is lower than its {} predicts.",
        where, tokens, nats(difference), setting.pretraining_name());
  if (a.end.verdict == Verdict::equivalent && std::abs(difference) > setting.ladder.options.margin)
    return fmt::format(
        "Its final loss {} at {} tokens is {} than that of the reference ({} nats), "
        "and it is still equivalent: it learned {} from the same tokens, "
        "and its loss there is what its {} predicts.",
        where, tokens, difference > 0 ? "higher" : "lower", nats(difference),
        difference > 0 ? "less" : "more", setting.pretraining_name());
  return "";
}

// "0.13 nats worse"
std::string worse_or_better(double value) {
  return fmt::format("{:.2f} nats {}", std::abs(value), value < 0 ? "better" : "worse");
}

std::string in_words(const stats::Interval& difference, Verdict verdict, double margin) {
  switch (verdict) {
    case Verdict::degraded:
    case Verdict::better:
      return worse_or_better(difference.estimate);
    case Verdict::equivalent:
      return fmt::format("within {:.2f} nats of the reference", margin);
    case Verdict::not_worse:
      return fmt::format("at most {}", worse_or_better(difference.high));
    default:
      return fmt::format("between {} and {}", worse_or_better(difference.low),
                         worse_or_better(difference.high));
  }
}

std::string largest_domain(const Architecture& a) {
  const stats::EndResult& end = a.end;
  const bool points = end.verdict == Verdict::degraded || end.verdict == Verdict::better;
  if (!points || end.domains.size() < 2) return "";
  const double sign = end.delta.estimate < 0 ? -1 : 1;
  const auto most = std::ranges::max_element(
      end.domains, {}, [&](const auto& entry) { return sign * entry.second.estimate; });
  return fmt::format("The difference is largest on {}: {}.", most->first, nats(most->second));
}

std::string trend(const Architecture& a) {
  if (!a.end.has_trend || !std::isfinite(a.end.trend.low)) return "";
  if (a.end.trend.low > 0)
    return fmt::format("Δ_end grows with more tokens: it changes by {} nats per doubling.",
                       nats(a.end.trend));
  if (a.end.trend.high < 0)
    return fmt::format("Δ_end falls with more tokens: it changes by {} nats per doubling.",
                       nats(a.end.trend));
  return "";
}

// Sentence about the checks that carry a verdict; "" if they and the main verdict are not settled.
std::string at_other_rates(const Architecture& a) {
  if (!a.end.judged) return "";
  std::vector<std::string> same;
  std::vector<std::string> differing;
  for (const Check& check : a.checks) {
    if (!check.end.judged) continue;
    if (check.end.verdict == a.end.verdict) same.push_back(check.purpose);
    else differing.push_back(fmt::format("{} at {}", word(check.end.verdict), check.purpose));
  }
  if (!differing.empty())
    return fmt::format("The verdict depends on the learning rate: {}.", join(differing, ", "));
  if (same.empty() || a.end.verdict == Verdict::not_settled) return "";
  if (same.size() == 2) return "The verdict is the same at half and at twice the learning rate.";
  return fmt::format("The verdict is the same at {}.", same.front());
}

std::string tuning_warning(const Architecture& a, const Setting& setting) {
  const auto grid = std::ranges::find(setting.grids, a.name, &Grid::model);
  if (grid == setting.grids.end() || !grid->at_the_end()) return "";
  return fmt::format(
      "Warning: The chosen learning rate of {} is at the end of its grid, "
      "so a better one may lie beyond.",
      a.name);
}

// Rates of the grid at which a run failed: they had no part in the choice.
std::string failed_rates(const Architecture& a, const Setting& setting) {
  const auto grid = std::ranges::find(setting.grids, a.name, &Grid::model);
  if (grid == setting.grids.end()) return "";
  std::vector<std::string> rates;
  for (const Grid::Point& point : grid->points)
    if (point.done < point.planned) rates.push_back(fmt::format("{:g}", point.learning_rate));
  if (rates.empty()) return "";
  return fmt::format(
      "Warning: Not every run of {} ended at these learning rates of its grid: {}. "
      "They had no part in the choice.",
      a.name, join(rates, ", "));
}

std::vector<std::string> tuning_warnings(const Architecture& a, const Setting& setting) {
  std::vector<std::string> out;
  for (const std::string& text : {tuning_warning(a, setting), failed_rates(a, setting)})
    if (!text.empty()) out.push_back(text);
  return out;
}

// Models of the plan that have no row in the tables. That of the reference is a problem of the
// ladder.
void add_missing_models(std::vector<std::string>& out, const Setting& setting, const Study& study) {
  std::vector<std::string> missing;
  for (const study::StudyRun& run : study.runs) {
    if (run.setting != setting.name || run.model == study.reference) continue;
    if (std::ranges::count(setting.architectures, run.model, &Architecture::name)) continue;
    if (!std::ranges::count(missing, run.model)) missing.push_back(run.model);
  }
  if (missing.empty()) return;
  out.push_back(
      fmt::format("These models of the plan have no finished run, "
                  "so the tables and figures of results leave them out: {}.",
                  join(missing)));
}

void add_missing_runs(std::vector<std::string>& out, const Setting& setting, const Study& study) {
  size_t missing = 0;
  for (const study::StudyRun& run : study.runs) {
    if (run.setting != setting.name || run.finished) continue;
    if (run.purpose == study::purpose::kTuning) continue;  // the table of learning rates shows it
    if (++missing > kMostMissing) continue;
    if (run.status == study::status::kMissing) {
      out.push_back(fmt::format("Run {} is missing: there is no record of it.", run.name));
      continue;
    }
    std::string reason = run.reason;
    if (reason.ends_with('.')) reason.pop_back();
    out.push_back(fmt::format("Run {} is missing ({}{}).", run.name, run.status,
                              reason.empty() ? "" : ": " + reason));
  }
  if (missing > kMostMissing)
    out.push_back(
        fmt::format("Runs that are missing in addition to these: {}. "
                    "The table of runs in the report lists them.",
                    missing - kMostMissing));
}

using Json = nlohmann::json;

Json finite(double value) { return std::isfinite(value) ? Json(value) : Json(); }

Json interval_json(const stats::Interval& interval) {
  return Json::array({finite(interval.low), finite(interval.high)});
}

Json number_json(const stats::EqualTokens& number) {
  return {{"value", finite(number.value.estimate)},
          {"interval", interval_json(number.value)},
          {"verdict", word(number.verdict)},
          {"problem", number.problem}};
}

Json score_json(const Setting& setting, const TaskScores& row, const Architecture& a,
                const Score& score) {
  return {{"setting", setting.name},
          {"task", row.name},
          {"metric", row.metric},
          {"recall", row.recall},
          {"model", a.name},
          {"tokens", score.tokens},
          {"seeds", score.seeds},
          {"items", score.items},
          {"value", finite(score.value.estimate)},
          {"interval", interval_json(score.value)},
          {"difference", finite(score.difference.estimate)},
          {"difference_interval", interval_json(score.difference)}};
}

}  // namespace

std::string question(const Setting& setting) {
  if (setting.mixed)
    return fmt::format(
        "Trained on {} and tested on held-out text of the same domains (split {}). The question: "
        "at equal training loss, "
        "does an architecture reach the same held-out loss as the reference?",
        join(setting.train), setting.held_out);
  return fmt::format(
      "Trained on {} and tested on {} (split {}), which were never seen in training. The question: "
      "at equal held-out loss on the training domains, "
      "is the loss out of domain higher than that of the reference?",
      join(setting.train), join(setting.test), setting.split);
}

std::vector<std::string> legend_of_verdicts(const Setting& setting) {
  const std::string loss(setting.test_name());
  const std::string equal(setting.pretraining_name());
  const stats::LadderOptions& limits = setting.ladder.options;
  return {
      fmt::format("The verdict is equivalent if all of the interval is within ±{0:.2f}, "
                  "the shaded band. Otherwise it is degraded if the interval is above zero, "
                  "better if it is below zero, not worse if it ends below +{0:.2f}, "
                  "and not settled in all other cases. "
                  "It is about Δ_end where this number can be judged, and else about E.",
                  limits.margin),
      fmt::format("Δ_end compares at equal {1}: the {0} at the end of training, "
                  "minus the {0} with which the reference ends at the same {1}.",
                  loss, equal),
      fmt::format("E compares at equal tokens: the difference of the {0}, "
                  "minus the part that follows from the difference of the {1}.",
                  loss, equal),
      fmt::format("R is recall in domain: "
                  "the same for held-out tokens that a repeated bigram of the context predicts. "
                  "Its margin is {:.2f}, the wider band.",
                  limits.recall_margin),
      "The unit is nats per token, of R nats per recall target. Right is worse. "
      "The 95 % confidence intervals hold for all architectures of the table together. "
      "Hollow symbols, if there are any, carry no verdict.",
      "Epochs is how often the training text was read: by the architecture, "
      "and by the reference where it has the same held-out loss.",
      fmt::format("Tokens needed is a multiple: the tokens of the architecture, "
                  "divided by those with which the reference reaches the same {}. "
                  "A value below 1 means that the architecture learns faster.",
                  equal)};
}

std::string in_one_sentence(const Architecture& a, const Setting& setting) {
  const stats::EndResult& end = a.end;
  const stats::LadderOptions& limits = setting.ladder.options;
  const bool by_delta = end.judged_by == "delta_end";
  const stats::Interval& number = by_delta ? end.delta : end.equal_tokens.value;
  if (end.judged_by.empty() || !std::isfinite(number.low)) return "";
  const std::string out = fmt::format(
      "{} it is {} {}",
      by_delta ? fmt::format("At equal {},", setting.pretraining_name()) : "After equal tokens,",
      in_words(number, end.verdict, limits.margin),
      setting.mixed ? "on held-out text" : "out of domain");
  const stats::EqualTokens& recall = end.recall;
  if (!recall.problem.empty() || !std::isfinite(recall.value.low)) return out + ".";
  return fmt::format("{}, and {} in recall.", out,
                     in_words(recall.value, recall.verdict, limits.recall_margin));
}

std::vector<std::string> sentences(const Architecture& a, const Setting& setting) {
  std::vector<std::string> out;
  // A reason that holds for every architecture is among the cautions of the setting.
  const std::string& shared = setting.ladder.problem;
  const bool own = shared.empty() || !a.end.reason.starts_with(shared);
  if (a.end.verdict == Verdict::not_settled && own) out.push_back(a.end.reason);
  if (!a.end.agreement.empty()) out.push_back(a.end.agreement);
  for (const std::string& text :
       {both_facts(a, setting), largest_domain(a), trend(a), a.end.note, at_other_rates(a)})
    if (!text.empty()) out.push_back(text);
  for (const std::string& text : tuning_warnings(a, setting)) out.push_back(text);
  for (const std::string& warning : a.warnings) out.push_back("Warning: " + warning);
  return out;
}

std::vector<std::string> cautions(const Setting& setting, const Study& study) {
  std::vector<std::string> out;
  const Ladder& ladder = setting.ladder;
  if (!ladder.problem.empty())
    out.push_back("No verdict is possible. " + ladder.problem +
                  (ladder.advice.empty() ? "" : " " + ladder.advice));
  if (ladder.problem.empty() && !ladder.mature)
    out.push_back(
        "The reference still learns to recall at its last rung. "
        "A longer ladder may change the verdicts.");
  if (!ladder.clusters.empty() && !ladder.clustered_by_source)
    out.push_back(
        "No sources of documents are given, so each document counts as independent: "
        "the intervals hold for these texts only.");
  for (const std::string& warning : ladder.warnings) out.push_back(warning);
  if (setting.has_reference())
    for (const std::string& text : tuning_warnings(setting.reference(), setting))
      out.push_back(text);
  add_missing_models(out, setting, study);
  add_missing_runs(out, setting, study);
  for (const std::string& text : task_cautions(setting)) out.push_back(text);
  return out;
}

Json tasks(const Study& study) {
  Json scores = Json::array();
  Json agreement = Json::array();
  Json problems = Json::array();
  bool has_tasks = false;
  for (const Setting& setting : study.settings) {
    has_tasks = has_tasks || !setting.tasks.empty();
    for (const TaskScores& row : setting.task_scores)
      for (size_t i = 0; i < row.scores.size(); ++i)
        if (row.scores[i])
          scores.push_back(score_json(setting, row, setting.architectures[i], *row.scores[i]));
    for (const Agreement& found : task_agreements(setting))
      agreement.push_back({{"setting", setting.name},
                           {"score", found.name},
                           {"recall", found.recall},
                           {"tokens", found.tokens},
                           {"models", found.points.size()},
                           {"kendall_tau", finite(found.tau.estimate)},
                           {"interval", interval_json(found.tau)},
                           {"text", found.text()}});
    for (const Architecture& a : setting.architectures)
      for (const Run* run : a.all_runs())
        for (const RunTask& task : run_tasks(setting, *run))
          if (!task.problem.empty())
            problems.push_back({{"setting", setting.name},
                                {"run", run->name},
                                {"task", task.task},
                                {"reason", task.problem}});
  }
  if (!has_tasks) return {};
  return {{"scores", scores}, {"agreement", agreement}, {"problems", problems}};
}

Json verdicts(const Study& study) {
  Json out = Json::array();
  for (const Setting& setting : study.settings)
    for (const Architecture& a : setting.architectures) {
      if (a.style == 0) continue;
      const stats::EndResult& end = a.end;
      const bool has = end.judged;
      out.push_back({{"setting", setting.name},
                     {"model", a.name},
                     {"verdict", word(end.verdict)},
                     {"delta_end", has ? finite(end.delta.estimate) : Json()},
                     {"interval", has ? interval_json(end.delta) : Json{Json(), Json()}},
                     {"judged_by", end.judged_by},
                     {"equal_tokens", number_json(end.equal_tokens)},
                     {"recall", number_json(end.recall)},
                     {"epochs", Json::array({finite(end.epochs), finite(end.reference_epochs)})},
                     {"final_loss", finite(end.final_loss)},
                     {"reference_loss", finite(end.reference_loss)},
                     {"trend", end.has_trend ? finite(end.trend.estimate) : Json()},
                     {"tokens", finite(end.tokens)},
                     {"agreement", end.agreement},
                     {"note", end.note},
                     {"reason", end.reason}});
    }
  return out;
}

}  // namespace assay::report
