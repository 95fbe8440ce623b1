#include "report/answer.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "report/table.h"

namespace assay::report {
namespace {

std::string nats(const stats::Interval& interval) { return show(interval, Format::change); }

std::string extreme(const stats::Degradation& d) {
  if (d.domains.size() < 2) return "";
  const auto most = std::ranges::max_element(d.domains, {}, [&](auto& entry) {
    return d.average.estimate < 0 ? -entry.second.estimate : entry.second.estimate;
  });
  return fmt::format(" Largest on {}: {}.", most->first, nats(most->second));
}

std::string main_sentence(const Comparison& c, const Setting& setting) {
  const stats::Degradation& d = c.degradation;
  if (!d.problem.empty()) return "no answer: " + d.problem + ".";
  const Verdict v = verdict(d);
  const char* what = v == Verdict::none ? "no difference found"
                     : setting.mixed    ? (v == Verdict::degraded ? "higher held-out loss" : "lower held-out loss")
                     : v == Verdict::degraded ? "degraded"
                                              : "better than the reference";
  return fmt::format("{}{}Δ = {} nats a token at equal {} loss.{}", what, v == Verdict::none ? ": " : ", ",
                     nats(d.average), name(c.kind), v == Verdict::none ? "" : extreme(d));
}

std::string other_sentence(const Comparison& first, const Comparison& other) {
  const stats::Degradation& d = other.degradation;
  if (!d.problem.empty()) return fmt::format(" At equal {} loss: no answer ({}).", name(other.kind), d.problem);
  const bool differs = first.degradation.problem.empty() && verdict(d) != verdict(first.degradation);
  return fmt::format(" At equal {} loss: Δ = {}{}.", name(other.kind), nats(d.average),
                     differs ? fmt::format(" ({}: the two measures disagree)", word(verdict(d))) : "");
}

std::string speed_sentence(const Comparison& c) {
  if (!c.convergence.problem.empty()) return "";
  return fmt::format(" It needs {} times the reference's tokens to reach a {} loss of {:.3f}.",
                     show(c.convergence.ratio, Format::ratio), name(c.kind), c.convergence.loss);
}

}  // namespace

Verdict verdict(const stats::Degradation& d) {
  if (!d.problem.empty()) return Verdict::unknown;
  return d.average.low > 0 ? Verdict::degraded : d.average.high < 0 ? Verdict::better : Verdict::none;
}

const char* word(Verdict verdict) {
  switch (verdict) {
    case Verdict::degraded:
      return "degraded";
    case Verdict::better:
      return "better";
    case Verdict::none:
      return "no difference found";
    default:
      return "no answer";
  }
}

std::string answer(const Architecture& a, const Setting& setting) {
  if (a.comparisons.empty()) return "no answer: the reference has no finished run.";
  const Comparison& first = a.comparisons.front();
  std::string out = main_sentence(first, setting);
  for (size_t i = 1; i < a.comparisons.size(); ++i) out += other_sentence(first, a.comparisons[i]);
  return out + speed_sentence(first);
}

std::string question(const Setting& setting) {
  if (setting.mixed)
    return fmt::format(
        "Trained on {} and tested on held-out text of the same domains (split {}): at equal training loss, does an "
        "architecture reach the same held-out loss?",
        join(setting.train), setting.held_out);
  return fmt::format(
      "Trained on {} and tested on {} (split {}), which were never seen in training: at equal pre-training loss, is "
      "the "
      "loss there higher than the reference's?",
      join(setting.train), join(setting.test), setting.split);
}

std::vector<std::string> cautions(const Setting& setting, const Study& study) {
  std::vector<std::string> out;
  for (const Architecture& a : setting.architectures)
    if (!a.comparisons.empty() && a.comparisons[0].degradation.problem.empty() &&
        a.comparisons[0].degradation.seed_freedom == 0) {
      out.push_back("No architecture has two seeds: the intervals count documents only, and are too narrow.");
      break;
    }
  for (const std::string& domain : setting.left_out)
    out.push_back(
        fmt::format("Domain {} is left out: its {} split has fewer than two documents.", domain, setting.split));
  for (const Json& row : study.runs)
    if (row["setting"] == setting.name && row["status"] != "done") {
      const std::string reason = row.value("reason", "");
      out.push_back(fmt::format("Run {} is missing ({}{}).", row["name"].get<std::string>(),
                                row["status"].get<std::string>(), reason.empty() ? "" : ": " + reason));
    }
  return out;
}

}  // namespace assay::report
