#include "report/task_scores.h"

#include <gtest/gtest.h>

#include <cmath>

#include "report/plots.h"
#include "report_folder.h"

namespace assay::report {
namespace {

using ReportTasks = ReportFolder;

// Two recall tasks, another task, and six contenders that are degraded by different amounts.
void add_tasks(FakeStudyFolder& fake) {
  fake.models = {{"full"}};
  for (int i = 0; i < 6; ++i) fake.models.push_back({fmt::format("model_{}", i), 0.04 * i, 1.1});
  const auto task = [](const char* name, bool recall, std::vector<std::string> metrics) {
    return run::TaskQuestion{.name = name,
                             .key = "key of " + std::string(name),
                             .recall = recall,
                             .metrics = metrics,
                             .items = 200};
  };
  fake.tasks = {task("fda", true, {"contains"}), task("swde", true, {"contains"}),
                task("lambada", false, {"acc", "perplexity"})};
}

TEST_F(ReportTasks, TasksAreATableOfModelsWithIntervals) {
  add_tasks(fake);
  fake.write(folder);
  const Written written = write_report(folder);
  const Study study = analyse(folder);
  const auto& rows = study.settings[0].task_scores;
  ASSERT_EQ(rows.size(), 5u) << "fda, swde, two metrics of lambada, the mean of recall tasks";
  const Score& reference = *rows[0].scores[0];
  const Score& last = *rows[0].scores[6];
  EXPECT_EQ(reference.tokens, 40'000'000) << "the largest budget that others share";
  EXPECT_EQ(reference.seeds, 4);
  EXPECT_TRUE(std::isnan(reference.difference.estimate));
  EXPECT_NEAR(last.difference.estimate, -0.5, 0.1);
  EXPECT_LT(last.difference.high, 0);
  EXPECT_LT(last.value.high, reference.value.low);
  const auto width = [](const stats::Interval& interval) { return interval.high - interval.low; };
  EXPECT_LT(width(last.difference), 0.9 * std::hypot(width(last.value), width(reference.value)))
      << "pairing by item makes the interval of the difference narrower";
  EXPECT_EQ(rows[3].metric, "perplexity");
  EXPECT_NEAR(rows[3].scores[6]->value.estimate, std::exp(2.2), 0.2);
  EXPECT_LT(rows[3].scores[6]->value.low, rows[3].scores[6]->value.high);
  EXPECT_NEAR(rows[3].scores[6]->difference.estimate, 0.2, 0.03);
  EXPECT_EQ(rows[4].name, "mean of 2 recall tasks");
  const std::string csv = read_file(folder / "tables/tasks.csv");
  EXPECT_TRUE(contains(csv, "task,metric,recall task,items,full,full low,full high,model_0"));
  EXPECT_TRUE(contains(csv, "\ntraining tokens,,,,40M,,,40M")) << csv;
  EXPECT_TRUE(contains(read_file(folder / "tables/task-runs.csv"),
                       "\nfull.10M.lr-0.001.seed-1,full,10000000,1,fda,contains,0."));
  EXPECT_TRUE(contains(html(), ">Differences to the reference on the tasks</h3>"));
  ASSERT_EQ(written.tasks["scores"].size(), 5 * 7u);
  EXPECT_EQ(written.tasks["scores"][0]["model"], "full");
  EXPECT_TRUE(written.tasks["scores"][0]["difference"].is_null());
  EXPECT_TRUE(written.tasks["problems"].empty());
  EXPECT_TRUE(contains(written.summary, "mean of 2 recall tasks, 6 architectures at 40M tokens"));
}

TEST_F(ReportTasks, ScoresOnRecallTasksAreComparedWithDeltaEnd) {
  add_tasks(fake);
  fake.write(folder);
  const Study study = analyse(folder);
  const std::vector<Agreement> found = task_agreements(study.settings[0]);
  ASSERT_EQ(found.size(), 4u) << "mean of recall tasks, lambada, fda, swde";
  EXPECT_EQ(found[0].points.size(), 6u);
  EXPECT_TRUE(found[0].reference);
  EXPECT_LT(found[0].tau.estimate, -0.8);
  EXPECT_LT(found[0].tau.high, 0);
  EXPECT_FALSE(found[1].recall);
  const FigureGroup group = agreement_plot(study.settings[0]);
  ASSERT_EQ(group.figures.size(), 1u);
  EXPECT_EQ(group.figures[0].series.size(), 7u);
  EXPECT_TRUE(contains(html(), "id=\"task-agreement\""));
  const nlohmann::json json = tasks(study)["agreement"][0];
  EXPECT_EQ(json["models"], 6);
  EXPECT_LT(json["kendall_tau"], -0.8);
}

TEST_F(ReportTasks, FewModelsHaveNoCorrelation) {
  add_tasks(fake);
  fake.models.resize(4);
  fake.write(folder);
  const Study study = analyse(folder);
  const Agreement found = task_agreements(study.settings[0])[0];
  EXPECT_TRUE(std::isnan(found.tau.estimate));
  EXPECT_EQ(found.text(),
            "mean of 2 recall tasks, 3 architectures at 40M tokens: "
            "too few models for a correlation (at least 5 are needed).");
  EXPECT_TRUE(contains(html(), "too few models for a correlation"));
  EXPECT_TRUE(tasks(study)["agreement"][0]["kendall_tau"].is_null());
}

TEST_F(ReportTasks, MissingTasksAreNamedByRun) {
  add_tasks(fake);
  fake.without_weights = "model_2";
  fake.write(folder);
  const std::string page = html();
  EXPECT_TRUE(
      contains(page,
               "Results of tasks are missing (the final weights of the run are not in this study): "
               "model_2.20M.lr-0.001.seed-1, "));
  const nlohmann::json problems = tasks(analyse(folder))["problems"];
  EXPECT_EQ(problems.size(), 8 * 3u);
  EXPECT_EQ(problems[0]["run"], "model_2.20M.lr-0.001.seed-1");
}

TEST_F(ReportTasks, StudyWithoutTasksShowsNothingAboutThem) {
  fake.write(folder);
  const Written written = write_report(folder);
  EXPECT_TRUE(written.tasks.is_null());
  EXPECT_FALSE(contains(html(), "Tasks"));
  EXPECT_FALSE(fs::exists(folder / "tables/tasks.csv"));
  EXPECT_FALSE(fs::exists(folder / "tables/task-runs.csv"));
}

TEST_F(ReportTasks, RecordsAloneGiveTheSameScores) {
  add_tasks(fake);
  fake.write(folder / "study");
  study::write_records(folder / "study", folder / "records");
  study::study_of_records(folder / "records", folder / "copy");
  EXPECT_EQ(write_report(folder / "study").tasks, write_report(folder / "copy").tasks);
}

}  // namespace
}  // namespace assay::report
