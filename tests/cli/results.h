#pragma once
// Files that runs and studies must leave the same, whatever happened while they were made.
#include <nlohmann/json.hpp>
#include <sstream>

#include "cli/program.h"

namespace assay::cli {

// Files that hold times, and what no result depends on.
inline bool is_timed(const fs::path& path) {
  const std::string name = path.filename();
  return name == "run.json" || name == "done.json" || name == "state.json" || name == "log.txt" ||
         name.starts_with("study.sqlite") || name == "report.html";
}

inline std::string without_times(const fs::path& metrics) {
  std::istringstream lines(read_file(metrics));
  std::string out;
  for (std::string line; std::getline(lines, line);) {
    nlohmann::json record = nlohmann::json::parse(line);
    for (const char* timed : {"tokens_per_second", "mfu", "seconds", "memory_bytes"})
      record.erase(timed);
    out += record.dump() + "\n";
  }
  return out;
}

// The step of a folder "step-20", or -1.
inline int step_of(const fs::path& folder) {
  const std::string name = folder.filename();
  return name.starts_with("step-") ? std::stoi(name.substr(5)) : -1;
}

// Is the file of a checkpoint that is not the newest one of its run?
inline bool is_of_older_checkpoint(const fs::path& file) {
  const fs::path checkpoint = file.parent_path();
  if (step_of(checkpoint) < 0) return false;
  for (const auto& other : fs::directory_iterator(checkpoint.parent_path()))
    if (step_of(other.path()) > step_of(checkpoint)) return true;
  return false;
}

// A run that a signal told to save keeps a checkpoint of that step as the older one of the two.
enum class Checkpoints { kAll, kNewest };

// All that a command must leave the same, by path.
inline std::map<std::string, std::string> results(const fs::path& folder, Checkpoints compared) {
  std::map<std::string, std::string> out;
  for (const auto& [path, hash] : contents(folder)) {
    if (is_timed(path)) continue;
    if (compared == Checkpoints::kNewest && is_of_older_checkpoint(folder / path)) continue;
    out[path] = path.ends_with("metrics.jsonl") ? without_times(folder / path) : hash;
  }
  return out;
}

inline void expect_same(const fs::path& actual, const fs::path& expected,
                        Checkpoints compared = Checkpoints::kAll) {
  const auto got = results(actual, compared);
  const auto wanted = results(expected, compared);
  EXPECT_GT(wanted.size(), 2u);
  for (const auto& [path, content] : wanted)
    EXPECT_TRUE(got.contains(path) && got.at(path) == content) << path << " differs";
  for (const auto& [path, content] : got)
    EXPECT_TRUE(wanted.contains(path)) << path << " was left behind";
}

}  // namespace assay::cli
