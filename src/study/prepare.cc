#include "study/prepare.h"

#include <algorithm>
#include <map>

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

// What the trainer says of a configuration, seed 0.
Json estimate(const fs::path& config, const Composed& composed, const fs::path& data, const std::string& model,
              const StudyOptions& options) {
  const fs::path output = config.string() + ".out", errors = config.string() + ".err";
  fs::remove(output), fs::remove(errors);
  Command command{{trainer(options), "train", config, "--data", data, "-o", config.string() + ".run", "--set",
                   "train.seed=0", "--dry-run", "--json"},
                  output,
                  errors};
  if (!options.devices.empty()) command.arguments.insert(command.arguments.end(), {"--device", options.devices[0]});
  const Ending ending = wait(start(command));
  check_interrupt();
  if (ending.code == kBadInput) fail("{}", translate(complaint(output, errors), config, composed, model));
  if (ending.code != 0)
    fail<Error>("{}: the trainer cannot build it ({}): {}", model, ending.text(), complaint(output, errors));
  const Json answer = Json::parse(read_file(output), nullptr, false);
  if (!answer.is_object()) fail<Error>("{}: the trainer's answer is no JSON object; see {}", model, output.string());
  fs::remove(output), fs::remove(errors);
  return answer;
}

// The runs of one model in one setting.
std::vector<PlannedRun> runs_of(const Model& model, const Setting& setting, const data::TokenStore& store,
                                const StudyOptions& options) {
  std::vector<PlannedRun> runs;
  Json answer;
  const std::string prefix = (setting.name.empty() ? "" : setting.name + ".") + model.name;
  for (const int64_t seed : model.seeds) {
    PlannedRun run{"", fmt::format("{}.seed-{}", prefix, seed), setting.name, model.name, seed, {}, store.folder(), {}};
    run.config = options.study / "configs" / (run.name + ".toml");
    const Composed composed = compose(model, setting, seed);
    write_file(run.config, composed.text);
    if (answer.is_null()) answer = estimate(run.config, composed, run.data, model.name, options);
    // The trainer's key holds every default and the numerics versions.
    const std::string identity = answer.value("key", compose(model, setting, 0).text);
    run.key = sha256(fmt::format("{}\n{}\n{}\n", identity, store.fingerprint(), seed));
    run.estimate = answer;
    runs.push_back(std::move(run));
  }
  return runs;
}

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

std::vector<PlannedRun> prepare(const Plan& plan, const StudyOptions& options) {
  make_folder(options.study / "configs");
  std::vector<PlannedRun> runs;
  Progress progress;
  for (const Setting& setting : plan.settings) {
    const data::TokenStore store(store_folder(setting, options));
    check_domains(setting, store);
    for (const Model& model : plan.models) {
      progress.show(fmt::format("checking {} {}", setting.name, model.name));
      std::ranges::move(runs_of(model, setting, store, options), std::back_inserter(runs));
    }
  }
  check_distinct(runs, plan);
  return runs;
}

}  // namespace assay::study
