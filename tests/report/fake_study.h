#pragma once
// A finished study with known losses: the loss out of domain is the held-out loss + 1 + a constant of the architecture.
#include <cmath>

#include "base/random.h"
#include "base/safetensors.h"
#include "study/store.h"

namespace assay::report {

using Json = nlohmann::json;

struct FakeModel {
  std::string name;
  double degradation = 0;  // nats
  double speed = 1;        // tokens count this much
  double unseen = 0;       // nats more on tokens unseen in training, which are a tenth
  std::string table = "";  // of its mixer, in its configuration
};

class FakeStudyFolder {
 public:
  std::vector<std::string> train = {"cc", "c4"}, out_of_domain = {"arxiv", "github", "stack"};
  std::vector<FakeModel> models = {{"full"}, {"window", 0.12, 1.1}, {"twin"}, {"mamba1", 0.05, 0.9}};
  std::vector<int64_t> seeds = {1, 2};
  int64_t documents = 40, evaluations = 12;
  std::map<std::string, int> numerics;  // version of selective_scan in the runs of a model; 1 where absent

  // Writes the run folders and study.sqlite. Runs of models named in `unfinished` stay out.
  void write(const fs::path& study, const std::vector<std::string>& unfinished = {}) {
    make_folder(study / "configs");
    study::Plan plan{"fake", "reference = \"full\"\n", "full", {{"", {"", train, out_of_domain, 512}, {}, {}}}, {}};
    std::vector<study::PlannedRun> runs;
    for (const FakeModel& model : models) {
      plan.models.push_back({model.name, seeds, {}, {}});
      for (const int64_t seed : seeds) runs.push_back(planned(study, model, seed));
    }
    study::Store store(study);
    store.set_plan(plan, runs);
    for (size_t i = 0; i < runs.size(); ++i) {
      const FakeModel& model = models[i / seeds.size()];
      if (std::count(unfinished.begin(), unfinished.end(), model.name)) {
        store.set_status(runs[i].key, "failed", "exit code 1: the loss is NaN at step 3");
        continue;
      }
      write_run(runs[i].folder(study), model, runs[i].seed);
      store.take(runs[i].key, runs[i].folder(study));
    }
  }

 private:
  study::PlannedRun planned(const fs::path& study, const FakeModel& model, int64_t seed) {
    study::PlannedRun run{sha256(fmt::format("{} {}", model.name, seed)),
                          fmt::format("{}.seed-{}", model.name, seed),
                          "",
                          model.name,
                          seed,
                          {},
                          {},
                          {{"tokens", 1e6}}};
    run.config = study / "configs" / (run.name + ".toml");
    write_file(run.config, config(model, seed));
    return run;
  }
  static std::string config(const FakeModel& model, int64_t seed) {
    return fmt::format(
        "[model]\nd_model = 512\nnum_layers = {}\npattern = [\"{}\"]\n{}[train]\nseed = {}\nsteps = 2000\nbatch_size = "
        "32\n"
        "sequence_length = 512\nwarmup_steps = 10\nlearning_rate = 0.001\n",
        model.name == "mamba1" ? 16 : 8, model.name == "mamba1" ? "mamba1" : "attention", model.table, seed);
  }

