#include "study/prepare.h"

#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <deque>
#include <map>
#include <memory>
#include <thread>
#include <utility>

#include "base/interrupt.h"
#include "base/program.h"
#include "base/progress.h"
#include "data/synthetic.h"
#include "data/token_store.h"
#include "study/process.h"

namespace assay::study {
namespace {

data::SyntheticOptions synthetic_options(const ConfigNode& layer) {
  data::SyntheticOptions options;
  if (layer.is_table("synthetic")) layer.child("synthetic").read(options);
  else if (layer.value("synthetic") != "true")
    fail("{}: data.synthetic must be true or a table of its options. Nothing was run.",
         layer.where("synthetic"));
  return options;
}

fs::path synthetic_folder(data::SyntheticOptions options, const fs::path& study) {
  return study / "data" / ("synthetic." + sha256(to_toml(fields_of(options))).substr(0, 8));
}

fs::path synthetic_store(const ConfigNode& layer, const fs::path& study) {
  const data::SyntheticOptions options = synthetic_options(layer);
  const fs::path folder = synthetic_folder(options, study);
  if (!fs::exists(folder)) {
    make_folder(folder.parent_path());
    data::synthesize(folder, options);
  }
  return folder;
}

fs::path store_folder(const Setting& setting, const StudyOptions& options) {
  if (const ConfigNode* layer = last_with(setting.data_layers, "synthetic"))
    return synthetic_store(*layer, options.study);
  const std::string folder = options.data.empty() ? setting.data.store : options.data;
  if (folder.empty())
    fail(
        "the plan names no data: give --data STORE, data.store or data.synthetic. "
        "`assay data prepare` makes a store from text. Nothing was run.");
  return fs::canonical(fs::exists(folder) ? fs::path(folder) : data::TokenStore(folder).folder());
}

void check_domains(const Setting& setting, const data::TokenStore& store) {
  const auto check = [&](const char* key, const std::string& domain, const std::string& split) {
    if (store.has(domain, split)) return;
    const ConfigNode* layer = last_with(setting.data_layers, key);
    const std::string where = layer ? layer->where(key) : key;
    if (const auto splits = store.splits(domain); !splits.empty())
      fail("{}: domain '{}' of {} has no split '{}'; it has {}.{} Nothing was run.", where, domain,
           store.folder().string(), split, join(splits),
           split == "valid" ? " Prepare a small corpus with a larger --valid-fraction." : "");
    const auto domains = store.domains();
    fail("{}: {} has no '{}' split of domain '{}'{}\n  Its domains: {}. Nothing was run.", where,
         store.folder().string(), split, domain, did_you_mean(domain, domains), join(domains));
  };
  for (const std::string& domain : setting.data.train) {
    check("train", domain, "train");
    check("train", domain, setting.data.held_out);
  }
  for (const std::string& domain : setting.data.out_of_domain)
    check("out_of_domain", domain, setting.data.test);
  for (const std::string& domain : setting.data.further)
    check("further", domain, setting.data.test);
}

std::string prefix(const Setting& setting) {
  return setting.name.empty() ? "" : setting.name + ".";
}

// The trainer's document about its error, or else what it wrote to standard error.
TrainerError complaint(const fs::path& output, const fs::path& errors) {
  try {
    return read_record<TrainerError>(output);
  } catch (const BadInput&) {
    const std::string text = read_file(errors);
    return {.error = text.empty() ? "the trainer said nothing" : text};
  }
}

// The first run of a model: what the trainer is asked about.
Variation first_variation(const Plan& plan, const Model& model) {
  const bool tuned = is_tuned(plan, model);
  return {.seed = 0,
          .tokens = model.budgets.back().tokens,
          .learning_rate = tuned ? plan.tuning->learning_rate.front() : 0};
}

// One model in one setting, and the trainer at work on what it makes of it.
class Question {
 public:
  Question(const Plan& plan, const Model& model, const Setting& setting,
           const data::TokenStore& store, const StudyOptions& options, size_t slot)
      : candidate_{&model, &setting, store.folder(), {}},
        composed_(compose(model, setting, first_variation(plan, model))),
        config_(options.study / "configs" / (prefix(setting) + model.name + ".question.toml")),
        output_(config_.string() + ".out"),
        errors_(config_.string() + ".err") {
    write_file(config_, composed_.toml());
    fs::remove(output_);
    fs::remove(errors_);
    command_ = {{trainer(options), "train", config_, "--data", candidate_.data, "-o",
                 config_.string() + ".run", "--dry-run", "--json"},
                output_,
                errors_};
    const auto place = placement(options, slot);
    command_.arguments.insert(command_.arguments.end(), place.begin(), place.end());
    child_ = start(command_);
  }
  Question(const Question&) = delete;
  ~Question() {
    if (child_ != 0) try {
        ::kill(child_, SIGTERM);
        wait(child_);
      } catch (const Error&) {  // another error is on its way
      }
    std::error_code none;
    for (const fs::path& file : {config_, output_, errors_}) fs::remove(file, none);
  }

