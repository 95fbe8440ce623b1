#include "nn/generate.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/random.h"

namespace assay::nn {
namespace {

// Token ids that may be drawn: all in order of id when nothing is cut, else the likeliest first,
// equal ones by id.
std::vector<int64_t> candidates(std::span<const float> logits, const Sampling& s) {
  std::vector<int64_t> ids(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  if (s.top_k == 0 && s.top_p == 1) return ids;
  const auto count = s.top_k > 0 ? std::min<int64_t>(s.top_k, ids.size()) : int64_t(ids.size());
  const auto likelier = [&](int64_t a, int64_t b) {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
  };
  std::ranges::partial_sort(ids, ids.begin() + count, likelier);
  ids.resize(count);
  return ids;
}

double sum(const std::vector<double>& weights) {
  return std::accumulate(weights.begin(), weights.end(), 0.0);
}

// Where the running sum of `weights` first exceeds `target`.
size_t reach(const std::vector<double>& weights, double target) {
  double running = 0;
  for (size_t i = 0; i + 1 < weights.size(); ++i)
    if ((running += weights[i]) > target) return i;
  return weights.size() - 1;
}

double uniform(uint64_t seed, int64_t position) {
  return Random(seed, "generate", uint64_t(position)).uniform();
}

}  // namespace

void check(const Sampling& s) {
  if (!(s.temperature >= 0) || !std::isfinite(s.temperature))
    fail("temperature = {} must be a finite number, 0 or more", s.temperature);
  if (s.top_k < 0) fail("top_k = {} must be positive, or 0 for all tokens", s.top_k);
  if (!(s.top_p > 0 && s.top_p <= 1)) fail("top_p = {} must be above 0 and at most 1", s.top_p);
}

int64_t sample(std::span<const float> logits, const Sampling& s, double uniform) {
  if (std::ranges::any_of(logits, [](float x) { return std::isnan(x); }))
    fail<Error>("the model's logits are not numbers (NaN)");
  const float largest = *std::ranges::max_element(logits);
  if (!std::isfinite(largest)) fail<Error>("the model's largest logit is {}", largest);
  if (s.temperature == 0) return std::ranges::max_element(logits) - logits.begin();
  const std::vector<int64_t> ids = candidates(logits, s);
  std::vector<double> weights;
  for (const int64_t id : ids)
    weights.push_back(std::exp((double(logits[id]) - largest) / s.temperature));
  if (s.top_p < 1) weights.resize(reach(weights, s.top_p * sum(weights)) + 1);
  return ids[reach(weights, uniform * sum(weights))];
}

std::vector<std::vector<int64_t>> generate(LanguageModel& model, const at::Tensor& prompts,
                                           int64_t max_tokens, const Sampling& sampling,
                                           std::span<const uint64_t> seeds, int64_t stop,
                                           const std::function<void(int64_t)>& progress,
                                           ModelState* given) {
  const at::NoGradGuard no_grad;
  ModelState fresh;
  ModelState& state = given ? *given : fresh;
  const int64_t batch = prompts.size(0), length = state.position + prompts.size(1);
  const int64_t longest =
      model.positions.defined() ? model.positions.size(0) : std::numeric_limits<int64_t>::max();
  if (max_tokens < 0) fail("max_tokens = {} must be 0 or more", max_tokens);
  if (max_tokens > longest - length)
    fail("a prompt of {} tokens and {} to follow do not fit the model's {} positions", length,
         max_tokens, longest);
  std::vector<std::vector<int64_t>> out(batch);
  std::vector<bool> ended(batch, false);
  at::Tensor next = prompts;
  for (int64_t made = 0; made < max_tokens && std::ranges::find(ended, false) != ended.end();
       ++made) {
    const at::Tensor last = model.hidden(next, state).slice(1, -1);
    const at::Tensor logits = at::linear(last, model.head_weight().to(last.scalar_type()))
                                  .squeeze(1)
                                  .to(at::kCPU, at::kFloat)
                                  .contiguous();
    const int64_t vocabulary = logits.size(1);
    next = at::zeros({batch, 1}, at::kLong);
    for (int64_t b = 0; b < batch; ++b) {
      const int64_t token = sample({logits.data_ptr<float>() + b * vocabulary, size_t(vocabulary)},
                                   sampling, uniform(seeds[b], length + made));
      next[b][0] = token;
      if (!ended[b]) out[b].push_back(token);
      ended[b] = ended[b] || token == stop;
    }
    next = next.to(prompts.device());
    if (progress) progress(made + 1);
  }
  return out;
}

}  // namespace assay::nn
