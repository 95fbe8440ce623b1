#include "study/plan.h"

#include <regex>

#include "fake_trainer.h"

namespace assay::study {
namespace {

class PlanErrors : public FakeStudy {
 protected:
  std::string error(const std::string& plan) {
    const StudyOptions study = options(plan);
    return message([&] { dry_run(study); });
  }
  // The plan with `from` replaced by `to`.
  std::string with(const std::string& from, const std::string& to) {
    std::string plan = kPlan;
    return plan.replace(plan.find(from), from.size(), to);
  }
  void expect(const std::string& plan, const std::vector<std::string>& parts) {
    const std::string text = error(plan);
    for (const std::string& part : parts)
      EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in: " << text;
    EXPECT_EQ(starts(), "");
  }
};

TEST_F(PlanErrors, NameThePositionAndTheNearestKey) {
  expect(with("seeds", "sedes"), {"plan.toml:3:", "unknown key 'sedes'", "did you mean 'seeds'?"});
  expect(with("sequence_length", "sequence_lenght"),
         {"plan.toml:4:", "did you mean 'sequence_length'?"});
  expect(with("held_out", "held_uot"), {"plan.toml:4:", "did you mean 'held_out'?"});
  expect(std::string(kPlan) + "[setting.x]\ntrian = {}\n",
         {"plan.toml:7:", "did you mean 'train'?"});
}

TEST_F(PlanErrors, NameOf100000LettersIsRefused) {
  const std::string name(100'000, 'a');
  expect(with("\"window\"", "\"" + name + "\""), {"plan.toml:2:", "at most 200 letters"});
  expect(std::string(kPlan) + "[setting." + name + "]\n", {"plan.toml:6:", "at most 200 letters"});
}

TEST_F(PlanErrors, NameUnknownModelsAndDomains) {
  expect(with("\"window\"", "\"windwo\""),
         {"plan.toml:2:", "unknown model 'windwo'", "did you mean 'window'?"});
  expect(with("\"fresh_a\"", "\"fresh_q\""), {"plan.toml:4:", "'fresh_q'", "did you mean 'fresh_"});
  expect(with("reference = \"full\"", "reference = \"ful\""),
         {"plan.toml:1:", "not among the models", "did you mean 'full'?"});
  expect(std::string(kPlan) + "[model.twin]\nbase = \"full\"\n",
         {"plan.toml:6:", "[model.twin] is not among the models"});
}

TEST_F(PlanErrors, MissingReferenceIsNamed) {
  expect(with("reference = \"full\"\n", ""),
         {"the key 'reference' is missing", "reference = \"full\""});
}

TEST_F(PlanErrors, SlipInModelsIsNotSuggestedToItsTable) {
  const std::string table = "[model.window]\nattention = { window = 8 }\n";
  expect(with("\"window\"", "\"windw\"") + table,
         {"plan.toml:2:", "unknown model 'windw'", "did you mean 'window'?"});
}

TEST_F(PlanErrors, TableWithoutABaseIsNamed) {
  expect(with("\"window\"", "\"mine\"") + "[model.mine]\nd_model = 8\n",
         {"plan.toml:6:", "no preset 'mine'", "the table [model.mine] has no base"});
}

TEST_F(PlanErrors, YamlIsToldThatPlansAreToml) {
  expect("# a plan\nreference: full\nmodels:\n  - full\n", {"looks like YAML", "plans are TOML"});
  expect("---\nreference: full\n", {"looks like YAML"});
}

TEST(PlanFile, NameOfAPlanIsResolved) {
  EXPECT_TRUE(plan_file("pocket").string().ends_with("/pocket.toml"));
  EXPECT_TRUE(fs::exists(plan_file("ablations/approx")));
  EXPECT_EQ(plan_file("mine.toml").string(), "mine.toml");
  const bool made = fs::create_directory("pocket");  // as an output folder of that name
  EXPECT_TRUE(plan_file("pocket").string().ends_with("/pocket.toml"));
  if (made) fs::remove("pocket");
  for (const char* file : {"plans/ablations/approx.toml", "ablations/approx.toml"}) {
    const fs::path before = fs::current_path();
    fs::current_path(fs::temp_directory_path());
    const std::string text = message([&] { plan_file(file); });
    fs::current_path(before);
    EXPECT_NE(text.find("did you mean the plan 'ablations/approx'"), std::string::npos) << text;
  }
  EXPECT_NE(
      message([] { plan_file("poket"); }).find("unknown plan 'poket'; did you mean 'pocket'?"),
      std::string::npos);
}

TEST_F(PlanErrors, RefuseWhatContradicts) {
  expect(with("[\"fresh_a\"]", "[\"known_a\"]"),
         {"plan.toml:4:", "both trained on and out of domain"});
  expect(with("tokens = 4000", "tokens = 4000, seed = 3"),
         {"plan.toml:5:", "'seed' in train is decided by the plan"});
  expect(with("seeds = [1, 2]", "seeds = [1, 1]"), {"plan.toml:3:", "gives the seed 1 twice"});
  expect(with("[1, 2]", "[1, \"b\"]"), {"plan.toml:3:", "must be a list of integers"});
  expect("reference = ", {"plan.toml:1:"});
}

TEST_F(PlanErrors, RefuseATableOfSizeThatNoModelHas) {
  expect(std::string(kPlan) + "size = { atention = { num_heads = 4 } }\n",
         {"plan.toml:6:", "no model of the plan has a table 'atention'; did you mean 'attention'?",
          "Nothing was run."});
}

TEST_F(PlanErrors, OfTheTrainerAreToldInTermsOfThePlan) {
  const std::string plan =
      with("[\"full\", \"window\"]", "[\"full\", \"mine\"]") +
      "[model.mine]\nbase = \"full\"\nattention = { num_heads = 4, chunk_sise = 3 }\n";
  expect(plan, {"plan.toml:8:",
                "unknown key 'chunk_sise' in model.mine.attention; did you mean 'chunk_size'?",
                "Nothing was run."});
}

TEST_F(PlanErrors, OfAssignmentsNameThem) {
  StudyOptions study = options(kPlan);
  study.set = {"sedes=[1]"};
  EXPECT_NE(message([&] { dry_run(study); }).find("--set sedes=[1]: unknown key 'sedes'"),
            std::string::npos);
}

TEST_F(FakeStudy, AssignmentsLieOverThePlan) {
  const std::string others =
      "size = { mamba1 = { expand = 1 } }\n[model.window]\nbase = \"window\"\n";
  const StudyOptions study = options(kPlan + others);
  const Plan plan = read_plan(study.plan, {"models=[\"full\"]", "seeds=[7]", "train.tokens=512"});
  ASSERT_EQ(plan.models.size(), 1u);
  EXPECT_EQ(plan.models[0].budgets[0].seeds, std::vector<int64_t>{7});
  EXPECT_NE(compose(plan.models[0], plan.settings[0], {.seed = 7}).toml().find("tokens = 512\n"),
            std::string::npos);
  EXPECT_TRUE(plan.text.ends_with(
      "# --set models=[\"full\"]\n# --set seeds=[7]\n# --set train.tokens=512\n"));
}

TEST_F(PlanErrors, LadderOfOneBudgetIsRefused) {
  const std::string plan = kPlan;
  expect(plan + "ladder = { tokens = [4000], seeds = [1, 2] }\n",
         {"plan.toml:6:", "at least two budgets"});
  expect(plan + "ladder = { tokens = [4000, 8000], seeds = [1] }\n",
         {"plan.toml:6:", "at least two seeds"});
  expect(plan + "ladder = { tokens = [8000, 4000], seeds = [1, 2] }\n",
         {"plan.toml:6:", "ascending order"});
  expect(plan + "tokens = [-1]\n", {"plan.toml:6:", "tokens = -1 is not a training budget"});
}

TEST_F(PlanErrors, SeedsPerBudgetMustFitSeedsAndTokens) {
  const std::string plan = kPlan;
  expect(plan + "tokens = [4000, 8000]\nseeds_per_budget = [2]\n",
         {"plan.toml:7:", "seeds_per_budget has 1 numbers for 2 budgets in tokens"});
  expect(plan + "tokens = [4000, 8000]\nseeds_per_budget = [3, 1]\n",
         {"plan.toml:7:", "seeds_per_budget has 3; expected 1 to 2, the number of seeds"});
  expect(plan + "seeds_per_budget = [1]\n", {"plan.toml:6:", "1 numbers for 0 budgets"});
  expect(plan + "ladder = { tokens = [4000, 8000], seeds = [1, 2], seeds_per_budget = [2, 1] }\n",
         {"plan.toml:6:", "every budget of a ladder needs at least two seeds"});
}

TEST_F(PlanErrors, DomainThatIsNamedTwiceIsRefused) {
  expect(with("[\"known_a\"]", "[\"known_a\", \"known_a\"]"),
         {"plan.toml:4:", "data.train names the domain 'known_a' twice. Nothing was run."});
  expect(with("[\"fresh_a\"]", "[\"fresh_a\", \"fresh_b\", \"fresh_a\"]"),
         {"plan.toml:4:", "data.out_of_domain names the domain 'fresh_a' twice."});
}

TEST_F(PlanErrors, KeysOfTrainWithoutEffectAreRefused) {
  const std::string tune = "tune = { learning_rate = [1e-3, 2e-3], tokens = 4000 }\n";
  const std::string by_tune = "learning_rate in train has no effect, because tune";
  expect(with("batch = 4", "batch = 4, learning_rate = 1e-3") + tune, {"plan.toml:5:", by_tune});
  expect(kPlan + tune + "[setting.x]\ntrain = { learning_rate = 1e-3 }\n",
         {"plan.toml:8:", by_tune});
  const std::string budgets = "tokens = [4000, 8000]\n";
  expect(with("tokens = 4000", "steps = 10") + budgets,
         {"plan.toml:5:", "'steps' in train has no effect", "every model has budgets in tokens"});
  expect(kPlan + budgets, {"plan.toml:5:", "'tokens' in train has no effect"});
  expect(
      without_tokens() + budgets + "[model.window]\ntrain = { steps = 10 }\n",
      {"plan.toml:8:", "'steps' in train has no effect", "model 'window' has budgets in tokens"});
}

TEST_F(PlanErrors, GridOfOneLearningRateIsRefused) {
  const std::string plan = kPlan;
  expect(plan + "tune = { learning_rate = [1e-3], tokens = 4000 }\n",
         {"plan.toml:6:", "at least two learning rates"});
  expect(plan + "tune = { learning_rate = [1e-3, -2e-3], tokens = 4000 }\n",
         {"plan.toml:6:", "-0.002 is not a positive number"});
  expect(plan + "tune = { learning_rate = [1e-3, 2e-3] }\n",
         {"plan.toml:6:", "tune.tokens must be given"});
}

TEST_F(FakeStudy, SeedsPerBudgetGivesLargeBudgetsFewerSeeds) {
  const auto runs = dry_run(
      options(without_tokens() +
              "tokens = [4000, 8000]\nseeds_per_budget = [2, 1]\n"
              "ladder = { tokens = [4000, 8000], seeds = [5, 6, 7], seeds_per_budget = [2, 3] }\n"
              "[model.window]\nbase = \"window\"\n"));
  std::vector<std::string> names;
  for (const auto& run : runs) names.push_back(run.name);
  EXPECT_EQ(names, (std::vector<std::string>{"full.4k.seed-5", "full.4k.seed-6", "full.8k.seed-5",
                                             "full.8k.seed-6", "full.8k.seed-7", "window.4k.seed-1",
                                             "window.4k.seed-2", "window.8k.seed-1"}));
}

TEST_F(FakeStudy, LadderGivesTheReferenceItsBudgetsAndSeeds) {
  const auto runs =
      dry_run(options(without_tokens() +
                      "tokens = [8000]\nladder = { tokens = [4000, 8000], seeds = [5, 6, 7] }\n"));
  ASSERT_EQ(runs.size(), 8u);
  EXPECT_EQ(runs[0].name, "full.4k.seed-5");
  EXPECT_EQ(runs[5].name, "full.8k.seed-7");
  EXPECT_EQ(runs[7].name, "window.8k.seed-2");
  EXPECT_EQ(runs[7].tokens, 8000);
  EXPECT_EQ(runs[7].estimate.steps, 20);
  EXPECT_EQ(runs[7].estimate.estimated_seconds, 1.5);
  EXPECT_EQ(runs[0].estimate.estimated_seconds, 1.0) << "the evaluation at the end is the same";
  EXPECT_EQ(ConfigNode::parse(runs[0].toml).child("train").value("tokens"), "4000");
}

TEST_F(FakeStudy, SmallBudgetsKeepNoCheckpointsOfStepsPastTheirEnd) {
  std::string plan = kPlan;
  plan.replace(plan.find("batch = 4"), 9, "batch = 4, keep_steps = [5, 10, 15]");
  const auto runs = dry_run(options(plan + "ladder = { tokens = [4000, 8000], seeds = [1, 2] }\n"));
  const auto kept = [&](size_t i) {
    return ConfigNode::parse(runs[i].toml).child("train").value("keep_steps");
  };
  EXPECT_EQ(runs[0].estimate.steps, 10);
  EXPECT_EQ(kept(0), "[5, 10]");
  EXPECT_EQ(runs[2].estimate.steps, 20);
  EXPECT_EQ(kept(2), "[5, 10, 15]");
}

TEST_F(FakeStudy, EqualRunsOfDifferentPlansHaveEqualKeys) {
  const auto ladder =
      dry_run(options(std::string(kPlan) + "ladder = { tokens = [4000, 8000], seeds = [1, 2] }\n"));
  const auto plain = dry_run(options(kPlan));
  EXPECT_EQ(ladder[0].key, plain[0].key);
  EXPECT_NE(ladder[2].key, plain[0].key) << "another budget is another run";
}

TEST_F(FakeStudy, TrainKeysOfAModelLieOverThePlans) {
  const auto plan = std::string(kPlan) +
                    "tune = { learning_rate = [1e-3, 2e-3], tokens = 4000 }\n" +
                    "[model.window]\ntrain = { learning_rate = 5e-3, batch = 8 }\n";
  const auto runs = dry_run(options(plan));
  ASSERT_EQ(runs.size(), 6u) << "a model with its own learning rate is not tuned";
  EXPECT_EQ(runs[0].purpose, purpose::kTuning);
  EXPECT_EQ(runs[0].name, "full.lr-0.001.seed-1");
  EXPECT_EQ(runs[5].model, "window");
  EXPECT_EQ(runs[5].learning_rate, 5e-3);
  EXPECT_EQ(ConfigNode::parse(runs[5].toml).child("train").value("batch"), "8");
}

TEST_F(FakeStudy, ComposesPresetSizeAndOverrides) {
  const auto plan =
      std::string(kPlan) +
      "size = { d_model = 64, num_layers = 3, attention = { num_heads = 4 }, "
      "mamba1 = { expand = 3 } }\n"
      "[model.window]\nseeds = [7]\nattention = { window = 16 }\nmamba1 = { state_size = 4 }\n";
  const auto runs = dry_run(options(plan));
  ASSERT_EQ(runs.size(), 3u);
  EXPECT_EQ(runs[2].name, "window.seed-7");
  const ConfigNode config = ConfigNode::parse(runs[2].toml);
  EXPECT_EQ(config.child("model").value("d_model"), "64");
  EXPECT_EQ(config.child("model").child("attention").value("window"), "16");
  EXPECT_EQ(config.child("model").child("attention").value("num_heads"), "4");
  EXPECT_EQ(config.child("model").child("mamba1").value("expand"), "3");
  EXPECT_FALSE(ConfigNode::parse(runs[0].toml).child("model").has("mamba1"))
      << "a table of size is for the models that have it";
  EXPECT_FALSE(config.child("model").has("seeds"));
  EXPECT_EQ(config.child("train").value("batch"), "4");
  EXPECT_EQ(config.child("train").value("seed"), "7");
  EXPECT_EQ(config.child("train").value("domains"), "[\"known_a\"]") << runs[2].toml;
}

TEST_F(FakeStudy, APatternOfItsOwnLeavesItsBasesTablesBehind) {
  const auto config_of = [&](const std::string& own) {
    const auto plan = std::regex_replace(std::string(kPlan), std::regex("\"window\""), "\"mine\"") +
                      "size = { attention = { num_heads = 4 } }\n[model.mine]\nbase = \"full\"\n" +
                      own;
    return ConfigNode::parse(dry_run(options(plan))[2].toml).child("model");
  };
  EXPECT_FALSE(config_of("pattern = [\"mamba1\"]\n").has("attention"));
  EXPECT_EQ(
      config_of("pattern = [\"mamba1\", \"attention\"]\n").child("attention").value("num_heads"),
      "4");
  EXPECT_TRUE(config_of("channel_mixer = \"swiglu\"\n").has("attention"));
  EXPECT_TRUE(config_of("pattern = [\"mamba1\"]\nattention = { window = 2 }\n").has("attention"))
      << "what it names itself is for the trainer to refuse";
}

}  // namespace
}  // namespace assay::study
