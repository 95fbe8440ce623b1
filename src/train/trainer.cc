#include "train/trainer.h"

#include <torch/torch.h>

#include <chrono>
#include <set>

#include "base/config_differences.h"
#include "base/interrupt.h"
#include "base/progress.h"
#include "base/version.h"
#include "data/sampler.h"
#include "data/token_store.h"
#include "eval/longest_input.h"
#include "ops/core/paths.h"
#include "run/metrics.h"
#include "train/causality.h"
#include "train/checkpoint.h"
#include "train/device.h"
#include "train/divergence.h"
#include "train/optimizer.h"
#include "train/run_evaluation.h"
#include "train/step_gradient.h"
#include "train/step_result.h"

namespace assay::train {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_between(Clock::time_point start, Clock::time_point end) {
  return std::chrono::duration<double>(end - start).count();
}
double since(Clock::time_point start) { return seconds_between(start, Clock::now()); }

// The fingerprint of the parts of the store that a run reads. Other parts of the store do not
// change the run.
std::string data_of(const data::TokenStore& store, const TrainConfig& c) {
  std::set<std::string> parts(c.eval_sets.begin(), c.eval_sets.end());
  for (const std::string& domain : c.domains) parts.insert(domain + ".train");
  return store.fingerprint(parts);
}

class Run {
 public:
  Run(const RunConfig& run_config, const TrainOptions& options)
      : config(run_config),
        c(config.train),
        folder{options.run},
        ranks(options.ranks),
        device(choose_device(ranks ? ranks->device(options.device) : options.device)),
        store(options.store),
        sampler(store, {c.domains, c.weights, c.sequence_length, uint64_t(c.seed), "train"}),
        model(std::make_shared<nn::LanguageModel>(config.model)),
        divergence(*model, sampler, c, device, folder) {
    model->compute_dtype = compute_dtype(c.precision, device);
    model->recompute_activations = c.recompute_activations;
    model->initialise(uint64_t(c.seed));
    model->to(device, model->compute_dtype == at::kDouble ? at::kDouble : at::kFloat);
    if (ranks) ranks->open(device);
    gradient.emplace(*model, sampler, c, device, ranks);
    optimizer.emplace(*model, c, gradient->sum());
    flops_per_token = model->forward_flops(c.sequence_length);
  }

  run::Provenance describe() const {
    const std::string device_type = device.is_cuda() ? "cuda" : "cpu";
    const run::Numerics numerics = numerics_of(config, device_type);
    std::map<std::string, std::string> paths;
    for (const ops::OpPath& path : ops::op_paths())
      if (path.device == device_type && numerics.contains(path.op)) paths[path.op] = path.path;
    int64_t train_tokens = 0;
    for (const std::string& domain : c.domains)
      train_tokens += store.documents(domain, "train").tokens();
    const std::string data = data_of(store, c);
    const std::string identity = config.identity(numerics);
    return {.parameters = model->parameter_count(),
            .flops_per_token = flops_per_token,
            .state_bytes = {.at_short = model->state_bytes(run::StateBytes::kShort),
                            .at_long = model->state_bytes(run::StateBytes::kLong)},
            .device = device_name(device),
            .torch = TORCH_VERSION,
            .assay = version(),
            .commit = commit(),
            .paths = paths,
            .numerics = numerics,
            .data = data,
            .train_tokens = train_tokens,
            .data_folder = fs::absolute(store.folder()).string(),
            .started = now_utc(),
            .identity = sha256(identity),
            .key = sha256(identity + config.toml() + data)};
  }

  bool writes() const { return !ranks || ranks->first(); }

  // On rank 0. The other ranks wait for it in the next exchange.
  void evaluate() {
    gradient->gather_parameters();
    if (writes()) metrics->write(evaluation->evaluate(state));
    state.evaluation_loss = 0;
    state.evaluation_steps = 0;
  }

  void save() {
    if (metrics) metrics->sync();
    gradient->gather_parameters();
    save_checkpoint(folder, *model, *optimizer, state, ranks);
    if (writes()) prune_checkpoints(folder, c.keep_steps);
  }

