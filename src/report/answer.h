#pragma once
// What a study found, in sentences.
#include "report/analysis.h"

namespace assay::report {

enum class Verdict { degraded, better, none, unknown };
Verdict verdict(const stats::Degradation& degradation);  // from the interval of the average
const char* word(Verdict verdict);                       // "degraded", "better", "no difference found", "no answer"

// "degraded by Δ = 0.120 [0.081, 0.163] nats a token at equal held-out loss. Largest on arxiv: …"
std::string answer(const Architecture& architecture, const Setting& setting);
// What a setting measures: "Trained on cc, c4; tested on …".
std::string question(const Setting& setting);
// What limits every number of the setting: one seed, runs that are missing.
std::vector<std::string> cautions(const Setting& setting, const Study& study);

}  // namespace assay::report
