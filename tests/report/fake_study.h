#pragma once
// A finished study with known answers, written through the store. The loss out of domain that the
// reference has at held-out loss h is h + 1; another model has h + 1 + its degradation.
#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "base/random.h"
#include "study/runner.h"
#include "study/store.h"

namespace assay::report {

struct FakeModel {
  std::string name;
  double degradation = 0;  // nats per token at equal held-out loss
  double speed = 1;        // the model learns as if it had seen this many times the tokens
  double unseen = 0;       // nats more on tokens unseen in training, which are a tenth
  std::string table = "";  // of its mixer, in its configuration
};

class FakeStudyFolder {
 public:
  std::vector<std::string> train = {"cc", "c4"};
  std::vector<std::string> out_of_domain = {"arxiv", "github", "stack"};
  std::vector<FakeModel> models = {{"full"}, {"window", 0.12, 1.1}, {"twin"}, {"mamba1", 0.2, 1.5}};
  std::vector<int64_t> seeds = {1, 2, 3, 4};
  std::vector<int64_t> budgets = {10'000'000, 20'000'000, 40'000'000, 80'000'000};  // the ladder
  std::vector<int64_t> contender_budgets = {20'000'000, 40'000'000};
  std::vector<double> rates;  // of the tuning grid; empty: nothing is tuned
  double best_rate = 2e-3;
  std::string diverging;        // model whose run at the largest rate fails
  bool check = false;           // runs at half and twice the learning rate
  std::string failing_purpose;  // of runs that fail
  std::string few_documents;    // model that is evaluated on half of the documents at its end
  bool has_sources = true;
  double seed_spread = 0.004;  // standard deviation of the loss out of domain
  int64_t clusters = 40;
  int64_t evaluations = 8;
  // Tasks of 200 items. A model answers a recall task as well as it is not degraded.
  std::vector<run::TaskQuestion> tasks;
  std::string without_weights;          // model whose tasks were not evaluated
  std::map<std::string, int> numerics;  // version of selective_scan of a model; 1 where absent

  // Writes the run folders and study.sqlite. Runs of models named in `unfinished` fail.
  void write(const fs::path& study, const std::vector<std::string>& unfinished = {}) {
    make_folder(study / "configs");
    study::Plan plan{.name = "fake",
                     .text = "# Is this a study? It is made up.\nreference = \"full\"\n",
                     .reference = "full"};
    study::Setting& setting = plan.settings.emplace_back();
    setting.data.train = train;
    setting.data.out_of_domain = out_of_domain;
    setting.data.sequence_length = 512;
    plan.has_ladder = budgets.size() > 1;
    if (!tasks.empty()) plan.tasks.emplace();
    setting.tasks = tasks;
    const ConfigNode nothing = ConfigNode::parse("");
    for (const FakeModel& model : models)
      plan.models.push_back({.name = model.name, .train = nothing});
    plan_runs(study);
    study::Store store(study);
    store.set_plan(plan, runs_);
    for (const study::PlannedRun& run : runs_) {
      const bool diverges = run.model == diverging && run.learning_rate == rates.back();
      if (diverges || run.purpose == failing_purpose || std::ranges::count(unfinished, run.model)) {
        store.set_status(run.key, study::status::kFailed, "exit code 1: the loss is NaN at step 3");
        continue;
      }
      write_run(run.folder(study), model_of(run), run);
      store.take(run, run.folder(study));
    }
  }

 private:
  std::vector<study::PlannedRun> runs_;

  const FakeModel& model_of(const study::PlannedRun& run) const {
    return *std::ranges::find(models, run.model, &FakeModel::name);
  }

  void plan_runs(const fs::path& study) {
    runs_.clear();
    for (const FakeModel& model : models)
      for (const double rate : rates)
        add(study, model, 1, budgets.front(), rate, study::purpose::kTuning);
    const double rate = rates.empty() ? 1e-3 : best_rate;
    for (const FakeModel& model : models) {
      const bool is_reference = model.name == "full";
      for (const int64_t tokens : is_reference ? budgets : contender_budgets)
        for (const int64_t seed : seeds)
          add(study, model, seed, tokens, rate, study::purpose::kStudy);
      if (!check || is_reference) continue;
      for (const auto& [factor, why] :
           {std::pair{0.5, study::purpose::kHalf}, {2.0, study::purpose::kDouble}})
        for (const int64_t seed : seeds)
          add(study, model, seed, contender_budgets.back(), factor * rate, why);
    }
  }

