#pragma once
// Loss by position in the context, far past the length of the training.              [LH: up to 16
// times that length]
#include <ATen/core/Tensor.h>

#include <vector>

#include "nn/language_model.h"

namespace assay::eval {

// −ln p of tokens[:, 1:] for tokens [B, T]: [B, T − 1] fp32 on the CPU. The model reads pieces of
// `piece` tokens and carries its state, so memory does not grow with T (except for caches of keys).
at::Tensor losses_by_position(nn::LanguageModel& model, const at::Tensor& tokens,
                              int64_t piece = 1024);

// The mean over positions first ≤ t < last of each sequence, where position t predicts token t + 1.
struct PositionBin {
  int64_t first;
  int64_t last;
  std::vector<double> losses;  // of each sequence
};
// Bins between 0, L/8, L/4, L/2, L, 2L, … for the length L of the training, up to the length of the
// sequences; a bin beyond L is halved, so that each doubling has two.
std::vector<PositionBin> bin_positions(const at::Tensor& losses, int64_t training_length);

}  // namespace assay::eval
