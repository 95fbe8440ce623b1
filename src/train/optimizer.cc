#include "train/optimizer.h"

#include <torch/torch.h>

#include <map>

namespace assay::train {
namespace {

constexpr std::array kMoments = {".exp_avg", ".exp_avg_sq"};

}  // namespace

AdamW::AdamW(nn::LanguageModel& model, const TrainConfig& c, GradientSum* sum)
    : parameters_(model.parameters()),
      sum_(sum),
      pieces_(sum ? sum->pieces() : Pieces(parameters_, 1)),
      beta1_(c.beta1),
      beta2_(c.beta2),
      epsilon_(c.epsilon),
      clip_(c.clip) {
  const std::map<std::string, nn::Treatment> treatments = model.treatments();
  std::map<std::pair<double, bool>, Group> groups;
  for (const auto& item : model.named_parameters()) {
    const nn::Treatment& treatment = treatments.at(item.key());
    Group& group = groups[{treatment.learning_rate, treatment.weight_decay}];
    group.learning_rate = treatment.learning_rate;
    group.weight_decay = treatment.weight_decay ? c.weight_decay : 0;
    group.parameters.push_back(names_.size());
    names_.push_back(item.key());
  }
  keep_rounded_weights(model);
  const at::NoGradGuard no_grad;
  const auto options = parameters_.front().options().requires_grad(false);
  for (const Pieces::Bucket& bucket : pieces_.buckets) {
    const int64_t own = bucket.size / (ranks() ? ranks()->size() : 1);
    moments_.push_back({at::zeros({own}, options), at::zeros({own}, options)});
  }
  updates_.resize(pieces_.buckets.size());
  std::vector<int64_t> positions;
  for (auto& [key, group] : groups) {
    for (const size_t i : group.parameters)
      for (const Part& part : pieces_.parts[i]) {
        const int64_t position = count_++;
        if (ranks() && !sum_->owns(part)) continue;
        positions.push_back(position);
        add_to_update(part, groups_.size());
      }
    groups_.push_back(std::move(group));
  }
  positions_ = at::tensor(positions, at::kLong).to(options.device());
}

// With ranks, GradientSum keeps them.
void AdamW::keep_rounded_weights(const nn::LanguageModel& model) {
  rounded_.resize(parameters_.size());
  for (nn::Linear* linear : nn::linears_of(model)) {
    if (!ranks() && linear->weight.is_cuda())
      linear->rounded = c10::make_intrusive<ops::RoundedWeight>();
    const auto found = std::ranges::find_if(parameters_, [&](const at::Tensor& parameter) {
      return parameter.is_same(linear->weight);
    });
    rounded_[size_t(found - parameters_.begin())] = linear->rounded;
  }
}

void AdamW::add_to_update(const Part& part, size_t group) {
  std::vector<Update>& updates = updates_[part.bucket];
  if (updates.empty() || updates.back().group != group) updates.push_back({.group = group});
  updates.back().parts.push_back(parts_.size());
  parts_.push_back(part);
  const Moments& moments = moments_[part.bucket];
  const int64_t first = ranks() ? ranks()->rank() * moments[0].numel() : 0;
  ops::AdamWTensors& tensors = updates.back().tensors;
  tensors.averages.push_back(moments[0].narrow(0, part.place - first, part.size));
  tensors.squares.push_back(moments[1].narrow(0, part.place - first, part.size));
}

at::Tensor AdamW::gradient(const Part& part) const {
  if (ranks()) return sum_->gradient(part);
  const at::Tensor& parameter = parameters_[part.parameter];
  const at::Tensor& gradient = parameter.grad();
  if (!gradient.defined()) return at::zeros({part.size}, parameter.options());
  const at::Tensor flat = gradient.reshape(-1);
  return flat.numel() == part.size ? flat : flat.narrow(0, part.begin, part.size);
}

at::Tensor AdamW::values(const Part& part) const {
  if (ranks()) return sum_->values(part);
  return parameters_[part.parameter].detach().view(-1).narrow(0, part.begin, part.size);
}

// The rounded weight that products keep; undefined if the weight has changed since.
at::Tensor AdamW::rounded_part(const Part& part) const {
  const auto& rounded = rounded_[part.parameter];
  if (!rounded || !rounded->is_of(parameters_[part.parameter])) return {};
  return rounded->value.view(-1).narrow(0, part.begin, part.size);
}

// In the order of the groups, whichever rank has the gradient.
at::Tensor AdamW::norms_of_gradients(const std::vector<at::Tensor>& gradients) const {
  const std::vector<at::Tensor> norms =
      gradients.empty() ? std::vector<at::Tensor>() : at::_foreach_norm(gradients);
  if (!ranks()) return at::stack(norms);
  const at::Tensor all = at::zeros({count_}, parameters_.front().options().requires_grad(false));
  if (!norms.empty()) all.index_copy_(0, positions_, at::stack(norms));
  ranks()->add_disjoint(all);
  return all;
}

at::Tensor AdamW::step(double learning_rate, int64_t step) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients;
  std::vector<at::Tensor> rounded;
  for (const Part& part : parts_) {
    gradients.push_back(gradient(part));
    rounded.push_back(rounded_part(part));
  }
  const at::Tensor norm = at::linalg_vector_norm(norms_of_gradients(gradients)).to(at::kFloat);
  // Once a gradient was not finite, no later step changes a weight: the trainer reads the norm
  // one step late.
  const at::Tensor broken = at::isfinite(norm).logical_not().to(at::kFloat);
  broken_ = broken_.defined() ? at::maximum(broken_, broken) : broken;
  const at::Tensor scale =
      clip_ > 0 ? at::clamp_min((norm + 1e-6) / clip_, 1) : at::ones_like(norm);
  // The next forward pass reads the parameters of the last bucket first.
  for (size_t bucket = updates_.size(); bucket-- > 0;) {
    for (Update& update : updates_[bucket]) {
      for (const size_t i : update.parts) {
        update.tensors.parameters.push_back(values(parts_[i]));
        update.tensors.gradients.push_back(gradients[i]);
        update.tensors.rounded.push_back(rounded[i]);
      }
      const ops::AdamWSettings settings{groups_[update.group].learning_rate * learning_rate,
                                        beta1_,
                                        beta2_,
                                        groups_[update.group].weight_decay,
                                        epsilon_,
                                        step + 1};
      ops::adamw_(update.tensors, settings, scale, broken_);
      update.tensors.parameters.clear();
      update.tensors.gradients.clear();
      update.tensors.rounded.clear();
    }
    if (ranks()) sum_->share(bucket);
  }
  for (size_t i = 0; i < parts_.size(); ++i)
    if (rounded[i].defined()) {
      const size_t parameter = parts_[i].parameter;
      rounded_[parameter]->version = int64_t(parameters_[parameter]._version());
    }
  for (at::Tensor& parameter : parameters_) parameter.mutable_grad().reset();
  return norm;
}

