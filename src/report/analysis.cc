#include "report/analysis.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/config.h"
#include "base/error.h"
#include "report/slices.h"
#include "run/training_loss.h"
#include "stats/curves.h"

namespace assay::report {
namespace {

constexpr size_t kParts = 12;  // of a profile
constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

// Mean over domains of what `get` says of each set; NaN when one is absent.
template <class Set, class Get>
double mean_of_sets(const std::map<std::string, Set>& sets, const std::vector<std::string>& domains,
                    const std::string& split, Get&& get) {
  double sum = 0;
  for (const std::string& domain : domains) {
    const auto found = sets.find(domain + "." + split);
    sum += found == sets.end() ? kNone : get(found->second);
  }
  return domains.empty() ? kNone : sum / double(domains.size());
}
template <class Set>
double mean_loss(const std::map<std::string, Set>& sets, const std::vector<std::string>& domains,
                 const std::string& split) {
  return mean_of_sets(sets, domains, split, [](const Set& set) { return set.loss; });
}

Evaluation read_evaluation(const run::EvaluationLine& line, const Setting& setting) {
  Evaluation out{.step = line.step,
                 .tokens = double(line.tokens),
                 .training_loss = kNone,
                 .sets = line.evaluation,
                 .attention_entropy = line.attention_entropy.value_or(run::Entropies{}),
                 .mean_attention_entropy = run::mean_entropy_of(line)};
  out.held_out_loss = mean_loss(out.sets, setting.train, setting.held_out);
  out.test_loss = mean_loss(out.sets, setting.test, setting.split);
  for (const std::string& domain : setting.test)
    out.test_losses[domain] = mean_loss(out.sets, {domain}, setting.split);
  return out;
}

RunEnd read_end(const run::End& losses, const Setting& setting) {
  const auto bits = [](const run::EndSet& set) { return set.bits_per_byte; };
  RunEnd end{.training_loss = kNone,
             .held_out_loss = mean_loss(losses.sets, setting.train, setting.held_out),
             .test_loss = mean_loss(losses.sets, setting.test, setting.split),
             .bits_per_byte = mean_of_sets(losses.sets, setting.test, setting.split, bits)};
  for (const std::string& domain : setting.test)
    end.test_losses[domain] = mean_loss(losses.sets, {domain}, setting.split);
  return end;
}

Run read_run(const study::StudyRun& row, const Setting& setting) {
  Run run{.name = row.name,
          .seed = row.seed,
          .tokens = row.tokens,
          .learning_rate = row.learning_rate,
          .data = *row.finished,
          .end = read_end(row.finished->end, setting)};
  for (const run::EvaluationLine& line : run.data.metrics.evaluations)
    run.evaluations.push_back(read_evaluation(line, setting));
  if (run.evaluations.empty())
    fail("The run {} holds no evaluation, so it cannot be reported.", run.name);
  const std::vector<double> training = run::training_losses(run.data.metrics);
  for (size_t k = 0; k < training.size(); ++k) run.evaluations[k].training_loss = training[k];
  run.end.training_loss = run.evaluations.back().training_loss;
  return run;
}

Architecture& architecture_of(Setting& setting, const std::string& model) {
  const auto found = std::ranges::find(setting.architectures, model, &Architecture::name);
  if (found != setting.architectures.end()) return *found;
  return setting.architectures.emplace_back(Architecture{.name = model});
}

void read_runs(Setting& setting, const std::vector<study::StudyRun>& rows) {
  for (const study::StudyRun& row : rows) {
    if (!row.finished || row.purpose == study::purpose::kTuning) continue;
    Architecture& a = architecture_of(setting, row.model);
    const bool of_study = row.purpose == study::purpose::kStudy;
    std::vector<Run>& runs = of_study ? a.budgets[row.tokens] : a.check_runs[row.purpose];
    runs.push_back(read_run(row, setting));
  }
  std::erase_if(setting.architectures, [](const Architecture& a) { return a.budgets.empty(); });
}

Setting read_setting(const study::StoredSetting& stored) {
  Setting setting{.name = stored.name,
                  .train = stored.train,
                  .test = stored.out_of_domain,
                  .further = stored.further.value_or(std::vector<std::string>()),
                  .held_out = stored.held_out,
                  .split = stored.test,
                  .tasks = stored.tasks.value_or(std::vector<run::TaskQuestion>())};
  setting.mixed = setting.test.empty();
  if (setting.mixed) {
    setting.test = setting.train;
    setting.split = setting.held_out;
  }
  setting.kinds =
      setting.mixed ? std::vector{Kind::training} : std::vector{Kind::held_out, Kind::training};
  return setting;
}

// The reference first, each with a style of its own; the styles are the same in every setting.
void order(Setting& setting, const study::StoredPlan& plan) {
  int next = 1;
  std::map<std::string, int> styles;
  for (const std::string& model : plan.models) styles[model] = model == plan.reference ? 0 : next++;
  for (Architecture& architecture : setting.architectures)
    architecture.style = styles[architecture.name];
  std::ranges::sort(setting.architectures, {}, &Architecture::style);
}

// ---- The secondary comparison, along training.

bool usable(const Evaluation& e, Kind kind) {
  return std::isfinite(e.pretraining_loss(kind)) && std::isfinite(e.test_loss);
}

// One "document" per domain: evaluations hold only the loss of a set, so intervals count seeds.
stats::Run curve(const Run& run, const Setting& setting, Kind kind) {
  stats::Run out{run.seed, {}};
  for (const Evaluation& evaluation : run.evaluations) {
    if (!usable(evaluation, kind)) continue;
    stats::Point point{evaluation.tokens, evaluation.pretraining_loss(kind), {}};
    for (const std::string& domain : setting.test)
      point.out_of_domain[domain] = {.nll = {evaluation.test_losses.at(domain)}, .tokens = {1}};
    out.curve.push_back(std::move(point));
  }
  return out;
}

stats::Runs curves(const std::vector<Run>& runs, const Setting& setting, Kind kind) {
  stats::Runs out;
  for (const Run& run : runs) out.push_back(curve(run, setting, kind));
  return out;
}

// Tokens of the warm-up: until then the schedule decides the loss, not the architecture.
double warmup_tokens(const Setting& setting) {
  double most = 0;
  for (const Architecture& a : setting.architectures)
    for (const Run* run : a.all_runs()) {
      int64_t warmup_steps = 0;
      int64_t batch_size = 0;
      int64_t sequence_length = 0;
      const ConfigNode train = ConfigNode::parse(run->data.config).child("train");
      train.read({{"warmup_steps", &warmup_steps, ""},
                  {"batch_size", &batch_size, ""},
                  {"sequence_length", &sequence_length, ""}},
                 train.keys());
      most = std::max(most, double(warmup_steps * batch_size * sequence_length));
    }
  return most;
}

// Mean loss over the test domains in each of equal parts of the range, mean over runs.
std::vector<double> means_in_parts(const std::vector<Run>& from, Kind kind, const stats::Runs& runs,
                                   stats::Range range, double after) {
  std::vector<double> out(kParts, 0.0);
  for (size_t r = 0; r < runs.size(); ++r) {
    std::vector<double> losses;
    for (const Evaluation& e : from[r].evaluations)
      if (usable(e, kind)) losses.push_back(e.test_loss);
    const stats::Curve curve = stats::curve_of(runs[r], after);
    const double width = range.width() / kParts;
    for (size_t part = 0; part < kParts; ++part) {
      const double low = range.low + double(part) * width;
      const auto weights =
          stats::mean_weights(curve, losses.size(), {low, std::min(low + width, range.high)});
      const double sum = std::inner_product(weights.begin(), weights.end(), losses.begin(), 0.0);
      out[part] += sum / double(runs.size());
    }
  }
  return out;
}

Comparison compare(const RunPair& pair, const Setting& setting, Kind kind, double after) {
  Comparison out{.kind = kind};
  if (!pair.first) {
    out.degradation.problem = "The two models share no budget.";
    out.convergence.problem = out.degradation.problem;
    return out;
  }
  out.tokens = pair.first->front().tokens;
  const stats::Runs own = curves(*pair.first, setting, kind);
  const stats::Runs reference = curves(*pair.second, setting, kind);
  const stats::Options options{.after_tokens = after};
  out.degradation = stats::degradation(own, reference, options);
  out.convergence = stats::convergence(own, reference, options);
  if (!out.degradation.problem.empty()) return out;
  const stats::Range range{out.degradation.loss_low, out.degradation.loss_high};
  const auto of_own = means_in_parts(*pair.first, kind, own, range, after);
  const auto of_reference = means_in_parts(*pair.second, kind, reference, range, after);
  for (size_t part = 0; part < kParts; ++part)
    out.profile.emplace_back(range.low + (double(part) + 0.5) * range.width() / kParts,
                             of_own[part] - of_reference[part]);
  return out;
}

void compare_along_training(Setting& setting) {
  const double after = warmup_tokens(setting);
  for (Architecture& a : setting.architectures) {
    if (a.style == 0 || !a.comparable) continue;
    const RunPair pair = runs_of_equal_budget(a, setting.reference());
    for (const Kind kind : setting.kinds)
      a.comparisons.push_back(compare(pair, setting, kind, after));
    a.warnings = slice_warnings(a, setting);
  }
}

}  // namespace

const char* name(Kind kind) { return kind == Kind::held_out ? "held-out" : "training"; }

std::vector<const Run*> Architecture::all_runs() const {
  std::vector<const Run*> out;
  for (const auto& [tokens, runs] : budgets)
    for (const Run& run : runs) out.push_back(&run);
  return out;
}

RunPair runs_of_equal_budget(const Architecture& a, const Architecture& b) {
  for (auto budget = a.budgets.rbegin(); budget != a.budgets.rend(); ++budget)
    if (const auto found = b.budgets.find(budget->first); found != b.budgets.end())
      return {&budget->second, &found->second};
  return {nullptr, nullptr};
}

Study analyse(const fs::path& folder) {
  if (!fs::exists(folder / "study.sqlite"))
    fail("{}: The folder holds no study (no study.sqlite). `assay run PLAN.toml -o {}` makes one.",
         folder.string(), folder.string());
  study::Store store(folder, study::Database::Mode::read);
  const study::StoredPlan plan = store.plan();
  Study out{.name = plan.name,
            .reference = plan.reference,
            .plan = plan.text,
            .runs = store.planned_runs()};
  for (const study::StoredSetting& stored : plan.settings) {
    Setting& setting = out.settings.emplace_back(read_setting(stored));
    std::vector<study::StudyRun> rows;
    for (const study::StudyRun& row : out.runs)
      if (row.setting == setting.name) rows.push_back(row);
    read_runs(setting, rows);
    order(setting, plan);
    setting.has_planned_ladder = plan.has_ladder;
    setting.ladder.options.study = plan.name;
    for (const study::VarianceRow& row : plan.variances.value_or(std::vector<study::VarianceRow>()))
      setting.ladder.options.variances.push_back({.study = row.study,
                                                  .model = row.model,
                                                  .tokens = row.tokens,
                                                  .seeds = row.seeds,
                                                  .variance = row.variance});
    setting.grids = grids(setting, rows);
    for (const study::StudyRun& row : rows)
      if (row.finished && setting.overlap.empty())
        setting.overlap = store.overlap(row.finished->provenance.data).value_or(study::Overlap{});
    compare_ends(setting);
    if (setting.has_reference()) compare_along_training(setting);
    setting.task_scores = task_scores(setting);
  }
  return out;
}

}  // namespace assay::report
