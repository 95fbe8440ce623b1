#pragma once
// Parts that mixers and models share. Parameters are kept in fp32 (or fp64); each layer computes
// in the dtype of its input, so a model runs in bf16 by being fed bf16, and its parameters are
// the master weights.
#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ops/dense/linear/linear.h"

namespace assay::nn {

// Overwrites a parameter with its starting values; nn/initial_values.h has the usual ones.
using Start = std::function<void(at::Tensor& parameter, const at::Generator&)>;

// How a parameter starts and how training treats it.
struct Treatment {
  Start start = {};          // empty: it keeps the value that it was added with
  double learning_rate = 1;  // times the run's
  bool weight_decay = false;
};

struct Linear;
struct LinearOptions;

// A module that says of each of its parameters how it starts and how training treats it.
struct Module : torch::nn::Module {
  at::Tensor add_parameter(const std::string& name, const at::Tensor& value, Treatment = {});
  std::shared_ptr<Linear> add_linear(const std::string& name, int64_t in, int64_t out);
  std::shared_ptr<Linear> add_linear(const std::string& name, int64_t in, int64_t out,
                                     LinearOptions);
  // Treatment of a parameter of this module itself, so that its owner can change it.
  Treatment& treatment(const std::string& name) { return own_treatments_.at(name); }
  // Treatments of all named_parameters(). Error if one was not added with add_parameter.
  std::map<std::string, Treatment> treatments() const;
  // Starts all parameters. The values are a pure function of the seed and each parameter's name.
  void initialise(uint64_t seed);

