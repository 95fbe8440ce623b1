// The page, the files next to it, and the summary.
#include <gtest/gtest.h>

#include <regex>
#include <set>

#include "report/contents.h"
#include "report/svg.h"
#include "report/tables.h"
#include "report_folder.h"

namespace assay::report {
namespace {

using ReportPage = ReportFolder;

TEST_F(ReportPage, AnswersFirstAndOpensOffline) {
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

TEST_F(ReportPage, EveryColumnOfTheVerdictsIsExplained) {
  fake.write(folder);
  const std::string page = top(html());
  for (const char* name :
       {"The verdict is", "Δ<sub>end</sub> compares", "E compares", "R is recall in domain",
        "Epochs is", "Tokens needed is", "within ±0.03, the shaded band", "Its margin is 0.05"})
    EXPECT_TRUE(contains(page, name)) << name;
}

TEST_F(ReportPage, SentenceOfAnArchitectureIsInItsRow) {
  fake.write(folder);
  const Study study = analyse(folder);
  const std::string page = top(html());
  for (const char* name : {"window", "twin", "mamba1"}) {
    const std::string text = in_one_sentence(architecture(study, name), study.settings[0]);
    EXPECT_TRUE(contains(page, html_text(text) + "</span></td></tr>")) << text;
  }
  const Architecture& window = architecture(study, "window");
  const std::string text = in_one_sentence(window, study.settings[0]);
  EXPECT_GT(window.end.delta.estimate, 0.05);
  EXPECT_TRUE(text.starts_with(
      fmt::format("At equal held-out loss, it is {:.2f} nats worse", window.end.delta.estimate)))
      << text;
  EXPECT_TRUE(contains(in_one_sentence(architecture(study, "twin"), study.settings[0]),
                       "it is within 0.03 nats of the reference out of domain"));
}

TEST_F(ReportPage, QuestionOfThePlanIsUnderTheTitle) {
  fake.write(folder);
  EXPECT_TRUE(contains(html(), "<h1>Study fake</h1>\n<p>Is this a study?</p>"));
}

TEST_F(ReportPage, PrintShowsWhatIsFolded) {
  fake.write(folder);
  EXPECT_TRUE(contains(html(), "details::details-content{content-visibility:visible}"));
}

TEST_F(ReportPage, NumbersOfSeedsAreAlignedAsNumbers) {
  fake.write(folder);
  EXPECT_TRUE(contains(html(), "<th scope=\"col\" class=\"n\">seeds</th>"));
}

TEST_F(ReportPage, LoadsNothingFromOutside) {
  fake.write(folder);
  const std::string page = html();
  for (const char* part : {"<script", "<link", "@import", "<iframe", "<img", "url(http"})
    EXPECT_FALSE(contains(page, part)) << part;
  const std::string without_namespace =
      std::regex_replace(page, std::regex("http://www\\.w3\\.org/2000/svg"), "");
  EXPECT_FALSE(contains(without_namespace, "http")) << "no address of another machine";
}

TEST_F(ReportPage, IsSmallForManyModels) {
  fake.models = {{"full"}};
  for (int i = 0; i < 11; ++i) fake.models.push_back({fmt::format("model_{}", i), 0.01 * i});
  fake.write(folder);
  EXPECT_LT(html().size(), 1'500'000u);
}

TEST_F(ReportPage, KernelsAreListedOnceForAllRuns) {
  fake.numerics["window"] = 2;
  fake.write(folder);
  const std::string page = html();
  size_t count = 0;
  for (size_t at = page.find("cpu kernel"); at != std::string::npos; ++count)
    at = page.find("cpu kernel", at + 1);
  EXPECT_EQ(count, 2u) << "one row per numerics version";
  EXPECT_TRUE(contains(read_file(folder / "tables/kernels.csv"),
                       "\nselective_scan,cpu kernel,1,32\nselective_scan,cpu kernel,2,8\n"));
  EXPECT_TRUE(contains(read_file(folder / "tables/runs.csv"), "selective_scan: cpu kernel"));
}

TEST_F(ReportPage, NamesAreEscaped) {
  fake.models[1].name = "a<b>&\"c";
  fake.write(folder);
  const std::string page = html();
  EXPECT_TRUE(contains(page, "a&lt;b&gt;&amp;&quot;c"));
  EXPECT_FALSE(contains(page, "a<b>"));
}

TEST_F(ReportPage, FiguresAreAccessible) {
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

TEST_F(ReportPage, EveryItemIsInThePageAndInAFile) {
  fake.rates = {1e-3, 2e-3, 4e-3};
  fake.check = true;
  fake.write(folder);
  const std::string page = html();
  const Study study = analyse(folder);
  size_t tables = 0;
  size_t figures = 0;
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
  EXPECT_EQ(tables, 21u);
  EXPECT_GE(figures, 15u);
  EXPECT_TRUE(fs::exists(folder / "tables/runs.csv"));
}

TEST_F(ReportPage, TablesHoldTheNumbers) {
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
  EXPECT_TRUE(contains(csv("predictions"), "\nwindow,40000000,80000000,0.1")) << csv("predictions");
  EXPECT_TRUE(contains(csv("predictions"), "not measured")) << csv("predictions");
  EXPECT_TRUE(contains(csv("ladder"), "\n10000000,,4,"));
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

TEST_F(ReportPage, SummaryIsATableOfText) {
  fake.write(folder);
  const std::string summary = write_report(folder).summary;
  EXPECT_TRUE(contains(summary, "architecture  verdict")) << summary;
  EXPECT_EQ(write_report(folder).runs, 16 + 3 * 8);
  EXPECT_TRUE(contains(summary, "\nwindow        degraded")) << summary;
  EXPECT_FALSE(contains(summary, "<"));
}

}  // namespace
}  // namespace assay::report
