#include "report/slices.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "report/table.h"

namespace assay::report {
namespace {

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
// Null when the last evaluation has no such set, or the set no such slice.
const run::EvaluatedSet* last_set(const Run& run, const std::string& set) {
  const run::EvaluatedSets& sets = run.evaluations.back().sets;
  const auto found = sets.find(set);
  return found == sets.end() ? nullptr : &found->second;
}
const run::Slice* last_slice(const Run& run, const std::string& set, const std::string& slice) {
  const run::EvaluatedSet* found = last_set(run, set);
  if (!found || !found->slices || !found->slices->contains(slice)) return nullptr;
  return &found->slices->at(slice);
}

// Mean of get(slice) over the runs that have the slice and a finite value.
template <class Get>
double mean_of(const std::vector<Run>& runs, const std::string& set, const std::string& slice,
               Get&& get) {
  double sum = 0;
  int64_t count = 0;
  for (const Run& run : runs) {
    const run::Slice* found = last_slice(run, set, slice);
    if (!found || !std::isfinite(get(*found))) continue;
    sum += get(*found);
    ++count;
  }
  return count ? sum / double(count) : kNone;
}
double loss_in(const run::Slice& slice) { return slice.loss; }
double tokens_in(const run::Slice& slice) { return double(slice.tokens); }

// Mean over the runs with slices, in which a slice without tokens is absent.
double share_above(const std::vector<Run>& runs, const std::string& set) {
  double sum = 0;
  int64_t count = 0;
  for (const Run& run : runs) {
    const run::EvaluatedSet* found = last_set(run, set);
    if (!found || !found->slices) continue;
    const run::Slice* above = last_slice(run, set, run::slice::kAbove12Nats);
    sum += above ? above->share : 0;
    ++count;
  }
  return count ? sum / double(count) : kNone;
}

template <class Get>
double mean_over_domains(const Setting& setting, Get&& get) {
  double sum = 0;
  int64_t count = 0;
  for (const std::string& domain : setting.test) {
    const double value = get(setting.set(domain));
    if (!std::isfinite(value)) continue;
    sum += value;
    ++count;
  }
  return count ? sum / double(count) : kNone;
}

double last_loss(const std::vector<Run>& runs, const std::string& domain) {
  return mean_over(runs,
                   [&](const Run& run) { return run.evaluations.back().test_losses.at(domain); });
}

// "position_64_256" after "position_8_16": by text, numbers by value.
bool natural(const std::string& a, const std::string& b) {
  size_t i = 0;
  size_t j = 0;
  while (i < a.size() && j < b.size()) {
    if (std::isdigit(a[i]) && std::isdigit(b[j])) {
      char* ei;
      char* ej;
      const auto x = std::strtoull(&a[i], &ei, 10);
      const auto y = std::strtoull(&b[j], &ej, 10);
      if (x != y) return x < y;
      i = size_t(ei - a.data());
      j = size_t(ej - b.data());
    } else if (a[i] != b[j]) {
      return a[i] < b[j];
    } else {
      ++i;
      ++j;
    }
  }
  return a.size() - i < b.size() - j;
}

}  // namespace

std::vector<std::string> slice_names(const Setting& setting) {
  std::vector<std::string> names;
  for (const Architecture& a : setting.architectures)
    for (const Run& run : a.runs())
      for (const std::string& domain : setting.test) {
        const run::EvaluatedSet* set = last_set(run, setting.set(domain));
        if (!set || !set->slices) continue;
        for (const auto& [slice, value] : *set->slices)
          if (slice != run::slice::kAbove12Nats && !std::ranges::count(names, slice))
            names.push_back(slice);
      }
  const std::vector<std::string> first = {run::slice::kFrequent, run::slice::kRare,
                                          run::slice::kUnseen, run::slice::kRepeatedBigram,
                                          run::slice::kOther};
  const auto rank = [&](const std::string& name) {
    return std::ranges::find(first, name) - first.begin();
  };
  std::ranges::sort(names, [&](auto& a, auto& b) {
    return rank(a) != rank(b) ? rank(a) < rank(b) : natural(a, b);
  });
  return names;
}

double slice_loss(const std::vector<Run>& runs, const Setting& setting, const std::string& slice) {
  return mean_over_domains(
      setting, [&](const std::string& set) { return mean_of(runs, set, slice, loss_in); });
}

double share_above_12_nats(const std::vector<Run>& runs, const Setting& setting) {
  return mean_over_domains(setting,
                           [&](const std::string& set) { return 100 * share_above(runs, set); });
}

std::vector<std::string> slice_warnings(const Architecture& a, const Setting& setting) {
  std::vector<std::string> out;
  const auto [own, reference] = runs_of_equal_budget(a, setting.reference());
  if (!own) return out;
  for (const std::string& domain : setting.test) {
    const std::string set = setting.set(domain);
    const double difference = last_loss(*own, domain) - last_loss(*reference, domain);
    const auto warn = [&](double part, const char* what) {
      const double ratio = part / difference;
      if (std::abs(difference) <= 0.01 || !(ratio > 0.5)) return;
      out.push_back(
          fmt::format("On {}, {} make up {} of the difference of {} nats at the last evaluation. "
                      "This difference is the one to the reference at equal tokens. "
                      "It may be about formatting and not about capability; "
                      "the table of the loss by kind of target token shows the rest.",
                      domain, what, ratio < 1 ? fmt::format("{:.0f} %", 100 * ratio) : "all",
                      show(difference, Format::change)));
    };
    const auto change = [&](const char* slice, auto&& get) {
      return mean_of(*own, set, slice, get) - mean_of(*reference, set, slice, get);
    };
    const double tokens = mean_over(*own, [&](const Run& run) {
      const run::EvaluatedSet* found = last_set(run, set);
      return found ? number(found->tokens) : kNone;
    });
    const double share = mean_of(*own, set, run::slice::kUnseen, tokens_in) / tokens;
    warn(share * change(run::slice::kUnseen, loss_in), "tokens that were never seen in training");
    warn(12 * (share_above(*own, set) - share_above(*reference, set)),
         "tokens with a loss above 12 nats");
  }
  return out;
}

}  // namespace assay::report
