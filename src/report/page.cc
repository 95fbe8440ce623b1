#include "report/page.h"

#include <fmt/format.h>

#include "base/error.h"
#include "base/version.h"
#include "report/answer.h"
#include "report/svg.h"
#include "study/plan.h"

namespace assay::report {
namespace {

constexpr const char* kStyle = R"(
:root{color-scheme:light dark;--paper:#fff;--ink:#1d1d1d;--soft:#555;--rule:#ddd;--panel:#f6f6f6;
--band:#dfe7f1;--link:#0059a0;--s0:#222;--s1:#0072B2;--s2:#D55E00;--s3:#009E73;--s4:#b0558a;
--s5:#9a7000;
--s6:#2a85c0;--s7:#7A5195;--s8:#6f6f6f;--degraded:#a84300;--better:#005c94;--equivalent:#5b3f8f;
--open:#555;--edge:#0006}
@media(prefers-color-scheme:dark){:root{--paper:#16181b;--ink:#e8e8e8;--soft:#b0b4b8;--rule:#3a3e43;
--panel:#202327;--band:#2b3644;--link:#7cb8ec;--s0:#eee;--s1:#4aa8e8;--s2:#f08a3c;--s3:#3cc79c;
--s4:#dc90b8;
--s5:#d9ab3c;--s6:#8acbf5;--s7:#b794cf;--s8:#a8a8a8;--degraded:#f3985a;--better:#6cb9f0;
--equivalent:#c0a6ee;
--open:#b5b5b5;--edge:#fff7}}
@media print{:root{color-scheme:light;--paper:#fff;--ink:#000;--soft:#333;--rule:#bbb;--panel:#fff;
--band:#e4eaf2;--link:#000;--s0:#222;--s1:#0072B2;--s2:#D55E00;--s3:#009E73;--s4:#b0558a;
--s5:#9a7000;
--s6:#2a85c0;--s7:#7A5195;--s8:#6f6f6f;--degraded:#a84300;--better:#005c94;--equivalent:#5b3f8f;
--open:#444;--edge:#fff}}
*{box-sizing:border-box}
body{margin:0;font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,Helvetica,Arial,sans-serif;
color:var(--ink);background:var(--paper)}
main{max-width:1240px;margin:0 auto;padding:12px 20px 60px}
h1{font-size:1.6rem;line-height:1.2;margin:.5em 0 .3em}
h2{font-size:1.3rem;margin:2em 0 .3em;padding-top:.4em;border-top:2px solid var(--ink)}
h3{font-size:1.08rem;margin:1.8em 0 .2em}
p{margin:.4em 0 .7em;max-width:85ch}
.note,figcaption{color:var(--soft);font-size:.92rem}
.hidden{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%);
  white-space:nowrap}
.skip{position:absolute;left:-999px}
.skip:focus{left:8px;top:8px;background:var(--paper);padding:.4em .8em;z-index:9}
nav{font-size:.93rem;margin:.6em 0}
nav a{margin-right:1.1em;white-space:nowrap}
.caution,.facts{background:var(--panel);padding:.5em .9em;margin:.6em 0;max-width:110ch;
overflow-wrap:anywhere;border-left:5px solid var(--open);list-style:none}
.caution{border-left-color:var(--degraded)}
.caution p,.facts p{margin:.15em 0;max-width:none}
.badge{display:inline-flex;align-items:center;gap:.4em;font-weight:700;white-space:nowrap;
border:2px solid currentColor;border-radius:4px;padding:.05em .5em}
.badge svg{fill:currentColor;flex:none}
.degraded{color:var(--degraded)}.better{color:var(--better)}.equivalent{color:var(--equivalent)}
.notworse{color:var(--equivalent);border-style:dotted}.open{color:var(--open);border-style:dashed}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,360px),1fr));gap:14px}
.grid.pairs{grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr))}
.grid.large{grid-template-columns:1fr}
figure{min-width:0;margin:0;border:1px solid var(--rule);border-radius:4px;padding:4px;
  break-inside:avoid}