  // Waits for the trainer.
  Candidate candidate(Progress& progress) {
    candidate_.answer = answer(progress);
    return std::move(candidate_);
  }

 private:
  Ending wait_for_child(Progress& progress) {
    const auto begin = std::chrono::steady_clock::now();
    Ending ending;
    while (!ended(child_, ending)) {
      check_interrupt();
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin;
      progress.show(fmt::format("checking {}{}, {}", prefix(*candidate_.setting),
                                candidate_.model->name, Progress::duration(passed.count())));
    }
    child_ = 0;
    check_interrupt();
    return ending;
  }
  run::Estimate answer(Progress& progress) {
    Ending ending = wait_for_child(progress);
    for (int restarts = 0; ending.stopped_from_outside() && restarts < kRestarts; ++restarts) {
      for (const fs::path& file : {output_, errors_}) fs::remove(file);
      child_ = start(command_);
      ending = wait_for_child(progress);
    }
    const std::string& model = candidate_.model->name;
    if (ending.code == kBadInput) fail("{}", composed_.translate(complaint(output_, errors_)));
    if (ending.code != 0)
      fail<Error>("{}: the trainer cannot build it ({}): {}", model, ending.text(),
                  complaint(output_, errors_).error);
    try {
      return read_record<run::Estimate>(output_);
    } catch (const BadInput& error) {
      fail<Error>(
          "{}: the trainer's answer cannot be read; is the program of another version of Assay? "
          "({})",
          model, error.what());
    }
  }

  Candidate candidate_;
  Composed composed_;
  fs::path config_;
  fs::path output_;
  fs::path errors_;
  Command command_;
  pid_t child_ = 0;
};

// Tokens of the largest budget.
double longest_run(const Candidate& c) {
  const int64_t longest = c.model->budgets.back().tokens;
  return double(longest > 0 ? longest : c.answer.tokens);
}

// Refuses two runs that are the same. Before tuning, the rates of tuned models are not known: such
// a model is then compared with other tuned models only, which get the same rate.
void check_distinct(const std::vector<PlannedRun>& runs, const Plan& plan, bool rates_are_known) {
  // by key, and whether it is tuned
  std::map<std::pair<std::string, bool>, const PlannedRun*> known;
  for (const PlannedRun& run : runs) {
    const auto model = std::ranges::find(plan.models, run.model, &Model::name);
    const bool tuned = !rates_are_known && is_tuned(plan, *model);
    const auto [found, fresh] = known.emplace(std::pair{run.key, tuned}, &run);
    if (fresh) continue;
    const PlannedRun& other = *found->second;
    const std::string advice =
        other.model == run.model && other.setting == run.setting
            ? fmt::format("both budgets are {}, so remove one of them",
                          counted(run.estimate.steps, "step"))
            : fmt::format("give one of them other seeds ([model.{}] seeds = […])", run.model);
    fail("{}: {} and {} are the same run; {}. Nothing was run.", plan.name, other.name, run.name,
         advice);
  }
}

// Names of runs and the models that have them. A name with dots can be made in two ways: setting a
// with model b.c, and setting a.b with model c.
class Names {
 public:
  explicit Names(const Plan& plan) : plan_(plan) {}
  // BadInput when another model, or the model in another setting, has the name.
  void add(const std::string& name, const std::string& setting, const std::string& model) {
    const std::string owner = setting.empty()
                                  ? fmt::format("model '{}'", model)
                                  : fmt::format("model '{}' in setting '{}'", model, setting);
    const auto [other, fresh] = owners_.emplace(name, owner);
    if (!fresh && other->second != owner)
      fail(
          "{}: runs of {} and of {} would have the same name, {}. "
          "Give a model or a setting another name. Nothing was run.",
          plan_.name, other->second, owner, name);
  }