  void add(const fs::path& study, const FakeModel& model, int64_t seed, int64_t tokens, double rate,
           const std::string& why) {
    study::PlannedRun run{
        .key = sha256(fmt::format("{} {} {} {}", model.name, seed, tokens, rate)),
        .name = fmt::format("{}.{}M.lr-{:g}.seed-{}", model.name, tokens / 1'000'000, rate, seed),
        .model = model.name,
        .purpose = why,
        .seed = seed,
        .tokens = tokens,
        .learning_rate = rate};
    run.estimate = {provenance(model)};
    run.estimate.steps = tokens / (32 * 512);
    run.estimate.tokens = tokens;
    run.config = study / "configs" / (run.name + ".toml");
    write_file(run.config, config(model, run));
    runs_.push_back(run);
  }

  static std::string config(const FakeModel& model, const study::PlannedRun& run) {
    return fmt::format(
        "[model]\nd_model = 512\nnum_layers = {}\npattern = [\"{}\"]\n{}[train]\nseed = {}\n"
        "tokens = {}\nbatch_size = 32\nsequence_length = 512\nwarmup_steps = 10\n"
        "learning_rate = {:g}\n",
        model.name == "mamba1" ? 16 : 8, model.name == "mamba1" ? "mamba1" : "attention",
        model.table, run.seed, run.tokens, run.learning_rate);
  }

  // How far a run has come when `tokens` of its budget are seen. A learning rate that is not the
  // best one ends higher.
  double held_out_loss(const FakeModel& model, const study::PlannedRun& run, double tokens) const {
    const double seen = tokens * model.speed / 1e6;
    const double detour = 0.3 * (1 - tokens / double(run.tokens));  // the rate is still high
    const double off = rates.empty() ? 0 : std::log2(run.learning_rate / best_rate);
    return 3 + 5 / (1 + std::sqrt(seen)) + detour + 0.05 * off * off;
  }

  void write_run(const run::Folder& folder, const FakeModel& model, const study::PlannedRun& run) {
    make_folder(folder.path);
    const int64_t steps = run.tokens / (32 * 512);
    {
      run::MetricsWriter metrics(folder, 0);
      for (int64_t k = 0; k <= 10 * evaluations; ++k) {
        const int64_t tokens = run.tokens * k / (10 * evaluations);
        const int64_t step = steps * k / (10 * evaluations);
        const double training = held_out_loss(model, run, double(tokens)) - 0.08;
        if (k > 0)
          metrics.write(run::TrainingLine{.step = step, .loss = training, .tokens = tokens});
        if (k % 10 == 0) metrics.write(evaluation(model, run, tokens, step));
      }
    }
    write_file(folder.config(), config(model, run));
    folder.provenance().write(provenance(model));
    folder.end().write(end(model, run, steps));
    folder.outcome().write({.steps = steps,
                            .tokens = run.tokens,
                            .seconds = 61.5,
                            .tokens_per_second = 532'800 * model.speed,
                            .peak_memory_bytes = 3'221'225'472,
                            .final_loss = 3.3});
    if (!tasks.empty()) folder.tasks().write(task_results(model, run));
    if (model.name == "mamba1") return;  // runs without probes
    const run::LayerProbe layer{.visibility = 0.9375, .uniformity = 0.5, .real_relation = 0.875};
    folder.probes().write({.layers = {layer, layer},
                           .mean = {.visibility = model.name == "window" ? 0.25 : 0.75,
                                    .uniformity = 0.5,
                                    .real_relation = 0.875,
                                    .attention_entropy = NAN}});
  }

  run::TaskResults task_results(const FakeModel& model, const study::PlannedRun& run) const {
    run::TaskResults out;
    for (const run::TaskQuestion& task : tasks) {
      run::TaskResult& result = out.results.emplace_back(
          run::TaskResult{.name = task.name, .key = task.key, .items = task.items});
      if (model.name == without_weights) {
        result.problem = "the final weights of the run are not in this study";
        continue;
      }
      Random of_items(1, task.name);
      Random of_run(uint64_t(run.seed), task.name + model.name);
      const double level = 0.7 - (task.recall ? 2 * model.degradation : 0);
      std::vector<double> right;
      std::vector<double> logprobs;
      for (int64_t i = 0; i < task.items; ++i) {
        right.push_back(0.8 * of_items.uniform() + 0.2 * of_run.uniform() < level);
        logprobs.push_back(-2 - model.degradation + 0.1 * of_run.normal());
      }
      for (const std::string& metric : task.metrics)
        if (run::is_likelihood(metric))
          result.metrics.push_back({.name = metric,
                                    .sums = run::block_sums(logprobs),
                                    .weights = run::block_sums(std::vector<double>(200, 1))});
        else result.metrics.push_back({.name = metric, .bits = run::bits_of(right)});
    }
    return out;
  }

