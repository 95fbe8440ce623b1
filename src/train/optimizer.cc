#include "train/optimizer.h"

#include <torch/torch.h>

#include <map>

#include "ops/dense/adamw/adamw.h"

namespace assay::train {

AdamW::AdamW(nn::LanguageModel& model, const TrainConfig& c, GradientSum* sum)
    : sum_(sum), beta1_(c.beta1), beta2_(c.beta2), epsilon_(c.epsilon), clip_(c.clip) {
  const std::map<std::string, nn::Treatment> treatments = model.treatments();
  std::map<std::pair<double, bool>, Group> groups;
  size_t index = 0;
  for (const auto& item : model.named_parameters()) {
    const nn::Treatment& treatment = treatments.at(item.key());
    Group& group = groups[{treatment.learning_rate, treatment.weight_decay}];
    group.learning_rate = treatment.learning_rate;
    group.weight_decay = treatment.weight_decay ? c.weight_decay : 0;
    group.names.push_back(item.key());
    group.parameters.push_back(item.value());
    group.owners.push_back(sum ? sum->owner(index++) : 0);
    const at::Device device =
        own(group, group.owners.size() - 1) ? item.value().device() : at::kMeta;
    const auto options = item.value().options().device(device).requires_grad(false);
    group.averages.push_back(at::zeros_like(item.value(), options));
    group.squares.push_back(at::zeros_like(item.value(), options));
  }
  std::vector<int64_t> positions;
  for (auto& [key, group] : groups) {
    for (size_t i = 0; i < group.parameters.size(); ++i, ++count_)
      if (own(group, i)) positions.push_back(count_);
    groups_.push_back(std::move(group));
  }
  positions_ = at::tensor(positions, at::kLong).to(groups_.front().parameters.front().device());
}

bool AdamW::own(const Group& group, size_t i) const {
  return !sum_ || !sum_->ranks() || group.owners[i] == sum_->ranks()->rank();
}

at::Tensor AdamW::norms_of_gradients() {
  std::vector<at::Tensor> gradients;
  for (Group& group : groups_)
    for (size_t i = 0; i < group.parameters.size(); ++i) {
      if (!own(group, i)) continue;
      at::Tensor& parameter = group.parameters[i];
      if (!parameter.grad().defined()) parameter.mutable_grad() = at::zeros_like(parameter);
      gradients.push_back(parameter.grad());
    }
  const std::vector<at::Tensor> norms =
      gradients.empty() ? std::vector<at::Tensor>() : at::_foreach_norm(gradients);
  return sum_ && sum_->ranks() ? at_all_positions(norms) : at::stack(norms);
}

// In the order of the groups, whichever rank has the gradient.
at::Tensor AdamW::at_all_positions(const std::vector<at::Tensor>& norms) {
  const auto options = groups_.front().parameters.front().options().requires_grad(false);
  const at::Tensor all = at::zeros({count_}, options);
  if (!norms.empty()) all.index_copy_(0, positions_, at::stack(norms));
  sum_->ranks()->add_disjoint(all);
  return all;
}

at::Tensor AdamW::step(double learning_rate, int64_t step) {
  const at::NoGradGuard no_grad;
  const at::Tensor norm = at::linalg_vector_norm(norms_of_gradients()).to(at::kFloat);
  // Once a gradient was not finite, no later step changes a weight: the trainer reads the norm
  // one step late.
  const at::Tensor broken = at::isfinite(norm).logical_not().to(at::kFloat);
  broken_ = broken_.defined() ? at::maximum(broken_, broken) : broken;
  const at::Tensor scale =
      clip_ > 0 ? at::clamp_min((norm + 1e-6) / clip_, 1) : at::ones_like(norm);
  for (Group& group : groups_) {
    ops::AdamWTensors tensors;
    for (size_t i = 0; i < group.parameters.size(); ++i) {
      if (!own(group, i)) continue;
      tensors.parameters.push_back(group.parameters[i]);
      tensors.gradients.push_back(group.parameters[i].grad());
      tensors.averages.push_back(group.averages[i]);
      tensors.squares.push_back(group.squares[i]);
    }
    const ops::AdamWSettings settings{group.learning_rate * learning_rate,
                                      beta1_,
                                      beta2_,
                                      group.weight_decay,
                                      epsilon_,
                                      step + 1};
    ops::adamw_(tensors, settings, scale, broken_);
    for (at::Tensor& parameter : tensors.parameters) parameter.mutable_grad().reset();
  }
  if (sum_ && sum_->ranks()) sum_->share_parameters();
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

std::map<std::string, int64_t> AdamW::owners() const {
  std::map<std::string, int64_t> out;
  for (const Group& group : groups_)
    for (size_t i = 0; i < group.names.size(); ++i)
      for (const char* moment : {"", ".exp_avg", ".exp_avg_sq"})
        out[group.names[i] + moment] = group.owners[i];
  return out;
}

}  // namespace assay::train
