// The tables of the primary comparison.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/progress.h"
#include "report/answer.h"
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
  if (verdict == stats::Verdict::not_settled) return "open";
  return verdict == stats::Verdict::not_worse ? "notworse" : word(verdict);
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
    case stats::Verdict::not_worse:
      return "M1 2L15 6V8L1 12V9.5L10 7L1 4.5ZM2 13H14V15H2Z";  // greater-or-equal sign
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

// The three numbers of an architecture, of which the first can be missing or carry no verdict.
std::vector<BarRow> bar_rows(const Architecture& a, const Setting& setting) {
  const stats::LadderOptions& limits = setting.ladder.options;
  const stats::EndResult& end = a.end;
  return {{"Δ", end.has_delta ? end.delta : kNoInterval, limits.margin, !end.judged},
          {"E", end.equal_tokens.value, limits.margin},
          {"R", end.recall.value, limits.recall_margin}};
}

BarScale bar_scale(const Setting& setting) {
  const double margin = setting.ladder.options.margin;
  BarScale scale{.low = -3 * margin, .high = 3 * margin};
  for (const Architecture* a : contenders(setting))
    for (const BarRow& row : bar_rows(*a, setting)) {
      if (!std::isfinite(row.interval.low)) continue;
      // An interval of a few seeds may be much wider than all estimates; its bar is cut there.
      const double most = 4 * std::abs(row.interval.estimate) + 4 * margin;
      scale.low = std::min(scale.low, std::max(row.interval.low, -most));
      scale.high = std::max(scale.high, std::min(row.interval.high, most));
    }
  const double side = 0.06 * (scale.high - scale.low);
  scale.low -= side;
  scale.high += side;
  return scale;
}

std::string bar_tip(const Architecture& a, const Setting& setting) {
  std::string tip = a.name + ", nats";
  for (const BarRow& row : bar_rows(a, setting))
    tip += fmt::format("; {}: {}", row.label,
                       std::isfinite(row.interval.estimate) ? show(row.interval, Format::change)
                                                            : "no comparison is possible");
  return tip;
}

Cell delta_of(const stats::EndResult& end) { return end.judged ? Cell(end.delta) : Cell(kNone); }

// The three numbers, one below the other.
Rich numbers_of(const stats::EndResult& end) {
  std::string lines;
  for (const stats::Interval& number :
       {end.judged ? end.delta : kNoInterval, end.equal_tokens.value, end.recall.value}) {
    if (!lines.empty()) lines += "<br>";
    lines += std::isfinite(number.estimate) ? show(number, Format::change) : "–";
  }
  return {"", lines};
}

Rich words_of(const Architecture& a, const Setting& setting) {
  const std::string text = in_one_sentence(a, setting);
  if (text.empty()) return {};
  return {"", fmt::format("<span class=\"words\">{}</span>", html_text(text))};
}

// "0.5 / 0.7": of the architecture, and of the reference where it has the same held-out loss.
std::string epochs(const stats::EndResult& end) {
  if (!std::isfinite(end.epochs)) return "";
  const std::string own = fmt::format("{:.2g}", end.epochs);
  return std::isfinite(end.reference_epochs) ? fmt::format("{} / {:.2g}", own, end.reference_epochs)
                                             : own;
}

std::vector<Cell> reference_row(const Architecture& a) {
  return {a.name,
          "reference",
          "",
          "",
          kNone,
          kNone,
          kNone,
          "",
          1.0,
          kNone,
          kNone,
          kNone,
          tokens_per_second(a),
          state_bytes_at_100k(a),
          ""};
}

// The smallest and the largest budget at which E and R can be read.
struct EarlyAndLate {
  const Architecture* architecture;
  const stats::BudgetResult* early;
  const stats::BudgetResult* late;
};

std::vector<EarlyAndLate> early_and_late(const Setting& setting) {
  std::vector<EarlyAndLate> out;
  for (const Architecture* a : contenders(setting)) {
    std::vector<const stats::BudgetResult*> usable;
    for (const stats::BudgetResult& budget : a->end.budgets)
      if (std::isfinite(budget.equal_tokens.estimate)) usable.push_back(&budget);
    if (usable.size() > 1) out.push_back({a, usable.front(), usable.back()});
  }
  return out;
}