 private:
  std::map<std::string, Treatment> own_treatments_;
};

// An output leads back into the residual stream. Every layer adds to the stream, so outputs start
// at smaller values. [GPT-2, §2.3]
enum class Role { input, output };

struct LinearOptions {
  Role role = Role::input;
  bool bias = false;
  Start start = {};  // of the weight; empty: N(0, 0.02), and for an output N(0, 0.02 / √(2 layers))
  bool weight_decay = true;  // of the weight
};

// y = x Wᵀ + b, followed by glu(y, activation) unless the activation is empty; weight [out, in],
// bias [out] or absent.
struct Projection {
  at::Tensor weight;
  at::Tensor bias = {};
  std::string_view activation = {};
  c10::intrusive_ptr<ops::GradientPlace> gradient_place = {};
  c10::intrusive_ptr<ops::RoundedWeight> rounded = {};
  at::Tensor operator()(const at::Tensor& x) const;
  // The weight converted to `dtype`, or the rounded one that training keeps, with the same bits.
  at::Tensor weight_in(at::ScalarType dtype) const;
};

// y = x Wᵀ + b. The model counts the FLOPs of every Linear.
struct Linear : Module {
  Linear(int64_t in, int64_t out, LinearOptions options = {});
  at::Tensor forward(const at::Tensor& x) const;
  Projection projection(std::string_view activation = {}) const;
  at::Tensor weight;
  at::Tensor bias;
  // of the weight in training; null: none
  c10::intrusive_ptr<ops::GradientPlace> gradient_place;
  c10::intrusive_ptr<ops::RoundedWeight> rounded;
};
// All projections in a module and its parts.
std::vector<Linear*> linears_of(const torch::nn::Module& module);

// The residual stream after a part of a layer: x + y, or x if y is undefined. The next norm adds.
struct Residual {
  at::Tensor x;
  at::Tensor y;
  at::Tensor sum() const;
};

// "rmsnorm": x / sqrt(mean x² + eps) ⊙ weight. "layernorm": (x − mean) / sqrt(var + eps) ⊙ weight +
// bias. "zero_centered_rmsnorm": as rmsnorm with 1 + weight, so that weight decay pulls towards 1
// [Qwen3-Next]. Over the last dimension [size], or over each of `groups` equal parts of it; weight
// and bias [size].
struct Norm : Module {
  Norm(const std::string& kind, int64_t size, double eps, int64_t groups = 1);
  at::Tensor forward(const at::Tensor& x) const;
  at::Tensor forward(Residual& x) const;  // of the sum, which x becomes
  // to(forward(x)) in `dtype`, by one kernel for some sizes (norm_linear of linear.h).
  at::Tensor forward_projected(Residual& x, const Projection& to, at::ScalarType dtype) const;
  // forward(x) ⊙ gate(z), "silu" or "sigmoid", or forward(x ⊙ silu(z)). z has the shape of x.
  at::Tensor forward_then_gate(const at::Tensor& x, const at::Tensor& z,
                               std::string_view gate = "silu") const;
  at::Tensor gate_then_forward(const at::Tensor& x, const at::Tensor& z) const;
  // Both are root-mean-square norms without a bias; a row may also have several heads [..., heads ·
  // size] that share the weight.
  static const std::vector<std::string>& kinds();
  at::Tensor weight;
  at::Tensor bias;
  double eps;
  int64_t groups;
  bool zero_centered;
};

// act(x W₁ᵀ) W₂ᵀ + b through `rank` channels; act "none", "tanh" or "sigmoid". [Hu et al. 2021]
struct LowRank : Module {
  LowRank(int64_t in, int64_t rank, int64_t out, bool with_bias, std::string activation = "none");
  at::Tensor forward(const at::Tensor& x) const;
  std::shared_ptr<Linear> down_proj;
  std::shared_ptr<Linear> up_proj;
  std::string activation;
};

// BadInput with the nearest name unless `value` is one of `names`.
void one_of(const char* mixer, const char* field, const std::string& value,
            const std::vector<std::string>& names);

// BadInput unless QK-norm's scale can start at `initial_scale` and learn at `learning_rate` times
// the run's rate.
void check_scale(const char* mixer, double initial_scale, double learning_rate);

at::Tensor wide(const at::Tensor& x);         // in float32 at least: for gates and decays
at::Tensor unit_length(const at::Tensor& x);  // x / sqrt(Σ x² + 1e-6) over the last dimension
// Values [B, T, Hk, T] for keys k [B, T, Hk, D] whose attention's output is its weights: of
// position j the j-th unit vector.
at::Tensor values_of_positions(const at::Tensor& k);
at::Tensor split_heads(const at::Tensor& x, int64_t num_heads);  // [B, T, H·D] → [B, T, H, D]
// width / num_heads; BadInput that names the mixer unless num_heads is positive and divides
// a positive width.
int64_t head_width(const char* mixer, int64_t width, int64_t num_heads);

class State;  // nn/state.h

// The sums of x [B, T, H, D] (fp32 or fp64) along time, in the same shape. They continue those of
// the pieces before, whose last one is state[name] [B, H, 1, D], and replace it.
at::Tensor running_sum(const at::Tensor& x, State& state, const std::string& name);

// Rotary position embedding on the two halves of a head. [RoFormer, eq. 34]
//   (x₁, x₂) ← (x₁ cos θ − x₂ sin θ, x₂ cos θ + x₁ sin θ),  θ = position · base^(−2i/D)
class Rotary {
 public:
  Rotary(int64_t head_dim, double base) : head_dim_(head_dim), base_(base) {}
  // x [B, T, H, D], the first of the T tokens at `position`; or [1, B, H, D], the rows of a batch
  // at positions of their own, which the context of the state has.
  at::Tensor operator()(const at::Tensor& x, int64_t position, State& state) const;
  // cos θ and sin θ, [T or B, D/2] each, on the device of x, fp32 (fp64 when x is): what the fused
  // operators take. On CUDA, those of rows at positions of their own need no wait for the device;
  // layers with the same angles share them, and the tables are kept alive for a captured step.
  std::pair<at::Tensor, at::Tensor> angles(const at::Tensor& x, int64_t position,
                                           State& state) const;
  // The tables of cos θ and sin θ for `end` positions or more.
  std::pair<at::Tensor, at::Tensor> tables(const at::Tensor& x, int64_t end) const;

 private:
  void extend(const at::Tensor& x, int64_t end) const;  // the tables to `end` positions
  int64_t head_dim_;
  double base_;
  // [positions seen so far, D/2], of the last device and dtype used
  mutable at::Tensor cos_;
  mutable at::Tensor sin_;
};

}  // namespace assay::nn
