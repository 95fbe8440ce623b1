#include "stats/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include "base/error.h"

namespace assay::stats {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr size_t kFewClusters = 5;
constexpr double kLongestForecast = 4;  // times the tokens of the last rung

// The reason why a run is unusable; empty if there is none.
std::string problem_of(const End& end) {
  if (!std::isfinite(end.held_out)) return fmt::format("a held-out loss of {}", end.held_out);
  for (const auto* domains : {&end.domains, &end.held_out_domains})
    for (const auto& [domain, losses] : *domains)
      for (const auto* values : {&losses.nll, &losses.recall_nll, &losses.bounded_nll})
        for (const double nll : *values)
          if (!std::isfinite(nll)) return fmt::format("a loss of {} on domain '{}'", nll, domain);
  return "";
}

double mean_held_out(const Budget& budget) {
  double sum = 0;
  for (const End& end : budget.runs) sum += end.held_out;
  return sum / double(budget.runs.size());
}

// The lowest and the highest held-out loss of the reference's runs.
std::pair<double, double> held_out_range(const std::vector<Budget>& ladder) {
  double low = std::numeric_limits<double>::infinity();
  double high = -low;
  for (const Budget& rung : ladder)
    for (const End& end : rung.runs) {
      low = std::min(low, end.held_out);
      high = std::max(high, end.held_out);
    }
  return {low, high};
}

double mean_training_loss(const Budget& budget) {
  double sum = 0;
  for (const End& end : budget.runs) sum += end.training_loss;
  return sum / double(budget.runs.size());
}

// A loss of the reference's rungs over their log tokens, by the curve of interpolation.h.
class LossOverTokens {
 public:
  LossOverTokens(const std::vector<Budget>& ladder, std::vector<double> losses)
      : losses_(std::move(losses)), curve_(places(ladder), losses_) {}
  double operator()(double log_tokens) const { return curve_.at(-log_tokens, losses_); }

 private:
  // A curve is read over what falls from rung to rung
  static std::vector<double> places(const std::vector<Budget>& ladder) {
    std::vector<double> places;
    for (const Budget& rung : ladder) places.push_back(-std::log(rung.tokens));
    return places;
  }
  std::vector<double> losses_;
  RungCurve curve_;
};

// Log tokens after which the reference ends with this held-out loss. Past the rungs the curve is a
// straight line, and at most a doubling is read from it.
double log_tokens_at(const std::vector<Budget>& ladder, double held_out) {
  std::vector<double> losses;
  for (const Budget& rung : ladder) losses.push_back(mean_held_out(rung));
  const LossOverTokens loss(ladder, losses);
  double few = std::log(ladder.front().tokens / 2);
  double many = std::log(ladder.back().tokens * 2);
  for (int step = 0; step < 60; ++step) {  // to the last bit
    const double middle = (few + many) / 2;
    (loss(middle) > held_out ? few : many) = middle;
  }
  return few;
}

}  // namespace

std::string millions(double tokens) {
  if (tokens < 1e6) return fmt::format("{:.0f} tokens", tokens);
  if (tokens < 1e9) return fmt::format("{:.4g}M tokens", tokens / 1e6);
  return fmt::format("{:.4g}B tokens", tokens / 1e9);
}

std::vector<Budget> in_order(std::vector<Budget> budgets) {
  std::ranges::sort(budgets, {}, &Budget::tokens);
  return budgets;
}

std::string problem_of(const std::vector<Budget>& budgets, const std::string& name) {
  for (size_t b = 0; b < budgets.size(); ++b) {
    const std::string at = millions(budgets[b].tokens);
    if (!(budgets[b].tokens > 0)) return fmt::format("A budget of {} is not above zero.", name);
    if (b > 0 && budgets[b].tokens == budgets[b - 1].tokens)
      return fmt::format("{} has the budget of {} twice; put its runs together.", name, at);
    if (budgets[b].runs.empty())
      return fmt::format("{} has no finished run at {}; train one.", name, at);
    for (const End& end : budgets[b].runs)
      if (const auto what = problem_of(end); !what.empty())
        return fmt::format("Seed {} of {} at {} ends with {}; train it again or leave it out.",
                           end.seed, name, at, what);
  }
  return "";
}

