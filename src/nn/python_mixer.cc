#include "nn/python_mixer.h"

#include <torch/library.h>
#include <torch/torch.h>

#include "base/files.h"
#include "ops/dense/linear/linear.h"

namespace assay::nn {
namespace {

// torch puts the name of Python's exception before its text, and a trace after it.
std::string text_of(const std::exception& error) {
  std::string text = error.what();
  if (const size_t trace = text.find("\n\nAt:\n"); trace != std::string::npos) text.resize(trace);
  constexpr std::string_view kName = "PythonModuleError: ";  // of python/assay/_mixers.py
  return text.starts_with(kName) ? text.substr(kName.size()) : text;
}

torch::jit::Stack call(const char* name, torch::jit::Stack arguments) {
  const auto function =
      c10::Dispatcher::singleton().findSchema({std::string("assay_python::") + name, ""});
  if (!function)
    fail(
        "this program has no Python, which a module in a plan needs. "
        "Install the Python package: `pip install .` in the folder of the repository. "
        "Then give the same command to its program `assay`. Nothing was changed.");
  try {
    function->callBoxed(arguments);
  } catch (const c10::Error&) {
    throw;  // of torch: an operator in the module
  } catch (const std::exception& error) {
    fail("{}", text_of(error));
  }
  return arguments;
}

bool is_file(const std::string& name) { return name.ends_with(".py"); }

class PythonMixer final : public Mixer {
 public:
  PythonMixer(const PythonCode& code, const std::string& part, const std::string& fields,
              const Place& place)
      : handle_(call("create", {code.source, code.name, python_class(part), fields, place.d_model,
                                place.layer, place.num_layers})
                    .at(0)
                    .toInt()) {
    add_parameters();
  }
  ~PythonMixer() override { call("release", {handle_}); }

  // Rows one after the other: the module is called by one thread.
  at::Tensor forward(const at::Tensor& x, State& state) override {
    if (left_out_) return x;
    if (state.context.rows.empty()) return forward_of_sequences(x, state);
    at::Tensor out = at::zeros_like(x);
    for (int64_t b = 0; b < x.size(1); ++b)
      if (state.context.rows.used(b))
        out.slice(1, b, b + 1)
            .copy_(forward_of_sequences(x.slice(1, b, b + 1), state.rows.states[size_t(b)]));
    return out;
  }

  void check(const at::Tensor& x) const { call("check", {handle_, x}); }
  std::string where() const { return call("where", {handle_}).at(0).toStringRef(); }
  void leave_out_if_it_needs_a_gpu() { left_out_ = call("needs_gpu", {handle_}).at(0).toBool(); }

  double mixing_flops(int64_t time) const override {
    return call("flops", {handle_, time}).at(0).toDouble();
  }

 private:
  static c10::List<std::string> no_names() { return c10::List<std::string>(); }

  at::Tensor forward_of_sequences(const at::Tensor& x, State& state) const {
    if (keeps_state_) return forward_with_state(x, state);
    // A module without a state reads the whole sequence again.
    const at::Tensor all = inputs_.append(state, x);
    const auto out = call("forward", {handle_, all, std::vector<at::Tensor>{}, no_names()});
    return out.at(0).toTensor().slice(1, all.size(1) - x.size(1));
  }

  at::Tensor forward_with_state(const at::Tensor& x, State& state) const {
    std::vector<at::Tensor> tensors;
    c10::List<std::string> names;
    for (const auto& [name, tensor] : state.tensors()) {
      names.push_back(name);
      tensors.push_back(tensor);
    }
    const auto out = call("forward", {handle_, x, tensors, names});
    const auto after = out.at(1).toTensorVector();
    const auto after_names = out.at(2).toList();
    for (size_t i = 0; i < after.size(); ++i) state[after_names.get(i).toStringRef()] = after[i];
    return out.at(0).toTensor();
  }

  // The parameters of the module, under their names in Python. Storage and gradients are shared.
  void add_parameters() {
    const auto told = call("parameters", {handle_});
    const auto names = told.at(0).toList();
    const auto tensors = told.at(1).toTensorVector();
    const auto decays = told.at(2).toBoolList();
    const auto rates = told.at(3).toDoubleList();
    keeps_state_ = told.at(4).toBool();
    for (size_t i = 0; i < tensors.size(); ++i) {
      Treatment treatment{.learning_rate = rates.get(i), .weight_decay = decays.get(i)};
      if (i == 0)  // Python starts all of them at once
        treatment.start = [handle = handle_](at::Tensor&, const at::Generator& generator) {
          call("initialise", {handle, int64_t(generator.current_seed() >> 1)});
        };
      add_below(*this, names.get(i).toStringRef(), tensors[i], treatment);
    }
  }

  // "qkv.weight" is the parameter "weight" of a part "qkv": names in C++ have no dots.
  static void add_below(Module& module, const std::string& name, const at::Tensor& tensor,
                        const Treatment& treatment) {
    const size_t dot = name.find('.');
    if (dot == std::string::npos) {
      module.add_parameter(name, tensor, treatment);
      return;
    }
    const std::string part = name.substr(0, dot);
    const auto* known = module.named_children().find(part);
    const auto below = known ? std::dynamic_pointer_cast<Module>(*known)
                             : module.register_module(part, std::make_shared<Module>());
    add_below(*below, name.substr(dot + 1), tensor, treatment);
  }

  const Cache inputs_ = add_cache("inputs");
  const int64_t handle_;
  bool keeps_state_ = false;
  bool left_out_ = false;
};

// The products of modules with float32 parameters that compute in bfloat16: those of the mixers in
// C++, instead of casts of weights and gradients.
TORCH_LIBRARY_FRAGMENT(assay_python, m) {
  m.def("linear_of_master(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
        [](const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
          // A module may expect a contiguous result, as that of torch is
          return ops::linear_of_master(x, weight, bias.value_or(at::Tensor())).contiguous();
        });
}

}  // namespace

std::string python_class(const std::string& part) { return part.substr(kPythonPrefix.size()); }

PythonCode read_python(const std::string& name, const std::string& known) {
  if (is_file(name)) return {name, known.empty() ? read_file(name) : known};
  const std::string now = "sha256 " + call("digest", {name}).at(0).toStringRef();
  if (!known.empty() && known != now)
    fail("the file of the Python module '{}' has changed since ({} before, {} now)", name, known,
         now);
  return {name, now};
}

std::shared_ptr<Mixer> make_python_mixer(const PythonCode& code, const std::string& part,
                                         const std::string& fields, const Place& place) {
  return std::make_shared<PythonMixer>(code, part, fields, place);
}

void check_python_mixer(const Mixer& mixer, const at::Tensor& x) {
  if (const auto* module = dynamic_cast<const PythonMixer*>(&mixer)) module->check(x);
}

std::string place_of_python_mixer(const Mixer& mixer) {
  const auto* module = dynamic_cast<const PythonMixer*>(&mixer);
  return module ? module->where() : "";
}

void leave_out_if_it_needs_a_gpu(Mixer& mixer) {
  if (auto* module = dynamic_cast<PythonMixer*>(&mixer)) module->leave_out_if_it_needs_a_gpu();
}

}  // namespace assay::nn