  const RunConfig config;
  const TrainConfig& c;
  run::Folder folder;
  Ranks* ranks;
  c10::Device device;
  data::TokenStore store;
  data::Sampler sampler;
  std::shared_ptr<nn::LanguageModel> model;
  DivergenceCheck divergence;
  std::optional<StepGradient> gradient;
  std::optional<AdamW> optimizer;
  std::optional<run::MetricsWriter> metrics;  // of rank 0
  std::optional<RunEvaluation> evaluation;    // of rank 0
  run::TrainingState state;
  double flops_per_token = 0;
};

// Refuses a folder that holds another run.
void check_folder(const RunConfig& config, const TrainOptions& options, const run::Folder& folder) {
  const std::string name = folder.path.string();
  if (!fs::exists(folder.config())) return;
  if (!options.resume)
    fail(
        "{}: holds a run already; give --resume to continue it, or choose another folder. "
        "Nothing was changed.",
        name);
  const RunConfig before = read_run_config(ConfigNode::read_file(folder.config()), options.store,
                                           options.ranks ? options.ranks->size() : 1);
  if (before.toml() != config.toml())
    fail(
        "{}: holds a run of another configuration: {}. Nothing was changed. "
        "Choose another folder, or give the same settings.",
        name,
        join(
            differences(ConfigNode::read_file(folder.config()), ConfigNode::parse(config.toml()))));
  if (!folder.provenance().exists()) return;
  if (folder.provenance().read().data != data_of(data::TokenStore(options.store), config.train))
    fail(
        "{}: holds a run on other data (see run.json there) than {}; nothing was changed. "
        "Choose another folder, or give the same store.",
        name, options.store.string());
}

// Refuses to continue with kernels that give other numbers than those of the steps before.
void check_numerics(const run::Provenance& before, const run::Provenance& now,
                    const run::Folder& folder) {
  for (const auto& [part, version] : now.numerics) {
    const auto started = before.numerics.find(part);
    if (started == before.numerics.end() || started->second == version) continue;
    fail(
        "{}: The run was started with numerics version {} of {} on {}, "
        "and the version is {} now on {}, "
        "so later steps would not be computed as the earlier ones. Nothing was changed. "
        "Continue it with the same version of Assay on the same kind of device, "
        "or train it again in another folder.",
        folder.path.string(), started->second, part, before.device, version, now.device);
  }
}

// metrics.jsonl may be cut off: a checkpoint holds no lines of it.
void warn_of_missing_metrics(const Run& run) {
  const int64_t step = run.state.step;
  const int64_t last = run.metrics->last_step();
  if (last < step / run.c.log_every * run.c.log_every)
    Progress().log(
        fmt::format("warning: {}: the lines of steps {} to {} are missing. "
                    "Training continues from the checkpoint, and the curves have a gap.",
                    run.folder.metrics().string(), last + 1, step));
}

// When a checkpoint is due. Without a number of steps, the time that the last one took decides: no
// result depends on it.
class Saving {
 public:
  explicit Saving(int64_t every) : every_(every) {}
  bool due(int64_t step) const { return every_ > 0 ? step % every_ == 0 : Clock::now() >= next_; }
  // True once per checkpoint that is due by time. Clocks differ, so rank 0 asks the others to save.
  bool ask(int64_t step) {
    const bool now = every_ == 0 && !asked_ && due(step);
    asked_ = asked_ || now;
    return now;
  }
  bool by_time() const { return every_ == 0; }
  void took(double seconds) {
    asked_ = false;
    next_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                               std::chrono::duration<double>(std::max(30.0, 50 * seconds)));
  }

 private:
  int64_t every_;
  bool asked_ = false;
  Clock::time_point next_ = Clock::now() + std::chrono::seconds(30);
};

