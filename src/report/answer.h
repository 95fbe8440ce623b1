#pragma once
// Results of a study, in sentences and as JSON.
#include <nlohmann/json.hpp>

#include "report/analysis.h"

namespace assay::report {

// The question of a setting: "Trained on cc, c4 and tested on …".
std::string question(const Setting& setting);
// Meaning of the verdicts of a setting and of the intervals.
std::vector<std::string> legend_of_verdicts(const Setting& setting);  // an entry per column
// The answer for a reader in a hurry; empty without a verdict.
std::string in_one_sentence(const Architecture& architecture, const Setting& setting);
// Why it is not settled, facts next to the verdict, where the difference is largest, warnings.
std::vector<std::string> sentences(const Architecture& architecture, const Setting& setting);
// Limits of every number of the setting: no ladder, few sources, runs that are missing.
std::vector<std::string> cautions(const Setting& setting, const Study& study);

// One object for each architecture but the reference, in each setting:
//   {"setting", "model", "verdict": "degraded" | "better" | "equivalent" | "not settled",
//    "delta_end", "interval": [low, high], "final_loss", "reference_loss", "trend", "reason"}
// Numbers are null where there are none.
nlohmann::json verdicts(const Study& study);

// Results of the tasks of the plan; null when it has none. "metric" is "" for a mean over tasks;
// "difference" is to the reference.
//   {"scores": [{"setting", "task", "metric", "recall", "model", "tokens", "seeds", "items",
//                "value", "interval", "difference", "difference_interval"}],
//    "agreement": [{"setting", "score", "recall", "tokens", "models", "kendall_tau", "interval",
//                   "text"}],
//    "problems": [{"setting", "run", "task", "reason"}]}
nlohmann::json tasks(const Study& study);

}  // namespace assay::report
