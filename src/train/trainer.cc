#include "train/trainer.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/torch.h>

#include <chrono>
#include <set>

#include "base/interrupt.h"
#include "base/progress.h"
#include "base/version.h"
#include "data/sampler.h"
#include "data/token_store.h"
#include "eval/end_losses.h"
#include "eval/held_out.h"
#include "eval/longest_input.h"
#include "eval/probes.h"
#include "ops/paths.h"
#include "run/metrics.h"
#include "train/checkpoint.h"
#include "train/device.h"
#include "train/optimizer.h"
#include "train/step_gradient.h"

namespace assay::train {
namespace {

using Clock = std::chrono::steady_clock;

double since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

std::string now_utc() {
  const std::time_t now = std::time(nullptr);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
  return text;
}

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
        model(std::make_shared<nn::LanguageModel>(config.model)) {
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
    std::map<std::string, std::string> paths;
    std::map<std::string, int64_t> numerics;
    for (const ops::OpPath& path : ops::op_paths())
      if (path.device == (device.is_cuda() ? "cuda" : "cpu")) {
        paths[path.op] = path.path;
        if (path.numerics > 0) numerics[path.op] = path.numerics;
      }
    for (const auto& [part, version] : model->numerics()) numerics[part] = version;
    const std::string data = data_of(store, c), versions = to_json(numerics).dump();
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
            .data_folder = fs::absolute(store.folder()).string(),
            .started = now_utc(),
            .identity = sha256(config.identity() + versions),
            .key = sha256(config.toml() + data + versions)};
  }

  bool writes() const { return !ranks || ranks->first(); }

  // Runs the step's forward again and names the first place that is not finite.
  std::string first_nonfinite(int64_t step) {
    const at::NoGradGuard no_grad;
    std::string place;
    model->watch = [&](int64_t layer, const at::Tensor& x) {
      if (place.empty() && !at::isfinite(x).all().item<bool>())
        place = layer < 0
                    ? "the embedding"
                    : fmt::format("layer {} ({})", layer,
                                  config.model.config
                                      .pattern[size_t(layer) % config.model.config.pattern.size()]);
    };
    gradients_watch(step);
    model->watch = nullptr;
    for (const auto& item : model->named_parameters())
      if (!at::isfinite(item.value()).all().item<bool>()) return place + ", weight " + item.key();
    return place.empty() ? "the gradient" : place;
  }
  void gradients_watch(int64_t step) {
    std::vector<int64_t> tokens(size_t(c.batch_size * (c.sequence_length + 1)));
    sampler.batch(step, c.batch_size, tokens.data());
    const at::Tensor batch = at::tensor(tokens).view({c.batch_size, -1}).to(device);
    for (const at::Tensor& part : batch.split(c.micro_batch_size)) {
      nn::ModelState state;
      model->hidden(part.slice(1, 0, -1), state);
    }
  }

  // The checkpoint of the step that fails holds the very weights that fail.
  std::string last_good(int64_t failing_step) const {
    const auto good = newest_checkpoint(folder, failing_step - 1);
    return good ? "the last good checkpoint is " + good->path.string()
                : "there is no checkpoint before it";
  }

  void check(int64_t step, double loss, double norm) {
    if (!std::isfinite(loss) || !std::isfinite(norm))
      fail<Error>(
          "step {}: loss {}, gradient norm {}; first non-finite value in {}; {}. "
          "Lower learning_rate, or raise warmup_steps.",
          step, loss, norm, first_nonfinite(step), last_good(step));
    if (c.spike > 0 && step > std::max<int64_t>(c.warmup_steps, 50) &&
        loss > state.mean_loss + c.spike)
      fail<Error>(
          "step {}: the loss jumped to {:.3f} from a running mean of {:.3f} (train.spike = {}); "
          "every value is finite; "
          "{}.",
          step, loss, state.mean_loss, c.spike, last_good(step));
    state.mean_loss = step == 0 ? loss : 0.98 * state.mean_loss + 0.02 * loss;
  }

  // On rank 0. The other ranks wait for it in the next exchange.
  void evaluate() {
    if (!writes()) {
      state.evaluation_loss = 0;
      state.evaluation_steps = 0;
      return;
    }
    const Clock::time_point start = Clock::now();
    const eval::Losses losses = held_out->run(*model);
    held_out_loss = loss_on_training_domains(losses);
    for (const auto& [name, set] : losses)
      if (!std::isfinite(set.total().nll))
        fail<Error>(
            "step {}: held-out loss {} on {}; first non-finite value in {}; {}. "
            "Lower learning_rate, or raise warmup_steps.",
            state.step, set.total().nll, name, first_nonfinite(state.step), last_good(state.step));
    const fs::path file = folder.document_losses(state.step);
    make_folder(file.parent_path());
    eval::write_losses(file, losses);
    constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
    run::EvaluationLine line{
        .step = state.step,
        .tokens = state.step * c.tokens_per_step(),
        .evaluation = eval::summary(losses),
        .held_out_loss = held_out_loss.value_or(kNone),
        .train_loss =
            state.evaluation_steps ? state.evaluation_loss / double(state.evaluation_steps) : kNone,
        .seconds = since(start)};
    if (const at::Tensor tokens = probe_tokens(1); tokens.defined())
      if (const auto entropy = eval::attention_entropy(*model, tokens); !entropy.empty())
        line.attention_entropy = entropy;
    metrics->write(line);
    state.evaluation_loss = 0;
    state.evaluation_steps = 0;
  }

