#pragma once
// Whether a model reads later tokens. The held-out losses of such a model mean nothing, because it
// sees the tokens that it predicts.
#include "nn/language_model.h"

namespace assay::train {

// BadInput that names the first layer and its mixer if an output of theirs changes when only later
// positions of the input change, or is not finite. The first two layers of each mixer read random
// sequences of min(sequence_length, 512) positions. Parameters that start at zero have other values
// meanwhile, because they can hide what a mixer reads. Afterwards the model has the bits that it
// had, and no random state is used. Modules of PyTorch are checked for more mistakes
// (nn::check_python_mixer).
void check_causality(nn::LanguageModel& model, int64_t sequence_length);

}  // namespace assay::train
