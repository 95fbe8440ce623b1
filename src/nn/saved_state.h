#pragma once
// A generation that can go on later: its tokens, and the state behind those that were read.
#include <cstdint>
#include <vector>

#include "base/files.h"
#include "nn/language_model.h"

namespace assay::nn {

struct Generation {
  std::vector<int64_t> tokens;  // prompt and what followed
  ModelState state;             // of a batch of one, behind the first state.position of them
};

// One safetensors file: "tokens" [T] i64, "layers.0.k" …; metadata: the model's fingerprint and the
// dtype it computes in.
void save_generation(const fs::path& file, const LanguageModel& model,
                     const Generation& generation);

// On the model's device, for a batch of `batch` that goes on from the same state. BadInput when the
// file is of another model (another configuration or other weights) or of another compute_dtype.
Generation load_generation(const fs::path& file, const LanguageModel& model, int64_t batch = 1);

}  // namespace assay::nn