run::Outcome train_steps(Run& run) {
  const TrainConfig& c = run.c;
  const double tokens_per_step = double(c.tokens_per_step());
  const double peak = peak_flops(run.device) * double(run.ranks ? run.ranks->size() : 1);
  std::optional<Progress> progress;
  if (run.writes()) progress.emplace();
  Clock::time_point start = Clock::now();
  Clock::time_point interval = start;
  // Evaluation and saving do not count as training
  double seconds_before = run.state.seconds;
  double paused = 0;
  Saving saving(c.checkpoint_every);
  const auto pause = [&](auto&& work) {
    const Clock::time_point from = Clock::now();
    work();
    const double seconds = since(from);
    paused += seconds;
    interval += Clock::now() - from;
    return seconds;
  };
  if (run.state.step == 0) pause([&] { run.evaluate(); });
  std::optional<StepResult> pending;
  std::optional<double> last_auxiliary_loss;
  int64_t timed_steps = 0;  // since `interval`; those before a restart have no time here
  double speed = 0;         // tokens per second since then
  bool asked_to_stop = false;
  bool asked_to_save = false;
  // Checks the pending step, adds it to the means and writes its line of metrics.jsonl. Everything
  // else that is written needs this first.
  const auto settle = [&] {
    if (!pending) return;
    const auto [loss, auxiliary_loss, gradient_norm, stop, save, ended] = pending->read();
    asked_to_stop = asked_to_stop || stop;
    asked_to_save = asked_to_save || save;
    run::TrainingState& s = run.state;
    run.divergence.check_step(pending->step, loss, gradient_norm, s.mean_loss);
    s.mean_loss = pending->step == 0 ? loss : 0.98 * s.mean_loss + 0.02 * loss;
    ++s.interval_steps;
    ++timed_steps;
    ++s.evaluation_steps;
    s.interval_loss += loss;
    s.evaluation_loss += loss;
    s.last_loss = loss;
    if (auxiliary_loss)
      s.interval_auxiliary_loss = s.interval_auxiliary_loss.value_or(0) + *auxiliary_loss;
    last_auxiliary_loss = auxiliary_loss;
    const int64_t steps = pending->step + 1;
    pending.reset();
    s.seconds = seconds_before + seconds_between(start, ended) - paused;
    speed =
        double(timed_steps) * tokens_per_step / std::max(1e-9, seconds_between(interval, ended));
    if (steps % c.log_every != 0 && steps != c.steps) return;
    std::optional<double> mean_auxiliary_loss = s.interval_auxiliary_loss;
    if (mean_auxiliary_loss) *mean_auxiliary_loss /= double(s.interval_steps);
    const run::TrainingLine line{.step = steps,
                                 .loss = s.interval_loss / double(s.interval_steps),
                                 .tokens = steps * c.tokens_per_step(),
                                 .learning_rate = learning_rate_at(c, steps - 1),
                                 .grad_norm = gradient_norm,
                                 .tokens_per_second = speed,
                                 .mfu = 3 * run.flops_per_token * speed / peak,
                                 .seconds = s.seconds,
                                 .memory_bytes = peak_memory_bytes(run.device),
                                 .auxiliary_loss = mean_auxiliary_loss};
    if (run.metrics) run.metrics->write(line);
    s.interval_loss = 0;
    s.interval_auxiliary_loss.reset();
    s.interval_steps = 0;
    timed_steps = 0;
    interval = ended;
  };
  while (run.state.step < c.steps) {
    run::TrainingState& s = run.state;
    const int64_t step = s.step;
    const bool rank_saves = run.ranks && run.ranks->first() && saving.ask(step);
    const StepGradient::Step made = run.gradient->compute(step, interrupted(), rank_saves);
    const at::Tensor norm = run.optimizer->step(learning_rate_at(c, step), step);
    settle();
    pending.emplace(step, made, norm);
    ++s.step;
    const bool evaluates = s.step % c.eval_every == 0 || s.step == c.steps;
    // All ranks save and stop after the same step: what one is asked for, all know a step later
    const bool due = run.ranks && saving.by_time() ? asked_to_save : saving.due(s.step);
    const bool saves = due || s.step == c.steps || std::ranges::count(c.keep_steps, s.step) > 0;
    const bool stops = (run.ranks ? asked_to_stop : interrupted()) && s.step < c.steps;
    if (evaluates || saves || stops) settle();
    const std::optional<double> held_out_loss =
        run.evaluation ? run.evaluation->held_out_loss() : std::nullopt;
    std::string shown = held_out_loss ? fmt::format("held-out loss {:.4f}", *held_out_loss)
                                      : fmt::format("training loss {:.4f}", s.last_loss);
    if (last_auxiliary_loss) shown += fmt::format("  auxiliary loss {:.4f}", *last_auxiliary_loss);
    if (speed > 0)
      shown += fmt::format("  {} tokens/s  MFU {:.1f} %  {} left", Progress::count(speed),
                           300 * run.flops_per_token * speed / peak,
                           Progress::duration(double(c.steps - s.step) * tokens_per_step / speed));
    if (progress) progress->show(fmt::format("step {}/{}  {}", s.step, c.steps, shown));
    if (evaluates) pause([&] { run.evaluate(); });
    if (saves) {
      saving.took(pause([&] { run.save(); }));
      asked_to_save = false;
    }
    if (stops) {
      run.save();
      throw Interrupted(
          fmt::format("interrupted after step {}; saved in {}. Continue with --resume.", s.step,
                      run.folder.path.string()));
    }
  }
  return {.steps = run.state.step,
          .tokens = run.state.step * c.tokens_per_step(),
          .seconds = run.state.seconds,
          .peak_memory_bytes = peak_memory_bytes(run.device),
          .final_loss = run.state.last_loss,
          .evaluation_and_saving_seconds = paused};
}