figure>svg{display:block;width:100%;height:auto;max-width:820px;margin:auto}
figcaption{text-align:right;padding:0 6px}
ul.note{margin:.4em 0 .7em;padding-left:1.2em;max-width:95ch}ul.note li{margin:.15em 0}
.key{white-space:nowrap}
.scroll{overflow-x:auto;margin:.3em 0;background:
linear-gradient(90deg,var(--paper) 60%,transparent) 0 0/32px 100% no-repeat local,
linear-gradient(270deg,var(--paper) 60%,transparent) 100% 0/32px 100% no-repeat local,
linear-gradient(90deg,var(--edge),transparent) 0 0/14px 100% no-repeat scroll,
linear-gradient(270deg,var(--edge),transparent) 100% 0/14px 100% no-repeat scroll}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{padding:.32em .7em;border-bottom:1px solid var(--rule);text-align:left;vertical-align:middle;
white-space:nowrap}
td.long{white-space:normal;min-width:22em;overflow-wrap:anywhere}
.cards th,.cards td{padding:.3em .34em;font-size:.86rem}.cards thead th{font-size:.8rem}
thead th{border-bottom:2px solid var(--ink);vertical-align:bottom;white-space:normal;
  min-width:4.2em}
tbody th{font-weight:600;position:sticky;left:0;background:var(--paper)}
td svg,th svg{display:block}.badge svg{display:inline}thead wbr,tbody wbr{display:none}
.n{text-align:right}
.words{display:block;white-space:normal;min-width:17em;max-width:26em}
a{color:var(--link)}
details>summary{cursor:pointer;margin:1.2em 0 .2em;font-weight:600}
pre{overflow-x:auto;background:var(--panel);padding:.8em;font-size:.85rem}
svg text{fill:var(--ink)}svg text.faint{fill:var(--soft)}
svg .paper{fill:var(--paper)}svg .grid{stroke:var(--rule)}svg .frame{stroke:var(--ink)}
svg .faint{stroke:var(--soft)}svg text.faint{stroke:none}svg .band{fill:var(--band)}
)";

constexpr const char* kNarrow = R"(
@media screen and (max-width:760px){main{padding:6px 12px 40px}h1{font-size:1.35rem}
tbody th{max-width:42vw;min-width:7em;white-space:normal;overflow-wrap:break-word}
tbody wbr{display:inline}
table.cards,.cards tbody,.cards tr,.cards th,.cards td{display:block}
.cards thead{position:absolute;clip-path:inset(50%);width:1px;height:1px;overflow:hidden}
.cards tr{border:1px solid var(--rule);border-radius:4px;margin:.6em 0;padding:.3em .6em}
.cards tbody th{font-size:1.05rem;max-width:none;position:static;border:0;padding:.2em 0}
.cards th::before{content:none}
.cards td{border:0;padding:.12em 0;display:flex;justify-content:space-between;gap:1em;
  text-align:right;
white-space:normal;align-items:center}
.cards td::before{content:attr(data-label);color:var(--soft);text-align:left;flex:1 1 9em}
.cards td:empty{display:none}.cards td.drawing{justify-content:center}
.words{text-align:left;max-width:none}
.cards td.drawing::before,.cards td:has(.words)::before{content:none}
figure{overflow-x:auto}figure>svg{min-width:var(--width)}
}
@media print{main{max-width:none;padding:0}body{font-size:10.5pt}nav,.skip,figcaption{display:none}
h2,h3,p.note{break-after:avoid}tr,p,li,.item{break-inside:avoid}.scroll{overflow:visible}
details::details-content{content-visibility:visible}
details>summary{list-style:none;break-after:avoid}
.scroll{background:none}
.grid,.grid.pairs{grid-template-columns:1fr 1fr}.grid.large{grid-template-columns:1fr}
figure>svg{max-height:20cm}table,.cards th,.cards td,.cards thead th{font-size:7.2pt}
th,td,.cards th,.cards td{padding:.2em .35em;white-space:normal;min-width:0}
td.n{white-space:nowrap}tbody th{position:static}tbody wbr{display:inline}
.badge{padding:0 .3em;border-width:1px}
pre{white-space:pre-wrap;overflow-wrap:anywhere}
.cards td svg,.cards th svg{max-width:150px;height:auto}thead{display:table-header-group}}
)";

