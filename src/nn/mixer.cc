#include "nn/mixer.h"

#include <algorithm>

namespace assay::nn {

int64_t Mixer::window() const {
  int64_t longest = 0;
  for (const Cache& cache : caches_) longest = std::max(longest, cache.window());
  return longest;
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