  run::Provenance provenance(const FakeModel& model) const {
    const int version = numerics.contains(model.name) ? numerics.at(model.name) : 1;
    return {.parameters = 34'000'000,
            .flops_per_token = 6.8e7,
            .state_bytes = {.at_short = 1 << 24, .at_long = 1 << 29},
            .device = "cpu, 2 cores",
            .torch = "2.11.0",
            .assay = "0.1.0",
            .commit = "0123456789abcdef",
            .paths = {{"selective_scan", "cpu kernel"}},
            .numerics = {{"selective_scan", version}},
            .data = sha256("data"),
            .started = "2030-01-01T00:00:00Z"};
  }

  std::string set(const std::string& domain) const {
    return domain + (std::ranges::count(train, domain) ? ".valid" : ".test");
  }

  // Loss of each set; the loss out of domain has noise of the seed.
  std::map<std::string, double> losses(const FakeModel& model, const study::PlannedRun& run,
                                       double tokens) const {
    std::map<std::string, double> out;
    const double held_out = held_out_loss(model, run, tokens);
    Random random(uint64_t(run.seed), model.name, uint64_t(run.tokens));
    const double noise = seed_spread * random.normal();
    for (const std::string& domain : train) out[set(domain)] = held_out;
    for (size_t i = 0; i < out_of_domain.size(); ++i) {
      const double more = model.degradation + 0.1 * model.unseen;
      out[set(out_of_domain[i])] =
          held_out + 1 + 0.2 * (double(i) - 1) + more * (1 + 0.3 * (1 - double(i))) + noise;
    }
    return out;
  }

  run::EvaluationLine evaluation(const FakeModel& model, const study::PlannedRun& run,
                                 int64_t tokens, int64_t step) const {
    run::EvaluationLine line{.step = step, .tokens = tokens, .train_loss = NAN};
    if (model.name != "mamba1") line.attention_entropy = {{0.5, 0.25}, {0.75, 0.5}};
    for (const auto& [name, loss] : losses(model, run, double(tokens)))
      line.evaluation[name] = with_slices(model, loss);
    return line;
  }

  run::End end(const FakeModel& model, const study::PlannedRun& run, int64_t steps) const {
    run::End out{.step = steps, .tokens = run.tokens};
    for (const auto& [name, loss] : losses(model, run, double(run.tokens))) {
      run::Clusters by_cluster;
      if (has_sources) by_cluster.names.emplace();
      const int64_t count = model.name == few_documents ? clusters / 2 : clusters;
      // The deviations of the clusters add up to zero.
      for (int64_t c = 0; c < count; ++c) {
        const double deviation = 0.2 * (double(c) / double(count - 1) - 0.5);
        by_cluster.documents.push_back(3);
        by_cluster.tokens.push_back(1000);
        by_cluster.nll.push_back(1000 * (loss + deviation));
        by_cluster.recall_tokens.push_back(200);
        by_cluster.recall_nll.push_back(200 * 1.9);
        if (has_sources) by_cluster.names->push_back(fmt::format("source {}", c));
      }
      out.sets[name] = {
          .loss = loss,
          .recall_loss = 1.9,
          .bits_per_byte = loss * 0.4,
          .tokens = 1000 * clusters,
          .documents = 3 * clusters,
          .clustered_by = has_sources ? run::EndSet::kBySource : run::EndSet::kByDocument,
          .clusters = by_cluster};
    }
    return out;
  }

  run::EvaluatedSet with_slices(const FakeModel& model, double loss) const {
    const int64_t n = 16'000;
    const auto slice = [&](double l, double share) {
      return run::Slice{.loss = l, .tokens = std::llround(share * double(n)), .share = share};
    };
    std::map<std::string, run::Slice> slices = {{"frequent", slice(loss - 0.5, 0.6)},
                                                {"rare", slice(loss + 1, 0.3)},
                                                {"unseen", slice(loss + 4 + model.unseen, 0.1)},
                                                {"repeated_bigram", slice(loss - 1, 0.2)},
                                                {"other", slice(loss + 0.2, 0.8)},
                                                {"position_0_64", slice(loss + 0.4, 0.1)},
                                                {"position_64_256", slice(loss, 0.4)},
                                                {"position_256_512", slice(loss - 0.1, 0.5)},
                                                {"above_12_nats", slice(NAN, 0.01)}};
    return {
        .loss = loss, .bits_per_byte = loss * 0.4, .tokens = n, .documents = 40, .slices = slices};
  }
};

}  // namespace assay::report
