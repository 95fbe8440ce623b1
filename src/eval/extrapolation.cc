#include "eval/extrapolation.h"

#include <torch/torch.h>

#include "base/interrupt.h"
#include "nn/lm_loss.h"

namespace assay::eval {

at::Tensor losses_by_position(nn::LanguageModel& model, const at::Tensor& tokens, int64_t piece) {
  const at::NoGradGuard no_grad;
  const int64_t batch = tokens.size(0);
  const int64_t length = tokens.size(1) - 1;
  const at::Tensor on_device = tokens.to(model.embedding.device());
  nn::ModelState state;
  std::vector<at::Tensor> losses;
  for (int64_t begin = 0; begin < length; begin += piece) {
    check_interrupt();
    const int64_t end = std::min(begin + piece, length);
    const at::Tensor hidden = model.hidden(on_device.slice(1, begin, end), state);
    const at::Tensor targets = on_device.slice(1, begin + 1, end + 1);
    losses.push_back(nn::score_tokens(hidden.flatten(0, 1), model.head_weight(), targets.flatten())
                         .losses.view({batch, -1})
                         .to(at::kCPU, at::kFloat));
  }
  return at::cat(losses, 1);
}

std::vector<PositionBin> bin_positions(const at::Tensor& losses, int64_t training_length) {
  const int64_t length = losses.size(1);
  std::vector<int64_t> edges = {0};
  for (int64_t part = 8; part > 1; part /= 2) edges.push_back(training_length / part);
  for (int64_t edge = training_length; edge < 2 * length; edge *= 2) {
    edges.push_back(edge);
    edges.push_back(edge + edge / 2);
  }
  std::vector<PositionBin> bins;
  for (size_t i = 0; i + 1 < edges.size(); ++i) {
    const int64_t first = edges[i];
    const int64_t last = std::min(edges[i + 1], length);
    if (last <= first) continue;
    PositionBin bin{first, last, {}};
    const at::Tensor means = losses.slice(1, first, last).to(at::kDouble).mean(1).contiguous();
    bin.losses.assign(means.data_ptr<double>(), means.data_ptr<double>() + means.numel());
    bins.push_back(std::move(bin));
  }
  return bins;
}

}  // namespace assay::eval
