#include "train/optimizer.h"

#include <torch/torch.h>

namespace assay::train {
namespace {

bool decays(const std::string& name, const at::Tensor& parameter) {
  return parameter.dim() == 2 && (name.ends_with(".weight") || name == "embedding" || name == "positions");
}

}  // namespace

AdamW::AdamW(nn::LanguageModel& model, const TrainConfig& c)
    : groups_(2), group_names_(2), beta1_(c.beta1), beta2_(c.beta2), epsilon_(c.epsilon), clip_(c.clip) {
  groups_[0].weight_decay = c.weight_decay;
  groups_[1].weight_decay = 0;
  for (const auto& item : model.named_parameters()) {
    const size_t g = decays(item.key(), item.value()) ? 0 : 1;
    group_names_[g].push_back(item.key());
    groups_[g].parameters.push_back(item.value());
    groups_[g].averages.push_back(at::zeros_like(item.value()));
    groups_[g].squares.push_back(at::zeros_like(item.value()));
  }
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
  const at::Tensor skip = at::isfinite(norm).logical_not().to(at::kFloat);
  const at::Tensor scale = clip_ > 0 ? at::clamp_min((norm + 1e-6) / clip_, 1) : at::ones_like(norm);
  for (Group& group : groups_) {
    if (group.parameters.empty()) continue;
    std::vector<at::Tensor> gradients;
    for (at::Tensor& parameter : group.parameters) gradients.push_back(parameter.grad());
    const std::vector<at::Tensor> steps(group.parameters.size(), at::full({}, double(step + 1), norm.options()));
    at::_fused_adamw_(group.parameters, gradients, group.averages, group.squares, {}, steps, learning_rate, beta1_, beta2_,
                      group.weight_decay, epsilon_, /*amsgrad=*/false, /*maximize=*/false, scale, skip);
    for (at::Tensor& parameter : group.parameters) parameter.mutable_grad().reset();
  }
  return norm;
}

nn::NamedTensors AdamW::moments() const {
  nn::NamedTensors out;
  for (size_t g = 0; g < groups_.size(); ++g)
    for (size_t i = 0; i < groups_[g].parameters.size(); ++i) {
      out.emplace_back(group_names_[g][i] + ".exp_avg", groups_[g].averages[i]);
      out.emplace_back(group_names_[g][i] + ".exp_avg_sq", groups_[g].squares[i]);
    }
  return out;
}

}  // namespace assay::train