 private:
  const Plan& plan_;
  std::map<std::string, std::string> owners_;
};

// A budget ends before some of the steps whose checkpoints a larger one keeps.
void drop_later_keep_steps(ConfigNode& train, int64_t steps) {
  if (!train.has("keep_steps")) return;
  std::vector<int64_t> kept;
  const Field field{"keep_steps", &kept, ""};
  train.read({field}, train.keys());
  std::erase_if(kept, [&](int64_t step) { return step > steps; });
  train.put("keep_steps", field.toml(), train.where("keep_steps"));
}

// Steps of a run of so many tokens, or of the run that the trainer was asked about (0).
int64_t steps_of(const Candidate& c, int64_t tokens) {
  if (tokens == 0) return c.answer.steps;
  const double per_step = double(c.answer.tokens) / double(c.answer.steps);
  return int64_t(std::ceil(double(tokens) / per_step));
}

// The run of a candidate.
PlannedRun planned(const Candidate& c, const Variation& variation, const char* why,
                   const std::string& label, const fs::path& study) {
  PlannedRun run;
  run.name =
      fmt::format("{}{}{}.seed-{}", prefix(*c.setting), c.model->name, label, variation.seed);
  run.setting = c.setting->name;
  run.model = c.model->name;
  run.purpose = why;
  run.seed = variation.seed;
  run.data = c.data;
  run.estimate = c.answer;
  const int64_t steps = steps_of(c, variation.tokens);
  run.tokens = c.answer.tokens / c.answer.steps * steps;
  run.learning_rate =
      variation.learning_rate > 0 ? variation.learning_rate : c.answer.learning_rate;
  run.estimate.steps = steps;
  run.estimate.tokens = run.tokens;
  const double end_seconds = c.answer.end_seconds.value_or(0);
  run.estimate.estimated_seconds -= end_seconds;
  run.estimate.estimated_seconds *= double(steps) / double(c.answer.steps);
  run.estimate.estimated_seconds += end_seconds;
  // The identity holds every default and the numerics versions, and neither budget, rate nor seed.
  // `data` is the fingerprint of what the run reads.
  run.key = sha256(fmt::format("{}\n{}\nseed {}\nsteps {}\nlearning_rate {}\n", c.answer.identity,
                               c.answer.data, run.seed, steps, run.learning_rate));
  run.config = study / "configs" / (run.name + ".toml");
  Composed composed = compose(*c.model, *c.setting, variation);
  drop_later_keep_steps(composed.train, run.estimate.steps);
  run.toml = composed.toml();
  return run;
}

std::string rounded_label(int64_t tokens) {
  const double n = double(tokens);
  return n >= 1e9   ? fmt::format(".{:.3g}B", n / 1e9)
         : n >= 1e6 ? fmt::format(".{:.0f}M", n / 1e6)
                    : fmt::format(".{:.0f}k", n / 1e3);
}

// ".82M"; with all digits where the model has two budgets of the same rounded label. Empty for a
// model whose only budget is that of `train`.
std::string budget_label(int64_t tokens, const Model& model) {
  if (tokens == 0) return "";
  const std::string label = rounded_label(tokens);
  const auto same = std::ranges::count(
      model.budgets, label, [](const Budget& budget) { return rounded_label(budget.tokens); });
  return same > 1 ? fmt::format(".{}", tokens) : label;
}

bool has_two_seeds(const Model& model) {
  return std::ranges::any_of(model.budgets,
                             [](const Budget& budget) { return budget.seeds.size() > 1; });
}

// Whether the reference has what every verdict needs: two budgets, and two seeds at one of them.
bool can_be_compared_with(const Plan& plan) {
  const Model& reference = *std::ranges::find(plan.models, plan.reference, &Model::name);
  return reference.budgets.size() > 1 && has_two_seeds(reference);
}

// Whether the variance between the seeds of contenders, which share it, can be estimated.
bool has_variance_of_contenders(const Plan& plan) {
  return !plan.variances.empty() || std::ranges::any_of(plan.models, [&](const Model& model) {
    return model.name != plan.reference && has_two_seeds(model);
  });
}

// A sentence if the shortest run of a candidate says nothing about its model, or "".
std::string caution_about_steps(const Plan& plan, const Candidate& c) {
  constexpr int64_t kFewest = 20;  // a run has as many evaluations
  int64_t steps = steps_of(c, c.model->budgets.front().tokens);
  if (is_tuned(plan, *c.model)) steps = std::min(steps, steps_of(c, plan.tuning->tokens));
  int64_t warmup = 0;
  const Field field{"warmup_steps", &warmup, ""};
  const ConfigNode train = compose(*c.model, *c.setting, {}).train;
  train.read({field}, train.keys());
  if (steps >= kFewest && steps > warmup) return "";
  return fmt::format(
      "{}{} has a run of {}{}. So few steps say nothing about a model; "
      "give larger budgets, or take the study as a trial.",
      prefix(*c.setting), c.model->name, counted(steps, "step"),
      warmup > 0 ? fmt::format(", and warmup_steps is {}", warmup) : "");
}

std::string rate_label(double rate) { return fmt::format(".lr-{}", rate); }

// The runs of study_runs, without the check for equal ones.
std::vector<PlannedRun> all_study_runs(const Plan& plan, const std::vector<Candidate>& candidates,
                                       const Rates& rates, const fs::path& study) {
  std::vector<PlannedRun> runs;
  std::vector<PlannedRun> checks;
  for (const Candidate& c : candidates) {
    const bool tuned = is_tuned(plan, *c.model);
    const auto found = rates.find({c.setting->name, c.model->name});
    if (tuned && found == rates.end()) continue;
    const double rate = tuned ? found->second : 0;
    for (const auto& [tokens, seeds] : c.model->budgets)
      for (const int64_t seed : seeds)
        runs.push_back(planned(c, {.seed = seed, .tokens = tokens, .learning_rate = rate},
                               purpose::kStudy, budget_label(tokens, *c.model), study));
    if (!tuned || !plan.tuning->check || c.model->name == plan.reference) continue;
    const Budget& largest = c.model->budgets.back();
    // A run of the grid has the same name without a budget
    const std::string budget = largest.tokens > 0 ? budget_label(largest.tokens, *c.model)
                                                  : rounded_label(c.answer.tokens);
    for (const auto& [factor, why] : {std::pair{0.5, purpose::kHalf}, {2.0, purpose::kDouble}})
      for (const int64_t seed : largest.seeds)
        checks.push_back(
            planned(c, {.seed = seed, .tokens = largest.tokens, .learning_rate = factor * rate},
                    why, budget + rate_label(factor * rate), study));
  }
  runs.insert(runs.end(), checks.begin(), checks.end());
  return runs;
}

}  // namespace

fs::path trainer(const StudyOptions& options) {
  return options.program.empty() ? own_program() : options.program;
}

std::vector<std::string> training(const PlannedRun& run, const StudyOptions& options) {
  return {trainer(options),
          "train",
          run.config,
          "--data",
          run.data,
          "-o",
          run.folder(options.study).path};
}

std::vector<std::string> placement(const StudyOptions& options, size_t slot) {
  std::vector<std::string> arguments;
  int64_t threads = options.threads;
  if (threads == 0 && options.jobs > 1)
    threads = std::max<int64_t>(1, int64_t(std::thread::hardware_concurrency()) / options.jobs);
  if (threads > 0) arguments.insert(arguments.end(), {"--threads", std::to_string(threads)});
  const auto& devices = options.devices;
  // The keys of runs cover the numerics versions of a device. All hosts of a cluster must find the
  // same keys, also those without a GPU.
  if (options.slurm && devices.empty()) arguments.insert(arguments.end(), {"--device", "cpu"});
  if (!devices.empty())
    arguments.insert(arguments.end(), {"--device", devices[slot % devices.size()]});
  return arguments;
}

std::vector<fs::path> synthetic_stores(const Plan& plan, const fs::path& study) {
  std::vector<fs::path> folders;
  for (const Setting& setting : plan.settings)
    if (const ConfigNode* layer = last_with(setting.data_layers, "synthetic"))
      folders.push_back(synthetic_folder(synthetic_options(*layer), study));
  return folders;
}

std::vector<Candidate> ask_trainer(const Plan& plan, const StudyOptions& options) {
  Names names(plan);
  for (const Setting& setting : plan.settings)
    for (const Model& model : plan.models)
      names.add(prefix(setting) + model.name, setting.name, model.name);
  make_folder(options.study / "configs");
  const size_t jobs = size_t(std::max<int64_t>(1, options.jobs));
  std::vector<Candidate> candidates;
  std::deque<std::unique_ptr<Question>> asked;
  Progress progress;
  const auto collect = [&] {
    candidates.push_back(asked.front()->candidate(progress));
    asked.pop_front();
  };
  size_t slot = 0;
  for (const Setting& setting : plan.settings) {
    const data::TokenStore store(store_folder(setting, options));
    check_domains(setting, store);
    for (const Model& model : plan.models) {
      if (asked.size() == jobs) collect();
      progress.show(fmt::format("checking {}{}", prefix(setting), model.name));
      asked.push_back(std::make_unique<Question>(plan, model, setting, store, options, slot++));
    }
  }
  while (!asked.empty()) collect();
  return candidates;
}

std::string caution_about(double tokens) {
  constexpr double kFewest = 40e6;
  if (tokens >= kFewest) return "";
  return fmt::format(
      "the longest run of the reference reads {:.3g}M tokens. "
      "On real text a Transformer recalls after {:.0f}M tokens or more, "
      "and before that the verdicts are \"not settled\". "
      "Prepare more text and train longer, or take the study as a trial.",
      tokens / 1e6, kFewest / 1e6);
}

std::string caution_about_epochs(const std::string& run, double epochs) {
  if (epochs <= kMostEpochs) return "";
  return fmt::format(
      "{} reads its training text {:.1f} times. "
      "Repeated text biases the comparison at equal held-out loss; "
      "train at most {:.1f} epochs, or prepare more text.",
      run, epochs, kMostEpochs);
}

std::vector<std::string> cautions(const Plan& plan, const std::vector<Candidate>& candidates) {
  std::vector<std::string> warnings;
  if (plan.models.size() > 1 && !can_be_compared_with(plan))
    warnings.push_back(
        "the reference has fewer than two budgets, or one seed at each of them, "
        "so every verdict will be \"not settled\". "
        "Give the plan a ladder, for example `ladder = { tokens = […], seeds = […] }`, "
        "or take the study as a trial.");
  else if (plan.models.size() > 1 && !has_variance_of_contenders(plan))
    warnings.push_back(
        "no model but the reference has two seeds at a budget, so the error is unknown. "
        "Every verdict will be \"not settled\". "
        "Give two or more seeds, for example `seeds = [1, 2, 3]`, or take the study as a trial.");
  for (const Candidate& c : candidates)
    if (const std::string caution = caution_about_steps(plan, c); !caution.empty()) {
      warnings.push_back(caution);
      break;
    }
  for (const Candidate& c : candidates) {
    const std::string caution = caution_about(longest_run(c));
    if (c.model->name != plan.reference || caution.empty()) continue;
    if (data::TokenStore(c.data.string()).manifest().contains("synthetic")) continue;
    warnings.push_back((c.setting->name.empty() ? "" : c.setting->name + ": ") + caution);
  }
  std::map<std::string, std::pair<double, std::string>> most;  // epochs and run, by setting
  for (const Candidate& c : candidates) {
    if (!c.answer.train_tokens) continue;
    const double tokens = longest_run(c);
    const double epochs = tokens / double(*c.answer.train_tokens);
    auto& [largest, model] = most[c.setting->name];
    if (epochs <= largest) continue;
    largest = epochs;
    model = fmt::format("{} with {:.3g}M tokens", c.model->name, tokens / 1e6);
  }
  for (const auto& [setting, longest] : most)
    warnings.push_back(caution_about_epochs(
        (setting.empty() ? "" : setting + ": ") + longest.second, longest.first));
  std::erase(warnings, "");
  return warnings;
}

std::vector<PlannedRun> tuning_runs(const Plan& plan, const std::vector<Candidate>& candidates,
                                    const fs::path& study) {
  std::vector<PlannedRun> runs;
  for (const Candidate& c : candidates) {
    if (!is_tuned(plan, *c.model)) continue;
    for (const double rate : plan.tuning->learning_rate)
      for (const int64_t seed : plan.tuning->seeds)
        runs.push_back(planned(c,
                               {.seed = seed, .tokens = plan.tuning->tokens, .learning_rate = rate},
                               purpose::kTuning, rate_label(rate), study));
  }
  return runs;
}

std::vector<PlannedRun> study_runs(const Plan& plan, const std::vector<Candidate>& candidates,
                                   const Rates& rates, const fs::path& study) {
  std::vector<PlannedRun> runs = all_study_runs(plan, candidates, rates, study);
  const auto checks =
      std::ranges::find_if(runs, [](const auto& run) { return run.purpose != purpose::kStudy; });
  check_distinct({runs.begin(), checks}, plan, /*rates_are_known=*/true);
  return runs;
}

void check_runs(const Plan& plan, const std::vector<Candidate>& candidates, const fs::path& study) {
  Names names(plan);
  const auto add_names = [&](const std::vector<PlannedRun>& runs) {
    for (const PlannedRun& run : runs) names.add(run.name, run.setting, run.model);
  };
  add_names(tuning_runs(plan, candidates, study));
  for (const double rate : plan.tuning ? plan.tuning->learning_rate : std::vector<double>{0}) {
    Rates rates;
    for (const Candidate& c : candidates) rates[{c.setting->name, c.model->name}] = rate;
    std::vector<PlannedRun> runs = all_study_runs(plan, candidates, rates, study);
    add_names(runs);
    std::erase_if(runs, [](const auto& run) { return run.purpose != purpose::kStudy; });
    check_distinct(runs, plan, /*rates_are_known=*/!plan.tuning);
  }
}

void write_configs(const std::vector<PlannedRun>& runs) {
  for (const PlannedRun& run : runs) write_file(run.config, run.toml);
}

}  // namespace assay::study
