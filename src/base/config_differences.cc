#include "base/config_differences.h"

#include <algorithm>
#include <iterator>

namespace assay {
namespace {

std::string path_of(const ConfigNode& table, const std::string& key) {
  return table.name().empty() ? key : table.name() + "." + key;
}

}  // namespace

std::vector<std::string> differences(const ConfigNode& before, const ConfigNode& now) {
  std::vector<std::string> keys = before.keys();
  std::vector<std::string> found;
  for (const std::string& key : now.keys())
    if (!before.has(key)) keys.push_back(key);
  for (const std::string& key : keys) {
    if (before.is_table(key) || now.is_table(key)) {
      std::ranges::move(differences(before.child(key), now.child(key)), std::back_inserter(found));
      continue;
    }
    const std::string is = now.value(key);
    const std::string was = before.value(key);
    if (is == was) continue;
    const auto shown = [](const std::string& value) { return value.empty() ? "absent" : value; };
    found.push_back(
        fmt::format("{} is {} instead of {}", path_of(now, key), shown(is), shown(was)));
  }
  return found;
}

}  // namespace assay
