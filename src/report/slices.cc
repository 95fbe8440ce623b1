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
double mean_of(const Architecture& a, const std::string& set, const std::string& slice, const char* key) {
  double sum = 0;
  int64_t count = 0;
  for (const Run& run : a.runs) {
    const Json value =
        last_set(run, set).value("slices", Json::object()).value(slice, Json::object()).value(key, Json());
    if (value.is_number() && std::isfinite(value.get<double>())) sum += value.get<double>(), ++count;
  }
  return count ? sum / double(count) : kNone;
}

template <class Get>
double mean_over_domains(const Setting& setting, Get&& get) {
  double sum = 0;
  int64_t count = 0;
  for (const std::string& domain : setting.test)
    if (const double value = get(domain + "." + setting.split); std::isfinite(value)) sum += value, ++count;
  return count ? sum / double(count) : kNone;
}

double last_loss(const Architecture& a, const std::string& domain) {
  return mean_over(a.runs, [&](const Run& run) { return run.evaluations.back().test_losses.at(domain); });
}

// "position_64_256" after "position_8_16": by text, numbers by value.
bool natural(const std::string& a, const std::string& b) {
  size_t i = 0, j = 0;
  while (i < a.size() && j < b.size()) {
    if (std::isdigit(a[i]) && std::isdigit(b[j])) {
      char *ei, *ej;
      const auto x = std::strtoull(&a[i], &ei, 10), y = std::strtoull(&b[j], &ej, 10);
      if (x != y) return x < y;
      i = size_t(ei - a.data()), j = size_t(ej - b.data());
    } else if (a[i] != b[j]) {
      return a[i] < b[j];
    } else {
      ++i, ++j;
    }
  }
  return a.size() - i < b.size() - j;
}

}  // namespace

std::vector<std::string> slice_names(const Setting& setting) {
  std::vector<std::string> names;
  for (const Architecture& a : setting.architectures)
    for (const Run& run : a.runs)
      for (const std::string& domain : setting.test) {
        const Json slices = last_set(run, domain + "." + setting.split).value("slices", Json::object());
        for (const auto& [slice, value] : slices.items())
          if (slice != kAbove && !std::ranges::count(names, slice)) names.push_back(slice);
      }
  const std::vector<std::string> first = {"frequent", "rare", "unseen", "repeated_bigram", "other"};
  const auto rank = [&](const std::string& name) { return std::ranges::find(first, name) - first.begin(); };
  std::ranges::sort(names, [&](auto& a, auto& b) { return rank(a) != rank(b) ? rank(a) < rank(b) : natural(a, b); });
  return names;
}

double slice_loss(const Architecture& a, const Setting& setting, const std::string& slice) {
  return mean_over_domains(setting, [&](const std::string& set) { return mean_of(a, set, slice, "loss"); });
}

double share_above_12_nats(const Architecture& a, const Setting& setting) {
  return mean_over_domains(setting, [&](const std::string& set) { return 100 * mean_of(a, set, kAbove, "share"); });
}

std::vector<std::string> slice_warnings(const Architecture& a, const Setting& setting) {
  std::vector<std::string> out;
  const Architecture& reference = setting.reference();
  for (const std::string& domain : setting.test) {
    const std::string set = domain + "." + setting.split;
    const double difference = last_loss(a, domain) - last_loss(reference, domain);
    const auto warn = [&](double part, const char* what) {
      if (std::abs(difference) > 0.01 && part / difference > 0.5)
        out.push_back(
            fmt::format("On {}, {} carry {:.0f} % of the last evaluation's difference of {:+.3f} nats: it may be about "
                        "formatting, not capability. Look at the other slices.",
                        domain, what, std::min(100.0, 100 * part / difference), difference));
    };
    const double tokens = mean_over(a.runs, [&](const Run& run) { return last_set(run, set).value("tokens", 0.0); });
    const double share = mean_of(a, set, "unseen", "tokens") / tokens;
    warn(share * (mean_of(a, set, "unseen", "loss") - mean_of(reference, set, "unseen", "loss")),
         "tokens never seen in training");
    warn(12 * (mean_of(a, set, kAbove, "share") - mean_of(reference, set, kAbove, "share")), "tokens above 12 nats");
  }
  return out;
}

}  // namespace assay::report