// "Of E, Kendall's τ is 0.91, and 0 of 12 architectures change their sign."
std::string agreement_of(const std::vector<EarlyAndLate>& pairs, const char* name,
                         stats::Interval stats::BudgetResult::* number) {
  std::vector<double> early;
  std::vector<double> late;
  int64_t contradictions = 0;
  for (const EarlyAndLate& pair : pairs) {
    const stats::Interval& first = pair.early->*number;
    const stats::Interval& last = pair.late->*number;
    if (!std::isfinite(first.estimate) || !std::isfinite(last.estimate)) continue;
    early.push_back(first.estimate);
    late.push_back(last.estimate);
    contradictions += (first.low > 0 && last.high < 0) || (first.high < 0 && last.low > 0);
  }
  if (early.size() < 3) return "";
  return fmt::format(
      " {}: Kendall's τ between the two budgets is {:.2f}; "
      "intervals on opposite sides of zero: {} of {}.",
      name, stats::kendall_tau(early, late), contradictions, early.size());
}

std::string rate(double learning_rate) { return fmt::format("{:g}", learning_rate); }

}  // namespace

std::string table_id(const Setting& setting, const std::string& name) {
  return setting.name.empty() ? name : setting.name + "-" + name;
}

Table verdict_table(const Setting& setting) {
  Table table{.id = table_id(setting, "verdicts"), .title = "Verdicts", .cards = true};
  const BarScale scale = bar_scale(setting);
  table.columns = {
      {"architecture"},
      {"verdict"},
      {.name = "nats; right: worse", .filed = false, .markup = "<br>" + interval_axis(scale)},
      {.name = "Δ_end, E and R with 95 % intervals", .filed = false},
      {"Δ_end, equal loss", Format::change, false},
      {"E, equal tokens", Format::change, false},
      {"R, recall in domain", Format::change, false},
      {"epochs, own / reference"},
      {"tokens needed, ×", Format::ratio},
      {"final loss − reference", Format::change, false},
      {"trend per doubling", Format::change, false},
      {"judged at, tokens", Format::tokens, false},
      {"tokens/s", Format::count, false},
      {"state at 102,400 tokens", Format::bytes, false},
      {.name = "in words", .filed = false}};
  if (setting.has_reference()) table.rows.push_back(reference_row(setting.reference()));
  for (const Architecture* a : contenders(setting)) {
    const stats::EndResult& end = a->end;
    const std::string bars =
        interval_bars(bar_rows(*a, setting), scale, a->style, bar_tip(*a, setting));
    table.rows.push_back({a->name, badge(end.verdict), Rich{"", bars}, numbers_of(end),
                          delta_of(end), end.equal_tokens.value, end.recall.value, epochs(end),
                          a->tokens_ratio, end.final_loss - end.reference_loss,
                          end.has_trend ? end.trend.estimate : kNone,
                          end.judged ? end.tokens : kNone, tokens_per_second(*a),
                          state_bytes_at_100k(*a), words_of(*a, setting)});
  }
  return table;
}

Table equal_tokens_table(const Setting& setting) {
  const stats::LadderOptions& limits = setting.ladder.options;
  Table table{
      .id = table_id(setting, "equal-tokens"),
      .title = "E and R by budget",
      .note = fmt::format(
          "E compares the {0} and R the loss on recall targets in domain after the same tokens, "
          "corrected for the difference of the {1} with the slope of the reference at this budget. "
          "Each interval has 95 % coverage by itself. Differences of R below {2} carry no verdict.",
          setting.test_name(), setting.pretraining_name(), limits.recall_margin)};
  table.columns = {{"architecture"},         {"tokens", Format::tokens},
                   {"seeds", Format::count}, {"epochs", Format::ratio},
                   {"E", Format::change},    {"R", Format::change},
                   {"slope", Format::ratio}, {"problem"}};
  for (const Architecture* a : contenders(setting))
    for (const stats::BudgetResult& budget : a->end.budgets)
      table.rows.push_back({a->name, budget.tokens, std::to_string(budget.seeds), budget.epochs,
                            budget.equal_tokens, budget.recall, budget.slope,
                            budget.no_equal_tokens});
  return table;
}