std::string problem_of(const std::vector<Budget>& ladder) {
  if (ladder.size() < 2)
    return fmt::format("The reference has {} rung; train it to the end at two or more budgets.",
                       ladder.size());
  if (const auto problem = problem_of(ladder, "the reference"); !problem.empty()) return problem;
  if (std::ranges::none_of(ladder, [](const Budget& rung) { return rung.runs.size() > 1; }))
    return "No rung of the reference has two seeds, so the error is unknown; "
           "train two or more seeds at every budget.";
  for (size_t b = 0; b + 1 < ladder.size(); ++b)
    if (!(mean_held_out(ladder[b + 1]) < mean_held_out(ladder[b])))
      return fmt::format(
          "The reference's held-out loss does not fall from {} ({:.3f}) to {} ({:.3f}); "
          "remove one of the two rungs or train more seeds.",
          millions(ladder[b].tokens), mean_held_out(ladder[b]), millions(ladder[b + 1].tokens),
          mean_held_out(ladder[b + 1]));
  const auto& domains = ladder[0].runs[0].domains;
  if (domains.empty()) return "The runs have no losses out of domain; evaluate them on one domain.";
  for (const auto& [name, losses] : domains)
    if (std::ranges::none_of(losses.tokens, [](double t) { return t > 0; }))
      return fmt::format("The domain '{}' has no tokens to predict; give it longer documents.",
                         name);
  return "";
}

Reference::Reference(const std::vector<Budget>& ladder, const Ends& ends,
                     const LadderOptions& options)
    : ladder_(ladder), ends_(ends), options_(options) {
  for (size_t b = 0; b < ladder.size(); ++b) recall_.push_back(ends.recall_loss(b));
  std::tie(low_, high_) = held_out_range(ladder);
}

bool Reference::mature() const {
  const size_t rungs = ladder_.size();
  return !(recall_fall(rungs - 2) > options_.maturity_fall) &&
         !(ends_.recall_lead(rungs - 1) < options_.recall_lead);
}

double Reference::seeds_per_rung() const {
  size_t runs = 0;
  for (const Budget& rung : ladder_) runs += rung.runs.size();
  return double(runs) / double(ladder_.size());
}

double Reference::loss_after(double tokens) const {
  if (tokens < ladder_.front().tokens || tokens > ladder_.back().tokens) return kNaN;
  std::vector<double> losses;
  for (size_t b = 0; b < ladder_.size(); ++b) losses.push_back(ends_.loss(b));
  return LossOverTokens(ladder_, losses)(std::log(tokens));
}

// The highest held-out loss that is still at rung b: a twentieth of the way to the rung before. A
// rule by the spread of the rung's runs would be wider for a reference that varies more.
double Reference::highest_at(size_t b) const {
  const double own = mean_held_out(ladder_[b]);
  return b == 0 ? kNaN : own + 0.05 * (mean_held_out(ladder_[b - 1]) - own);
}

// Tokens at which the reference would reach a held-out loss below the ladder, rounded up to
// doublings of the last rung. A line in log tokens through the last two rungs: optimistic.
double Reference::tokens_to_reach(double held_out) const {
  const Budget& top = ladder_.back();
  const Budget& before = ladder_[ladder_.size() - 2];
  const double doublings = std::log2(top.tokens / before.tokens);
  const double fall = (mean_held_out(before) - mean_held_out(top)) / doublings;
  const double missing = (mean_held_out(top) - held_out) / fall;
  return top.tokens * std::exp2(std::clamp(std::ceil(missing - 1e-6), 1.0, 20.0));
}

// How much more the loss on recall targets falls than that on the other targets, from rung b to the
// next one: the growth of the lead. Every loss falls while a model learns, and recall is learned
// while its loss falls faster. At most the fall itself, because the lead also grows where the loss
// on other targets rises. Per doubling of the tokens where the rungs are closer than that:
// additional rungs do not make a reference mature.
double Reference::recall_fall(size_t b) const {
  const double doublings = std::log2(ladder_[b + 1].tokens / ladder_[b].tokens);
  const double growth = ends_.recall_lead(b + 1) - ends_.recall_lead(b);
  return std::min(recall_[b] - recall_[b + 1], growth) / std::min(1.0, doublings);
}

