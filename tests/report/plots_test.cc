#include "report/plots.h"

#include <gtest/gtest.h>

#include <regex>
#include <set>

#include "report/svg.h"
#include "report_folder.h"

namespace assay::report {
namespace {

using ReportPlots = ReportFolder;

TEST_F(ReportPlots, MainFigureShowsEveryEndAndTheLadder) {
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

TEST(ReportFigures, StylesDifferAndOnlyTheReferenceHasItsColourAndShape) {
  std::set<std::pair<std::string, Shape>> seen;
  for (int style = 0; style <= 56; ++style) {
    EXPECT_TRUE(seen.emplace(colour(style), shape(style)).second) << style;
    if (style == 0) continue;
    EXPECT_STRNE(colour(style), colour(0)) << style;
    EXPECT_NE(shape(style), shape(0)) << style;
  }
}

TEST(ReportFigures, LabelsOfTheSmallScaleAreInsideIt) {
  constexpr double kHalfLetter = 3.5;  // of 11 pixels, bold
  const std::regex label("x=\"([0-9.]+)\"[^>]*>([^<]*)<");
  for (const double high : {0.1, 0.125, 0.25, 0.5}) {
    const std::string axis = interval_axis({.low = -high, .high = high});
    const auto width = std::stod(axis.substr(axis.find("width=\"") + 7));
    for (std::sregex_iterator found(axis.begin(), axis.end(), label), end; found != end; ++found) {
      const double half = kHalfLetter * double((*found)[2].length());
      EXPECT_LE(std::stod((*found)[1]) + half, width) << found->str();
    }
  }
}

TEST_F(ReportPlots, BudgetFigureHasTheTicksOfItsPoints) {
  fake.write(folder);
  Study study = analyse(folder);
  Setting& setting = study.settings[0];
  for (Architecture& a : setting.architectures)
    if (a.name != "window" && !a.end.budgets.empty()) a.end.budgets.resize(1);
  setting.architectures.back().end.budgets[0].tokens = 5e6;
  const Figure figure = budget_plots(setting).figures.at(0);
  ASSERT_EQ(figure.series.size(), 1u) << "a model with one budget has no line";
  EXPECT_EQ(figure.series[0].x, (std::vector<double>{20e6, 40e6})) << "one series is not shifted";
  ASSERT_EQ(figure.x.ticks.size(), 2u);
  const auto [low, high] = shown_range(figure, false);
  for (const auto& [value, text] : figure.x.ticks) {
    EXPECT_GT(value, low) << text;
    EXPECT_LT(value, high) << text;
  }
}

TEST_F(ReportPlots, EntropyIsDrawnForModelsWithSoftmaxWeights) {
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

TEST_F(ReportPlots, ModelsThatDifferInOneHyperparameterAreJoined) {
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

}  // namespace
}  // namespace assay::report
