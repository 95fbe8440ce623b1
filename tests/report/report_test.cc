#include "report/report.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include "base/error.h"
#include "fake_study.h"
#include "report/analysis.h"
#include "report/answer.h"
#include "report/plots.h"

namespace assay::report {
namespace {

class Report : public testing::Test {
 protected:
  void SetUp() override {
    folder = fs::temp_directory_path() / fmt::format("assay-report-{}", ::getpid()), fs::remove_all(folder);
  }
  void TearDown() override { fs::remove_all(folder); }
  std::string html() { return read_file(write_report(folder)); }
  const Architecture& architecture(const Study& study, const std::string& name) {
    for (const Architecture& a : study.settings[0].architectures)
      if (a.name == name) return a;
    throw std::runtime_error("no architecture " + name);
  }
  static bool contains(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
  }

  fs::path folder;
  FakeStudyFolder fake;
};

TEST_F(Report, FindsTheDegradationThatWasPutIn) {
  fake.write(folder);
  const Study study = analyse(folder);
  ASSERT_EQ(study.settings.size(), 1u);
  EXPECT_EQ(study.settings[0].reference().name, "full");
  for (const Comparison& c : architecture(study, "window").comparisons) {
    EXPECT_EQ(c.degradation.problem, "");
    EXPECT_NEAR(c.degradation.average.estimate, 0.12, 0.03);
    EXPECT_EQ(verdict(c.degradation), Verdict::degraded);
    EXPECT_GT(c.degradation.domains.at("arxiv").estimate, c.degradation.domains.at("stack").estimate);
    EXPECT_NEAR(c.convergence.ratio.estimate, 1 / 1.1, 0.03);
  }
  for (const Comparison& c : architecture(study, "twin").comparisons) EXPECT_EQ(verdict(c.degradation), Verdict::none);
}

TEST_F(Report, TheProfileAveragesToDelta) {
  fake.write(folder);
  const Study study = analyse(folder);
  for (const char* name : {"window", "mamba1"})
    for (const Comparison& c : architecture(study, name).comparisons) {
      double sum = 0;
      for (const auto& [loss, difference] : c.profile) sum += difference;
      EXPECT_NEAR(sum / double(c.profile.size()), c.degradation.average.estimate, 1e-6) << name;
    }
}

TEST_F(Report, PageAnswersOnTopAndOpensOffline) {
  fake.write(folder);
  const std::string page = html();
  const size_t evidence = page.find("The evidence");
  EXPECT_LT(page.find("<b>window</b>: degraded, Δ = +0.1"), evidence);
  EXPECT_LT(page.find("<b>twin</b>: no difference found: Δ = "), evidence);
  for (const char* part : {"Plotly.newPlot", "id=\"held-out-arxiv\"", "id=\"training-mean\"", "id=\"delta-held-out\"",
                           "Where each number comes from", "cpu kernel", "34,000,000", "position 64–256"})
    EXPECT_TRUE(contains(page, part)) << part;
  for (const char* part : {"<script src", "<link", "@import"}) EXPECT_FALSE(contains(page, part)) << part;
  EXPECT_GT(page.size(), 4'000'000u) << "Plotly is not in it";
}

TEST_F(Report, WritesEveryTableAndFigure) {
  fake.write(folder);
  write_report(folder);
  for (const char* table :
       {"losses", "degradation", "convergence", "slices", "slices-by-run", "probes", "speed",
        "hyperparameters-differing", "hyperparameters-common", "evaluations", "attention-entropy", "runs"})
    EXPECT_TRUE(fs::exists(folder / "tables" / fmt::format("{}.csv", table))) << table;
  const std::string csv = read_file(folder / "tables/degradation.csv");
  EXPECT_TRUE(contains(csv, "average,average low,average high")) << csv;
  EXPECT_TRUE(contains(csv, "\nwindow,held-out loss,0.1")) << csv;
  EXPECT_TRUE(contains(read_file(folder / "tables/hyperparameters-differing.csv"), "model.num_layers,8,8,8,16"));
  EXPECT_FALSE(contains(read_file(folder / "tables/hyperparameters-common.csv"), "num_layers"));
  const std::string probes = read_file(folder / "tables/probes.csv");
  EXPECT_TRUE(contains(probes, "\nwindow,0.25,0.9375,0.875,0.5,")) << probes;
  EXPECT_FALSE(contains(probes, "mamba1")) << "it has none";
  EXPECT_TRUE(contains(read_file(folder / "tables/runs.csv"), "window.seed-2,done,"));
  for (const char* figure : {"held-out-mean", "training-stack", "delta-training", "difference-held-out",
                             "curve-training", "attention-entropy", "attention-entropy-by-layer"})
    EXPECT_TRUE(contains(read_file(folder / "figures" / fmt::format("{}.svg", figure)), "</svg>")) << figure;
}

TEST_F(Report, DrawsTheEntropyOfThoseThatHaveWeights) {
  fake.write(folder);
  const FigureGroup group = entropy_plots(analyse(folder).settings[0]);
  ASSERT_EQ(group.figures.size(), 2u);
  for (const Series& series : group.figures[0].series) {
    EXPECT_NE(series.name, "mamba1");
    EXPECT_EQ(series.y.back(), 0.5);
  }
  EXPECT_EQ(group.figures[1].series[0].y, (std::vector<double>{0.375, 0.625}));
  write_report(folder);
  EXPECT_TRUE(contains(read_file(folder / "tables/attention-entropy.csv"), ",1,0,0.75\n"));
}

TEST_F(Report, DrawsModelsThatDifferInOneHyperparameterAlone) {
  const auto attention = [](int window, const char* position) {
    return fmt::format("[model.attention]\nwindow = {}\nposition = \"{}\"\n", window, position);
  };
  fake.models = {{"full", 0, 1, 0, attention(-1, "rope")},
                 {"wide", 0.1, 1, 0, attention(256, "rope")},
                 {"narrow", 0.3, 1, 0, attention(64, "rope")},
                 {"narrow_none", 0.4, 1, 0, attention(64, "none")},
                 {"mamba1", 0.05, 0.9}};  // differs in much
  fake.write(folder);
  const FigureGroup group = ablation_plots(analyse(folder).settings[0]);
  ASSERT_EQ(group.figures.size(), 4u);
  const Figure& window = group.figures[2];
  EXPECT_EQ(window.id, "over-attention.window");
  ASSERT_EQ(window.series.size(), 4u);                         // the line, and a point with its interval each
  EXPECT_EQ(window.series[0].x, (std::vector<double>{6, 8}));  // log2
  EXPECT_NEAR(window.series[0].y[0], 0.3, 0.04);
  EXPECT_EQ(window.series[3].name, "full");
  EXPECT_EQ(window.series[3].x, std::vector<double>{9});  // −1, all, stands apart behind the others
  EXPECT_EQ(window.series[3].y, std::vector<double>{0});  // the reference
  EXPECT_EQ(window.series[1].name, "narrow");
  EXPECT_TRUE(window.series[1].upright && window.series[1].low[0] < window.series[0].y[0]);
  EXPECT_EQ(window.x.ticks, (std::vector<std::pair<double, std::string>>{{9, "-1"}, {8, "256"}, {6, "64"}}));
  EXPECT_EQ(group.figures[3].id, "over-attention.window-entropy");
  EXPECT_EQ(group.figures[3].series[0].y, (std::vector<double>{0.5, 0.5}));
  EXPECT_EQ(group.figures[0].id, "over-attention.position");
  EXPECT_EQ(group.figures[0].series[0].x, (std::vector<double>{0, 1}));
  EXPECT_EQ(group.figures[0].x.ticks[1].second, "rope");
  EXPECT_TRUE(contains(html(), "id=\"over-attention.window\""));
  EXPECT_TRUE(contains(read_file(folder / "figures/over-attention.window.svg"), ">256</text>"));
  EXPECT_GT(shown_range(window, true).second, window.series[1].high[0]);
}

TEST_F(Report, MixedDomainComparesHeldOutLossAtEqualTrainingLoss) {
  fake.out_of_domain = {};
  fake.models[1].degradation = 0;
  fake.write(folder);
  const Study study = analyse(folder);
  EXPECT_TRUE(study.settings[0].mixed);
  ASSERT_EQ(architecture(study, "window").comparisons.size(), 1u);
  EXPECT_EQ(architecture(study, "window").comparisons[0].kind, Kind::training);
  EXPECT_NEAR(architecture(study, "window").comparisons[0].degradation.average.estimate, 0, 0.01);
  const std::string page = html();
  EXPECT_TRUE(contains(page, "Held-out loss against training loss"));
  EXPECT_TRUE(contains(page, "id=\"training-c4\""));
}

TEST_F(Report, ReportsFinishedRunsAndNamesTheOthers) {
  fake.write(folder, {"mamba1"});
  const std::string page = html();
  EXPECT_TRUE(contains(page, "Run mamba1.seed-1 is missing (failed: exit code 1: the loss is NaN at step 3)."));
  EXPECT_TRUE(contains(page, "<b>window</b>: degraded"));
  EXPECT_FALSE(contains(page, "<b>mamba1</b>"));
}

TEST_F(Report, SaysSoWhenTheReferenceIsMissing) {
  fake.write(folder, {"full"});
  EXPECT_TRUE(contains(html(), "<b>window</b>: no answer: the reference has no finished run."));
}

TEST_F(Report, OneSeedIsACaution) {
  fake.seeds = {1};
  fake.write(folder);
  EXPECT_TRUE(contains(html(), "the intervals count documents only"));
}

TEST_F(Report, WarnsWhenUnseenTokensCarryTheDifference) {
  fake.models[1] = {"window", 0, 1, 1.5};
  fake.write(folder);
  EXPECT_TRUE(contains(html(), "tokens never seen in training carry")) << "0.1 of the tokens, 1.5 nats worse";
  fs::remove_all(folder);
  fake.models[1] = {"window", 0.12};
  fake.write(folder);
  EXPECT_FALSE(contains(html(), "tokens never seen in training carry"));
}

TEST_F(Report, RefusesToMixNumericsVersions) {
  fake.numerics["window"] = 2;
  fake.write(folder);
  EXPECT_TRUE(contains(html(), "<b>window</b>: no answer: the runs differ in the version of selective_scan (2 and 1)"));
}

TEST_F(Report, OfAFolderWithoutAStudyIsAnError) {
  EXPECT_THROW(write_report(folder), BadInput);
  fake.write(folder, {"full", "window", "twin", "mamba1"});
  EXPECT_THROW(write_report(folder), BadInput);
  EXPECT_FALSE(fs::exists(folder / "report.html"));
}

}  // namespace
}  // namespace assay::report