nn::NamedTensors AdamW::moments() const {
  nn::NamedTensors out;
  for (const Group& group : groups_)
    for (const size_t i : group.parameters)
      for (const char* moment : kMoments)
        out.emplace_back(names_[i] + moment, at::empty(parameters_[i].sizes(),
                                                       parameters_[i].options().device(at::kMeta)));
  return out;
}

// Calls work() with the moments of each parameter of a bucket.
void AdamW::in_whole(size_t bucket, const Moments& whole, const TensorFunction& work) const {
  const Pieces::Bucket& layout = pieces_.buckets[bucket];
  for (size_t j = 0; j < layout.parameters.size(); ++j) {
    const at::Tensor& parameter = parameters_[layout.parameters[j]];
    for (size_t m = 0; m < kMoments.size(); ++m)
      work(names_[layout.parameters[j]] + kMoments[m],
           whole[m].narrow(0, layout.places[j], parameter.numel()).view_as(parameter));
  }
}

void AdamW::read_moments(const TensorFunction& read) const {
  for (size_t b = 0; b < moments_.size(); ++b) {
    Moments whole = moments_[b];
    if (ranks())
      for (at::Tensor& flat : whole) flat = ranks()->gather(flat).view(-1);
    in_whole(b, whole, read);
  }
}

void AdamW::write_moments(const TensorFunction& write) {
  for (size_t b = 0; b < moments_.size(); ++b) {
    Moments whole = moments_[b];
    if (ranks())
      for (at::Tensor& flat : whole) flat = at::zeros({pieces_.buckets[b].size}, flat.options());
    in_whole(b, whole, write);
    for (size_t m = 0; ranks() && m < kMoments.size(); ++m)
      moments_[b][m].copy_(whole[m].view({ranks()->size(), -1})[ranks()->rank()]);
  }
}

}  // namespace assay::train
