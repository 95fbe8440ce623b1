#include "base/error.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace assay {
namespace {

// Two neighbours that changed places are one error.
size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> before;
  std::vector<size_t> last;
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    before = std::exchange(last, row);
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        row[j] = std::min(row[j], before[j - 2] + 1);
    }
  }
  return row.back();
}

}  // namespace

std::string did_you_mean(std::string_view name, std::span<const std::string> candidates) {
  constexpr size_t kLongestName = 64;  // longer ones are no misspelled names
  if (name.size() > kLongestName) return "";
  // A name that continues the given one is nearer than another at the same distance
  const auto distance = [&](const std::string& candidate) {
    return std::pair(edit_distance(name, candidate), !candidate.starts_with(name));
  };
  const auto nearest = std::ranges::min_element(candidates, {}, distance);
  if (nearest == candidates.end()) return "";
  const size_t most = name.size() < 5 ? 1 : std::max<size_t>(2, name.size() / 3);
  if (edit_distance(name, *nearest) <= most) return fmt::format("; did you mean '{}'?", *nearest);
  constexpr size_t kShortestBeginning = 3;
  const auto longer = std::ranges::find_if(
      candidates, [&](const std::string& candidate) { return candidate.starts_with(name); });
  if (name.size() < kShortestBeginning || longer == candidates.end()) return "";
  return fmt::format("; did you mean '{}'?", *longer);
}

std::string counted(int64_t count, std::string_view noun) {
  return fmt::format("{} {}{}", count, noun, count == 1 ? "" : "s");
}

std::string join(std::span<const std::string> words, std::string_view separator) {
  return fmt::format("{}", fmt::join(words.begin(), words.end(), separator));
}

}  // namespace assay
