#pragma once
// The short causal convolution along time that recurrent mixers put before their
// recurrence. [H3; Mamba]
//   y_t = silu(Σ_j w_j ⊙ x_{t−K+1+j} + b)
//       depthwise, K taps, zeros before the start; K = 0: silu alone
#include "nn/mixer.h"

namespace assay::nn {

struct ShortConv : Module {
  // width 0 to 8; activation "silu" or "none". start = 0: weight and bias start uniform in ±1/√K,
  // as torch's Conv1d does. start > 0: weights at N(0, start), the bias at 0.
  ShortConv(int64_t channels, int64_t width, bool with_bias, std::string activation = "silu",
            double start = 0);
  // x [B, T, channels] → the same; reads and replaces state["conv"], the last K − 1 inputs [B,
  // channels, K − 1].
  at::Tensor forward(const at::Tensor& x, State& state) const;
  // forward() with the result in parts along the channels, as views.
  std::vector<at::Tensor> forward(const at::Tensor& x, State& state, at::IntArrayRef parts) const;

  // [channels, K], [channels]; undefined where there is none
  at::Tensor weight;
  at::Tensor bias;
  std::string activation;
};

}  // namespace assay::nn
