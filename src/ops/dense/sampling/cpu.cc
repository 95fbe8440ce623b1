// Sampling on the CPU, in double precision.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "ops/dense/sampling/kernel.h"

namespace assay::ops {
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
        const float x = logits_[size_t(a)];
        const float y = logits_[size_t(b)];
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

int64_t cpu::sample_row(std::span<const float> logits, const Draw& s) {
  if (std::ranges::any_of(logits, [](float x) { return std::isnan(x); })) return -1;
  const float largest = *std::ranges::max_element(logits);
  if (!std::isfinite(largest)) return -1;
  if (s.temperature == 0) return std::ranges::max_element(logits) - logits.begin();
  const auto weight = [&](int32_t id) {
    return std::exp((double(logits[size_t(id)]) - largest) / s.temperature);
  };
  if (s.top_k > 0) {
    Likeliest likeliest(logits, all_ids(logits.size()));
    std::vector<double> weights;
    for (const int32_t id : likeliest.first(size_t(s.top_k))) weights.push_back(weight(id));
    if (s.top_p < 1) weights.resize(reach(weights, s.top_p * sum(weights)) + 1);
    return likeliest.first(size_t(s.top_k))[reach(weights, s.uniform * sum(weights))];
  }
  std::vector<double> weights(logits.size());
  for (size_t i = 0; i < weights.size(); ++i) weights[i] = weight(int32_t(i));
  const double total = sum(weights);
  if (s.top_p == 1) return int64_t(reach(weights, s.uniform * total));
  Likeliest likeliest(logits, above_share(weights, total, s.top_p));
  const auto known = [&](int32_t id) { return weights[size_t(id)]; };
  const Head drawn = head(likeliest, s.top_p * total, known);
  return drawn.ids[reach(drawn.weights, s.uniform * sum(drawn.weights))];
}

}  // namespace assay::ops
