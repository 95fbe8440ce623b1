#include "train/optimizer.h"

#include <torch/torch.h>

#include <map>

namespace assay::train {

AdamW::AdamW(nn::LanguageModel& model, const TrainConfig& c)
    : beta1_(c.beta1), beta2_(c.beta2), epsilon_(c.epsilon), clip_(c.clip) {
  const std::map<std::string, nn::Treatment> treatments = model.treatments();
  std::map<std::pair<double, bool>, Group> groups;
  for (const auto& item : model.named_parameters()) {
    const nn::Treatment& treatment = treatments.at(item.key());
    Group& group = groups[{treatment.learning_rate, treatment.weight_decay}];
    group.learning_rate = treatment.learning_rate;
    group.weight_decay = treatment.weight_decay ? c.weight_decay : 0;
    group.names.push_back(item.key());
    group.parameters.push_back(item.value());
    group.averages.push_back(at::zeros_like(item.value()));
    group.squares.push_back(at::zeros_like(item.value()));
  }
  for (auto& [key, group] : groups) groups_.push_back(std::move(group));
}

at::Tensor AdamW::step(double learning_rate, int64_t step) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> all;
  for (Group& group : groups_)
    for (at::Tensor& parameter : group.parameters) {
      if (!parameter.grad().defined()) parameter.mutable_grad() = at::zeros_like(parameter);
      all.push_back(parameter.grad());
    }
  const at::Tensor norm = at::linalg_vector_norm(at::stack(at::_foreach_norm(all))).to(at::kFloat);
  // Once a gradient was not finite, no later step changes a weight: the trainer reads the norm
  // one step late.
  const at::Tensor broken = at::isfinite(norm).logical_not().to(at::kFloat);
  broken_ = broken_.defined() ? at::maximum(broken_, broken) : broken;
  const at::Tensor scale =
      clip_ > 0 ? at::clamp_min((norm + 1e-6) / clip_, 1) : at::ones_like(norm);
  for (Group& group : groups_) {
    std::vector<at::Tensor> gradients;
    for (at::Tensor& parameter : group.parameters) gradients.push_back(parameter.grad());
    const std::vector<at::Tensor> steps(group.parameters.size(),
                                        at::full({}, double(step + 1), norm.options()));
    at::_fused_adamw_(group.parameters, gradients, group.averages, group.squares, {}, steps,
                      group.learning_rate * learning_rate, beta1_, beta2_, group.weight_decay,
                      epsilon_,
                      /*amsgrad=*/false, /*maximize=*/false, scale, broken_);
    for (at::Tensor& parameter : group.parameters) parameter.mutable_grad().reset();
  }
  return norm;
}

nn::NamedTensors AdamW::moments() const {
  nn::NamedTensors out;
  for (const Group& group : groups_)
    for (size_t i = 0; i < group.names.size(); ++i) {
      out.emplace_back(group.names[i] + ".exp_avg", group.averages[i]);
      out.emplace_back(group.names[i] + ".exp_avg_sq", group.squares[i]);
    }
  return out;
}

}  // namespace assay::train