// Colours of the series, from the variables above.
std::string series_style() {
  std::string out;
  for (int style = 0; style < 9; ++style) {
    out += fmt::format("svg .s{0}{{stroke:var(--s{0})}}", style);
    out += fmt::format("svg .s{0}.solid{{fill:var(--s{0});stroke:none}}", style);
    out += fmt::format("svg .s{0}.hollow{{fill:var(--paper)}}", style);
  }
  return out;
}

std::string legend(const Setting& setting) {
  std::vector<std::string> entries;
  for (const Architecture& a : setting.architectures)
    entries.push_back(fmt::format(
        R"(<span class="key"><svg width="14" height="14" aria-hidden="true">{}</svg> {}{}</span>)",
        symbol(a.style, 7, 7.5, 5), escape(a.name), a.style == 0 ? " (reference)" : ""));
  return fmt::format("<p class=\"note\">Symbols: {}.</p>\n", join(entries));
}

std::string html(const FigureGroup& group) {
  const char* layout = group.large                 ? " large"
                       : group.figures.size() == 1 ? " large"
                       : group.figures.size() % 3  ? " pairs"
                                                   : "";
  std::string out = fmt::format("<h3>{}</h3>\n<p class=\"note\">{}</p>\n<div class=\"grid{}\">\n",
                                html_text(group.title), html_text(group.note), layout);
  for (const Figure& figure : group.figures) {
    const std::string link =
        fmt::format("<a href=\"figures/{}.svg\">SVG<span class=\"hidden\"> of {}</span></a>",
                    escape(figure.id), escape(figure.title));
    out += fmt::format("<figure style=\"--width:{}px\">{}<figcaption>{}</figcaption></figure>\n",
                       figure.width, to_svg(figure), link);
  }
  return out + "</div>\n";
}

std::string csv_link(const Table& table) {
  return fmt::format("<a href=\"tables/{}.csv\">CSV<span class=\"hidden\"> of {}</span></a>",
                     escape(table.id), escape(table.title));
}

std::string html(const Table& table, bool folded) {
  if (table.rows.empty() || !table.shown) return "";
  const std::string note =
      fmt::format("<p class=\"note\">{} {}</p>\n", html_text(table.note), csv_link(table));
  if (folded)
    return fmt::format("<details><summary>{}</summary>\n{}{}</details>\n", html_text(table.title),
                       note, to_html(table));
  return fmt::format("<div class=\"item\"><h3>{}</h3>\n{}{}</div>\n", html_text(table.title), note,
                     to_html(table));
}

std::string html(const Item& item) {
  if (const auto* table = std::get_if<Table>(&item.content)) return html(*table, item.folded);
  return html(std::get<FigureGroup>(item.content));
}

// "limited-along-training" in the setting "limited".
std::string anchor(const Setting& setting, const std::string& section) {
  std::string out;
  for (const char c : setting.name + "-" + section)
    out += std::isalnum(static_cast<unsigned char>(c)) ? c : '-';
  return "section-" + out;
}

std::string facts(const Setting& setting) {
  std::string out;
  for (const Architecture& a : setting.architectures) {
    if (a.style == 0) continue;
    const std::vector<std::string> all = sentences(a, setting);
    if (all.empty()) continue;
    std::vector<std::string> findings;
    std::vector<std::string> warnings;
    for (const std::string& sentence : all) {
      const bool is_warning = sentence.starts_with("Warning:");
      (is_warning ? warnings : findings).push_back(sentence);
    }
    out += fmt::format("<div class=\"facts\"><p><b>{}</b> ({})</p>", escape(a.name),
                       word(a.end.verdict));
    out += fmt::format("<p>{}</p>", html_text(join(findings, " ")));
    for (const std::string& warning : warnings) out += fmt::format("<p>{}</p>", html_text(warning));
    out += "</div>\n";
  }
  return out;
}

