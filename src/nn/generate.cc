#include "nn/generate.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/random.h"
#include "ops/parallel.h"

namespace assay::nn {
namespace {

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

// Orders token ids by falling logit, equal ones by id, as far as it is asked to. Selection instead
// of a full sort: a vocabulary has tens of thousands of tokens, and few of them can be drawn.
class Likeliest {
 public:
  Likeliest(std::span<const float> logits, std::vector<int32_t> ids)
      : logits_(logits), ids_(std::move(ids)) {}

  // The first `count` ids in order.
  std::span<const int32_t> first(size_t count) {
    count = std::min(count, ids_.size());
    if (count > sorted_) {
      const auto likelier = [&](int32_t a, int32_t b) {
        const float x = logits_[size_t(a)], y = logits_[size_t(b)];
        return x != y ? x > y : a < b;
      };
      const auto begin = ids_.begin() + std::ptrdiff_t(sorted_);
      const auto end = ids_.begin() + std::ptrdiff_t(count);
      if (end != ids_.end()) std::nth_element(begin, end, ids_.end(), likelier);
      std::sort(begin, end, likelier);
      sorted_ = count;
    }
    return {ids_.data(), count};
  }
  size_t size() const { return ids_.size(); }

 private:
  std::span<const float> logits_;
  std::vector<int32_t> ids_;
  size_t sorted_ = 0;
};

std::vector<int32_t> all_ids(size_t count) {
  std::vector<int32_t> ids(count);
  std::iota(ids.begin(), ids.end(), 0);
  return ids;
}

// The likeliest tokens whose weights together first exceed `target`, and their weights.
struct Head {
  std::vector<int32_t> ids;
  std::vector<double> weights;
};
Head head(Likeliest& likeliest, double target, auto&& weight) {
  Head out;
  double running = 0;
  for (size_t count = 64;; count *= 4) {
    const auto ids = likeliest.first(count);
    for (size_t i = out.ids.size(); i < ids.size(); ++i) {
      out.ids.push_back(ids[i]);
      out.weights.push_back(weight(ids[i]));
      running += out.weights.back();
      if (running > target) return out;
    }
    if (ids.size() == likeliest.size()) return out;
  }
}

// Tokens that may belong to the likeliest that hold the share top_p of `total`. The others have
// less than 1 - top_p of it together.
std::vector<int32_t> above_share(const std::vector<double>& weights, double total, double top_p) {
  const double least = 0.999 * (1 - top_p) * total / double(weights.size());
  std::vector<int32_t> ids;
  for (size_t i = 0; i < weights.size(); ++i)
    if (weights[i] >= least) ids.push_back(int32_t(i));
  return ids;
}

}  // namespace

int64_t sample(std::span<const float> logits, const Sampling& s, double uniform) {
  if (std::ranges::any_of(logits, [](float x) { return std::isnan(x); }))
    fail<Error>("the model's logits are not numbers (NaN)");
  const float largest = *std::ranges::max_element(logits);
  if (!std::isfinite(largest)) fail<Error>("the model's largest logit is {}", largest);
  if (s.temperature == 0) return std::ranges::max_element(logits) - logits.begin();
  const auto weight = [&](int32_t id) {
    return std::exp((double(logits[size_t(id)]) - largest) / s.temperature);
  };
  if (s.top_k > 0) {
    Likeliest likeliest(logits, all_ids(logits.size()));
    std::vector<double> weights;
    for (const int32_t id : likeliest.first(size_t(s.top_k))) weights.push_back(weight(id));
    if (s.top_p < 1) weights.resize(reach(weights, s.top_p * sum(weights)) + 1);
    return likeliest.first(size_t(s.top_k))[reach(weights, uniform * sum(weights))];
  }
  std::vector<double> weights(logits.size());
  for (size_t i = 0; i < weights.size(); ++i) weights[i] = weight(int32_t(i));
  const double total = sum(weights);
  if (s.top_p == 1) return int64_t(reach(weights, uniform * total));
  Likeliest likeliest(logits, above_share(weights, total, s.top_p));
  const auto known = [&](int32_t id) { return weights[size_t(id)]; };
  const Head drawn = head(likeliest, s.top_p * total, known);
  return drawn.ids[reach(drawn.weights, uniform * sum(drawn.weights))];
}

double uniform_at(uint64_t seed, int64_t position) {
  return Random(seed, "generate", uint64_t(position)).uniform();
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
    next = at::empty({batch, 1}, at::kLong);
    int64_t* drawn = next.data_ptr<int64_t>();
    ops::at_parallel_for()(batch, 1, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) {
        const float* row = logits.data_ptr<float>() + b * vocabulary;
        const double uniform = uniform_at(seeds[size_t(b)], length + made);
        drawn[b] = sample({row, size_t(vocabulary)}, sampling, uniform);
      }
    });
    for (int64_t b = 0; b < batch; ++b) {
      const int64_t token = drawn[b];
      if (!ended[b]) out[b].push_back(token);
      ended[b] = ended[b] || token == stop;
    }
    next = next.to(prompts.device());
    if (progress) progress(made + 1);
  }
  return out;
}

}  // namespace assay::nn
