#include "study/reuse.h"

#include <algorithm>

namespace assay::study {
namespace {

// The reason why the record of a run of the same name is that of another run.
std::string difference(const run::Provenance& record, const run::Provenance& planned) {
  if (record.data != planned.data)
    return fmt::format("it read other data (fingerprint {:.8}, and this store has {:.8})",
                       record.data, planned.data);
  for (const auto& [part, version] : planned.numerics) {
    const auto other = record.numerics.find(part);
    const int64_t there = other == record.numerics.end() ? 1 : other->second;
    if (there == version) continue;
    return fmt::format(
        "{} has numerics version {} there and {} here (another device or version of Assay)", part,
        there, version);
  }
  return "its configuration, learning rate or defaults differ";
}

}  // namespace

Reusable::Reusable(const std::vector<fs::path>& folders) {
  for (const fs::path& folder : folders)
    for (auto& [key, record] : read_records(folder))
      by_key_[key] = {std::move(record), folder.string()};
}

const Reusable::Found* Reusable::find(const std::string& key) const {
  const auto found = by_key_.find(key);
  return found == by_key_.end() ? nullptr : &found->second;
}

std::string Reusable::explain_missing(const std::vector<PlannedRun>& runs) const {
  std::map<std::string, const Found*> by_name;
  for (const auto& [key, found] : by_key_) by_name.emplace(found.record.name, &found);
  int64_t missing = 0;
  std::string example;
  for (const PlannedRun& run : runs) {
    const auto other = by_name.find(run.name);
    if (find(run.key) || other == by_name.end()) continue;
    ++missing;
    if (example.empty())
      example = fmt::format("{} of {}: {}", run.name, other->second->folder,
                            difference(other->second->record.provenance, run.estimate));
  }
  if (missing == 0) return "";
  return fmt::format("{} of {} runs have only a record of the same name that is not reused. {}",
                     missing, runs.size(), example);
}

}  // namespace assay::study
