// Every plan and preset of the project works: it expands, the trainer accepts each of its models,
// and each model, at the size that the plan gives it, reads a sequence.
#include <torch/torch.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "data/folder.h"
#include "data/prepare.h"
#include "data/tokenizer.h"
#include "ops/paths.h"
#include "study/plan.h"
#include "study/runner.h"
#include "train/trainer.h"

namespace assay::train {
namespace {

constexpr int64_t kVocabulary = 300, kRecordedVocabulary = 16000;
const fs::path kPlans = fs::path(ASSAY_SOURCE_DIR) / "plans";
const fs::path kRecords = fs::path(ASSAY_SOURCE_DIR) / "docs/results/records";

// A store with every domain that a plan names.
class Plans : public testing::Test {
 protected:
  Plans() {
    data::PrepareOptions options{
        .store = folder_ / "store", .tokenizer = folder_ / "t.model", .valid_fraction = 0.3};
    for (const std::string domain : {"cc", "c4", "arxiv", "book", "github", "stack", "wiki",
                                     "known_a", "known_b", "fresh_a", "fresh_b", "fresh_c"}) {
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
        const RunConfig config =
            read_run_config(ConfigNode::parse(text, model.name), folder_ / "store");
        reads(config.model, model.name);
      }
  }
}

// The identity that a run of this configuration has on a GPU.
std::string identity(const RunConfig& config) {
  std::map<std::string, int64_t> numerics;
  for (const ops::OpPath& path : ops::op_paths())
    if (path.device == "cuda" && path.numerics > 0) numerics[path.op] = path.numerics;
  nn::ModelSpec shallow = config.model;
  shallow.config.num_layers = int64_t(shallow.config.pattern.size());
  for (const auto& [part, version] : nn::LanguageModel(shallow).numerics())
    numerics[part] = version;
  return sha256(config.identity() + to_json(numerics).dump());
}

fs::path plan_of_records(const std::string& name) {
  const fs::path file = name + ".toml";
  return fs::exists(kPlans / file) ? kPlans / file : kPlans / "ablations" / file;
}

// A new default or a new operator must not change the identity of earlier runs, or nobody could
// reuse the records in docs/results.
TEST_F(Plans, FindTheRecordsOfTheirRuns) {
  int64_t found = 0;
  for (const auto& entry : fs::directory_iterator(kRecords)) {
    const auto recorded = read_record<study::RecordedPlan>(entry.path() / "plan.json");
    const study::Records records = study::read_records(entry.path());
    const study::Plan plan = study::read_plan(plan_of_records(entry.path().filename()));
    std::map<std::string, std::string> identities;
    for (const study::Model& model : plan.models) {
      const std::string text =
          study::compose(model, plan.settings.at(0), {.tokens = 1 << 20}).toml();
      RunConfig config = read_run_config(ConfigNode::parse(text, model.name), folder_ / "store");
      config.model.config.vocab_size = kRecordedVocabulary;
      identities[model.name] = identity(config);
    }
    for (const study::StoredRun& run : recorded.runs) {
      const auto record = records.find(run.key);
      if (record == records.end()) continue;  // it was not finished
      EXPECT_EQ(identities.at(run.model), record->second.provenance.identity)
          << run.name << " of " << entry.path();
      ++found;
    }
  }
  EXPECT_GT(found, 100);
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
    EXPECT_GT(run.estimate.estimated_seconds, 0) << run.name;
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
