// Verdicts and differences of a study with known answers.
#include <gtest/gtest.h>

#include "report/svg.h"
#include "report_folder.h"

namespace assay::report {
namespace {

using stats::Verdict;
using ReportVerdicts = ReportFolder;

TEST_F(ReportVerdicts, KnownDegradationIsFound) {
  fake.write(folder);
  const Study study = analyse(folder);
  ASSERT_EQ(study.settings.size(), 1u);
  EXPECT_EQ(study.settings[0].reference().name, "full");
  const stats::EndResult& window = architecture(study, "window").end;
  EXPECT_EQ(window.verdict, Verdict::degraded) << window.reason;
  EXPECT_NEAR(window.delta.estimate, 0.12, 0.015);
  EXPECT_EQ(window.tokens, 40e6);
  EXPECT_GT(window.domains.at("arxiv").estimate, window.domains.at("stack").estimate);
  ASSERT_TRUE(window.has_trend);
  EXPECT_NEAR(window.trend.estimate, 0, 0.02);
  EXPECT_EQ(window.budgets.size(), 2u);
  EXPECT_EQ(architecture(study, "twin").end.verdict, Verdict::equivalent);
}

TEST_F(ReportVerdicts, NegativeDifferenceIsBetter) {
  fake.models[1].degradation = -0.15;
  fake.write(folder);
  EXPECT_EQ(architecture(analyse(folder), "window").end.verdict, Verdict::better);
  EXPECT_TRUE(contains(top(html()), "</svg>better</span>"));
}

TEST_F(ReportVerdicts, WideIntervalIsNotSettled) {
  fake.models[1].degradation = 0.03;
  fake.seed_spread = 0.1;
  fake.write(folder);
  const Study study = analyse(folder);
  EXPECT_EQ(architecture(study, "window").end.verdict, Verdict::not_settled);
  EXPECT_NE(architecture(study, "window").end.reason, "");
  const std::string page = top(html());
  EXPECT_TRUE(contains(page, "</svg>not settled</span>"));
  EXPECT_TRUE(contains(page, html_text(architecture(study, "window").end.reason)));
}

TEST_F(ReportVerdicts, FasterAndDegradedModelShowsBothFacts) {
  fake.write(folder);  // mamba1 learns 1.5 times as fast and is degraded by 0.2
  fake.models[3].degradation = 0.05;
  fs::remove_all(folder);
  fake.write(folder);
  const Study study = analyse(folder);
  const stats::EndResult& mamba = architecture(study, "mamba1").end;
  ASSERT_EQ(mamba.verdict, Verdict::degraded) << mamba.reason;
  ASSERT_LT(mamba.final_loss, mamba.reference_loss);
  EXPECT_TRUE(contains(facts(study, "mamba1"), "It has the lowest final loss out of domain"));
  EXPECT_TRUE(
      contains(facts(study, "mamba1"),
               "and is still degraded: its loss there is higher than its held-out loss predicts."));
  EXPECT_TRUE(contains(top(html()), "and is still degraded"));
}

TEST_F(ReportVerdicts, TrendIsASentenceWithTheSignOfTheTable) {
  fake.write(folder);
  Study study = analyse(folder);
  stats::EndResult& end = study.settings[0].architectures[1].end;
  end.trend = {-0.011, -0.019, -0.004};
  const std::string name = end.name;
  EXPECT_TRUE(contains(facts(study, name),
                       "Δ_end falls with more tokens: it changes by −0.011 [−0.019, −0.004] nats"))
      << facts(study, name);
  end.trend = {0.011, 0.004, 0.019};
  EXPECT_TRUE(contains(facts(study, name), "Δ_end grows with more tokens: it changes by +0.011"));
}

TEST_F(ReportVerdicts, FasterModelNeedsFewerTokens) {
  fake.write(folder);
  EXPECT_NEAR(architecture(analyse(folder), "window").tokens_ratio, 1 / 1.1, 0.05);
}

// All architectures of a study share one variance between seeds.
TEST_F(ReportVerdicts, PredictionsUseTheSeedsOfAllArchitectures) {
  const auto of_window = [&] {
    fs::remove_all(folder);
    fake.write(folder);
    const auto found = predictions(analyse(folder).settings[0]);
    return std::ranges::find(found, "window", &Foretold::name)->predicted;
  };
  const stats::Interval among_all = of_window();
  fake.models = {{"full"}, {"window", 0.12, 1.1}};
  const stats::Interval alone = of_window();
  EXPECT_NEAR(among_all.estimate, alone.estimate, 1e-12);
  EXPECT_GT(std::abs(among_all.high - alone.high), 1e-6);
}

TEST_F(ReportVerdicts, ProfileAveragesToTheSecondaryMeasure) {
  fake.write(folder);
  const Study study = analyse(folder);
  for (const char* name : {"window", "mamba1"})
    for (const Comparison& c : architecture(study, name).comparisons) {
      ASSERT_EQ(c.degradation.problem, "");
      EXPECT_EQ(c.tokens, 40'000'000) << "the largest budget that both have";
      double sum = 0;
      for (const auto& [loss, difference] : c.profile) sum += difference;
      EXPECT_NEAR(sum / double(c.profile.size()), c.degradation.average.estimate, 1e-6) << name;
    }
}

TEST_F(ReportVerdicts, MixedDomainComparesHeldOutLossAtEqualTrainingLoss) {
  fake.out_of_domain = {};
  fake.models[1].degradation = 0;
  fake.write(folder);
  const Study study = analyse(folder);
  EXPECT_TRUE(study.settings[0].mixed);
  const Architecture& window = architecture(study, "window");
  ASSERT_EQ(window.comparisons.size(), 1u);
  EXPECT_EQ(window.comparisons[0].kind, Kind::training);
  EXPECT_NEAR(window.end.delta.estimate, 0, 0.01);
  EXPECT_EQ(window.end.domains.size(), 2u);
  const std::string page = html();
  EXPECT_TRUE(contains(page, "Held-out loss against training loss"));
  EXPECT_TRUE(contains(page, "id=\"ladder-c4\""));
}

TEST_F(ReportVerdicts, RecordsGiveTheDifferencesOfTheStudyInAMixedDomain) {
  fake.out_of_domain = {};
  fake.write(folder / "study");
  study::write_records(folder / "study", folder / "records");
  study::study_of_records(folder / "records", folder / "copy");
  const Study study = analyse(folder / "study");
  const Study copy = analyse(folder / "copy");
  const auto delta = [](const Study& of) { return architecture(of, "window").end.delta; };
  EXPECT_NEAR(delta(copy).estimate, delta(study).estimate, 1e-3);
  EXPECT_NEAR(delta(copy).low, delta(study).low, 1e-3);
}

TEST_F(ReportVerdicts, UnseenTokensThatMakeTheDifferenceAreAWarning) {
  fake.models[1] = {"window", 0, 1, 1.5};
  fake.write(folder);
  const std::string page = html();
  EXPECT_TRUE(contains(page, "tokens that were never seen in training make up"))
      << "0.1 of the tokens are 1.5 nats worse";
  EXPECT_TRUE(contains(page, " of the difference of +0.")) << "with its sign, as in the tables";
  fs::remove_all(folder);
  fake.models[1] = {"window", 0.12};
  fake.write(folder);
  EXPECT_FALSE(contains(html(), "tokens that were never seen in training make up"));
}

TEST_F(ReportVerdicts, RecordsAloneGiveTheSameVerdicts) {
  fake.write(folder / "study");
  study::write_records(folder / "study", folder / "records");
  study::study_of_records(folder / "records", folder / "copy");
  const Written first = write_report(folder / "study");
  const Written copy = write_report(folder / "copy");
  ASSERT_EQ(first.verdicts.size(), copy.verdicts.size());
  for (size_t i = 0; i < copy.verdicts.size(); ++i) {
    const nlohmann::json& expected = first.verdicts[i];
    EXPECT_EQ(copy.verdicts[i]["verdict"], expected["verdict"]) << expected;
    EXPECT_NEAR(copy.verdicts[i]["delta_end"], expected["delta_end"], 1e-3);
    for (const size_t end : {0, 1})
      EXPECT_NEAR(copy.verdicts[i]["interval"][end], expected["interval"][end], 1e-3);
  }
  EXPECT_FALSE(fs::exists(folder / "copy/runs"));
  EXPECT_TRUE(fs::exists(folder / "copy/figures/ladder-mean.svg"));
}

TEST_F(ReportVerdicts, ReportInAnotherFolderLeavesTheStudyAsItIs) {
  fake.write(folder / "study");
  const Written written = write_report(folder / "study", folder / "out");
  EXPECT_EQ(written.page, folder / "out/report.html");
  EXPECT_TRUE(fs::exists(folder / "out/figures/ladder-mean.svg"));
  for (const char* name : {"report.html", "figures", "tables"})
    EXPECT_FALSE(fs::exists(folder / "study" / name)) << name;
  EXPECT_EQ(read_file(written.page), read_file(write_report(folder / "study").page));
  study::write_records(folder / "study", folder / "records");
  for (const char* other : {"study", "records"})
    EXPECT_THROW(write_report(folder / "study", folder / other), BadInput) << other;
}

TEST_F(ReportVerdicts, VerdictsAreOneJsonObjectPerArchitecture) {
  fake.write(folder);
  const nlohmann::json verdicts = write_report(folder).verdicts;
  ASSERT_EQ(verdicts.size(), 3u);
  const nlohmann::json& window = verdicts[0];
  EXPECT_EQ(window["setting"], "");
  EXPECT_EQ(window["model"], "window");
  EXPECT_EQ(window["verdict"], "degraded");
  EXPECT_NEAR(window["delta_end"].get<double>(), 0.12, 0.015);
  EXPECT_LT(window["interval"][0], window["delta_end"]);
  EXPECT_GT(window["interval"][1], window["delta_end"]);
  EXPECT_GT(window["final_loss"], 4);
  EXPECT_GT(window["reference_loss"], 4);
  EXPECT_TRUE(window["trend"].is_number());
  EXPECT_EQ(window["reason"], "");
}

}  // namespace
}  // namespace assay::report
