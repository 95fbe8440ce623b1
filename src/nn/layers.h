#pragma once
// Parts that mixers and models share. Parameters are kept in fp32 (or fp64); each layer computes
// in the dtype of its input, so a model runs in bf16 by being fed bf16, and its parameters are
// the master weights.
#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <span>
#include <string>
#include <vector>

namespace assay::nn {

// y = x Wᵀ + b; weight [out, in], bias [out] or absent.
struct Linear : torch::nn::Module {
  Linear(int64_t in, int64_t out, bool with_bias);
  at::Tensor forward(const at::Tensor& x) const;
  at::Tensor weight, bias;
};

// "rmsnorm": x / sqrt(mean x² + eps) ⊙ weight. "layernorm": (x − mean) / sqrt(var + eps) ⊙ weight +
// bias. "zero_centered_rmsnorm": as rmsnorm with 1 + weight, so that weight decay pulls towards 1
// [Qwen3-Next]. Over the last dimension [size], or over each of `groups` equal parts of it; weight
// and bias [size].
struct Norm : torch::nn::Module {
  Norm(const std::string& kind, int64_t size, double eps, int64_t groups = 1);
  at::Tensor forward(const at::Tensor& x) const;
  static const std::vector<std::string>& kinds();
  at::Tensor weight, bias;
  double eps;
  int64_t groups;
  bool zero_centered;
};

// act(x W₁ᵀ) W₂ᵀ + b through `rank` channels; act "none", "tanh" or "sigmoid". [Hu et al. 2021]
struct LowRank : torch::nn::Module {
  LowRank(int64_t in, int64_t rank, int64_t out, bool with_bias, std::string activation = "none");
  at::Tensor forward(const at::Tensor& x) const;
  std::shared_ptr<Linear> down_proj, up_proj;
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

// Rotary position embedding on the two halves of a head. [RoFormer, eq. 34]
//   (x₁, x₂) ← (x₁ cos θ − x₂ sin θ, x₂ cos θ + x₁ sin θ),  θ = position · base^(−2i/D)
// x [B, T, H, D]; the first of the T positions is `offset`.
class Rotary {
 public:
  Rotary(int64_t head_dim, double base) : head_dim_(head_dim), base_(base) {}
  at::Tensor operator()(const at::Tensor& x, int64_t offset) const;
  // x [1, B, H, D]: rows at positions of their own lie along time.
  at::Tensor operator()(const at::Tensor& x, std::span<const int64_t> positions) const;
  // cos θ and sin θ, [T, D/2] each, on the device of x, fp32 (fp64 when x is): what the
  // fused operators take.
  std::pair<at::Tensor, at::Tensor> angles(const at::Tensor& x, int64_t offset) const;
  // The same for one position per entry, [B, D/2] each; of position 0 for unused rows (-1).
  std::pair<at::Tensor, at::Tensor> angles(const at::Tensor& x,
                                           std::span<const int64_t> positions) const;

 private:
  void extend(const at::Tensor& x, int64_t end) const;  // the tables to `end` positions
  int64_t head_dim_;
  double base_;
  mutable at::Tensor cos_, sin_;  // [positions seen so far, D/2], of the last device and dtype used
};

}  // namespace assay::nn
