#include "report/table.h"

#include <gtest/gtest.h>

#include <cmath>

#include "report/figures.h"
#include "report/svg.h"

namespace assay::report {
namespace {

const Table kTable{
    "t",
    "T",
    "",
    {{"name"}, {"loss", Format::loss}, {"Δ", Format::change}, {"empty"}},
    {{std::string("a,\"b\""), 3.14159, stats::Interval{-0.12345, -0.2, 0.01}, std::string()},
     {std::string("<c>"), NAN, NAN, std::string()}}};

TEST(Table, CsvKeepsEveryDigitAndQuotesText) {
  EXPECT_EQ(
      to_csv(kTable),
      "name,loss,Δ,Δ low,Δ high,empty\n\"a,\"\"b\"\"\",3.14159,-0.12345,-0.2,0.01,\n<c>,,,,,\n");
}

TEST(Table, HtmlIsEscapedAndRoundedWithoutEmptyColumns) {
  const std::string html = to_html(kTable);
  for (const char* part :
       {"<th scope=\"row\">a,&quot;b&quot;</th>", "<caption class=\"hidden\">T</caption>", "3.142",
        "−0.123 [−0.200, +0.010]", "&lt;c&gt;", "<td class=\"n\">–</td>"})
    EXPECT_NE(html.find(part), std::string::npos) << part << " is not in " << html;
  EXPECT_EQ(html.find("empty"), std::string::npos);
}

TEST(Table, ShortenedIdentifierIsNotALongCell) {
  const Table table{.id = "t",
                    .title = "T",
                    .columns = {{"name"}, {"key", Format::code}, {"reason"}},
                    .rows = {{std::string("a"), std::string(64, 'f'), std::string(41, 'g')}}};
  const std::string html = to_html(table);
  EXPECT_NE(html.find("<td class=\"long\">ggg"), std::string::npos) << html;
  EXPECT_NE(html.find("<td title=\"fff"), std::string::npos) << html;
}

TEST(Table, NamesMayBreakAfterAnUnderscore) {
  Table table = kTable;
  table.rows = {{std::string("gated_delta"), 1.0, 1.0, std::string()}};
  EXPECT_NE(to_html(table).find(">gated_<wbr>delta</th>"), std::string::npos);
  EXPECT_NE(to_csv(table).find("\ngated_delta,"), std::string::npos);
}

TEST(Table, NumbersHaveUnits) {
  EXPECT_EQ(show(1536.0, Format::bytes), "1.5 KiB");
  EXPECT_EQ(show(12'300'000.0, Format::count), "12.30M");
  EXPECT_EQ(show(187.0, Format::seconds), "3:07");
  EXPECT_EQ(show(std::string(64, 'a'), Format::code), std::string(12, 'a') + "…");
}

Figure figure() {
  Figure out{"f", "a < b", {"x", false, {}, {}}, {"y", false, {}, {}}};
  out.series = {{"one", 0, {1, 2, NAN, 4}, {2, 3, 4, 5}, {}, {}},
                {"two", 1, {1, 2}, {3, 4}, {0.5, 1.5}, {1.5, 2.5}, false, 4}};
  return out;
}

TEST(Figure, RangeCoversDataAndErrorBars) {
  const auto [low, high] = shown_range(figure(), false);
  EXPECT_LT(low, 0.5);
  EXPECT_GT(high, 4);
  Figure logarithmic = figure();
  logarithmic.x.log = true;
  EXPECT_GT(shown_range(logarithmic, false).first, 0);
}

TEST(Figure, SvgHasErrorBarsTooltipsAndTheIdentityLine) {
  Figure f = figure();
  f.identity = true;
  const std::string svg = to_svg(f);
  EXPECT_NE(svg.find("<title>two: 1.000 [0.500, 1.500]</title>"), std::string::npos) << svg;
  EXPECT_NE(svg.find("class=\"faint\" x1"), std::string::npos) << "the identity line";
  f.y.range = {100, 101};
  EXPECT_NE(to_svg(f).find("identity: below this range"), std::string::npos);
}

TEST(Figure, LongRowLabelsAreInsideTheDrawing) {
  Figure f = figure();
  f.y.title = "";
  f.y.ticks = {{1, std::string(30, 'm') + "\t"}, {2, "short"}};
  const std::string svg = to_svg(f);
  const std::string end = "\" text-anchor=\"end\" font-weight=\"bold\">mmm";
  const size_t label = svg.find(end);
  ASSERT_NE(label, std::string::npos) << svg;
  const size_t start = svg.rfind("<text x=\"", label) + 9;
  EXPECT_GE(std::stod(svg.substr(start)), 30 * 8.3) << "the place where the label ends";
}

TEST(Figure, SubscriptOfDeltaIsDrawn) {
  EXPECT_EQ(html_text("Δ_end < 0"), "Δ<sub>end</sub> &lt; 0");
  EXPECT_NE(svg_text("Δ_end").find("<tspan"), std::string::npos);
}

TEST(Figure, PageStylesCanReplaceEveryColour) {
  const std::string svg = to_svg(figure());
  EXPECT_NE(svg.find("class=\"s1 solid\" fill=\"#0072B2\""), std::string::npos) << svg;
  EXPECT_NE(svg.find("class=\"paper\""), std::string::npos);
  EXPECT_EQ(svg.find("style="), std::string::npos) << "attributes give way to style sheets";
}

TEST(Figure, SvgIsEscapedAndHasALegend) {
  const std::string svg = to_svg(figure());
  EXPECT_NE(svg.find("a &lt; b"), std::string::npos);
  EXPECT_NE(svg.find(">two</text>"), std::string::npos);
  EXPECT_EQ(svg.find("nan"), std::string::npos);
  Figure flat = figure();
  flat.series = {{"one", 0, {1, 1}, {2, 2}, {}, {}}};
  EXPECT_EQ(to_svg(flat).find("nan"), std::string::npos) << "a single point needs a range, too";
  flat.series.clear();
  EXPECT_NE(to_svg(flat).find("</svg>"), std::string::npos);
}

}  // namespace
}  // namespace assay::report