// Adds measurements of the whole run from the lines of metrics.jsonl: earlier processes may have
// written most of them.
void add_measured(run::Outcome& outcome, const std::vector<run::TrainingLine>& lines) {
  std::vector<double> rates;
  for (const run::TrainingLine& line : lines) {
    if (line.tokens_per_second) rates.push_back(*line.tokens_per_second);
    outcome.peak_memory_bytes =
        std::max(outcome.peak_memory_bytes, line.memory_bytes.value_or(int64_t{0}));
  }
  if (rates.empty()) return;
  const auto median = rates.begin() + std::ssize(rates) / 2;
  std::ranges::nth_element(rates, median);
  outcome.tokens_per_second = *median;
}

// Seconds of a training step. A part of a step is timed: as many sequences, or as much of one
// sequence, as the device could process in half a second at its peak. The rest is scaled by FLOPs.
double time_step(Run& run) {
  constexpr double kPeakSeconds = 0.5;
  constexpr double kLongest = 4;
  const auto flops_of = [&](int64_t sequences, int64_t time) {
    return 3 * run.model->forward_flops(time) * double(sequences) * double(time);
  };
  const double limit = kPeakSeconds * peak_flops(run.device);
  int64_t time = run.c.sequence_length;
  while (time > 256 && flops_of(1, time) > limit) time /= 2;
  const int64_t sequences =
      std::clamp<int64_t>(int64_t(std::min(1e9, limit / flops_of(1, time))), 1, run.c.batch_size);
  double fastest = std::numeric_limits<double>::infinity();
  const Clock::time_point begin = Clock::now();
  for (int i = 0; i < 4 && since(begin) < kLongest; ++i) {  // the first warms up
    check_interrupt();
    const Clock::time_point start = Clock::now();
    run.gradient->compute_part(0, sequences, time).sum().item<double>();
    run.optimizer->step(0, 0).item<double>();
    fastest = std::min(fastest, since(start));
  }
  return fastest * flops_of(run.c.batch_size, run.c.sequence_length) / flops_of(sequences, time);
}

// Seconds of one evaluation of at most so many tokens per set (0: all). A token that is only
// evaluated needs a third of the FLOPs.
double evaluation_seconds(const Run& run, double seconds_of_step, int64_t tokens_per_set) {
  int64_t tokens = 0;
  for (const std::string& set : run.c.eval_sets) {
    const auto [domain, split] = eval::domain_and_split(set);
    const int64_t all = run.store.documents(domain, split).tokens();
    tokens += tokens_per_set > 0 ? std::min(tokens_per_set, all) : all;
  }
  return seconds_of_step / 3 * double(tokens) / double(run.c.tokens_per_step());
}

[[noreturn]] void explain_memory(const TrainConfig& c, const std::string& what) {
  fail<Error>(
      "out of memory: {}\n  Lower train.micro_batch_size (now {}), "
      "give train.recompute_activations = true, or lower train.sequence_length (now {}).",
      what.substr(0, what.find('\n')), c.micro_batch_size, c.sequence_length);
}

template <class Work>
auto with_memory_advice(const TrainConfig& c, Work&& work) {
  try {
    return work();
  } catch (const c10::OutOfMemoryError& error) {
    explain_memory(c, error.what_without_backtrace());
  } catch (const std::bad_alloc&) {
    explain_memory(c, "the CPU has no more");
  } catch (const c10::Error& error) {
    const std::string what = error.what_without_backtrace();
    if (what.find("not enough memory") == std::string::npos &&
        what.find("can't allocate memory") == std::string::npos)
      throw;
    explain_memory(c, what);
  }
}

// Removes a run folder that this process made if an error leaves nothing but the lock in it.
class NewFolder {
 public:
  explicit NewFolder(const fs::path& folder) : folder_(folder), is_new_(!fs::exists(folder)) {}
  ~NewFolder() {
    std::error_code ignored;
    const auto is_lock = [](const auto& entry) { return entry.path().filename() == ".lock"; };
    if (is_new_ && std::uncaught_exceptions() > exceptions_ &&
        std::all_of(fs::directory_iterator(folder_, ignored), {}, is_lock))
      fs::remove_all(folder_, ignored);
  }
  bool is_new() const { return is_new_; }

