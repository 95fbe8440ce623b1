#pragma once
// From study.sqlite and the runs' losses of single documents to report.html, figures/*.svg and tables/*.csv.
#include "base/files.h"

namespace assay::report {

// Writes them into the study's folder, each file whole or not at all, and returns the path of report.html. Finished
// runs are enough; the others are named in it. BadInput when the folder holds no study or no run is finished.
fs::path write_report(const fs::path& study);

}  // namespace assay::report
