#pragma once
// What runs and studies must leave the same, whatever happened while they were made.
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

// All that a command must leave the same, by path.
inline std::map<std::string, std::string> results(const fs::path& folder) {
  std::map<std::string, std::string> out;
  for (const auto& [path, hash] : contents(folder))
    if (path.ends_with("metrics.jsonl")) out[path] = without_times(folder / path);
    else if (!is_timed(path)) out[path] = hash;
  return out;
}

inline void expect_same(const fs::path& actual, const fs::path& expected) {
  const auto got = results(actual), wanted = results(expected);
  EXPECT_GT(wanted.size(), 2u);
  for (const auto& [path, content] : wanted)
    EXPECT_TRUE(got.contains(path) && got.at(path) == content) << path << " differs";
  for (const auto& [path, content] : got)
    EXPECT_TRUE(wanted.contains(path)) << path << " was left behind";
}

}  // namespace assay::cli
