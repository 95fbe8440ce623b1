#pragma once
// Every registered mixer and channel mixer, as its file says that it is tested. Include
// <torch/torch.h> first.
#include "testing.h"

namespace assay::nn {

struct MixerExample {
  std::string name;
  std::string mixer;
  std::string table;
  bool channel;
  // In float64, every parameter off its starting value, so that no part is without effect.
  std::shared_ptr<Mixer> make(int64_t d_model) const {
    const MixerEntry& entry = (channel ? channel_mixers() : mixers()).at(mixer);
    const auto made = entry.make(ConfigNode::parse(table), d_model);
    const at::NoGradGuard no_grad;
    made->to(at::kDouble);
    made->initialise(1);
    at::Generator noise = generator(name);
    for (at::Tensor& parameter : made->parameters()) {
      const double size = parameter.dim() > 1 ? 1 / std::sqrt(double(parameter.size(-1))) : 0.3;
      parameter.add_(at::randn(parameter.sizes(), noise, parameter.options()), size);
    }
    return made;
  }
};

// For messages of GoogleTest.
inline void PrintTo(const MixerExample& example, std::ostream* out) { *out << example.name; }

inline std::vector<MixerExample> mixer_examples() {
  std::vector<MixerExample> out;
  for (const bool channel : {false, true}) {
    const auto& registry = channel ? channel_mixers() : mixers();
    for (const std::string& name : registry.names()) {
      int number = 0;
      for (const std::string& table : registry.at(name).examples)
        out.push_back({name + "_" + std::to_string(number++), name, table, channel});
    }
  }
  return out;
}

}  // namespace assay::nn