  void write_run(const fs::path& folder, const FakeModel& model, int64_t seed) {
    make_folder(folder / "evaluations");
    std::string lines;
    for (int64_t k = 0; k <= evaluations; ++k) lines += evaluation(folder, model, seed, k).dump() + "\n";
    write_file(folder / "metrics.jsonl", lines);
    write_file(folder / "config.toml", config(model, seed));
    write_file(folder / "run.json",
               Json{{"parameters", 34'000'000},
                    {"flops_per_token", 6.8e7},
                    {"state_bytes", {{"2048", 1 << 24}, {"102400", 1 << 29}}},
                    {"device", "cpu, 2 cores"},
                    {"torch", "2.11.0"},
                    {"assay", "0.1.0"},
                    {"commit", "0123456789abcdef"},
                    {"paths", {{"selective_scan", "cpu kernel"}}},
                    {"data", sha256("data")},
                    {"numerics", {{"selective_scan", numerics.contains(model.name) ? numerics.at(model.name) : 1}}},
                    {"started", "2030-01-01T00:00:00Z"}}
                   .dump());
    write_file(folder / "done.json", Json{{"steps", 2000},
                                          {"tokens", 32'768'000},
                                          {"seconds", 61.5},
                                          {"tokens_per_second", 532'800 * model.speed},
                                          {"peak_memory_bytes", 3'221'225'472},
                                          {"final_loss", 3.3}}
                                         .dump());
    if (model.name == "mamba1") return;  // a run without probes
    const Json mean{
        {"visibility", model.name == "window" ? 0.25 : 0.75}, {"uniformity", 0.5}, {"real_relation", 0.875}};
    Json layer = mean;
    layer["visibility"] = 0.9375;
    write_file(folder / "probes.json", Json{{"mean", mean}, {"layers", {mean, layer}}}.dump());
  }

  std::string split(const std::string& domain) const { return std::ranges::count(train, domain) ? ".valid" : ".test"; }

  // Training loss falls from about 9 to 3.4; a seed shifts the loss out of domain by its own 0.01.
  Json evaluation(const fs::path& folder, const FakeModel& model, int64_t seed, int64_t k) {
    Random random(uint64_t(seed), model.name, uint64_t(k));
    const double tokens = double(k) / double(evaluations) * 32'768'000;
    const double held_out =
        3.4 + 5.6 * std::exp(-4.5 * std::pow(tokens * model.speed / 32'768'000, 0.55)) + 0.002 * random.normal();
    const double shift = 0.01 * Random(uint64_t(seed), model.name).normal();
    Json line{{"step", k * 100},
              {"tokens", tokens},
              {"train_loss", k ? Json(held_out - 0.08) : Json()},
              {"evaluation", Json::object()}};
    if (model.name != "mamba1") line["attention_entropy"] = {{0.5, 0.25}, {0.75, 0.5}};
    std::vector<std::vector<double>> nll, counts;
    std::vector<TensorEntry> tensors;
    const auto add = [&](const std::string& domain, double loss) {
      const std::string set = domain + split(domain);
      double sum = 0;
      auto& n = nll.emplace_back();
      for (int64_t d = 0; d < documents; ++d) {
        n.push_back(400 * (loss + 0.3 * Random(7, domain).at(uint64_t(d)) * 0x1p-64 - 0.15));
        sum += n.back();
      }
      line["evaluation"][set] = sets(model, sum / (400.0 * double(documents)));
    };
    for (const std::string& domain : train) add(domain, held_out);
    for (size_t i = 0; i < out_of_domain.size(); ++i)
      add(out_of_domain[i], held_out + 1 + 0.2 * double(i) +
                                (model.degradation + 0.1 * model.unseen) * (1 + 0.3 * (1 - double(i))) + shift);
    std::vector<int64_t> tokens_of(size_t(documents), 400);
    size_t i = 0;
    for (const auto* names : {&train, &out_of_domain})
      for (const std::string& domain : *names) {
        tensors.push_back({domain + split(domain) + ".nll", "F64", {documents}, std::as_bytes(std::span(nll[i++]))});
        tensors.push_back(
            {domain + split(domain) + ".tokens", "I64", {documents}, std::as_bytes(std::span(tokens_of))});
        tensors.push_back({domain + split(domain) + ".bytes", "I64", {documents}, std::as_bytes(std::span(tokens_of))});
      }
    write_safetensors(folder / "evaluations" / fmt::format("step-{}.safetensors", k * 100), tensors);
    return line;
  }

  Json sets(const FakeModel& model, double loss) {
    const double n = 400.0 * double(documents);
    const auto slice = [&](double l, double share) { return Json{{"loss", l}, {"tokens", share * n}}; };
    return {{"loss", loss},
            {"bits_per_byte", loss * 0.4},
            {"tokens", n},
            {"documents", documents},
            {"slices",
             {{"frequent", slice(loss - 0.5, 0.6)},
              {"rare", slice(loss + 1, 0.3)},
              {"unseen", slice(loss + 4 + model.unseen, 0.1)},
              {"repeated_bigram", slice(loss - 1, 0.2)},
              {"other", slice(loss + 0.2, 0.8)},
              {"position_0_64", slice(loss + 0.4, 0.1)},
              {"position_64_256", slice(loss, 0.4)},
              {"position_256_512", slice(loss - 0.1, 0.5)},
              {"above_12_nats", {{"tokens", 0.01 * n}, {"share", 0.01}}}}}};
  }
};

}  // namespace assay::report