 private:
  const fs::path folder_;
  const bool is_new_;
  const int exceptions_ = std::uncaught_exceptions();
};

run::Outcome read_outcome(const run::Folder& folder) try {
  return folder.outcome().read();
} catch (const BadInput& error) {
  fail("{}; nothing was changed. Remove the file and give --resume to write it again.",
       error.what());
}

}  // namespace

// Facts that must be the same on all ranks before anything is written.
std::map<std::string, std::string> facts_of(const RunConfig& config, const TrainOptions& options) {
  const run::Folder folder{options.run};
  const auto newest = newest_checkpoint(folder);
  return {{"configuration", config.toml()},
          {"token store", data_of(data::TokenStore(options.store), config.train)},
          {"version of Assay", version() + " " + commit()},
          {"newest checkpoint in the run folder", newest ? newest->path.filename() : "none"},
          {"state of the run", folder.outcome().exists() ? "done" : "not done"}};
}

run::Outcome train(const RunConfig& config, const TrainOptions& options) {
  const run::Folder folder{options.run};
  std::optional<NewFolder> new_folder;
  std::optional<FolderLock> lock;
  if (!options.ranks || options.ranks->first()) {
    run::check_output_folder(options.run, run::Folder{options.run}.provenance().path);
    new_folder.emplace(options.run);
    make_folder(options.run);
    lock.emplace(options.run);
    check_folder(config, options, folder);
    remove_scratch(folder);
  }
  if (options.ranks) options.ranks->agree(facts_of(config, options));
  if (folder.outcome().exists()) return read_outcome(folder);
  set_up_torch();
  return with_memory_advice(config.train, [&] {
    // Refuses what does not fit, as the next line does, before anything is written
    Run run(config, options);
    const TrainConfig& c = run.c;
    run::Provenance provenance = run.describe();
    if (const auto newest = newest_checkpoint(folder)) {
      if (folder.provenance().exists()) {
        const auto before = folder.provenance().read();
        check_numerics(before, provenance, folder);
        provenance.started = before.started;
      }
      run.state = load_checkpoint(*newest, *run.model, *run.optimizer);
    }
    if (run.state.step == 0) check_causality(*run.model, c.sequence_length);
    if (!run.writes()) return train_steps(run);
    // A process may have been killed between its last checkpoint and this.
    prune_checkpoints(folder, c.keep_steps);
    run::Outcome outcome;
    try {
      write_file(folder.config(), config.toml());
      folder.provenance().write(provenance);
      run.evaluation.emplace(*run.model, run.store, c, run.folder, run.divergence);
      run.metrics.emplace(folder, run.state.step);
      warn_of_missing_metrics(run);
      outcome = train_steps(run);
    } catch (const BadInput&) {
      // Damaged data is found when it is read. A run without a checkpoint is removed.
      std::error_code ignored;
      if (new_folder->is_new() && !newest_checkpoint(folder)) fs::remove_all(options.run, ignored);
      throw;
    }
    add_measured(outcome, run::read_metrics(folder).training);
    run.evaluation->evaluate_end(run.state);
    run.evaluation->write_probes(run.state);
    outcome.held_out_loss = run.evaluation->held_out_loss();
    folder.outcome().write(outcome);
    return outcome;
  });
}

run::Estimate describe_run(const RunConfig& config, const TrainOptions& options) {
  set_up_torch();
  return with_memory_advice(config.train, [&] {
    Progress progress;
    progress.show("building the model");
    Run run(config, options);
    // A study asks about all models before it trains the first one
    check_causality(*run.model, run.c.sequence_length);
    progress.show("timing a part of a step");
    const double seconds = time_step(run);
    run::Estimate out{run.describe()};
    out.steps = run.c.steps;
    out.tokens = run.c.tokens;
    out.learning_rate = run.c.learning_rate;
    const int64_t evaluations = run.c.steps / run.c.eval_every + 1;
    out.end_seconds = evaluation_seconds(run, seconds, run.c.end_tokens);
    out.estimated_seconds =
        seconds * double(run.c.steps) +
        double(evaluations) * evaluation_seconds(run, seconds, run.c.eval_tokens) +
        *out.end_seconds;
    out.longest_input = eval::longest_input(*run.model);
    return out;
  });
}

}  // namespace assay::train
