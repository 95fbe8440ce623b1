#include "report/report.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <regex>
#include <set>

#include "base/error.h"
#include "fake_study.h"
#include "report/analysis.h"
#include "report/answer.h"
#include "report/contents.h"
#include "report/svg.h"
#include "report/tables.h"
#include "report/training_loss.h"

namespace assay::report {
namespace {

using stats::Verdict;

class Report : public testing::Test {
 protected:
  void SetUp() override {
    folder = fs::temp_directory_path() / fmt::format("assay-report-{}", ::getpid());
    fs::remove_all(folder);
  }
  void TearDown() override { fs::remove_all(folder); }

  std::string html() { return read_file(write_report(folder).page); }
  static const Architecture& architecture(const Study& study, const std::string& name) {
    for (const Architecture& a : study.settings[0].architectures)
      if (a.name == name) return a;
    throw std::runtime_error("no architecture " + name);
  }
  std::string facts(const Study& study, const std::string& name) {
    return join(sentences(architecture(study, name), study.settings[0]), "\n");
  }
  static bool contains(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
  }
  // The first screen of the page, before the evidence.
  static std::string top(const std::string& page) { return page.substr(0, page.find("<nav")); }

  fs::path folder;
  FakeStudyFolder fake;
};

TEST_F(Report, KnownDegradationIsFound) {
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

TEST_F(Report, NegativeDifferenceIsBetter) {
  fake.models[1].degradation = -0.15;
  fake.write(folder);
  EXPECT_EQ(architecture(analyse(folder), "window").end.verdict, Verdict::better);
  EXPECT_TRUE(contains(top(html()), "</svg>better</span>"));
}

TEST_F(Report, WideIntervalIsNotSettled) {
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

TEST_F(Report, FasterAndDegradedModelShowsBothFacts) {
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

TEST_F(Report, FasterModelNeedsFewerTokens) {
  fake.write(folder);
  EXPECT_NEAR(architecture(analyse(folder), "window").tokens_ratio, 1 / 1.1, 0.05);
}

TEST_F(Report, MissingLadderIsNotSettledWithAdvice) {
  fake.budgets = {40'000'000};
  fake.contender_budgets = {40'000'000};
  fake.write(folder);
  const Study study = analyse(folder);
  const stats::EndResult& window = architecture(study, "window").end;
  EXPECT_EQ(window.verdict, Verdict::not_settled);
  EXPECT_TRUE(contains(window.reason, "The reference was trained at one budget (40M tokens)"));
  EXPECT_TRUE(contains(window.reason,
                       "Add `ladder = { tokens = [5_000_000, 10_000_000, "
                       "20_000_000, 40_000_000], seeds = [1, 2, 3, 4] }` to the plan"))
      << window.reason;
  EXPECT_NEAR(window.final_loss - window.reference_loss, 0.12, 0.05);
  const std::string page = html();
  EXPECT_TRUE(contains(top(page), "not settled"));
  EXPECT_TRUE(contains(page, "No verdict is possible."));
}

TEST_F(Report, ProfileAveragesToTheSecondaryMeasure) {
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

TEST_F(Report, PageAnswersFirstAndOpensOffline) {
  fake.write(folder);
  const std::string page = html();
  EXPECT_TRUE(contains(top(page), "</svg>degraded</span>"));
  EXPECT_TRUE(contains(top(page), "</svg>equivalent</span>"));
  for (const char* part : {"id=\"ladder-mean\"", "id=\"ladder-arxiv\"", "id=\"delta-by-domain\"",
                           "Provenance of every number", "cpu kernel", "34,000,000",
                           "position 64–256", "Sources per domain: arxiv 40"})
    EXPECT_TRUE(contains(page, part)) << part;
  EXPECT_FALSE(contains(page, "no difference"));
}

TEST_F(Report, PageLoadsNothingFromOutside) {
  fake.write(folder);
  const std::string page = html();
  for (const char* part : {"<script", "<link", "@import", "<iframe", "<img", "url(http"})
    EXPECT_FALSE(contains(page, part)) << part;
  const std::string without_namespace =
      std::regex_replace(page, std::regex("http://www\\.w3\\.org/2000/svg"), "");
  EXPECT_FALSE(contains(without_namespace, "http")) << "no address of another machine";
}

TEST_F(Report, PageOfManyModelsIsSmall) {
  fake.models = {{"full"}};
  for (int i = 0; i < 11; ++i) fake.models.push_back({fmt::format("model_{}", i), 0.01 * i});
  fake.write(folder);
  EXPECT_LT(html().size(), 1'500'000u);
}

TEST_F(Report, NamesAreEscaped) {
  fake.models[1].name = "a<b>&\"c";
  fake.write(folder);
  const std::string page = html();
  EXPECT_TRUE(contains(page, "a&lt;b&gt;&amp;&quot;c"));
  EXPECT_FALSE(contains(page, "a<b>"));
}

TEST_F(Report, FiguresAreAccessible) {
  fake.write(folder);
  const std::string page = html();
  std::set<std::string> ids;
  const std::regex id("<svg[^>]* id=\"([^\"]+)\" role=\"img\" aria-labelledby=");
  for (auto it = std::sregex_iterator(page.begin(), page.end(), id); it != std::sregex_iterator();
       ++it)
    EXPECT_TRUE(ids.insert((*it)[1]).second) << (*it)[1] << " is used twice";
  EXPECT_GT(ids.size(), 10u);
  for (const std::string& one : ids) {
    EXPECT_TRUE(contains(page, "<title id=\"title-" + one + "\">")) << one;
    EXPECT_TRUE(contains(page, "<desc id=\"desc-" + one + "\">")) << one;
  }
  for (const char* part : {"<caption", "scope=\"col\"", "scope=\"row\"", "class=\"skip\"",
                           "lang=\"en\"", "prefers-color-scheme:dark", "@media print"})
    EXPECT_TRUE(contains(page, part)) << part;
}

TEST_F(Report, EveryItemIsInThePageAndInAFile) {
  fake.rates = {1e-3, 2e-3, 4e-3};
  fake.check = true;
  fake.write(folder);
  const std::string page = html();
  const Study study = analyse(folder);
  size_t tables = 0, figures = 0;
  for (const Item& item : contents(study.settings[0])) {
    if (const auto* table = std::get_if<Table>(&item.content)) {
      ++tables;
      EXPECT_EQ(read_file(folder / "tables" / (table->id + ".csv")), to_csv(*table));
      EXPECT_EQ(contains(page, "tables/" + table->id + ".csv\">"), table->shown) << table->id;
      continue;
    }
    for (const Figure& figure : std::get<FigureGroup>(item.content).figures) {
      ++figures;
      const std::string svg = read_file(folder / "figures" / (figure.id + ".svg"));
      EXPECT_TRUE(contains(page, svg)) << figure.id << ": the page has the text of the file";
    }
  }
  EXPECT_EQ(tables, 19u);
  EXPECT_GE(figures, 15u);
  EXPECT_TRUE(fs::exists(folder / "tables/runs.csv"));
}

TEST_F(Report, TablesHoldTheNumbers) {
  fake.write(folder);
  write_report(folder);
  const auto csv = [&](const char* name) {
    return read_file(folder / "tables" / fmt::format("{}.csv", name));
  };
  EXPECT_TRUE(contains(csv("verdicts"), "\nwindow,degraded,0.1")) << csv("verdicts");
  EXPECT_TRUE(contains(csv("delta-by-domain"), "mean,mean low,mean high"));
  EXPECT_TRUE(contains(csv("delta-by-recall"), "\nwindow,0.1")) << csv("delta-by-recall");
  EXPECT_TRUE(contains(csv("delta-by-budget"), "\nwindow,20000000,4,"));
  EXPECT_TRUE(contains(csv("predictions"), "\nwindow,20000000,40000000,0.1")) << csv("predictions");
  EXPECT_TRUE(contains(csv("ladder"), "\n10000000,4,"));
  EXPECT_TRUE(contains(csv("degradation"), "mean,mean low,mean high"));
  EXPECT_TRUE(contains(csv("degradation"), "\nwindow,held-out loss,40000000,"));
  EXPECT_TRUE(contains(csv("losses"), "\nfull,80000000,4,"));
  EXPECT_TRUE(contains(csv("losses"), "\nwindow,40000000,4,"));
  EXPECT_TRUE(contains(csv("hyperparameters-differing"), "model.num_layers,8,8,8,16"));
  EXPECT_FALSE(contains(csv("hyperparameters-common"), "num_layers"));
  EXPECT_TRUE(contains(csv("probes"), "\nwindow,0.25,0.9375,0.875,0.5,")) << csv("probes");
  EXPECT_FALSE(contains(csv("probes"), "mamba1")) << "it has none";
  EXPECT_TRUE(contains(csv("runs"), "window.40M.lr-0.001.seed-2,study,done,"));
}

TEST_F(Report, MainFigureShowsEveryEndAndTheLadder) {
  fake.write(folder);
  const Study study = analyse(folder);
  const Figure figure = ladder_plot(study.settings[0]).figures.at(0);
  EXPECT_TRUE(figure.identity);
  const Series& curve = figure.series.at(0);
  EXPECT_GT(curve.x.size(), 50u);
  for (size_t i = 0; i < curve.x.size(); ++i) EXPECT_NEAR(curve.y[i], curve.x[i] + 1, 0.02);
  std::map<std::string, size_t> ends;
  for (const Series& series : figure.series)
    if (!series.line) ends[series.name] += series.x.size();
  EXPECT_EQ(ends.at("full"), 16u);
  EXPECT_EQ(ends.at("window"), 8u);
  EXPECT_EQ(ladder_plots_by_domain(study.settings[0]).figures.size(), 3u);
}

TEST_F(Report, TuningTableMarksTheChosenRate) {
  fake.rates = {1e-3, 2e-3, 4e-3};
  fake.diverging = "window";
  fake.write(folder);
  const Study study = analyse(folder);
  ASSERT_EQ(study.settings[0].grids.size(), 4u);
  for (const Grid& grid : study.settings[0].grids) {
    ASSERT_EQ(grid.points.size(), 3u) << grid.model;
    EXPECT_TRUE(grid.points[1].chosen);
    EXPECT_FALSE(grid.at_the_end());
    EXPECT_LT(grid.points[1].held_out_loss, grid.points[0].held_out_loss);
  }
  write_report(folder);
  const std::string csv = read_file(folder / "tables/learning-rates.csv");
  EXPECT_TRUE(contains(csv, "\nwindow,10000000,0.004,,0 of 1,")) << csv;
  EXPECT_TRUE(contains(csv, ",1 of 1,chosen\n")) << csv;
  EXPECT_FALSE(contains(html(), "is missing")) << "a rate that diverges is a result";
}

TEST_F(Report, GridThatTheStudySharesIsComplete) {
  fake.rates = {1e-3, 2e-3, 4e-3};
  fake.check = true;
  fake.contender_budgets = {10'000'000};  // the budget of the grid
  fake.write(folder);
  const Study study = analyse(folder);
  ASSERT_EQ(study.settings[0].grids.size(), 4u);
  for (const Grid& grid : study.settings[0].grids) EXPECT_EQ(grid.points.size(), 3u) << grid.model;
}

TEST_F(Report, RateAtTheEndOfTheGridIsAWarning) {
  fake.rates = {1e-3, 2e-3};
  fake.write(folder);
  EXPECT_TRUE(contains(facts(analyse(folder), "window"),
                       "The chosen learning rate of window is at the end of its grid"));
  EXPECT_TRUE(contains(html(), "chosen, at the end of the grid"));
}

TEST_F(Report, ChecksOfTheLearningRateHaveVerdicts) {
  fake.rates = {1e-3, 2e-3, 4e-3};
  fake.check = true;
  fake.write(folder);
  const Study study = analyse(folder);
  const auto& checks = architecture(study, "window").checks;
  ASSERT_EQ(checks.size(), 2u);
  for (const Check& check : checks) EXPECT_EQ(check.end.verdict, Verdict::degraded);
  EXPECT_TRUE(contains(facts(study, "window"), "The verdict is the same at half and at twice"));
  EXPECT_TRUE(architecture(study, "full").checks.empty());
}

TEST_F(Report, RecordsAloneGiveTheSameVerdicts) {
  fake.write(folder / "study");
  study::write_records(folder / "study", folder / "records");
  study::study_of_records(folder / "records", folder / "copy");
  const Written first = write_report(folder / "study");
  const Written copy = write_report(folder / "copy");
  EXPECT_EQ(first.verdicts, copy.verdicts);
  EXPECT_EQ(first.summary, copy.summary);
  EXPECT_FALSE(fs::exists(folder / "copy/runs"));
  EXPECT_TRUE(fs::exists(folder / "copy/figures/ladder-mean.svg"));
}

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

TEST_F(Report, TasksAreATableOfModelsWithIntervals) {
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

TEST_F(Report, ScoresOnRecallTasksAreComparedWithDeltaEnd) {
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

TEST_F(Report, FewModelsHaveNoCorrelation) {
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

TEST_F(Report, MissingTasksAreNamedByRun) {
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

TEST_F(Report, StudyWithoutTasksShowsNothingAboutThem) {
  fake.write(folder);
  const Written written = write_report(folder);
  EXPECT_TRUE(written.tasks.is_null());
  EXPECT_FALSE(contains(html(), "Tasks"));
  EXPECT_FALSE(fs::exists(folder / "tables/tasks.csv"));
  EXPECT_FALSE(fs::exists(folder / "tables/task-runs.csv"));
}

TEST_F(Report, RecordsAloneGiveTheSameScores) {
  add_tasks(fake);
  fake.write(folder / "study");
  study::write_records(folder / "study", folder / "records");
  study::study_of_records(folder / "records", folder / "copy");
  EXPECT_EQ(write_report(folder / "study").tasks, write_report(folder / "copy").tasks);
}

TEST_F(Report, VerdictsAreOneJsonObjectPerArchitecture) {
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

TEST_F(Report, JsonWithoutLadderHasNulls) {
  fake.budgets = {20'000'000};
  fake.contender_budgets = {40'000'000};
  fake.write(folder);
  const nlohmann::json window = write_report(folder).verdicts[0];
  EXPECT_EQ(window["verdict"], "not settled");
  for (const char* key : {"delta_end", "trend", "reference_loss"})
    EXPECT_TRUE(window[key].is_null()) << key;
  EXPECT_TRUE(window["interval"][0].is_null());
  EXPECT_TRUE(window["final_loss"].is_number());
}

TEST_F(Report, SummaryIsATableOfText) {
  fake.write(folder);
  const std::string summary = write_report(folder).summary;
  EXPECT_TRUE(contains(summary, "architecture  verdict")) << summary;
  EXPECT_EQ(write_report(folder).runs, 16 + 3 * 8);
  EXPECT_TRUE(contains(summary, "\nwindow        degraded")) << summary;
  EXPECT_FALSE(contains(summary, "<"));
}

TEST_F(Report, EntropyIsDrawnForModelsWithSoftmaxWeights) {
  fake.contender_budgets = {40'000'000};
  fake.write(folder);
  const FigureGroup group = entropy_plots(analyse(folder).settings[0]);
  ASSERT_EQ(group.figures.size(), 2u);
  for (const Series& series : group.figures[0].series) {
    EXPECT_NE(series.name, "mamba1");
    EXPECT_EQ(series.y.back(), 0.5);
  }
  EXPECT_EQ(group.figures[1].series[0].y, (std::vector<double>{0.375, 0.625}));
  EXPECT_EQ(group.figures[1].x.ticks.size(), 2u) << "layers are whole numbers";
  write_report(folder);
  EXPECT_TRUE(contains(read_file(folder / "tables/attention-entropy.csv"), ",1,0,0.75\n"));
}

TEST_F(Report, ModelsThatDifferInOneHyperparameterAreJoined) {
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
  ASSERT_EQ(window.series.size(), 4u) << "the line, and one point with its interval per model";
  EXPECT_EQ(window.series[0].x, (std::vector<double>{6, 8})) << "log2";
  EXPECT_NEAR(window.series[0].y[0], 0.3, 0.04);
  EXPECT_EQ(window.series[3].name, "full");
  EXPECT_EQ(window.series[3].x, std::vector<double>{9}) << "all is placed after the others";
  EXPECT_EQ(window.series[3].y, std::vector<double>{0}) << "the reference";
  EXPECT_EQ(window.series[1].name, "narrow");
  EXPECT_TRUE(window.series[1].upright);
  EXPECT_LT(window.series[1].low[0], window.series[0].y[0]);
  EXPECT_EQ(window.x.ticks,
            (std::vector<std::pair<double, std::string>>{{9, "all"}, {8, "256"}, {6, "64"}}));
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
  const Architecture& window = architecture(study, "window");
  ASSERT_EQ(window.comparisons.size(), 1u);
  EXPECT_EQ(window.comparisons[0].kind, Kind::training);
  EXPECT_NEAR(window.end.delta.estimate, 0, 0.01);
  EXPECT_EQ(window.end.domains.size(), 2u);
  const std::string page = html();
  EXPECT_TRUE(contains(page, "Held-out loss against training loss"));
  EXPECT_TRUE(contains(page, "id=\"ladder-c4\""));
}

TEST_F(Report, MissingRunsAreNamed) {
  fake.seeds = {1, 2};
  fake.write(folder, {"mamba1"});
  const std::string page = html();
  EXPECT_TRUE(contains(page,
                       "Run mamba1.20M.lr-0.001.seed-1 is missing (failed: exit code 1: "
                       "the loss is NaN at step 3)."));
  EXPECT_TRUE(contains(top(page), "</svg>degraded</span>"));
  EXPECT_FALSE(contains(page, ">mamba1</th>"));
}

TEST_F(Report, MissingReferenceIsNotSettled) {
  fake.write(folder, {"full"});
  EXPECT_EQ(architecture(analyse(folder), "window").end.reason,
            "The reference has no finished run.");
  EXPECT_TRUE(contains(html(), "The reference has no finished run."));
}

TEST_F(Report, OneSeedEverywhereIsNotSettled) {
  fake.seeds = {1};
  fake.write(folder);
  EXPECT_EQ(architecture(analyse(folder), "window").end.verdict, Verdict::not_settled);
  EXPECT_TRUE(contains(html(), "No rung of the reference has two seeds"));
}

TEST_F(Report, DocumentsWithoutSourcesAreACaution) {
  fake.has_sources = false;
  fake.write(folder);
  const std::string page = html();
  EXPECT_TRUE(contains(page, "the intervals hold for these texts only"));
  EXPECT_TRUE(contains(page, "Documents per domain: arxiv 40"));
}

TEST_F(Report, UnseenTokensThatMakeTheDifferenceAreAWarning) {
  fake.models[1] = {"window", 0, 1, 1.5};
  fake.write(folder);
  EXPECT_TRUE(contains(html(), "tokens that were never seen in training make up"))
      << "0.1 of the tokens are 1.5 nats worse";
  fs::remove_all(folder);
  fake.models[1] = {"window", 0.12};
  fake.write(folder);
  EXPECT_FALSE(contains(html(), "tokens that were never seen in training make up"));
}

TEST_F(Report, OtherNumericsVersionsAreNotCompared) {
  fake.numerics["window"] = 2;
  fake.write(folder);
  const Study study = analyse(folder);
  EXPECT_EQ(architecture(study, "window").end.reason,
            "The runs differ in the numerics version of selective_scan (1 and 2). "
            "Run the older ones again.");
  EXPECT_TRUE(architecture(study, "window").comparisons.empty());
  EXPECT_EQ(architecture(study, "mamba1").end.verdict, Verdict::degraded);
}

TEST_F(Report, FolderWithoutFinishedRunsIsAnError) {
  EXPECT_THROW(write_report(folder), BadInput);
  fake.write(folder, {"full", "window", "twin", "mamba1"});
  EXPECT_THROW(write_report(folder), BadInput);
  EXPECT_FALSE(fs::exists(folder / "report.html"));
}

TEST(TrainingLoss, FallingLossIsReadAtTheStep) {
  std::vector<TrainingLine> lines;
  for (int64_t step = 10; step <= 200; step += 10)
    lines.push_back({.step = step, .loss = 5 - 0.01 * (double(step) - 4.5)});
  EXPECT_NEAR(training_loss_at(lines, 100, 50, 150), 4, 1e-12);
  EXPECT_NEAR(training_loss_at(lines, 200, 150, 200), 3, 1e-12) << "one-sided at the end";
}

TEST(TrainingLoss, FewLinesGiveTheirMean) {
  EXPECT_NEAR(training_loss_at({{.step = 10, .loss = 3}}, 10, 0, 10), 3, 1e-12);
  EXPECT_TRUE(std::isnan(training_loss_at({}, 10, 0, 10)));
}

}  // namespace
}  // namespace assay::report
