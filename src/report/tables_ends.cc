// The tables of the primary comparison.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/progress.h"
#include "report/svg.h"
#include "report/tables.h"
#include "stats/prediction.h"

namespace assay::report {
namespace {

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
constexpr stats::Interval kNoInterval{kNone, kNone, kNone};

std::vector<const Architecture*> contenders(const Setting& setting) {
  std::vector<const Architecture*> out;
  for (const Architecture& a : setting.architectures)
    if (a.style != 0) out.push_back(&a);
  return out;
}

const char* css_of(stats::Verdict verdict) {
  return verdict == stats::Verdict::not_settled ? "open" : word(verdict);
}
// A mark of its own for each verdict, so that colour is not the only sign.
const char* mark_of(stats::Verdict verdict) {
  switch (verdict) {
    case stats::Verdict::degraded:
      return "M8 2L15 14H1Z";  // triangle that points up: a higher loss
    case stats::Verdict::better:
      return "M8 14L1 2H15Z";  // triangle that points down: a lower loss
    case stats::Verdict::equivalent:
      return "M2 4H14V7H2ZM2 9H14V12H2Z";  // equals sign
    default:
      return "M8 1A7 7 0 1 0 8 15A7 7 0 1 0 8 1ZM8 4A4 4 0 1 1 8 12A4 4 0 1 1 8 4Z";  // ring
  }
}

Rich badge(stats::Verdict verdict) {
  const char* text = word(verdict);
  const std::string path = fmt::format(R"(<path fill-rule="evenodd" d="{}"/>)", mark_of(verdict));
  const std::string icon = fmt::format(
      R"(<svg aria-hidden="true" width="13" height="13" viewBox="0 0 16 16">{}</svg>)", path);
  return {text, fmt::format(R"(<span class="badge {}">{}{}</span>)", css_of(verdict), icon, text)};
}

BarScale bar_scale(const Setting& setting) {
  BarScale scale{.low = -3 * setting.ladder.margin,
                 .high = 3 * setting.ladder.margin,
                 .margin = setting.ladder.margin};
  for (const Architecture* a : contenders(setting)) {
    if (!a->end.judged) continue;
    // An interval of a few seeds may be much wider than all estimates; its bar is cut there.
    const double most = 4 * std::abs(a->end.delta.estimate) + 4 * setting.ladder.margin;
    scale.low = std::min(scale.low, std::max(a->end.delta.low, -most));
    scale.high = std::max(scale.high, std::min(a->end.delta.high, most));
  }
  const double side = 0.06 * (scale.high - scale.low);
  scale.low -= side;
  scale.high += side;
  return scale;
}

std::string bar_tip(const Architecture& a, const Setting& setting) {
  if (!a.end.judged) return a.name + ": no comparison is possible";
  return fmt::format("{}: {} nats per token; the margin is ±{:.2f}", a.name,
                     show(a.end.delta, Format::change), setting.ladder.margin);
}

Cell delta_of(const stats::EndResult& end) { return end.judged ? Cell(end.delta) : Cell(kNone); }

std::vector<Cell> reference_row(const Architecture& a) {
  return {a.name,
          "reference",
          "",
          kNone,
          kNone,
          kNone,
          1.0,
          kNone,
          tokens_per_second(a),
          state_bytes_at_100k(a)};
}

std::string rate(double learning_rate) { return fmt::format("{:g}", learning_rate); }

}  // namespace

std::string table_id(const Setting& setting, const std::string& name) {
  return setting.name.empty() ? name : setting.name + "-" + name;
}

Table verdict_table(const Setting& setting) {
  Table table{.id = table_id(setting, "verdicts"), .title = "Verdicts", .cards = true};
  const BarScale scale = bar_scale(setting);
  const std::string difference = "final loss − reference";
  table.columns = {
      {"architecture"},
      {"verdict"},
      {.name = "Δ_end, nats per token", .filed = false, .markup = "<br>" + interval_axis(scale)},
      {"Δ_end with 95 % interval", Format::change},
      {difference, Format::change},
      {"trend per doubling", Format::change},
      {"tokens needed, ×", Format::ratio},
      {"judged at, tokens", Format::tokens},
      {"tokens/s", Format::count},
      {"state at 102,400 tokens", Format::bytes}};
  if (setting.has_reference()) table.rows.push_back(reference_row(setting.reference()));
  for (const Architecture* a : contenders(setting)) {
    const stats::EndResult& end = a->end;
    const std::string bar =
        interval_bar(end.judged ? end.delta : kNoInterval, scale, a->style, bar_tip(*a, setting));
    table.rows.push_back({a->name, badge(end.verdict), Rich{"", bar}, delta_of(end),
                          end.final_loss - end.reference_loss,
                          end.has_trend ? end.trend.estimate : kNone, a->tokens_ratio,
                          end.judged ? end.tokens : kNone, tokens_per_second(*a),
                          state_bytes_at_100k(*a)});
  }
  return table;
}

Table domain_table(const Setting& setting) {
  Table table{.id = table_id(setting, "delta-by-domain"),
              .title = "Δ_end by domain",
              .note =
                  "Exploratory: each interval has 95 % coverage by itself, "
                  "and no correction is made for looking at several domains. "
                  "The mean has the simultaneous interval of the verdict."};
  table.columns = {
      {"architecture"}, {"judged at, tokens", Format::tokens}, {"mean", Format::change}};
  for (const std::string& domain : setting.test) table.columns.push_back({domain, Format::change});
  for (const char* error : {"error of its seeds", "error of the reference", "error of documents"})
    table.columns.push_back({error, Format::loss, false});
  for (const Architecture* a : contenders(setting)) {
    const stats::EndResult& end = a->end;
    if (!end.judged) continue;
    std::vector<Cell> row = {a->name, end.tokens, end.delta};
    for (const std::string& domain : setting.test) row.push_back(end.domains.at(domain));
    for (const double error : {end.seed_error, end.reference_error, end.document_error})
      row.push_back(error);
    table.rows.push_back(std::move(row));
  }
  return table;
}

Table recall_table(const Setting& setting) {
  Table table{.id = table_id(setting, "delta-by-recall"),
              .title = "Recall targets and other targets",
              .note =
                  "Recall targets are tokens that a repeated bigram of the context predicts. "
                  "The two parts add up to Δ_end. "
                  "Each part is the sum of its differences, divided by the number of all targets. "
                  "Each interval has 95 % coverage by itself."};
  table.columns = {{"architecture"},
                   {"Δ_end", Format::change},
                   {"part on recall targets", Format::change},
                   {"part on other targets", Format::change}};
  for (const Architecture* a : contenders(setting))
    if (a->end.judged)
      table.rows.push_back({a->name, a->end.delta_single, a->end.recall_part, a->end.other_part});
  return table;
}

Table budget_table(const Setting& setting) {
  Table table{.id = table_id(setting, "delta-by-budget"),
              .title = "Δ_end by budget",
              .note =
                  "Each interval has 95 % coverage by itself. "
                  "The verdict is about the largest budget without a problem. "
                  "A budget that the ladder does not cover has no Δ_end."};
  table.columns = {{"architecture"},
                   {"tokens", Format::tokens},
                   {"seeds", Format::count},
                   {setting.pretraining_name(), Format::loss},
                   {setting.test_name(), Format::loss},
                   {"Δ_end", Format::change},
                   {"problem"}};
  for (const Architecture* a : contenders(setting))
    for (const stats::BudgetResult& budget : a->end.budgets)
      table.rows.push_back({a->name, budget.tokens, std::to_string(budget.seeds), budget.held_out,
                            budget.out_of_domain,
                            budget.problem.empty() ? Cell(budget.delta) : Cell(kNone),
                            budget.problem + budget.caveat});
  return table;
}

Table prediction_table(const Setting& setting) {
  const std::vector<Foretold> found = predictions(setting);
  std::vector<double> predicted, measured;
  int64_t inside = 0;
  for (const Foretold& one : found) {
    if (!one.measured) continue;
    predicted.push_back(one.predicted.estimate);
    measured.push_back(one.measured->estimate);
    inside += one.inside();
  }
  std::string note =
      "Smaller budgets of an architecture predict the budget of its verdict. "
      "All its budgets predict twice the largest one, "
      "where the ladder reaches that far and the reference does not overfit. "
      "From one smaller budget, the prediction is its Δ_end. "
      "From several, it is the regression line of Δ_end over log tokens. "
      "Budgets without a verdict are used only if no budget has one. "
      "The interval is meant to hold 90 % of the later measurements, with as many seeds.";
  if (!measured.empty())
    note += fmt::format(" Of {} measurements, {} are in the interval.", measured.size(), inside);
  if (measured.size() >= 3)
    note += fmt::format(
        " Kendall's τ between prediction and measurement is {:.2f}; 1 is the same order.",
        stats::kendall_tau(predicted, measured));
  Table table{.id = table_id(setting, "predictions"),
              .title = "Δ_end predicted from smaller budgets",
              .note = note};
  table.columns = {{"architecture"},
                   {"predicted from", Format::tokens},
                   {"for", Format::tokens},
                   {"predicted Δ_end, 90 %", Format::change},
                   {"measured Δ_end, 95 %", Format::change},
                   {"measured value in the interval"}};
  for (const Foretold& one : found)
    table.rows.push_back({one.name, one.from, one.tokens, one.predicted,
                          one.measured ? Cell(*one.measured) : Cell(kNone),
                          !one.measured  ? "not measured"
                          : one.inside() ? "yes"
                                         : "no"});
  return table;
}

Table ladder_table(const Setting& setting) {
  Table table{.id = table_id(setting, "ladder"),
              .title = "The ladder of the reference",
              .note =
                  "The reference was trained to the end at each budget. "
                  "The losses are means over the seeds. "
                  "The loss on recall targets shows whether the reference is mature: "
                  "it then falls by at most 0.1 nats from one budget to the next."};
  table.columns = {{"tokens", Format::tokens},
                   {"seeds", Format::count},
                   {setting.pretraining_name(), Format::loss},
                   {setting.test_name(), Format::loss}};
  for (const std::string& domain : setting.test) table.columns.push_back({domain, Format::loss});
  table.columns.push_back({"loss on recall targets", Format::loss});
  for (size_t b = 0; b < setting.ladder.budgets.size(); ++b) {
    const stats::Budget& budget = setting.ladder.budgets[b];
    const auto mean = [&](auto&& get) {
      double sum = 0;
      for (const stats::End& end : budget.runs) sum += get(end);
      return sum / double(budget.runs.size());
    };
    std::vector<Cell> row = {budget.tokens, std::to_string(budget.runs.size()),
                             mean([](const stats::End& end) { return end.held_out; }),
                             mean([](const stats::End& end) { return loss_of(end); })};
    for (const std::string& domain : setting.test)
      row.push_back(mean([&](const stats::End& end) { return loss_of(end, domain); }));
    row.push_back(b < setting.ladder.recall.size() ? setting.ladder.recall[b] : kNone);
    table.rows.push_back(std::move(row));
  }
  return table;
}

Table tuning_table(const Setting& setting) {
  Table table{.id = table_id(setting, "learning-rates"),
              .title = "Learning rates that were tried",
              .note =
                  "The table shows the held-out loss of the training domains at the end of a run, "
                  "as a mean over seeds. "
                  "A run has the given number of tokens. "
                  "The rate with the lowest loss is used. "
                  "Losses out of domain have no part in the choice."};
  table.columns = {{"architecture"},    {"tokens", Format::tokens},
                   {"learning rate"},   {"held-out loss", Format::loss},
                   {"runs that ended"}, {"choice"}};
  for (const Grid& grid : setting.grids)
    for (const Grid::Point& point : grid.points) {
      std::string choice = point.chosen ? "chosen" : "";
      if (point.chosen && grid.at_the_end()) choice += ", at the end of the grid";
      table.rows.push_back({grid.model, double(grid.tokens), rate(point.learning_rate),
                            point.held_out_loss, fmt::format("{} of {}", point.done, point.planned),
                            choice});
    }
  return table;
}

Table check_table(const Setting& setting) {
  Table table{.id = table_id(setting, "learning-rate-checks"),
              .title = "Verdicts at half and at twice the learning rate",
              .note =
                  "All rates are compared with the same ladder. "
                  "The chosen rates have the intervals of the study. "
                  "Those of the other rates hold for all of them together (95 %)."};
  table.columns = {{"architecture"},
                   {"learning rate"},
                   {"which"},
                   {"verdict"},
                   {"Δ_end", Format::change},
                   {setting.pretraining_name(), Format::loss},
                   {setting.test_name(), Format::loss},
                   {.name = "reason", .shown = false}};
  for (const Architecture* a : contenders(setting)) {
    if (a->checks.empty()) continue;
    table.rows.push_back({a->name, rate(a->runs().front().learning_rate), "the chosen rate",
                          badge(a->end.verdict), delta_of(a->end), a->end.held_out,
                          a->end.final_loss, ""});
    for (const Check& check : a->checks)
      table.rows.push_back({a->name, rate(check.learning_rate), check.purpose,
                            badge(check.end.verdict), delta_of(check.end), check.end.held_out,
                            check.end.final_loss, check.end.reason});
  }
  return table;
}

Table overlap_table(const Setting& setting) {
  Table table{.id = table_id(setting, "overlap"),
              .title = "Do the test text and the held-out text occur in the training text?",
              .note =
                  "Duplicates are documents whose tokens equal those of a training document. "
                  "A 13-gram is a sequence of 13 tokens. "
                  "The last column is the share of the 13-grams that the training text has, too.",
              .columns = {{"domain"},
                          {"text"},
                          {"documents", Format::tokens},
                          {"duplicates", Format::tokens},
                          {"shared 13-grams", Format::percent}}};
  for (const auto& row : setting.overlap)
    table.rows.push_back({row.domain,
                          std::ranges::count(setting.train, row.domain) ? "held-out" : "test",
                          double(row.documents), double(row.duplicates),
                          row.ngrams > 0 ? 100 * row.ngram_share() : kNone});
  return table;
}

}  // namespace assay::report
