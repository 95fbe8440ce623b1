#include "eval/longest_input.h"

#include <torch/torch.h>

#include <algorithm>

namespace assay::eval {

int64_t longest_input(const nn::LanguageModel& model) {
  if (model.positions.defined()) return model.positions.size(0);
  int64_t longest = model.spec.config.max_positions > 0 ? model.spec.config.max_positions : 2048;
  for (const auto& layer : model.layers) longest = std::min(longest, layer->mixer->max_time());
  return longest;
}

}  // namespace assay::eval
