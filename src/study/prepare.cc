#include "study/prepare.h"

#include <signal.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <thread>
#include <utility>

#include "base/interrupt.h"
#include "base/progress.h"
#include "data/synthetic.h"
#include "data/token_store.h"
#include "study/process.h"

namespace assay::study {
namespace {

fs::path synthetic_store(const ConfigNode& layer, const fs::path& study) {
  data::SyntheticOptions options;
  if (layer.is_table("synthetic")) layer.child("synthetic").read(options);
  else if (layer.value("synthetic") != "true")
    fail("{}: data.synthetic must be true or a table of its options. Nothing was run.", layer.where("synthetic"));
  const fs::path folder = study / "data" / ("synthetic." + sha256(to_toml(fields_of(options))).substr(0, 8));
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
        "the plan names no data: give --data STORE, data.store or data.synthetic. `assay data prepare` makes a store "
        "from text. Nothing was run.");
  return fs::canonical(fs::exists(folder) ? fs::path(folder) : data::TokenStore(folder).folder());
}

void check_domains(const Setting& setting, const data::TokenStore& store) {
  const auto check = [&](const char* key, const std::string& domain, const std::string& split) {
    if (store.has(domain, split)) return;
    const auto domains = store.domains();
    const ConfigNode* layer = last_with(setting.data_layers, key);
    fail("{}: {} has no '{}' split of domain '{}'{}\n  Its domains: {}. Nothing was run.",
         layer ? layer->where(key) : key, store.folder().string(), split, domain, did_you_mean(domain, domains),
         join(domains));
  };
  for (const std::string& domain : setting.data.train) {
    check("train", domain, "train");
    check("train", domain, setting.data.held_out);
  }
  for (const std::string& domain : setting.data.out_of_domain) check("out_of_domain", domain, setting.data.test);
}

std::string complaint(const fs::path& output, const fs::path& errors) {
  const Json answer = Json::parse(read_file(output), nullptr, false);
  if (answer.is_object() && answer.contains("error")) return answer["error"];
  const std::string text = read_file(errors);
  return text.empty() ? "the trainer said nothing" : text;
}

// One model in one setting, and the trainer at work on what it makes of it (seed 0).
class Question {
 public:
  Question(const Model& model, const Setting& setting, fs::path store_folder, std::string fingerprint,
           const StudyOptions& options, size_t slot)
      : model_(model), setting_(setting), data_(std::move(store_folder)), fingerprint_(std::move(fingerprint)) {
    for (const int64_t seed : model.seeds) runs_.push_back(planned(seed, options.study / "configs"));
    output_ = runs_[0].config.string() + ".out", errors_ = runs_[0].config.string() + ".err";
    fs::remove(output_), fs::remove(errors_);
    Command command{{trainer(options), "train", runs_[0].config, "--data", data_, "-o",
                     runs_[0].config.string() + ".run", "--set", "train.seed=0", "--dry-run", "--json"},
                    output_,
                    errors_};
    const auto place = placement(options, slot);
    command.arguments.insert(command.arguments.end(), place.begin(), place.end());
    child_ = start(command);
  }
  Question(const Question&) = delete;
  ~Question() {
    if (child_ == 0) return;
    ::kill(child_, SIGTERM);
    wait(child_);
  }

  // Waits for the trainer. The runs of the model, once it has accepted them.
  std::vector<PlannedRun> runs() {
    const Json answer = this->answer();
    for (PlannedRun& run : runs_) {
      // The trainer's key holds every default and the numerics versions.
      const std::string identity = answer.value("key", compose(model_, setting_, 0).text);
      run.key = sha256(fmt::format("{}\n{}\n{}\n", identity, fingerprint_, run.seed));
      run.estimate = answer;
    }
    return std::move(runs_);
  }

 private:
  PlannedRun planned(int64_t seed, const fs::path& configs) const {
    const std::string prefix = (setting_.name.empty() ? "" : setting_.name + ".") + model_.name;
    PlannedRun run{"", fmt::format("{}.seed-{}", prefix, seed), setting_.name, model_.name, seed, {}, data_, {}};
    run.config = configs / (run.name + ".toml");
    write_file(run.config, compose(model_, setting_, seed).text);
    return run;
  }

  Json answer() {
    const Ending ending = wait(std::exchange(child_, 0));
    check_interrupt();
    if (ending.code == kBadInput) {
      const Composed composed = compose(model_, setting_, runs_[0].seed);
      fail("{}", translate(complaint(output_, errors_), runs_[0].config, composed, model_.name));
    }
    if (ending.code != 0)
      fail<Error>("{}: the trainer cannot build it ({}): {}", model_.name, ending.text(), complaint(output_, errors_));
    const Json answer = Json::parse(read_file(output_), nullptr, false);
    if (!answer.is_object())
      fail<Error>("{}: the trainer's answer is no JSON object; see {}", model_.name, output_.string());
    fs::remove(output_), fs::remove(errors_);
    return answer;
  }

  const Model& model_;
  const Setting& setting_;
  fs::path data_, output_, errors_;
  std::string fingerprint_;
  std::vector<PlannedRun> runs_;
  pid_t child_ = 0;
};

void check_distinct(const std::vector<PlannedRun>& runs, const Plan& plan) {
  std::map<std::string, std::string> names;
  for (const PlannedRun& run : runs)
    if (const auto [other, fresh] = names.emplace(run.key, run.name); !fresh)
      fail("{}: {} and {} are the same run; give one of them other seeds ([model.{}] seeds = […]). Nothing was run.",
           plan.name, other->second, run.name, run.model);
}

}  // namespace

fs::path trainer(const StudyOptions& options) {
  return options.program.empty() ? fs::read_symlink("/proc/self/exe") : options.program;
}

std::vector<std::string> placement(const StudyOptions& options, size_t slot) {
  std::vector<std::string> arguments;
  int64_t threads = options.threads;
  if (threads == 0 && options.jobs > 1)
    threads = std::max<int64_t>(1, int64_t(std::thread::hardware_concurrency()) / options.jobs);
  if (threads > 0) arguments.insert(arguments.end(), {"--threads", std::to_string(threads)});
  const auto& devices = options.devices;
  if (!devices.empty()) arguments.insert(arguments.end(), {"--device", devices[slot % devices.size()]});
  return arguments;
}

std::vector<PlannedRun> prepare(const Plan& plan, const StudyOptions& options) {
  make_folder(options.study / "configs");
  const size_t jobs = size_t(std::max<int64_t>(1, options.jobs));
  std::vector<PlannedRun> runs;
  std::deque<std::unique_ptr<Question>> asked;
  const auto collect = [&] {
    std::ranges::move(asked.front()->runs(), std::back_inserter(runs));
    asked.pop_front();
  };
  Progress progress;
  size_t slot = 0;
  for (const Setting& setting : plan.settings) {
    const data::TokenStore store(store_folder(setting, options));
    check_domains(setting, store);
    for (const Model& model : plan.models) {
      if (asked.size() == jobs) collect();
      progress.show(fmt::format("checking {} {}", setting.name, model.name));
      asked.push_back(std::make_unique<Question>(model, setting, store.folder(), store.fingerprint(), options, slot++));
    }
  }
  while (!asked.empty()) collect();
  check_distinct(runs, plan);
  return runs;
}

}  // namespace assay::study
