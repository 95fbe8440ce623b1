#include "train/causality.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <map>

#include "nn/python_mixer.h"

namespace assay::train {
namespace {

constexpr int64_t kLongest = 512;
constexpr int64_t kLayersOfAMixer = 2;
// Kernels may round otherwise if later positions of a chunk change. An output that reads one of 512
// positions changes by more.
double tolerance_of(at::ScalarType dtype) { return dtype == at::kDouble ? 1e-9 : 1e-3; }

// The parameters that start at zero, with small random numbers as long as this lives.
class FilledZeros {
 public:
  FilledZeros(torch::nn::Module& part, at::Generator& generator) {
    for (const at::Tensor& parameter : part.parameters()) {
      if (parameter.count_nonzero().item<int64_t>() > 0) continue;
      zeros_.push_back(parameter);
      const auto options = at::TensorOptions().dtype(at::kFloat);
      zeros_.back().copy_(0.1 * at::randn(parameter.sizes(), generator, options));
    }
  }
  ~FilledZeros() {
    const at::NoGradGuard no_grad;
    for (at::Tensor& parameter : zeros_) parameter.zero_();
  }
  FilledZeros(const FilledZeros&) = delete;

 private:
  std::vector<at::Tensor> zeros_;
};

// The largest difference of two outputs, relative to the largest of their values.
double change(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor both = at::stack({a, b}).to(at::kDouble);
  const double largest = (both[0] - both[1]).abs().max().item<double>();
  return largest / std::max(both.abs().max().item<double>(), 1e-30);
}

// Tells the author of a mixer where to look for the mistake.
std::string how_to_find(const nn::Mixer& part, const nn::ModelSpec& spec, const std::string& name) {
  if (nn::is_python(name)) {
    const ConfigNode model = ConfigNode::parse(spec.toml()).child("model");
    std::string file;
    model.read(Fields{{"python", &file, ""}}, model.keys());
    return fmt::format("Its forward is at {}; `assay check {}:{}` says more.",
                       nn::place_of_python_mixer(part), file, nn::python_class(name));
  }
  return "The tests MixerForms check every mixer of the program.";
}

}  // namespace

void check_causality(nn::LanguageModel& model, int64_t sequence_length) {
  const int64_t time = std::min({sequence_length, model.max_time(), kLongest});
  if (time < 2) return;
  // Odd, so that it lies within the chunks of mixers that divide a sequence
  const int64_t cut = time / 2 | 1;
  const at::NoGradGuard no_grad;
  at::Generator generator = at::detail::createCPUGenerator(/*seed_val=*/1);
  const nn::ModelConfig& c = model.spec.config;
  const auto options = at::TensorOptions().dtype(at::kFloat);
  at::Tensor x = at::randn({1, time, c.d_model}, generator, options).repeat({2, 1, 1});
  x[1].slice(0, cut).copy_(at::randn({time - cut, c.d_model}, generator, options));
  x = x.to(model.embedding.options());
  const auto check = [&](nn::Mixer& part, const std::string& name, int64_t layer,
                         nn::State& state) {
    const FilledZeros filled(part, generator);
    nn::check_python_mixer(part, x.to(model.product_dtype()));
    nn::State fresh = state;
    const at::Tensor output = part.forward(x, state);
    if (!output.isfinite().all().item<bool>())
      fail(
          "layer {}: {} returns NaN or infinite values for random inputs of variance 1, "
          "with the parameters that it starts with. Nothing was trained. {}",
          layer, name, how_to_find(part, model.spec, name));
    if (change(output, part.forward(x, fresh)) > tolerance_of(x.scalar_type()))
      fail(
          "layer {}: {} returns other values when it reads the same sequence again. "
          "Does it draw random numbers (dropout), or keep something from call to call? "
          "Nothing was trained. {}",
          layer, name, how_to_find(part, model.spec, name));
    // Sequence 1 of the batch differs from sequence 0 from `cut` on
    const at::Tensor before = output.slice(1, 0, cut);
    const double changed = change(before[0], before[1]);
    if (changed <= tolerance_of(x.scalar_type())) return;
    fail(
        "layer {}: {} reads later tokens. "
        "If the positions from {} on of a sequence of {} change, "
        "its outputs before them change by {:.2g} of the largest. "
        "The held-out losses of such a model mean nothing, "
        "because it sees the tokens that it predicts. Nothing was trained. "
        "Let an output depend on its own and earlier positions only. {}",
        layer, name, cut, time, changed, how_to_find(part, model.spec, name));
  };
  std::map<std::string, int64_t> checked;  // layers of one mixer
  nn::Context context{.last = true};
  for (int64_t i = 0; i < std::ssize(model.layers); ++i) {
    const std::string& name = c.pattern[size_t(i) % c.pattern.size()];
    if (++checked[name] > kLayersOfAMixer) continue;
    nn::State state;
    std::swap(state.context, context);
    check(*model.layers[size_t(i)]->mixer, name, i, state);
    if (nn::Mixer* mixer = model.layers[size_t(i)]->channel_mixer.get())
      check(*mixer, c.channel_mixer, i, state);
    std::swap(state.context, context);
  }
}

}  // namespace assay::train
