#include "nn/mixer.h"

#include <ATen/ops/add.h>

namespace assay::nn {

int64_t State::bytes() const {
  int64_t total = 0;
  for (const auto& [name, tensor] : tensors_) total += tensor.numel() * tensor.element_size();
  return total;
}

void State::add_auxiliary_loss(const at::Tensor& loss) {
  at::Tensor& sum = handed.at(kAuxiliaryLoss);
  sum = sum + loss;
}

Registry<MixerEntry>& mixers() {
  static Registry<MixerEntry> registry("mixer");
  return registry;
}

Registry<MixerEntry>& channel_mixers() {
  static Registry<MixerEntry> registry("channel mixer");
  return registry;
}

}  // namespace assay::nn
