// torch.classes.assay.Mixer: a registered mixer for PyTorch. python/assay/nn.py makes an nn.Module
// of it, which registers the same tensors as its parameters.
#include <torch/torch.h>
// after torch.h:
#include <torch/custom_class.h>

#include "nn/initial_values.h"
#include "nn/mixer.h"

namespace assay::nn {
namespace {

using Tensors = c10::Dict<std::string, at::Tensor>;  // a dict of Python
using Strings = std::vector<std::string>;
using NamedTensors = std::tuple<Strings, std::vector<at::Tensor>>;

// ValueError of Python for errors of the user, without the place in a file that does not exist.
template <class Call>
auto for_python(const std::string& kind, const Call& call) {
  try {
    return call();
  } catch (const ConfigError& error) {
    TORCH_CHECK_VALUE(false, describe_problem(kind, error.problem, kind, "No module was made."));
  } catch (const Error& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
}

const MixerEntry& entry_of(const std::string& kind) {
  if (channel_mixers().contains(kind)) return channel_mixers().at(kind);
  return mixers().at(kind);
}

Tensors to_dict(const std::map<std::string, at::Tensor>& tensors) {
  Tensors out;
  for (const auto& [name, tensor] : tensors) out.insert(name, tensor);
  return out;
}

class MixerClass final : public torch::CustomClassHolder {
 public:
  MixerClass(std::string kind, const std::string& fields, int64_t d_model, int64_t layer,
             int64_t num_layers, bool first)
      : kind_(std::move(kind)), d_model_(d_model) {
    TORCH_CHECK_VALUE(d_model > 0 && layer >= 0 && layer < num_layers, kind_,
                      ": d_model = ", d_model, ", layer = ", layer,
                      " and num_layers = ", num_layers,
                      " must satisfy d_model > 0 and 0 <= layer < num_layers");
    for_python(kind_, [&] {
      const ConfigNode table = ConfigNode::parse(fields, kind_);
      mixer_ = entry_of(kind_).make(table, Place(d_model, layer, num_layers, first));
      start_outputs(*mixer_, num_layers);
    });
  }

  NamedTensors parameters() const { return named(mixer_->named_parameters()); }
  NamedTensors buffers() const { return named(mixer_->named_buffers()); }

  // Whether weight decay applies to each of parameters(), and the factor of its learning rate.
  std::tuple<std::vector<bool>, std::vector<double>> treatments() const {
    std::tuple<std::vector<bool>, std::vector<double>> out;
    const auto all = mixer_->treatments();
    for (const auto& item : mixer_->named_parameters()) {
      std::get<0>(out).push_back(all.at(item.key()).weight_decay);
      std::get<1>(out).push_back(all.at(item.key()).learning_rate);
    }
    return out;
  }

  void initialise(int64_t seed) { mixer_->initialise(uint64_t(seed)); }

  // (y, state, handed): State::tensors() and Context::handed before and after.
  std::tuple<at::Tensor, Tensors, Tensors> forward(const at::Tensor& x, const Tensors& before,
                                                   const Tensors& handed) {
    TORCH_CHECK_VALUE(x.dim() == 3 && x.size(1) > 0 && x.size(2) == d_model_, kind_,
                      ": x must be [batch, time, ", d_model_, "]; its shape is ", x.sizes());
    State state;
    for (const auto& item : before) state[item.key()] = item.value();
    for (const auto& item : handed) state.context.handed[item.key()] = item.value();
    return for_python(kind_, [&] {
      const at::Tensor y = mixer_->forward(x, state);
      return std::tuple(y, to_dict(state.tensors()), to_dict(state.context.handed));
    });
  }

  static Strings kinds() {
    Strings names = mixers().names();
    for (const std::string& name : channel_mixers().names()) names.push_back(name);
    return names;
  }

  // Formula and source; names, types, defaults as TOML and meanings of the fields; the
  // configurations that it is tested with, as TOML.
  static std::tuple<std::string, Strings, Strings, Strings, Strings, Strings> describe(
      const std::string& kind) {
    return for_python(kind, [&] {
      const MixerEntry& entry = entry_of(kind);
      Strings names;
      Strings types;
      Strings defaults;
      Strings docs;
      for (const Field& field : entry.fields()) {
        names.push_back(field.name);
        types.push_back(field.type());
        defaults.push_back(field.toml());
        docs.push_back(field.doc);
      }
      return std::tuple(entry.about, names, types, defaults, docs, entry.examples);
    });
  }

 private:
  static NamedTensors named(const torch::OrderedDict<std::string, at::Tensor>& tensors) {
    return {tensors.keys(), tensors.values()};
  }

  const std::string kind_;
  const int64_t d_model_;
  std::shared_ptr<Mixer> mixer_;
};

const auto registered =
    torch::class_<MixerClass>("assay", "Mixer")
        .def(torch::init<std::string, std::string, int64_t, int64_t, int64_t, bool>())
        .def("parameters", &MixerClass::parameters)
        .def("buffers", &MixerClass::buffers)
        .def("treatments", &MixerClass::treatments)
        .def("initialise", &MixerClass::initialise)
        .def("forward", &MixerClass::forward)
        .def_static("kinds", &MixerClass::kinds)
        .def_static("describe", &MixerClass::describe);

}  // namespace
}  // namespace assay::nn