std::string Reference::immaturity(double held_out) const {
  const double limit = options_.maturity_fall;
  size_t segment = ends_.curve().segment(held_out);
  const size_t last = ladder_.size() - 2;
  // Before it learns to recall, its loss on recall targets need not fall either.
  if (const double lead = ends_.recall_lead(segment + 1); lead < options_.recall_lead)
    return fmt::format(
        "The reference does not recall yet at this held-out loss ({:.3f}): after {}, "
        "recall targets are easier for it than others by {:.2f} nats; {:.2f} are needed. "
        "Train the reference and the contender longer.",
        held_out, tokens_of(segment + 1), lead, options_.recall_lead);
  // At a rung the question is whether the reference still learns to recall after it.
  if (segment < last && held_out <= highest_at(segment + 1)) ++segment;
  const auto fall = [&](size_t b) { return recall_fall(b); };
  if (!(fall(segment) > limit)) return "";
  // Budgets are whole steps, so doublings are not exact
  const bool closer = ladder_[segment + 1].tokens < 1.99 * ladder_[segment].tokens;
  std::string reason = fmt::format(
      "The reference still learns to recall at this held-out loss ({:.3f}): "
      "from {} to {}, its loss on recall targets falls by {:.2f} nats{} more than that on others, "
      "and the limit is {:.2f}.",
      held_out, tokens_of(segment), tokens_of(segment + 1), fall(segment),
      closer ? " per doubling of the tokens" : "", limit);
  for (size_t b = segment + 1; b <= last; ++b)
    if (!(fall(b) > limit))
      return reason + fmt::format(
                          " The reference is mature from {} on; "
                          "train the contender until its held-out loss is {:.3f} or less.",
                          tokens_of(b), highest_at(b));
  const double before = last > 0 ? fall(last - 1) : 2 * fall(last);
  const double shrink = std::clamp(fall(last) / std::max(before, 1e-9), 0.3, 0.9);
  const double doublings = std::ceil(std::log(limit / fall(last)) / std::log(shrink));
  const double tokens = ladder_.back().tokens * std::exp2(std::clamp(doublings, 1.0, 20.0));
  return reason +
         fmt::format(" Train the reference and the contender to about {}.", millions(tokens));
}

Reference::Rise Reference::rise_until(size_t b) const {
  size_t lowest = 0;
  for (size_t earlier = 1; earlier <= b; ++earlier)
    if (ends_.loss(earlier) < ends_.loss(lowest)) lowest = earlier;
  return {ends_.loss(b) - ends_.loss(lowest), lowest};
}

// The loss out of domain has risen there while the held-out loss fell. A third of the limit is
// allowed at the held-out loss itself, because a contender seldom ends exactly at a rung.
std::string Reference::overfitting(double held_out) const {
  const double limit = options_.overfit_rise;
  const size_t until = ends_.curve().segment(held_out) + 1;
  const Rise rise = rise_until(until);
  const double here = ends_.reference_loss(held_out) - ends_.loss(rise.from);
  if (!(rise.nats > limit) || !(here > limit / 3)) return "";
  return fmt::format(
      "The reference overfits the training domains at this held-out loss ({:.3f}): "
      "its loss out of domain rises by {:.3f} nats from {} to {}. Compare at a smaller budget, "
      "which ends with a held-out loss of {:.3f} or more, or train on more text.",
      held_out, rise.nats, tokens_of(rise.from), tokens_of(until),
      mean_held_out(ladder_[rise.from]));
}

// A training loss that is not known is taken for a memorised text.
std::string Reference::memorising(const Budget& budget) const {
  const double gap = mean_held_out(budget) - mean_training_loss(budget);
  if (gap <= options_.memorising_gap) return "";
  const std::string after = "after " + millions(budget.tokens);
  if (std::isnan(gap))
    return fmt::format("its training loss {} is unknown, so it is taken to memorise.", after);
  return fmt::format(
      "{}, its held-out loss is {:.2f} nats above its training loss, and the limit is {:.2f}.",
      after, gap, options_.memorising_gap);
}

// Less than one epoch is no repetition.
bool Reference::differ(double epochs, double others) const {
  const double ratio = std::max(1.0, epochs) / std::max(1.0, others);
  return std::max(ratio, 1 / ratio) > options_.epochs_ratio;
}

double Reference::epochs_at(double held_out) const {
  const double at = log_tokens_at(ladder_, held_out);
  size_t b = 0;
  while (b + 2 < ladder_.size() && at > std::log(ladder_[b + 1].tokens)) ++b;
  const double first = std::log(ladder_[b].tokens);
  const double share = (at - first) / (std::log(ladder_[b + 1].tokens) - first);
  return std::exp((1 - share) * std::log(ladder_[b].epochs) +
                  share * std::log(ladder_[b + 1].epochs));
}

