#include "report/analysis.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/config.h"
#include "base/safetensors.h"
#include "report/slices.h"
#include "stats/curves.h"
#include "study/store.h"

namespace assay::report {
namespace {

constexpr size_t kParts = 12;  // of a profile
constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

double number(const Json& json, const std::string& key) {
  return json.contains(key) && json[key].is_number() ? json[key].get<double>() : kNone;
}

double mean_loss(const Json& sets, const std::vector<std::string>& domains, const std::string& split) {
  double sum = 0;
  for (const std::string& domain : domains) sum += number(sets.value(domain + "." + split, Json::object()), "loss");
  return domains.empty() ? kNone : sum / double(domains.size());
}

Evaluation read_evaluation(const Json& line, const Setting& setting) {
  Evaluation out{
      line.at("step"), number(line, "tokens"), number(line, "train_loss"), 0, 0, {}, line.at("evaluation"), {}};
  out.held_out_loss = mean_loss(out.sets, setting.train, setting.held_out);
  out.test_loss = mean_loss(out.sets, setting.test, setting.split);
  for (const std::string& domain : setting.test) out.test_losses[domain] = mean_loss(out.sets, {domain}, setting.split);
  out.attention_entropy = line.value("attention_entropy", out.attention_entropy);
  return out;
}

std::vector<double> doubles(const Safetensors& file, const std::string& name) {
  const TensorEntry& tensor = file.at(name);
  std::vector<double> out;
  if (tensor.dtype == "F64")
    for (const double value : file.values<double>(name)) out.push_back(value);
  else if (tensor.dtype == "I64")
    for (const int64_t value : file.values<int64_t>(name)) out.push_back(double(value));
  else fail("losses of documents are F64 and their tokens I64, but '{}' is {}", name, tensor.dtype);
  return out;
}

bool usable(const Evaluation& e, Kind kind) {
  return std::isfinite(e.pretraining_loss(kind)) && std::isfinite(e.test_loss);
}

stats::Run curve(const Run& run, const Setting& setting, Kind kind, const fs::path& study) {
  stats::Run out{run.seed, {}};
  for (const Evaluation& evaluation : run.evaluations) {
    if (!usable(evaluation, kind)) continue;
    const Safetensors file(study / run.row["folder"].get<std::string>() / "evaluations" /
                           fmt::format("step-{}.safetensors", evaluation.step));
    stats::Point point{evaluation.tokens, evaluation.pretraining_loss(kind), {}};
    for (const std::string& domain : setting.test) {
      const std::string prefix = domain + "." + setting.split;
      point.out_of_domain[domain] = {doubles(file, prefix + ".nll"), doubles(file, prefix + ".tokens")};
    }
    out.curve.push_back(std::move(point));
  }
  return out;
}

stats::Runs curves(const Architecture& architecture, const Setting& setting, Kind kind, const fs::path& study) {
  stats::Runs out;
  for (const Run& run : architecture.runs) out.push_back(curve(run, setting, kind, study));
  return out;
}

// Why the numbers of these runs must not be compared: other data, or another version of an operation's numerics.
std::string mixed_numerics(const Architecture& a, const Architecture& b) {
  std::map<std::string, Json> seen;
  for (const Architecture* architecture : {&a, &b})
    for (const Run& run : architecture->runs) {
      const Json& provenance = run.row["provenance"];
      Json versions = provenance.value("numerics", Json::object());
      versions["data"] = provenance.value("data", "");
      for (const auto& [operation, version] : versions.items())
        if (const auto [first, fresh] = seen.emplace(operation, version); !fresh && first->second != version)
          return fmt::format("the runs differ in the version of {} ({} and {}); run the older ones again", operation,
                             first->second.dump(), version.dump());
    }
  return "";
}

// Tokens of the warm-up: until then a loss says more of the schedule than of the architecture.
double warmup_tokens(const Setting& setting) {
  double most = 0;
  for (const Architecture& a : setting.architectures)
    for (const Run& run : a.runs) {
      int64_t warmup_steps = 0, batch_size = 0, sequence_length = 0;
      const ConfigNode train = ConfigNode::parse(run.row["config"].get<std::string>()).child("train");
      train.read({{"warmup_steps", &warmup_steps, ""},
                  {"batch_size", &batch_size, ""},
                  {"sequence_length", &sequence_length, ""}},
                 train.keys());
      most = std::max(most, double(warmup_steps * batch_size * sequence_length));
    }
  return most;
}

// Mean loss over the test domains in each of equal parts of the range, mean over runs.
std::vector<double> means_in_parts(const Architecture& a, Kind kind, const stats::Runs& runs, stats::Range range,
                                   double after) {
  std::vector<double> out(kParts, 0.0);
  for (size_t r = 0; r < runs.size(); ++r) {
    std::vector<double> losses;
    for (const Evaluation& e : a.runs[r].evaluations)
      if (usable(e, kind)) losses.push_back(e.test_loss);
    const stats::Curve curve = stats::curve_of(runs[r], after);
    for (size_t part = 0; part < kParts; ++part) {
      const double width = range.width() / kParts, low = range.low + double(part) * width;
      const auto weights = stats::mean_weights(curve, losses.size(), {low, std::min(low + width, range.high)});
      out[part] += std::inner_product(weights.begin(), weights.end(), losses.begin(), 0.0) / double(runs.size());
    }
  }
  return out;
}

std::vector<std::pair<double, double>> profile(const Architecture& a, const stats::Runs& runs,
                                               const Architecture& reference, const stats::Runs& reference_runs,
                                               const Comparison& c, double after) {
  if (!c.degradation.problem.empty()) return {};
  const stats::Range range{c.degradation.loss_low, c.degradation.loss_high};
  const auto of_a = means_in_parts(a, c.kind, runs, range, after);
  const auto of_reference = means_in_parts(reference, c.kind, reference_runs, range, after);
  std::vector<std::pair<double, double>> out;
  for (size_t part = 0; part < kParts; ++part)
    out.emplace_back(range.low + (double(part) + 0.5) * range.width() / kParts, of_a[part] - of_reference[part]);
  return out;
}

void compare_all(Setting& setting, Kind kind, const fs::path& study) {
  std::vector<stats::Runs> runs;
  for (const Architecture& a : setting.architectures) runs.push_back(curves(a, setting, kind, study));
  std::vector<const stats::Runs*> pool;
  for (const stats::Runs& one : runs) pool.push_back(&one);
  const stats::Options options{.after_tokens = warmup_tokens(setting)};
  for (size_t i = 1; i < runs.size(); ++i) {
    Comparison out{kind, {}, {}, {}};
    out.degradation.problem = out.convergence.problem = mixed_numerics(setting.architectures[i], setting.reference());
    if (out.degradation.problem.empty()) {
      out.degradation = stats::degradation(runs[i], runs[0], options, pool);
      out.convergence = stats::convergence(runs[i], runs[0], options, pool);
      out.profile = profile(setting.architectures[i], runs[i], setting.reference(), runs[0], out, options.after_tokens);
    }
    setting.architectures[i].comparisons.push_back(std::move(out));
  }
}

Run read_run(const Json& row, const Setting& setting, study::Store& store) {
  Run run{row, row["seed"], store.metrics(row["key"]), {}};
  for (const Json& line : store.evaluations(row["key"])) run.evaluations.push_back(read_evaluation(line, setting));
  return run;
}

void add_run(Setting& setting, const Json& row, study::Store& store) {
  auto found = std::ranges::find(setting.architectures, row["model"].get<std::string>(), &Architecture::name);
  if (found == setting.architectures.end()) {
    setting.architectures.push_back({row["model"], 0, {}, {}, {}});
    found = setting.architectures.end() - 1;
  }
  found->runs.push_back(read_run(row, setting, store));
  if (found->runs.back().evaluations.empty())
    fail("run {} holds no evaluation; nothing can be reported of it", row["name"].get<std::string>());
}

Setting read_setting(const Json& json) {
  Setting setting{
      json["name"], json["train"], json["out_of_domain"], {}, json["held_out"], json["test"], false, {}, {}};
  setting.mixed = setting.test.empty();
  if (setting.mixed) setting.test = setting.train, setting.split = setting.held_out;
  setting.kinds = setting.mixed ? std::vector{Kind::training} : std::vector{Kind::held_out, Kind::training};
  return setting;
}

// The reference first, each with a style of its own; the styles are the same in every setting.
void order(Setting& setting, const Json& plan) {
  int next = 1;
  std::map<std::string, int> styles;
  for (const Json& model : plan["models"]) styles[model] = model == plan["reference"] ? 0 : next++;
  for (Architecture& architecture : setting.architectures) architecture.style = styles[architecture.name];
  std::ranges::sort(setting.architectures, {}, &Architecture::style);
}

void leave_out_single_documents(Setting& setting, const Json& row, study::Store& store) {
  const auto evaluations = store.evaluations(row["key"]);
  if (evaluations.empty()) return;
  const Json& sets = evaluations.front().at("evaluation");
  const auto single = [&](const std::string& domain) {
    return sets.value(domain + "." + setting.split, Json::object()).value("documents", 2) < 2;
  };
  std::ranges::copy_if(setting.test, std::back_inserter(setting.left_out), single);
  std::erase_if(setting.test, single);
}

void compare_all(Setting& setting, const fs::path& study) {
  if (setting.architectures.empty() || setting.reference().style != 0) return;
  for (const Kind kind : setting.kinds) compare_all(setting, kind, study);
  for (size_t i = 1; i < setting.architectures.size(); ++i)
    setting.architectures[i].warnings = slice_warnings(setting.architectures[i], setting);
}

}  // namespace

const char* name(Kind kind) { return kind == Kind::held_out ? "held-out" : "training"; }

double mean_attention_entropy(const Evaluation& evaluation) {
  double sum = 0, count = 0;
  for (const auto& heads : evaluation.attention_entropy)
    for (const double entropy : heads) sum += entropy, ++count;
  return sum / count;
}

Study analyse(const fs::path& folder) {
  if (!fs::exists(folder / "study.sqlite"))
    fail("{}: holds no study (no study.sqlite); `assay run PLAN.toml -o {}` makes one", folder.string(),
         folder.string());
  study::Store store(folder, study::Database::Mode::read);
  Study out;
  out.plan = store.plan();
  out.name = out.plan["name"], out.reference = out.plan["reference"], out.runs = store.planned_runs();
  for (const Json& json : out.plan["settings"]) {
    Setting& setting = out.settings.emplace_back(read_setting(json));
    for (const Json& row : out.runs) {
      if (row["setting"] != json["name"] || row["status"] != "done") continue;
      if (setting.architectures.empty()) leave_out_single_documents(setting, row, store);
      add_run(setting, row, store);
    }
    order(setting, out.plan);
    compare_all(setting, folder);
  }
  return out;
}

}  // namespace assay::report
