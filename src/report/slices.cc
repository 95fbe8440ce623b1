#include "report/slices.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace assay::report {
namespace {

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
constexpr const char* kAbove = "above_12_nats";

const Json& last_set(const Run& run, const std::string& set) {
  static const Json none = Json::object();
  const Json& sets = run.evaluations.back().sets;
  return sets.contains(set) ? sets[set] : none;
}

// A number of a slice, mean over the runs that have it.
double mean_of(const std::vector<Run>& runs, const std::string& set, const std::string& slice,
               const char* key) {
  double sum = 0;
  int64_t count = 0;
  for (const Run& run : runs) {
    const Json slices = last_set(run, set).value("slices", Json::object());
    const double value = number(slices.value(slice, Json::object()), key);
    if (!std::isfinite(value)) continue;
    sum += value;
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
  size_t i = 0, j = 0;
  while (i < a.size() && j < b.size()) {
    if (std::isdigit(a[i]) && std::isdigit(b[j])) {
      char *ei, *ej;
      const auto x = std::strtoull(&a[i], &ei, 10), y = std::strtoull(&b[j], &ej, 10);
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
        const Json slices = last_set(run, setting.set(domain)).value("slices", Json::object());
        for (const auto& [slice, value] : slices.items())
          if (slice != kAbove && !std::ranges::count(names, slice)) names.push_back(slice);
      }
  const std::vector<std::string> first = {"frequent", "rare", "unseen", "repeated_bigram", "other"};
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
      setting, [&](const std::string& set) { return mean_of(runs, set, slice, "loss"); });
}

double share_above_12_nats(const std::vector<Run>& runs, const Setting& setting) {
  return mean_over_domains(
      setting, [&](const std::string& set) { return 100 * mean_of(runs, set, kAbove, "share"); });
}

std::vector<std::string> slice_warnings(const Architecture& a, const Setting& setting) {
  std::vector<std::string> out;
  const auto [own, reference] = runs_of_equal_budget(a, setting.reference());
  if (!own) return out;
  for (const std::string& domain : setting.test) {
    const std::string set = setting.set(domain);
    const double difference = last_loss(*own, domain) - last_loss(*reference, domain);
    const auto warn = [&](double part, const char* what) {
      if (std::abs(difference) <= 0.01 || !(part / difference > 0.5)) return;
      out.push_back(fmt::format(
          "On {}, {} make up {:.0f} % of the difference of {:+.3f} nats at the last evaluation. "
          "It may be about formatting and not about capability; "
          "the table of slices shows the rest.",
          domain, what, std::min(100.0, 100 * part / difference), difference));
    };
    const auto change = [&](const char* slice, const char* key) {
      return mean_of(*own, set, slice, key) - mean_of(*reference, set, slice, key);
    };
    const double tokens =
        mean_over(*own, [&](const Run& run) { return number(last_set(run, set), "tokens"); });
    const double share = mean_of(*own, set, "unseen", "tokens") / tokens;
    warn(share * change("unseen", "loss"), "tokens that were never seen in training");
    warn(12 * change(kAbove, "share"), "tokens above 12 nats");
  }
  return out;
}

}  // namespace assay::report
