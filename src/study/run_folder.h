#pragma once
// The folder of a run, read while the run goes on.
#include <memory>
#include <string>

#include "run/folder.h"
#include "run/metrics.h"

namespace assay::study {

std::string last_line(const fs::path& file);  // the last line that is not empty, or "no output"
// Summary of a finished run: "arxiv.test 4.081, cc.valid 3.412, 12.3k tokens/s, 0:42".
std::string summary(const run::Folder& folder);
// Waits a minute at most for a process that holds the folder: it may still be saving.
std::unique_ptr<FolderLock> lock_when_free(const fs::path& folder);
// "full.seed-1 step 20/100 held-out loss 4.1 12.3k tokens/s"
std::string progress_text(const std::string& name, const run::Newest& newest, int64_t steps);
// Waits until no process holds the folder. True when there is a checkpoint to resume from;
// otherwise clears what a killed run left, except its log.
bool begin_or_resume(const run::Folder& folder);

}  // namespace assay::study
