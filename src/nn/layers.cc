#include "nn/layers.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <cmath>

#include "base/error.h"
#include "base/random.h"
#include "nn/initial_values.h"
#include "nn/mixer.h"
#include "ops/core/tensors.h"
#include "ops/recurrence/linear_attention/linear_attention.h"
#include "ops/rowwise/gated_norm/gated_norm.h"
#include "ops/rowwise/glu/glu.h"
#include "ops/rowwise/norm/norm.h"
#include "ops/rowwise/unit_length/unit_length.h"

namespace assay::nn {

at::Tensor Module::add_parameter(const std::string& name, const at::Tensor& value,
                                 Treatment treatment) {
  own_treatments_[name] = std::move(treatment);
  return register_parameter(name, value);
}

std::shared_ptr<Linear> Module::add_linear(const std::string& name, int64_t in, int64_t out) {
  return add_linear(name, in, out, {});
}

std::shared_ptr<Linear> Module::add_linear(const std::string& name, int64_t in, int64_t out,
                                           LinearOptions options) {
  return register_module(name, std::make_shared<Linear>(in, out, std::move(options)));
}

std::map<std::string, Treatment> Module::treatments() const {
  std::map<std::string, Treatment> found;
  const auto collect = [&](const std::string& path, const torch::nn::Module& part) {
    const auto* module = dynamic_cast<const Module*>(&part);
    for (const auto& item : part.named_parameters(/*recurse=*/false)) {
      if (!module || !module->own_treatments_.contains(item.key()))
        fail<Error>("parameter '{}{}' was not added with Module::add_parameter", path, item.key());
      found[path + item.key()] = module->own_treatments_.at(item.key());
    }
  };
  collect("", *this);
  for (const auto& part : named_modules("", /*include_self=*/false))
    collect(part.key() + ".", *part.value());
  return found;
}

void Module::initialise(uint64_t seed) {
  const at::NoGradGuard no_grad;
  const std::map<std::string, Treatment> how = treatments();
  for (auto& item : named_parameters())
    if (const Start& start = how.at(item.key()).start)
      start(item.value(), at::make_generator<at::CPUGeneratorImpl>(
                              Random(seed, "initialise " + item.key()).next()));
}

Linear::Linear(int64_t in, int64_t out, LinearOptions options) {
  // The start of an output depends on the number of layers, so the model sets it.
  if (!options.start && options.role == Role::input) options.start = normal(kMatrixDeviation);
  weight = add_parameter("weight", torch::zeros({out, in}),
                         {.start = std::move(options.start), .weight_decay = options.weight_decay});
  if (options.bias) bias = add_parameter("bias", torch::zeros({out}));
}

std::vector<Linear*> linears_of(const torch::nn::Module& module) {
  std::vector<Linear*> found;
  for (const auto& part : module.modules(/*include_self=*/false))
    if (auto* linear = dynamic_cast<Linear*>(part.get())) found.push_back(linear);
  return found;
}

namespace {

bool is_trained_in_bf16(const at::Tensor& weight, const at::Tensor& x) {
  return at::GradMode::is_enabled() && weight.requires_grad() && x.dim() > 1 && x.numel() > 0 &&
         x.scalar_type() == at::kBFloat16 && weight.scalar_type() == at::kFloat;
}

}  // namespace

at::Tensor Projection::operator()(const at::Tensor& x) const {
  if (is_trained_in_bf16(weight, x)) {
    const at::Tensor y = ops::linear_of_master(x, weight, bias, gradient_place, rounded);
    return activation.empty() ? y : ops::glu(y, activation);
  }
  const at::Tensor w = weight_in(x.scalar_type());
  const at::Tensor b = bias.defined() ? bias.to(x.scalar_type()) : bias;
  return activation.empty() ? ops::linear(x, w, b, w.is_same(weight))
                            : ops::linear_glu(x, w, b, activation, w.is_same(weight));
}

at::Tensor Projection::weight_in(at::ScalarType dtype) const {
  const bool is_kept = dtype == at::kBFloat16 && rounded && rounded->is_of(weight);
  return is_kept ? rounded->value : weight.to(dtype);
}

Projection Linear::projection(std::string_view activation) const {
  return {weight, bias, activation, gradient_place, rounded};
}

at::Tensor Linear::forward(const at::Tensor& x) const { return projection()(x); }

const std::vector<std::string>& Norm::kinds() {
  static const std::vector<std::string> names = {"rmsnorm", "layernorm", "zero_centered_rmsnorm"};
  return names;
}

Norm::Norm(const std::string& kind, int64_t size, double eps, int64_t groups)
    : eps(eps), groups(groups), zero_centered(kind == "zero_centered_rmsnorm") {
  if (std::ranges::find(kinds(), kind) == kinds().end())
    fail("unknown norm '{}'{}; there are {}", kind, did_you_mean(kind, kinds()), join(kinds()));
  if (groups < 1 || size % groups) fail("norm: {} groups do not divide {} channels", groups, size);
  weight = add_parameter("weight", zero_centered ? torch::zeros({size}) : torch::ones({size}));
  if (kind == "layernorm") bias = add_parameter("bias", torch::zeros({size}));
}

at::Tensor Norm::forward(const at::Tensor& x) const {
  const at::Tensor w = zero_centered ? 1 + weight : weight;
  return bias.defined() ? ops::layer_norm(x, w, bias, eps, groups)
                        : ops::rms_norm(x, w, eps, groups);
}

at::Tensor Norm::forward(Residual& x) const {
  if (!x.y.defined()) return forward(x.x);
  const at::Tensor w = zero_centered ? 1 + weight : weight;
  const auto bias_or_none = bias.defined() ? std::optional(bias) : std::nullopt;
  auto [sum, normed] = ops::add_norm(x.x, x.y, w, bias_or_none, eps, groups);
  x = {sum, {}};
  return normed;
}

at::Tensor Norm::forward_projected(Residual& x, const Projection& to, at::ScalarType dtype) const {
  const bool plain = !bias.defined() && groups == 1 && !zero_centered;
  if (!plain || at::GradMode::is_enabled() || x.x.scalar_type() != dtype)
    return to(forward(x).to(dtype));
  const at::Tensor w = to.weight_in(dtype);
  const at::Tensor b = to.bias.defined() ? to.bias.to(dtype) : to.bias;
  auto [sum, projected] =
      ops::norm_linear(x.x, x.y, weight, eps, w, b, to.activation, w.is_same(to.weight));
  x = {sum, {}};
  return projected;
}

at::Tensor Residual::sum() const { return y.defined() ? x + y : x; }

namespace {

at::Tensor gated(const Norm& norm, const at::Tensor& x, const at::Tensor& z, bool gate_first,
                 std::string_view gate) {
  const int64_t heads = x.size(-1) / norm.weight.size(0);
  const at::Tensor w = norm.zero_centered ? 1 + norm.weight : norm.weight;
  return ops::gated_rms_norm(x, z, heads > 1 ? w.repeat(heads) : w, norm.eps, gate_first,
                             heads * norm.groups, gate);
}

}  // namespace

at::Tensor Norm::forward_then_gate(const at::Tensor& x, const at::Tensor& z,
                                   std::string_view gate) const {
  return gated(*this, x, z, /*gate_first=*/false, gate);
}

at::Tensor Norm::gate_then_forward(const at::Tensor& x, const at::Tensor& z) const {
  return gated(*this, x, z, /*gate_first=*/true, "silu");
}

LowRank::LowRank(int64_t in, int64_t rank, int64_t out, bool with_bias, std::string act)
    : down_proj(add_linear("down_proj", in, rank)),
      up_proj(add_linear("up_proj", rank, out, {.bias = with_bias})),
      activation(std::move(act)) {}

at::Tensor LowRank::forward(const at::Tensor& x) const {
  const at::Tensor h = down_proj->forward(x);
  return up_proj->forward(activation == "tanh"      ? h.tanh()
                          : activation == "sigmoid" ? h.sigmoid()
                                                    : h);
}

void one_of(const char* mixer, const char* field, const std::string& value,
            const std::vector<std::string>& names) {
  if (std::ranges::find(names, value) == names.end())
    fail("{}: {} = '{}' must be one of {}{}", mixer, field, value, join(names),
         did_you_mean(value, names));
}

void check_scale(const char* mixer, double initial_scale, double learning_rate) {
  if (!(initial_scale > 0) || std::isinf(initial_scale))
    fail("{}: initial_scale = {} must be positive", mixer, initial_scale);
  if (!(learning_rate >= 0) || std::isinf(learning_rate))
    fail("{}: scale_learning_rate = {} must be positive, or 0 for a fixed scale", mixer,
         learning_rate);
}

at::Tensor wide(const at::Tensor& x) {
  return x.to(at::promote_types(x.scalar_type(), at::kFloat));
}

at::Tensor unit_length(const at::Tensor& x) { return ops::unit_length(x, 1e-6); }

at::Tensor values_of_positions(const at::Tensor& k) {
  return at::eye(k.size(1), k.options()).unsqueeze(1).expand({k.size(0), -1, k.size(2), -1});
}

at::Tensor split_heads(const at::Tensor& x, int64_t num_heads) {
  return x.unflatten(-1, {num_heads, -1});
}

int64_t head_width(const char* mixer, int64_t width, int64_t num_heads) {
  if (num_heads < 1 || width < 1 || width % num_heads)
    fail(
        "{}: num_heads = {} must be positive and divide {} channels (d_model, "
        "or what expand makes of it)",
        mixer, num_heads, width);
  return width / num_heads;
}

// On CPUs, linear attention whose queries and keys are 1.
at::Tensor running_sum(const at::Tensor& x, State& state, const std::string& name) {
  if (!x.is_cpu()) {
    at::Tensor sums = ops::prefix_sums(x.flatten(2)).view_as(x);
    if (const auto before = state.find(name)) sums = sums + before->squeeze(2).unsqueeze(1);
    state[name] = sums.select(1, -1).unsqueeze(2).clone();
    return sums;
  }
  const at::Tensor one = at::ones({1, 1, 1, 1}, x.options()).expand({x.size(0), x.size(1), 1, 1});
  at::Tensor sums;
  std::tie(sums, state[name]) = ops::linear_attention(one, one, x, 1, state.find(name));
  return sums;
}

namespace {

// x [B, T, H, D]; cos and sin of the angles [T, D/2].
at::Tensor turned(const at::Tensor& x, const std::pair<at::Tensor, at::Tensor>& angles) {
  const auto& [c, s] = angles;
  const at::Tensor cos = c.to(x.scalar_type()).unsqueeze(1);  // [T, 1, D/2]
  const at::Tensor sin = s.to(x.scalar_type()).unsqueeze(1);
  const auto halves = x.chunk(2, -1);
  return at::cat({halves[0] * cos - halves[1] * sin, halves[1] * cos + halves[0] * sin}, -1);
}

}  // namespace

void Rotary::extend(const at::Tensor& x, int64_t end) const {
  const auto real = at::promote_types(x.scalar_type(), at::kFloat);
  if (!cos_.defined() || cos_.size(0) < end || cos_.device() != x.device() ||
      cos_.scalar_type() != real) {
    const auto f64 = at::TensorOptions().dtype(at::kDouble);
    const at::Tensor frequency =
        at::pow(base_, -at::arange(0, head_dim_, 2, f64) / double(head_dim_));
    const at::Tensor angle =
        at::outer(at::arange(std::max<int64_t>(end, 256) * 5 / 4, f64), frequency);
    cos_ = angle.cos().to(x.device(), real);
    sin_ = angle.sin().to(x.device(), real);
  }
}

std::pair<at::Tensor, at::Tensor> Rotary::angles(const at::Tensor& x, int64_t position,
                                                 State& state) const {
  const RowPositions& rows = state.context.rows;
  if (rows.empty()) {
    const int64_t end = position + x.size(1);
    extend(x, end);
    return {cos_.slice(0, position, end), sin_.slice(0, position, end)};
  }
  extend(x, rows.on_device.defined() ? rows.capacity : rows.end());
  if (rows.on_device.defined()) state.rows.read_by_graph = {cos_, sin_};
  const std::string name = fmt::format("rotary angles {} {}", head_dim_, base_);
  at::Tensor& cos = state.context.handed[name + " cos"];
  at::Tensor& sin = state.context.handed[name + " sin"];
  if (!cos.defined()) {
    const at::Tensor index = rows.index(x.device());
    cos = cos_.index_select(0, index);
    sin = sin_.index_select(0, index);
  }
  return {cos, sin};
}

std::pair<at::Tensor, at::Tensor> Rotary::tables(const at::Tensor& x, int64_t end) const {
  extend(x, end);
  return {cos_, sin_};
}

at::Tensor Rotary::operator()(const at::Tensor& x, int64_t position, State& state) const {
  return turned(x, angles(x, position, state));
}

}  // namespace assay::nn
