#pragma once
// The folders of task files: plans/tasks here, or beside the program.
#include <vector>

#include "base/files.h"
#include "study/plan.h"

namespace assay::cli {

inline std::vector<fs::path> task_folders() {
  std::vector<fs::path> folders = study::plan_folders();
  for (fs::path& folder : folders) folder /= "tasks";
  return folders;
}

}  // namespace assay::cli
