#pragma once
// From study.sqlite to report.html, figures/*.svg and tables/*.csv.
#include <nlohmann/json.hpp>
#include <string>

#include "base/files.h"

namespace assay::report {

struct Written {
  fs::path page;            // report.html
  int64_t runs = 0;         // of the plan that are finished
  nlohmann::json verdicts;  // answer.h
  nlohmann::json tasks;     // answer.h; null when the plan has none
  std::string summary;      // the verdicts as a table of text, and a line for each reason
};

// Writes them into the study's folder, or into `output` if it is given, each file whole or not at
// all. Finished runs are enough; the page names the others. BadInput when the folder holds no study
// or no run is finished.
Written write_report(const fs::path& study, const fs::path& output = {});
// Writes the variances between the seeds of the study to a table that plans can name. Rows of other
// studies in an existing file are kept. Returns the number of rows of this study.
int64_t write_variances(const fs::path& study, const fs::path& file);

}  // namespace assay::report
