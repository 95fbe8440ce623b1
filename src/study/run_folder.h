#pragma once
// What a run leaves in its folder, read while it goes on.
#include <string>

#include "run/folder.h"

namespace assay::study {

std::string last_line(const fs::path& file);  // the last line that is not empty, or "no output"
// Of a finished run: "arxiv.test 4.081, cc.valid 3.412, 12.3k tokens/s, 0:42".
std::string summary(const run::Folder& folder);
void wait_until_free(const run::Folder& folder);  // until no process holds it
// Waits until no process holds the folder. True when there is a checkpoint to resume from;
// otherwise clears what a killed run left, except its log.
bool begin_or_resume(const run::Folder& folder);

}  // namespace assay::study
