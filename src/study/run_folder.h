#pragma once
// What a run leaves in its folder, read while it goes on.
#include <nlohmann/json.hpp>

#include "base/files.h"

namespace assay::study {

// The newest line of metrics.jsonl that has a number under `key`: "loss" is in training lines,
// "held_out_loss" in evaluations. An empty object when there is none.
nlohmann::json last_metrics_line(const fs::path& folder, const std::string& key);
std::string last_line(const fs::path& file);  // the last line that is not empty, or "no output"
// Of end.json and done.json: "arxiv.test 4.081, cc.valid 3.412, 12.3k tokens/s, 0:42".
std::string summary(const fs::path& folder);
// Waits until no process holds the folder. True when there is a checkpoint to resume from;
// otherwise clears what a killed run left, except its log.
bool begin_or_resume(const fs::path& folder);

}  // namespace assay::study