std::string sources(const Setting& setting) {
  if (setting.ladder.clusters.empty()) return "";
  std::string out;
  for (const auto& [domain, count] : setting.ladder.clusters)
    out += fmt::format("{}{} {}", out.empty() ? "" : ", ", domain, count);
  return fmt::format("<p class=\"note\">{} per domain: {}.</p>\n",
                     setting.ladder.clustered_by_source ? "Sources" : "Documents", escape(out));
}

std::string opening(const SettingContents& s, const Study& study) {
  const Setting& setting = *s.setting;
  std::string out;
  if (!setting.name.empty())
    out +=
        fmt::format("<h2 id=\"{}\">{}</h2>\n", anchor(setting, "verdicts"), escape(setting.name));
  out += fmt::format("<p>{} Reference: <b>{}</b>.</p>\n", escape(question(setting)),
                     escape(study.reference));
  for (const Item& item : s.items)
    if (const auto* table = std::get_if<Table>(&item.content);
        table && item.section.empty() && table->shown)
      out += to_html(*table);
  out += "<ul class=\"note\">\n";
  for (const std::string& entry : legend_of_verdicts(setting))
    out += fmt::format("<li>{}</li>\n", html_text(entry));
  out += fmt::format("<li>The table as <a href=\"tables/{}verdicts.csv\">CSV</a>.</li>\n</ul>\n",
                     setting.name.empty() ? "" : escape(setting.name) + "-");
  std::string warnings;
  for (const std::string& caution : cautions(setting, study))
    warnings += fmt::format("<p>{}</p>", html_text(caution));
  if (!warnings.empty())
    out += fmt::format("<div class=\"caution\"><p><b>Limits of this study</b></p>{}</div>\n",
                       warnings);
  return out + facts(setting) + sources(setting) + legend(setting);
}

std::string title(const SettingContents& s, const std::string& section) {
  return s.setting->name.empty() ? section : s.setting->name + ": " + section;
}

std::vector<std::string> sections(const SettingContents& s) {
  std::vector<std::string> out;
  for (const Item& item : s.items)
    if (!item.section.empty() && (out.empty() || out.back() != item.section))
      out.push_back(item.section);
  return out;
}

std::string navigation(const std::vector<SettingContents>& settings) {
  std::string out = "<nav aria-label=\"Sections\">";
  for (const SettingContents& s : settings)
    for (const std::string& section : sections(s))
      out += fmt::format("<a href=\"#{}\">{}</a> ", anchor(*s.setting, section),
                         escape(title(s, section)));
  return out + "<a href=\"#provenance\">Provenance</a></nav>\n";
}

std::string body(const SettingContents& s) {
  std::string out;
  for (const std::string& section : sections(s)) {
    out += fmt::format("<section aria-labelledby=\"{0}\"><h2 id=\"{0}\">{1}</h2>\n",
                       anchor(*s.setting, section), escape(title(s, section)));
    for (const Item& item : s.items)
      if (item.section == section) out += html(item);
    out += "</section>\n";
  }
  return out;
}

}  // namespace

std::string page(const Study& study, const std::vector<SettingContents>& settings,
                 const std::vector<Table>& provenance) {
  std::string out = fmt::format(
      "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
      "<title>{0}</title>\n<style>{1}{2}{3}</style>\n</head>\n<body>\n"
      "<a class=\"skip\" href=\"#main\">Skip to the verdicts</a>\n"
      "<main id=\"main\">\n<h1>Study {0}</h1>\n",
      escape(study.name), kStyle, series_style(), kNarrow);
  if (const std::string asked = study::opening_sentence(study.plan); !asked.empty())
    out += fmt::format("<p>{}</p>\n", html_text(asked));
  for (const SettingContents& s : settings) out += opening(s, study);
  out += navigation(settings);
  for (const SettingContents& s : settings) out += body(s);
  out += "<section aria-labelledby=\"provenance\"><h2 id=\"provenance\">Provenance</h2>\n";
  for (const Table& table : provenance) out += html(table, true);
  out += fmt::format("<details><summary>The plan</summary><pre>{}</pre></details></section>\n",
                     escape(study.plan));
  out += fmt::format("<p class=\"note\">Made by Assay {}.</p>\n</main>\n", escape(version()));
  return out + "</body>\n</html>\n";
}

}  // namespace assay::report
