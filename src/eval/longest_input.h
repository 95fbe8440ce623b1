#pragma once
#include "nn/language_model.h"

namespace assay::eval {

// Tokens that a model reads at most when it answers: its learned positions, where it has them; else
// model.max_positions; else 2048, which is also what an exported model says of itself.
int64_t longest_input(const nn::LanguageModel& model);

}  // namespace assay::eval
