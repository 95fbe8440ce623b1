#pragma once
// Several models measured by `assay bench models`, each in a process of its own: what one of
// them leaves behind (memory, a broken device) does not touch the next, and its peak of memory
// is its own.
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "base/files.h"

namespace assay::bench {

// For each MODEL the first row that `program bench models MODEL --json arguments…` prints; for
// a process that fails, {"model": MODEL, "failure": why}; after an interrupt for those that
// are left too.
nlohmann::json model_rows(const fs::path& program, const std::vector<std::string>& models,
                          const std::vector<std::string>& arguments);

}  // namespace assay::bench