std::string Reference::repetition(const Budget& contender) const {
  const double held_out = mean_held_out(contender);
  const double own = contender.epochs;
  const double others = epochs_at(held_out);
  if (std::isnan(own) || std::isnan(others) || !differ(own, others)) return "";
  const std::string by_reference = memorising(ladder_[ends_.curve().segment(held_out) + 1]);
  const std::string by_contender = memorising(contender);
  if (by_reference.empty() && by_contender.empty()) return "";
  return fmt::format(
      "At this held-out loss ({:.3f}) the contender has read its text {:.1f} times, "
      "the reference {:.1f} times. They may differ by a factor of {:.2f}, "
      "because the {} memorises its text: {} Train on more text.",
      held_out, own, others, options_.epochs_ratio,
      by_reference.empty() ? "contender" : "reference",
      by_reference.empty() ? by_contender : by_reference);
}

std::optional<size_t> Reference::rung_at(double tokens) const {
  for (size_t b = 0; b < ladder_.size(); ++b)
    if (std::abs(tokens / ladder_[b].tokens - 1) <= options_.tokens_tolerance) return b;
  return std::nullopt;
}

std::string Reference::immature_segment(size_t b) const {
  const std::string from_to = fmt::format("from {} to {}", tokens_of(b), tokens_of(b + 1));
  if (const double lead = ends_.recall_lead(b + 1); lead < options_.recall_lead)
    return fmt::format("It does not recall yet after {}: the lead is {:.2f} of {:.2f} nats.",
                       tokens_of(b + 1), lead, options_.recall_lead);
  if (!(recall_fall(b) > options_.maturity_fall)) return "";
  return fmt::format(
      "It learns to recall {}: this loss falls by {:.3f} nats more than that on other targets, "
      "and the limit is {:.3f}.",
      from_to, recall_fall(b), options_.maturity_fall);
}

std::string Reference::repeated_segment(size_t b, Line line) const {
  if (line == Line::recall_tangent) return "";
  const std::string from_to = fmt::format("from {} to {}", tokens_of(b), tokens_of(b + 1));
  const double rise = rise_until(b + 1).nats;
  if (rise > options_.overfit_rise && ends_.loss(b + 1) > ends_.loss(b))
    return fmt::format(
        "It overfits {}: its loss out of domain rises by {:.3f} nats, and the limit is {:.3f}.",
        from_to, rise, options_.overfit_rise);
  const double first = ladder_[b].epochs;
  const double second = ladder_[b + 1].epochs;
  if (std::isnan(first) || std::isnan(second) || !differ(first, second)) return "";
  const std::string memorised = memorising(ladder_[b + 1]);
  if (memorised.empty()) return "";
  return fmt::format("It memorises {} ({:.1f} to {:.1f} epochs): {}", from_to, first, second,
                     memorised);
}

// Slopes of repeated text show what repetition costs, so they are not used for the change of the
// slope either. Those of an immature reference are.
std::optional<Tangent> Reference::tangent(size_t rung, Line line) const {
  const size_t segments = ladder_.size() - 1;
  const auto usable = [&](size_t b) {
    return b < segments && immature_segment(b).empty() && repeated_segment(b, line).empty();
  };
  Tangent tangent{
      .rung = rung, .before = rung > 0 && usable(rung - 1), .after = usable(rung), .others = {}};
  if (!tangent.before && !tangent.after) return std::nullopt;
  const size_t used = tangent.after ? rung : rung - 1;
  const bool both = tangent.before && tangent.after;
  for (const size_t b : {both ? rung - 1 : used - 1, both ? rung : used + 1})  // may wrap
    if (b < segments && repeated_segment(b, line).empty()) tangent.others.push_back(b);
  return tangent;
}

std::string Reference::no_tangent(size_t rung, Line line) const {
  std::string text =
      fmt::format("The slope of the reference's curve is unknown at {}.", tokens_of(rung));
  for (size_t b = rung > 0 ? rung - 1 : 0; b <= rung && b + 1 < ladder_.size(); ++b)
    text +=
        " " + immature_segment(b) + (immature_segment(b).empty() ? repeated_segment(b, line) : "");
  return text + " Add a rung of the reference, on text that is read once.";
}

std::string Reference::unequal_epochs(size_t rung, double epochs) const {
  const double own = ladder_[rung].epochs;
  if (std::isnan(epochs) || std::isnan(own) || !differ(epochs, own)) return "";
  return fmt::format(
      "After {} the contender has read its text {:.1f} times and the reference {:.1f} times. "
      "Train both on the same text.",
      tokens_of(rung), epochs, own);
}

std::string Reference::implausible(size_t rung, double held_out) const {
  const double width = high_ - low_;
  if (held_out >= low_ - width && held_out <= high_ + width) return "";
  return fmt::format(
      "After {} the held-out loss is {:.3f}, and on the whole ladder it is {:.3f} to {:.3f}. "
      "No line of the reference reaches so far. {}",
      tokens_of(rung), held_out, low_, high_,
      is_above(held_out)
          ? "Was the model trained to its end, and are its losses in the same unit?"
          : "Does the model read the tokens that it predicts, or are its losses in another unit?");
}

