#include "nn/mixer.h"

namespace assay::nn {

int64_t State::bytes() const {
  int64_t total = 0;
  for (const auto& [name, tensor] : tensors_) total += tensor.numel() * tensor.element_size();
  return total;
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
