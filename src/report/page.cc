#include "report/page.h"

#include <fmt/format.h>

#include "base/version.h"
#include "report/answer.h"
#include "report/plotly.h"
#include "report/svg.h"

namespace assay::report {
namespace {

constexpr const char* kStyle = R"(
*{box-sizing:border-box}
body{margin:0;font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,Helvetica,Arial,sans-serif;color:#222;background:#fff}
main{max-width:1240px;margin:0 auto;padding:16px 20px 60px}
h1{font-size:1.7rem;line-height:1.2;margin:.6em 0 .3em}
h2{font-size:1.3rem;margin:2em 0 .3em;padding-top:.4em;border-top:2px solid #222}
h3{font-size:1.08rem;margin:1.8em 0 .2em}
p{margin:.4em 0 .8em;max-width:75ch}
.note{color:#555;font-size:.93rem}
ul.answers{list-style:none;margin:1em 0;padding:0}
ul.answers li{border-left:6px solid #777;background:#f6f6f6;padding:.55em .9em;margin:.5em 0;max-width:95ch}
ul.answers .degraded{border-color:#D55E00} ul.answers .better{border-color:#0072B2} ul.answers .none{border-color:#009E73}
.warning{display:block;font-size:.93rem;margin-top:.35em;color:#7a3b00}
.caution{background:#fff4e0;border:1px solid #e69f00;padding:.5em .9em;max-width:95ch;overflow-wrap:anywhere}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,380px),1fr));gap:14px}
.wide{grid-template-columns:repeat(auto-fit,minmax(min(100%,520px),1fr))}
.panel{min-width:0;border:1px solid #e2e2e2;border-radius:4px;padding:2px}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;margin:.4em 0 .6em;font-size:.95rem}
.legend span{display:inline-flex;align-items:center;gap:6px}
.scroll{overflow-x:auto;margin:.3em 0;-webkit-overflow-scrolling:touch}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{padding:.32em .7em;border-bottom:1px solid #ddd;text-align:left;vertical-align:top;white-space:nowrap}
thead th{border-bottom:2px solid #222;background:#fff;vertical-align:bottom;white-space:normal;min-width:4.5em}
tbody th{font-weight:600;position:sticky;left:0;background:#fff}
.n{text-align:right}
a{color:#0059a0}
details>summary{cursor:pointer;margin:1.2em 0 .2em;font-weight:600}
pre{overflow-x:auto;background:#f6f6f6;padding:.8em;font-size:.85rem}
@media(max-width:600px){main{padding:8px 12px 40px}h1{font-size:1.4rem}tbody th{max-width:42vw;min-width:7.5em;white-space:normal;overflow-wrap:break-word}}
)";

constexpr const char* kScript = R"(
for (const element of document.querySelectorAll('.plot')) {
  const figure = JSON.parse(document.getElementById(element.id + '-data').textContent);
  Plotly.newPlot(element, figure.data, figure.layout, {responsive: true, displayModeBar: false});
}
)";

std::string legend(const Setting& setting) {
  std::string out = "<div class=\"legend\">";
  for (const Architecture& a : setting.architectures)
    out += fmt::format("<span><svg width=\"16\" height=\"16\" aria-hidden=\"true\">{}</svg>{}{}</span>",
                       symbol(a.style, 8, 8, 5.5), escape(a.name), a.style == 0 ? " (reference)" : "");
  return out + "</div>\n";
}

std::string plot(const Figure& figure) {
  std::string data = to_plotly(figure).dump(), safe;
  for (const char c : data) safe += c == '<' ? "\\u003c" : std::string(1, c);  // no tag can end the script early
  return fmt::format(
      "<div class=\"plot\" id=\"{0}\" role=\"img\" aria-label=\"{1}\"></div>"
      "<script type=\"application/json\" id=\"{0}-data\">{2}</script>\n",
      escape(figure.id), escape(figure.title), safe);
}

std::string svg_links(const FigureGroup& group) {
  std::string out;
  for (const Figure& figure : group.figures)
    out += fmt::format("{}<a href=\"figures/{}.svg\">{}</a>", out.empty() ? "SVG: " : ", ", escape(figure.id),
                       escape(figure.title));
  return out;
}

std::string html(const FigureGroup& group, const Setting& setting) {
  if (group.figures.empty()) return "";
  std::string out =
      fmt::format("<h3>{}</h3>\n<p class=\"note\">{} {}.</p>\n{}<div class=\"grid{}\">\n", escape(group.title),
                  escape(group.note), svg_links(group), legend(setting), group.figures.size() % 3 == 0 ? "" : " wide");
  for (const Figure& figure : group.figures) out += "<div class=\"panel\">" + plot(figure) + "</div>\n";
  return out + "</div>\n";
}

std::string html(const Table& table) {
  if (table.rows.empty()) return "";
  return fmt::format("<h3>{}</h3>\n<p class=\"note\">{} <a href=\"tables/{}.csv\">CSV</a></p>\n{}", escape(table.title),
                     escape(table.note), escape(table.id), to_html(table));
}

std::string folded(const Table& table) {
  if (table.rows.empty()) return "";
  return fmt::format(
      "<details><summary>{}</summary>\n<p class=\"note\"><a href=\"tables/{}.csv\">CSV</a></p>\n{}</details>\n",
      escape(table.title), escape(table.id), to_html(table));
}

const char* css(const Architecture& a) {
  if (a.comparisons.empty()) return "unknown";
  switch (verdict(a.comparisons[0].degradation)) {
    case Verdict::degraded:
      return "degraded";
    case Verdict::better:
      return "better";
    case Verdict::none:
      return "none";
    default:
      return "unknown";
  }
}

std::string answers(const Setting& setting) {
  std::string out = "<ul class=\"answers\">\n";
  for (const Architecture& a : setting.architectures) {
    if (a.style == 0) continue;
    out += fmt::format("<li class=\"{}\"><b>{}</b>: {}", css(a), escape(a.name), escape(answer(a, setting)));
    for (const std::string& warning : a.warnings)
      out += fmt::format("<span class=\"warning\">Warning: {}</span>", escape(warning));
    out += "</li>\n";
  }
  return out + "</ul>\n";
}

std::string opening(const Setting& setting, const Study& study) {
  std::string out;
  if (!setting.name.empty()) out += fmt::format("<h2>{}</h2>\n", escape(setting.name));
  out += fmt::format("<p>{} Reference: <b>{}</b>.</p>\n", escape(question(setting)), escape(study.reference));
  for (const std::string& caution : cautions(setting, study))
    out += fmt::format("<p class=\"caution\">{}</p>\n", escape(caution));
  return out + answers(setting);
}

std::string body(const Section& s, bool many) {
  std::string out =
      many ? fmt::format("<h2>{}: the evidence</h2>\n", escape(s.setting->name)) : "<h2>The evidence</h2>\n";
  out += html(s.losses);
  for (const FigureGroup& group : s.figures) out += html(group, *s.setting);
  for (const Table* table : {&s.degradation, &s.convergence, &s.slices, &s.probes, &s.speed, &s.differing})
    out += html(*table);
  return out + folded(s.common);
}

}  // namespace

std::string page(const Study& study, const std::vector<Section>& sections, const Table& runs) {
  std::string out = fmt::format(
      "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" "
      "content=\"width=device-width, "
      "initial-scale=1\">\n<title>{0}</title>\n<style>{1}</style>\n</head>\n<body>\n<main>\n<h1>Study {0}</h1>\n",
      escape(study.name), kStyle);
  for (const Section& section : sections) out += opening(*section.setting, study);
  for (const Section& section : sections) out += body(section, sections.size() > 1);
  out += "<h2>Provenance</h2>\n" + html(runs);
  out += fmt::format("<details><summary>The plan</summary><pre>{}</pre></details>\n",
                     escape(study.plan["text"].get<std::string>()));
  out += fmt::format("<p class=\"note\">Made by Assay {}.</p>\n</main>\n<script>", escape(version()));
  out += plotly_js();
  return out + "</script>\n<script>" + kScript + "</script>\n</body>\n</html>\n";
}

}  // namespace assay::report