std::string Reference::outside(double held_out) const {
  if (is_above(held_out))
    return fmt::format(
        "The held-out loss {:.6g} is above that of every run of the reference ({:.6g} or less); "
        "train longer or add a smaller rung.",
        held_out, high_);
  if (const Rise rise = rise_until(ladder_.size() - 1); rise.nats > options_.overfit_rise)
    return fmt::format(
        "The held-out loss {:.3f} is below that of every run of the reference ({:.3f} or more), "
        "and the reference overfits the training domains before it gets there; "
        "compare at a smaller budget, which ends with a held-out loss of {:.3f} or more, "
        "or train on more text.",
        held_out, low_, mean_held_out(ladder_[rise.from]));
  const double tokens = tokens_to_reach(held_out);
  const double last = ladder_.back().tokens;
  const std::string advice =
      tokens <= kLongestForecast * last
          ? fmt::format("add a rung of the reference at about {}", millions(tokens))
          : fmt::format("add rungs of the reference above {}, each twice the one before",
                        millions(last));
  return fmt::format(
      "The held-out loss {:.3f} is below that of every run of the reference ({:.3f} or more); {}.",
      held_out, low_, advice);
}

std::vector<std::string> Reference::warnings() const {
  std::vector<std::string> out;
  if (ladder_.size() == 2)
    out.push_back(
        "The ladder has two rungs, so the curve between them is a straight line. "
        "No interval counts the error of this line. Add a rung of the reference.");
  for (size_t b = 0; b < ladder_.size(); ++b)
    if (ladder_[b].runs.size() < 2)
      out.push_back(
          fmt::format("The rung of {} has one seed; its variance is taken from the other rungs.",
                      tokens_of(b)));
  for (size_t b = 0; b + 1 < ladder_.size(); ++b) {
    if (ends_.loss(b + 1) < ends_.loss(b)) continue;
    const bool overfits = rise_until(b + 1).nats > options_.overfit_rise;
    out.push_back(fmt::format(
        "The reference's loss out of domain does not fall from {} to {} ({:.3f} to {:.3f}). {}",
        tokens_of(b), tokens_of(b + 1), ends_.loss(b), ends_.loss(b + 1),
        overfits ? "It overfits there, so no verdict is given where this loss has begun to rise."
                 : "Comparisons between these two rungs may change with more seeds of both."));
  }
  warn_of_texts(out);
  return out;
}

void Reference::warn_of_texts(std::vector<std::string>& out) const {
  for (const Text text : {Text::test, Text::held_out})
    for (size_t d = 0; d < ends_.domains(text).size(); ++d)
      if (const size_t clusters = ends_.clusters(text, d); clusters < kFewClusters)
        out.push_back(fmt::format(
            "The {}domain '{}' has {}; the intervals hold for these texts only.",
            text == Text::held_out ? "held-out text of the " : "", ends_.domains(text)[d],
            clusters < 2 ? "one source" : fmt::format("only {} sources", clusters)));
  if (ends_.domains().size() < 2)
    out.push_back(
        "The runs have one domain, so no interval treats the domains as a sample. "
        "Evaluate on more unseen domains.");
  if (std::ranges::any_of(recall_, [](double loss) { return std::isnan(loss); }))
    out.push_back(
        "The runs have no recall targets, so it is unknown whether the reference is mature. "
        "Maturity is not checked.");
}

double ladder_loss(const std::vector<Budget>& unordered, double held_out) {
  const std::vector<Budget> ladder = in_order(unordered);
  if (ladder.size() < 2 || !problem_of(ladder).empty()) return kNaN;
  if (const auto [low, high] = held_out_range(ladder); held_out < low || held_out > high)
    return kNaN;
  const Ends ends(ladder);
  return ends.reference_loss(held_out);
}

double ladder_tokens(const std::vector<Budget>& unordered, double held_out) {
  const std::vector<Budget> ladder = in_order(unordered);
  if (ladder.size() < 2 || !problem_of(ladder).empty()) return kNaN;
  std::vector<double> losses;
  for (const Budget& rung : ladder) losses.push_back(mean_held_out(rung));
  if (held_out > losses.front() || held_out < losses.back()) return kNaN;
  return std::exp(log_tokens_at(ladder, held_out));
}

}  // namespace assay::stats