  // Mean over the valid splits of the training domains, or over their other sets without these.
  std::optional<double> loss_on_training_domains(const eval::Losses& losses) const {
    const auto mean = [&](const std::string& split) -> std::optional<double> {
      double sum = 0;
      int64_t count = 0;
      for (const auto& [name, set] : losses) {
        const size_t dot = name.rfind('.');
        if (!std::ranges::count(c.domains, name.substr(0, dot))) continue;
        if (!split.empty() && name.substr(dot + 1) != split) continue;
        sum += set.total().loss();
        ++count;
      }
      return count > 0 ? std::optional(sum / double(count)) : std::nullopt;
    };
    const std::optional<double> valid = mean("valid");
    return valid ? valid : mean("");
  }

  // The losses that architectures are compared by, over more text than the evaluations
  // along the run.
  void evaluate_end() {
    const eval::HeldOut all(store, {c.eval_sets, c.domains, c.sequence_length, c.end_tokens,
                                    c.micro_batch_size * c.sequence_length});
    const eval::Losses losses = all.run(*model);
    held_out_loss = loss_on_training_domains(losses);
    const run::End end{.step = state.step,
                       .tokens = state.step * c.tokens_per_step(),
                       .sets = eval::end_losses(losses, store)};
    for (const auto& [name, set] : end.sets)
      if (!std::isfinite(set.loss))
        fail<Error>(
            "the loss at the end of the run is not finite on {}; {}. Lower learning_rate, "
            "or raise warmup_steps.",
            name, last_good(state.step));
    folder.end().write(end);
  }

  // Held-out text of the first set; undefined where there is none that is long enough to ask about.
  at::Tensor probe_tokens(int64_t sequences) const {
    if (c.eval_sets.empty()) return {};
    const at::Tensor tokens = eval::probe_tokens(
        store, c.eval_sets.front(), std::min(eval::kProbeLength, c.sequence_length), sequences);
    return tokens.size(1) < eval::kProbeLeast ? at::Tensor() : tokens;
  }

  // What the mixers learned to do with earlier positions.
  void write_probes() {
    const at::Tensor tokens = probe_tokens(4);
    if (!tokens.defined()) return;
    run::Probes found = eval::probe(*model, tokens);
    found.step = state.step;
    found.set = c.eval_sets.front();
    folder.probes().write(found);
  }

  void save() {
    if (metrics) metrics->sync();
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
  std::optional<StepGradient> gradient;
  std::optional<AdamW> optimizer;
  std::optional<run::MetricsWriter> metrics;  // of rank 0
  std::optional<eval::HeldOut> held_out;
  std::optional<double> held_out_loss;  // of the last evaluation in this process
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
  if (read_file(folder.config()) != config.toml())
    fail(
        "{}: holds a run of another configuration (see config.toml there); nothing was changed. "
        "Choose another folder, or give the same settings.",
        name);
  if (!folder.provenance().exists()) return;
  if (folder.provenance().read().data != data_of(data::TokenStore(options.store), config.train))
    fail(
        "{}: holds a run on other data (see run.json there) than {}; nothing was changed. "
        "Choose another folder, or give the same store.",
        name, options.store.string());
}

// When a checkpoint is due. Without a number of steps, the time that the last one took decides: no
// result depends on it.
class Saving {
 public:
  explicit Saving(int64_t every) : every_(every) {}
  bool due(int64_t step) const { return every_ > 0 ? step % every_ == 0 : Clock::now() >= next_; }
  // The same, said once only. Ranks have clocks of their own, so rank 0 asks the others to save.
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

// The loss and the gradient norm of one step. They are read one step later, so that the host
// prepares the next step while the device works on this one.
class StepResult {
 public:
  // `norm` is a scalar on the device, too.
  StepResult(int64_t step, double rate, const StepGradient::Step& made, const at::Tensor& norm)
      : step(step), learning_rate(rate) {
    std::vector<at::Tensor> scalars = {made.loss, norm};
    if (made.stop.defined()) scalars.insert(scalars.end(), {made.stop, made.save});
    for (at::Tensor& scalar : scalars) scalar = scalar.to(at::kDouble);
    const at::Tensor all = at::stack(scalars);
    values_ = at::empty_like(all, at::TensorOptions(at::kCPU).pinned_memory(all.is_cuda()));
    values_.copy_(all, /*non_blocking=*/true);
    if (!all.is_cuda()) return;
    copied_.emplace(c10::DeviceType::CUDA);
    copied_->record(c10::impl::getDeviceGuardImpl(c10::DeviceType::CUDA)->getStream(all.device()));
  }
  struct Values {
    double loss, norm;  // of the gradient
    bool stop, save;
  };
  Values read() const {  // waits for the step
    if (copied_) copied_->synchronize();
    const double* value = values_.data_ptr<double>();
    const bool flags = values_.numel() > 2;
    return {value[0], value[1], flags && value[2] > 0, flags && value[3] > 0};
  }
  int64_t step;
  double learning_rate;