Table early_table(const Setting& setting) {
  const std::vector<EarlyAndLate> pairs = early_and_late(setting);
  Table table{.id = table_id(setting, "early"),
              .title = "Is the early answer that of longer runs?",
              .note =
                  "E and R at the smallest and at the largest budget with a mature rung. "
                  "Each interval has 95 % coverage by itself." +
                  agreement_of(pairs, "E", &stats::BudgetResult::equal_tokens) +
                  agreement_of(pairs, "R", &stats::BudgetResult::recall)};
  table.columns = {{"architecture"},
                   {"early, tokens", Format::tokens},
                   {"late, tokens", Format::tokens},
                   {"E, early", Format::change},
                   {"E, late", Format::change},
                   {"R, early", Format::change},
                   {"R, late", Format::change}};
  for (const EarlyAndLate& pair : pairs)
    table.rows.push_back({pair.architecture->name, pair.early->tokens, pair.late->tokens,
                          pair.early->equal_tokens, pair.late->equal_tokens, pair.early->recall,
                          pair.late->recall});
  return table;
}

Table wide_table(const Setting& setting) {
  Table table{.id = table_id(setting, "all-domains"),
              .title = "All unseen domains",
              .note =
                  "E by domain, and its mean over all unseen domains. "
                  "\"As a sample\" is the interval for the mean over domains of this kind: "
                  "it counts that other domains could have been chosen. "
                  "Each interval has 95 % coverage by itself."};
  if (setting.further.empty()) return table;
  table.columns = {{"architecture"}, {"mean", Format::change}, {"as a sample", Format::change}};
  for (const std::string& domain : setting.unseen())
    table.columns.push_back({domain, Format::change});
  for (const Architecture* a : contenders(setting)) {
    const stats::EqualTokens& wide = a->wide.equal_tokens;
    if (!wide.problem.empty() || wide.domains.empty()) continue;
    std::vector<Cell> row = {a->name, wide.single, wide.over_domains};
    for (const std::string& domain : setting.unseen()) row.push_back(wide.domains.at(domain));
    table.rows.push_back(std::move(row));
  }
  return table;
}

Table domain_table(const Setting& setting) {
  Table table{.id = table_id(setting, "delta-by-domain"),
              .title = "Δ_end by domain",
              .note =
                  "Exploratory: each interval has 95 % coverage by itself, "
                  "and no correction is made for looking at several domains. "
                  "The mean has the simultaneous interval of the verdict. Domains as a sample: "
                  "the interval counts that other domains could have been chosen. Bounded loss: "
                  "each token counts at most ln V + 3 nats."};
  table.columns = {{"architecture"},
                   {"judged at, tokens", Format::tokens},
                   {"mean", Format::change},
                   {"domains as a sample", Format::change},
                   {"bounded loss", Format::change}};
  for (const std::string& domain : setting.test) table.columns.push_back({domain, Format::change});
  for (const char* error : {"error of its seeds", "error of the reference", "error of documents"})
    table.columns.push_back({error, Format::loss, false});
  for (const Architecture* a : contenders(setting)) {
    const stats::EndResult& end = a->end;
    if (!end.judged) continue;
    std::vector<Cell> row = {a->name, end.tokens, end.delta, end.over_domains, end.bounded};
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
                  "Of the budgets without a problem that repeat their text least, "
                  "the verdict is about the largest. "
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
  std::vector<double> predicted;
  std::vector<double> measured;
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
              .note = fmt::format(
                  "The reference was trained to the end at each budget. "
                  "The losses are means over the seeds. "
                  "The loss on recall targets shows whether the reference is mature: "
                  "it then falls by at most {:.2g} nats more than the loss on other targets, "
                  "from one budget to the next.",
                  setting.ladder.options.maturity_fall)};
  table.columns = {{"tokens", Format::tokens},
                   {"epochs", Format::ratio},
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
    std::vector<Cell> row = {budget.tokens, budget.epochs, std::to_string(budget.runs.size()),
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
