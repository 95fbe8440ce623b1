#include "train/divergence.h"

#include <torch/torch.h>

#include <cmath>
#include <map>

#include "train/checkpoint.h"

namespace assay::train {

void DivergenceCheck::check_step(int64_t step, double loss, double gradient_norm,
                                 double mean_loss) {
  if (!std::isfinite(loss) || !std::isfinite(gradient_norm))
    fail<Error>(
        "step {}: loss {}, gradient norm {}; first non-finite value in {}; {}. "
        "Lower learning_rate, or raise warmup_steps.",
        step, loss, gradient_norm, first_nonfinite(step), last_good(step));
  if (c_.spike > 0 && step > std::max<int64_t>(c_.warmup_steps, 50) && loss > mean_loss + c_.spike)
    fail<Error>(
        "step {}: the loss jumped to {:.3f} from a running mean of {:.3f} (train.spike = {}); "
        "every value is finite; {}.",
        step, loss, mean_loss, c_.spike, last_good(step));
}

void DivergenceCheck::check_held_out(int64_t step, const std::string& set, double nll) {
  if (std::isfinite(nll)) return;
  fail<Error>(
      "step {}: held-out loss {} on {}; first non-finite value in {}; {}. "
      "Lower learning_rate, or raise warmup_steps.",
      step, nll, set, first_nonfinite(step), last_good(step));
}

void DivergenceCheck::check_end(int64_t step, const std::string& set, double loss) const {
  if (std::isfinite(loss)) return;
  fail<Error>(
      "the loss at the end of the run is not finite on {}; {}. Lower learning_rate, "
      "or raise warmup_steps.",
      set, last_good(step));
}

// Runs the step's forward again and names the first place that is not finite.
std::string DivergenceCheck::first_nonfinite(int64_t step) {
  const at::NoGradGuard no_grad;
  const std::vector<std::string>& pattern = model_.spec.config.pattern;
  std::string place;
  model_.watch = [&](int64_t layer, const at::Tensor& x) {
    if (place.empty() && !at::isfinite(x).all().item<bool>())
      place = layer < 0
                  ? "the embedding"
                  : fmt::format("layer {} ({})", layer, pattern[size_t(layer) % pattern.size()]);
  };
  run_forward(step);
  model_.watch = nullptr;
  std::map<const void*, at::Tensor> kept;  // ranks have only parts of them in float32
  for (const nn::Linear* linear : nn::linears_of(model_))
    if (linear->rounded && linear->rounded->is_of(linear->weight))
      kept[linear->weight.unsafeGetTensorImpl()] = linear->rounded->value;
  for (const auto& item : model_.named_parameters()) {
    const auto found = kept.find(item.value().unsafeGetTensorImpl());
    const at::Tensor& value = found == kept.end() ? item.value() : found->second;
    if (!at::isfinite(value).all().item<bool>()) return place + ", weight " + item.key();
  }
  return place.empty() ? "the gradient" : place;
}

void DivergenceCheck::run_forward(int64_t step) {
  std::vector<int64_t> tokens(size_t(c_.batch_size * (c_.sequence_length + 1)));
  sampler_.batch(step, c_.batch_size, tokens.data());
  const at::Tensor batch = at::tensor(tokens).view({c_.batch_size, -1}).to(device_);
  for (const at::Tensor& part : batch.split(c_.micro_batch_size)) {
    nn::ModelState state;
    model_.hidden(part.slice(1, 0, -1), state);
  }
}

// The checkpoint of the step that fails holds the very weights that fail.
std::string DivergenceCheck::last_good(int64_t failing_step) const {
  const auto good = newest_checkpoint(folder_, failing_step - 1);
  return good ? "the last good checkpoint is " + good->path.string()
              : "there is no checkpoint before it";
}

}  // namespace assay::train