 private:
  at::Tensor values_;
  std::optional<c10::Event> copied_;
};

run::Outcome train_steps(Run& run) {
  const TrainConfig& c = run.c;
  const double tokens_per_step = double(c.tokens_per_step()),
               peak = peak_flops(run.device) * double(run.ranks ? run.ranks->size() : 1);
  std::optional<Progress> progress;
  if (run.writes()) progress.emplace();
  Clock::time_point start = Clock::now(), interval = start;
  // Evaluation and saving do not count as training
  double seconds_before = run.state.seconds, paused = 0;
  std::vector<double> rates;
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
  double norm = 0;
  bool asked_to_stop = false, asked_to_save = false;
  // Checks the pending step and adds it to the means. Everything that is written needs this first.
  const auto settle = [&] {
    if (!pending) return;
    const auto [loss, gradient_norm, stop, save] = pending->read();
    asked_to_stop = asked_to_stop || stop;
    asked_to_save = asked_to_save || save;
    run.check(pending->step, loss, gradient_norm);
    run::TrainingState& s = run.state;
    ++s.interval_steps;
    ++s.evaluation_steps;
    s.interval_loss += loss;
    s.evaluation_loss += loss;
    s.last_loss = loss;
    norm = gradient_norm;
    pending.reset();
  };
  while (run.state.step < c.steps) {
    run::TrainingState& s = run.state;
    const int64_t step = s.step;
    const bool rank_saves = run.ranks && run.ranks->first() && saving.ask(step);
    const StepGradient::Step made = run.gradient->compute(step, interrupted(), rank_saves);
    const double rate = learning_rate_at(c, step);
    const at::Tensor norm_now = run.optimizer->step(rate, step);
    settle();
    pending.emplace(step, rate, made, norm_now);
    ++s.step;
    const bool logs = s.step % c.log_every == 0 || s.step == c.steps;
    const bool evaluates = s.step % c.eval_every == 0 || s.step == c.steps;
    // All ranks save and stop after the same step: what one is asked for, all know a step later
    const bool due = run.ranks && saving.by_time() ? asked_to_save : saving.due(s.step);
    const bool saves = due || s.step == c.steps;
    const bool stops = (run.ranks ? asked_to_stop : interrupted()) && s.step < c.steps;
    if (logs || evaluates || saves || stops) settle();
    s.seconds = seconds_before + since(start) - paused;
    const double interval_steps = double(s.interval_steps + (pending ? 1 : 0));
    const double speed = interval_steps * tokens_per_step / std::max(1e-9, since(interval));
    const std::string shown_loss = run.held_out_loss
                                       ? fmt::format("held-out loss {:.4f}", *run.held_out_loss)
                                       : fmt::format("training loss {:.4f}", s.last_loss);
    if (progress)
      progress->show(
          fmt::format("step {}/{}  {}  {} tokens/s  MFU {:.1f} %  {} left", s.step, c.steps,
                      shown_loss, Progress::count(speed), 300 * run.flops_per_token * speed / peak,
                      Progress::duration(double(c.steps - s.step) * tokens_per_step / speed)));
    if (logs) {
      const run::TrainingLine line{.step = s.step,
                                   .loss = s.interval_loss / double(s.interval_steps),
                                   .tokens = s.step * c.tokens_per_step(),
                                   .learning_rate = rate,
                                   .grad_norm = norm,
                                   .tokens_per_second = speed,
                                   .mfu = 3 * run.flops_per_token * speed / peak,
                                   .seconds = s.seconds,
                                   .memory_bytes = peak_memory_bytes(run.device)};
      if (run.metrics) run.metrics->write(line);
      rates.push_back(speed);
      s.interval_loss = 0;
      s.interval_steps = 0;
      interval = Clock::now();
    }
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
  std::ranges::nth_element(rates, rates.begin() + std::ptrdiff_t(rates.size() / 2));
  return {.steps = run.state.step,
          .tokens = run.state.step * c.tokens_per_step(),
          .seconds = run.state.seconds,
          .tokens_per_second = rates.empty() ? 0.0 : rates[rates.size() / 2],
          .peak_memory_bytes = peak_memory_bytes(run.device),
          .final_loss = run.state.last_loss,
          .evaluation_and_saving_seconds = paused};
}

// Seconds of a training step. A part of a step is timed: as many sequences, or as much of one
// sequence, as the device could process in half a second at its peak. The rest is scaled by FLOPs.
double time_step(Run& run) {
  constexpr double kPeakSeconds = 0.5, kLongest = 4;
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
    run.gradient->compute_part(0, sequences, time).item<double>();
    run.optimizer->step(0, 0).item<double>();
    fastest = std::min(fastest, since(start));
  }
  return fastest * flops_of(run.c.batch_size, run.c.sequence_length) / flops_of(sequences, time);
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

run::Outcome read_outcome(const run::Folder& folder) try {
  return folder.outcome().read();
} catch (const BadInput& error) {
  fail("{}; nothing was changed. Remove the file and give --resume to write it again.",
       error.what());
}

}  // namespace

std::string RunConfig::toml() const { return model.toml() + "\n[train]\n" + train.toml(); }

std::string RunConfig::identity() const {
  TrainConfig t = train;
  t.steps = t.tokens = t.seed = 0;
  t.learning_rate = 0;
  if (t.warmup_fraction > 0) t.warmup_steps = 0;
  t.eval_every = t.eval_tokens = t.checkpoint_every = t.log_every = 0;
  t.keep_steps.clear();
  return model.toml() + "\n[train]\n" + t.toml();
}

RunConfig read_run_config(const ConfigNode& file, const fs::path& store_folder, int64_t ranks) {
  file.read(Fields{}, {"model", "train"});
  RunConfig config{nn::ModelSpec::read(file.child("model")), {}};
  const ConfigNode table = file.child("train");
  table.read(config.train);
  config.train.complete(table, ranks);
  const data::TokenStore store(store_folder);
  nn::ModelConfig& model = config.model.config;
  if (model.vocab_size == 0) model.vocab_size = store.vocab_size();
  if (model.vocab_size < store.vocab_size())
    file.child("model").refuse(
        "vocab_size", fmt::format("{{table}}.vocab_size = {} is below the store's {} ({})",
                                  model.vocab_size, store.vocab_size(), store_folder.string()));
  if (model.positions == "learned" && model.max_positions == 0)
    model.max_positions = config.train.sequence_length;
  if (config.train.domains.empty())
    for (const std::string& domain : store.domains())
      if (store.has(domain, "train")) config.train.domains.push_back(domain);
  for (const std::string& domain : config.train.domains) store.documents(domain, "train");
  if (config.train.eval_sets.empty())
    config.train.eval_sets = eval::default_sets(store, config.train.domains);
  for (const std::string& set : config.train.eval_sets)
    store.documents(set.substr(0, set.rfind('.')), set.substr(set.rfind('.') + 1));
  // A forward is a third of a step: 3 % of the run's time over its evaluations
  if (config.train.eval_tokens == 0) {
    const double evaluations = double(config.train.steps) / double(config.train.eval_every) + 1;
    const double sets = double(std::max<size_t>(1, config.train.eval_sets.size()));
    config.train.eval_tokens =
        std::max<int64_t>(config.train.sequence_length,
                          int64_t(0.09 * double(config.train.tokens) / evaluations / sets));
  }
  return config;
}

// What must be the same on all ranks before anything is written.
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
  std::optional<FolderLock> lock;
  if (!options.ranks || options.ranks->first()) {
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
    if (const auto newest = newest_checkpoint(folder))
      run.state = load_checkpoint(*newest, *run.model, *run.optimizer);
    if (!run.writes()) return train_steps(run);
    write_file(folder.config(), config.toml());
    folder.provenance().write(run.describe());
    run.held_out.emplace(
        run.store, eval::HeldOut::Options{c.eval_sets, c.domains, c.sequence_length, c.eval_tokens,
                                          c.micro_batch_size * c.sequence_length});
    run.metrics.emplace(folder, run.state.step);
    run::Outcome outcome = train_steps(run);
    run.evaluate_end();
    run.write_probes();
    outcome.held_out_loss = run.held_out_loss;
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
    progress.show("timing a part of a step");
    const double seconds = time_step(run);
    run::Estimate out{run.describe()};
    out.steps = run.c.steps;
    out.tokens = run.c.tokens;
    out.learning_rate = run.c.learning_rate;
    out.estimated_seconds = seconds * double(run.c.steps);
    out.longest_input = eval::longest_input(*run.model);
    return out;
  });
}

}  // namespace assay::train
