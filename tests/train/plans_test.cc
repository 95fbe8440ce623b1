// Every plan and preset of the project works: it expands, the trainer accepts each of its models,
// and each model, at the size that the plan gives it, reads a sequence.
#include <torch/torch.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "data/folder.h"
#include "data/prepare.h"
#include "data/tokenizer.h"
#include "ops/core/called.h"
#include "ops/core/paths.h"
#include "study/plan.h"
#include "study/runner.h"
#include "train/trainer.h"

namespace assay::train {
namespace {

constexpr int64_t kVocabulary = 300;
constexpr int64_t kRecordedVocabulary = 16000;
const fs::path kPlans = fs::path(ASSAY_SOURCE_DIR) / "plans";
const fs::path kRecords = fs::path(ASSAY_SOURCE_DIR) / "docs/results/records";

// A store with every domain that a plan names.
class Plans : public testing::Test {
 protected:
  Plans() {
    data::PrepareOptions options{
        .store = folder_ / "store", .tokenizer = folder_ / "t.model", .valid_fraction = 0.3};
    for (const std::string domain :
         {"cc",      "c4",      "arxiv",   "book",     "github",  "stack",    "wiki",
          "known_a", "known_b", "fresh_a", "fresh_b",  "fresh_c", "chinese",  "css",
          "data",    "french",  "german",  "hardware", "html",    "japanese", "latin",
          "patches", "russian", "shell",   "spanish",  "svg",     "terminal", "verse"}) {
      options.domains.emplace_back(domain, domain + ".*");
      for (const std::string split : {"train", "test"})
        options.inputs.push_back(
            folder_.write(domain + "." + split + ".jsonl", documents(domain + split)));
    }
    data::train_tokenizer({.inputs = {options.inputs[0]}, .vocab_size = kVocabulary},
                          options.tokenizer);
    data::prepare(options);
  }
  static std::string documents(const std::string& name) {
    std::string lines;
    for (int i = 0; i < 40; ++i) {
      std::string text;
      for (int j = 0; j < 30; ++j)
        text += fmt::format("sentence {} of text {} in {}. ", j, i, name);
      lines += nlohmann::json{{"text", text}}.dump() + "\n";
    }
    return lines;
  }
  static void reads(nn::ModelSpec spec, const std::string& what) {
    const at::NoGradGuard no_grad;
    // All matrices 0: every token is as likely as any other
    nn::LanguageModel model(std::move(spec));
    const at::Tensor tokens = at::randint(model.spec.config.vocab_size, {1, 34}, at::kLong);
    EXPECT_NEAR(model.loss(tokens).item<double>(), std::log(double(model.spec.config.vocab_size)),
                1e-4)
        << what;
  }
  data::Folder folder_;
};

// Modules of packages that may not be installed
bool needs_python(const std::string& model) { return model.find("python:") != std::string::npos; }

TEST_F(Plans, AreAcceptedModelByModel) {
  for (const auto& entry : fs::recursive_directory_iterator(kPlans)) {
    const std::string folder = entry.path().parent_path().filename();
    const bool is_plan = folder == "plans" || folder == "ablations";
    if (entry.path().extension() != ".toml" || !is_plan) continue;
    SCOPED_TRACE(entry.path().string());
    const study::Plan plan = study::read_plan(entry.path());
    for (const study::Setting& setting : plan.settings)
      for (const study::Model& model : plan.models) {
        const study::Variation variation{
            .seed = model.budgets.back().seeds.at(0),
            .tokens = model.budgets.back().tokens,
            .learning_rate = study::is_tuned(plan, model) ? plan.tuning->learning_rate.at(0) : 0};
        const std::string text = study::compose(model, setting, variation).toml();
        if (needs_python(text)) continue;
        const RunConfig config =
            read_run_config(ConfigNode::parse(text, model.name), folder_ / "store");
        reads(config.model, model.name);
      }
  }
}

fs::path plan_of_records(const std::string& name) {
  const fs::path file = name + ".toml";
  return fs::exists(kPlans / file) ? kPlans / file : kPlans / "ablations" / file;
}

// A new key or a new operator must not change the identity of earlier runs. Otherwise nobody could
// reuse the records in docs/results.
TEST_F(Plans, FindTheRecordsOfTheirRuns) {
  int64_t found = 0;
  for (const auto& entry : fs::directory_iterator(kRecords)) {
    if (!entry.is_directory()) continue;
    const auto recorded = read_record<study::RecordedPlan>(entry.path() / "plan.json");
    const study::Records records = study::read_records(entry.path());
    const study::Plan plan = study::read_plan(plan_of_records(entry.path().filename()));
    std::map<std::string, std::string> identities;
    std::set<std::string> with_python;
    for (const study::Model& model : plan.models) {
      const std::string text =
          study::compose(model, plan.settings.at(0), {.tokens = 1 << 20}).toml();
      if (needs_python(text)) {
        with_python.insert(model.name);
        continue;
      }
      RunConfig config = read_run_config(ConfigNode::parse(text, model.name), folder_ / "store");
      config.model.config.vocab_size = kRecordedVocabulary;
      identities[model.name] = sha256(config.identity(numerics_of(config, "cuda")));
    }
    for (const study::StoredRun& run : recorded.runs) {
      const auto record = records.find(run.key);
      if (record == records.end()) continue;  // it was not finished
      if (with_python.contains(run.model)) continue;
      EXPECT_EQ(identities.at(run.model), record->second.provenance.identity)
          << run.name << " of " << entry.path();
      ++found;
    }
  }
  EXPECT_GT(found, 100);
}

// The operators of `names` that have versions.
std::set<std::string> with_versions(const std::set<std::string>& names) {
  std::set<std::string> found;
  for (const ops::OpPath& path : ops::op_paths())
    if (names.contains(path.op)) found.insert(path.op);
  return found;
}

// A run of few layers and five tokens finds the operators of a longer model and sequence.
std::set<std::string> operators_of_a_step(const nn::ModelSpec& spec) {
  nn::LanguageModel model(spec);
  const ops::CalledOps called;
  const int64_t tokens = std::min<int64_t>(300, model.max_time()) + 1;
  model.loss(at::zeros({1, tokens}, at::kLong)).backward();
  return with_versions(called.names);
}

nn::ModelSpec small_model(const std::string& part, bool is_mixer, const std::string& example) {
  const std::string pattern = is_mixer ? part : "attention";
  const std::string channel_mixer = is_mixer ? "swiglu" : part;
  const std::string text = fmt::format(
      "[model]\nvocab_size = 8\nd_model = 48\nnum_layers = 3\npattern = [\"{}\"]\n"
      "channel_mixer = \"{}\"\n[model.{}]\n{}",
      pattern, channel_mixer, part, example);
  return nn::ModelSpec::read(ConfigNode::parse(text).child("model"));
}

// By operator, the models that call it: each mixer and channel mixer as it is tested.
std::map<std::string, std::set<std::string>> callers() {
  std::map<std::string, std::set<std::string>> callers;
  for (const bool is_mixer : {true, false}) {
    const auto& registry = is_mixer ? nn::mixers() : nn::channel_mixers();
    for (const std::string& part : registry.names())
      for (const std::string& example : registry.at(part).examples) {
        const nn::ModelSpec spec = small_model(part, is_mixer, example);
        const std::set<std::string> called = operators_of_a_step(spec);
        EXPECT_EQ(with_versions(nn::parts_of(spec).operators), called) << spec.toml();
        for (const std::string& op : called) callers[op].insert(part + "\n" + example);
      }
  }
  return callers;
}

TEST(Identity, ChangesForExactlyTheModelsThatCallAnOperator) {
  const auto callers_of = callers();
  std::set<std::string> unused;
  for (const ops::OpPath& path : ops::op_paths()) {
    if (path.op == "adamw" || path.device != "cuda") continue;
    const auto found = callers_of.find(path.op);
    if (found == callers_of.end()) unused.insert(path.op);
    for (const bool is_mixer : {true, false}) {
      const auto& registry = is_mixer ? nn::mixers() : nn::channel_mixers();
      for (const std::string& part : registry.names())
        for (const std::string& example : registry.at(part).examples) {
          const RunConfig config{small_model(part, is_mixer, example), {.gradient_slices = 1}};
          run::Numerics numerics = numerics_of(config, "cuda");
          const std::string before = config.identity(numerics);
          const bool calls =
              found != callers_of.end() && found->second.contains(part + "\n" + example);
          EXPECT_EQ(numerics.contains(path.op), calls) << path.op << " in " << part;
          if (calls) ++numerics[path.op];
          EXPECT_EQ(config.identity(numerics) != before, calls) << path.op << " in " << part;
        }
    }
  }
  EXPECT_EQ(unused, (std::set<std::string>{"chunk_summaries", "sample"}))
      << "Training calls all other operators. Does a new one call record_call()?";
}

TEST(Identity, DoesNotContainDefaults) {
  const auto identity = [](const std::string& text) {
    const ConfigNode file = ConfigNode::parse(text);
    RunConfig config{nn::ModelSpec::read(file.child("model")), {}};
    file.child("train").read(config.train);
    config.train.complete(file.child("train"));
    return config.identity({{"glu", 1}, {"rwkv7", 2}});
  };
  const std::string train = "[train]\nsteps = 10\nbatch_size = 4\n";
  const std::string model = "[model]\npattern = [\"mamba1\"]\n";
  EXPECT_EQ(identity(model + train), identity(model + "residual_in_fp32 = false\n" + train +
                                              "clip = 1.0\nmicro_batch_size = 4\nseed = 3\n"));
  EXPECT_NE(identity(model + train), identity(model + "residual_in_fp32 = true\n" + train));
  EXPECT_NE(identity(model + train), identity(model + train + "clip = 2.0\n"));
  EXPECT_EQ(identity(model + train).find("\"glu\""), std::string::npos);
  EXPECT_NE(identity(model + train).find("\"rwkv7\":2"), std::string::npos);
}

TEST_F(Plans, DryRunOfARealOne) {
  study::StudyOptions options;
  options.plan = kPlans / "pocket.toml";
  options.study = folder_ / "study";
  options.data = folder_ / "store";
  options.devices = {"cpu"};
  options.program = ASSAY_PROGRAM;
  const auto runs = study::dry_run(options);
  ASSERT_EQ(runs.size(), 15u);
  for (const study::PlannedRun& run : runs) {
    EXPECT_NEAR(double(run.estimate.parameters) / 0.85e6, 1, 0.2) << run.name;
    EXPECT_GT(run.estimate.end_seconds, 0) << run.name;
    EXPECT_GT(run.estimate.estimated_seconds, *run.estimate.end_seconds) << run.name;
  }
}

TEST(Presets, ReadASequence) {
  for (const auto& entry : fs::directory_iterator(kPlans / "models")) {
    nn::ModelSpec spec = nn::ModelSpec::read(ConfigNode::read_file(entry.path()).child("model"));
    spec.config.vocab_size = 8;
    spec.config.num_layers = int64_t(spec.config.pattern.size());
    spec.config.max_positions = 64;
    nn::LanguageModel model(spec);
    const at::NoGradGuard no_grad;
    EXPECT_NEAR(model.loss(at::zeros({1, 34}, at::kLong)).item<double>(), std::log(8.0), 1e-4)
        << entry.path();
  }
}

}  // namespace
}  // namespace assay::train
