#include "data/sampler.h"

#include <algorithm>
#include <numeric>

#include "base/error.h"
#include "base/random.h"

namespace assay::data {
namespace {

constexpr int64_t kPeriod = 1024;

// Whole slots of a period: the largest remainder method, but no domain goes without.
std::vector<int64_t> apportion(const std::vector<double>& weights) {
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::vector<int64_t> slots;
  std::vector<double> excess;  // exact share minus slots given
  for (const double weight : weights) {
    const double share = weight / total * kPeriod;
    slots.push_back(std::max<int64_t>(1, int64_t(share)));
    excess.push_back(share - double(slots.back()));
  }
  auto give = [&](auto best, int64_t slot) {
    slots[size_t(best - excess.begin())] += slot;
    *best -= double(slot);
  };
  while (std::accumulate(slots.begin(), slots.end(), int64_t{0}) < kPeriod)
    give(std::max_element(excess.begin(), excess.end()), 1);
  while (std::accumulate(slots.begin(), slots.end(), int64_t{0}) > kPeriod) {
    auto worst = excess.end();
    for (auto it = excess.begin(); it != excess.end(); ++it)
      if (slots[size_t(it - excess.begin())] > 1 && (worst == excess.end() || *it < *worst))
        worst = it;
    give(worst, -1);
  }
  return slots;
}

void check_weights(const std::vector<double>& weights, size_t domains) {
  if (weights.size() != domains) fail("{} weights for {} domains", weights.size(), domains);
  for (const double weight : weights)
    if (!(weight > 0) || weight > 1e300)
      fail("a domain's weight is {}; positive numbers were expected", weight);
  if (int64_t(domains) > kPeriod) fail("{} domains; at most {} can be mixed", domains, kPeriod);
}

std::vector<int64_t> shuffled(int64_t size) {
  const Permutation order(uint64_t(size), 0, purpose("held-out documents"));
  std::vector<int64_t> out;
  for (int64_t i = 0; i < size; ++i) out.push_back(int64_t(order(uint64_t(i))));
  return out;
}

std::vector<Segment> in_order(std::vector<Segment> segments) {
  std::ranges::sort(segments, {}, [](const Segment& s) { return std::pair(s.document, s.begin); });
  return segments;
}

}  // namespace

Sampler::Sampler(const TokenStore& store, Options options)
    : options_(std::move(options)), first_{0} {
  const int64_t length = options_.sequence_length;
  if (length < 1) fail("sequence_length is {}; at least 1 was expected", length);
  if (options_.domains.empty())
    for (const std::string& domain : store.domains())
      if (store.has(domain, options_.split)) options_.domains.push_back(domain);
  if (options_.domains.empty())
    fail("{}: no domain has a split '{}'", store.folder().string(), options_.split);
  for (const std::string& domain : options_.domains) {
    const Documents& documents = store.documents(domain, options_.split);
    if (documents.tokens() < length + 1)
      fail("{}: {}.{} has {} tokens, fewer than sequence_length + 1 = {}", store.folder().string(),
           domain, options_.split, documents.tokens(), length + 1);
    documents_.push_back(&documents);
    blocks_.push_back(std::max<int64_t>(1, (documents.tokens() - length) / length));
  }
  if (options_.weights.empty())
    for (const Documents* documents : documents_)
      options_.weights.push_back(double(documents->tokens()));
  check_weights(options_.weights, options_.domains.size());
  for (const int64_t slots : apportion(options_.weights)) first_.push_back(first_.back() + slots);
}

Sampler::Place Sampler::place(int64_t n) const {
  const int64_t period = n / kPeriod;
  const auto slot = int64_t(Permutation(kPeriod, options_.seed, purpose("domain order"),
                                        uint64_t(period))(uint64_t(n % kPeriod)));
  const int64_t domain = std::upper_bound(first_.begin(), first_.end(), slot) - first_.begin() - 1;
  const int64_t first = first_[size_t(domain)];
  const int64_t blocks = blocks_[size_t(domain)];
  const int64_t length = options_.sequence_length;
  // Position of the sample among the samples of this domain
  const int64_t turn = period * (first_[size_t(domain) + 1] - first) + slot - first;
  const int64_t epoch = turn / blocks;
  // Seeded by name, so that a domain's order does not depend on which others are mixed in.
  const uint64_t seed = options_.seed ^ purpose(options_.domains[size_t(domain)]);
  const auto block = int64_t(Permutation(uint64_t(blocks), seed, purpose("block order"),
                                         uint64_t(epoch))(uint64_t(turn % blocks)));
  const int64_t slack = documents_[size_t(domain)]->tokens() - 1 - blocks * length;
  const auto shift = epoch ? int64_t(Random(seed, "block offset").at(uint64_t(epoch)) %
                                     uint64_t(std::min(length, slack + 1)))
                           : 0;
  return {domain, epoch, shift + block * length};
}

void Sampler::sample(int64_t n, int64_t* tokens) const {
  const Place at = place(n);
  documents_[size_t(at.domain)]->read(at.offset, options_.sequence_length + 1, tokens);
}

void Sampler::batch(int64_t step, int64_t batch_size, int64_t* tokens) const {
  for (int64_t row = 0; row < batch_size; ++row)
    sample(step * batch_size + row, tokens + row * (options_.sequence_length + 1));
}

std::vector<double> Sampler::proportions() const {
  std::vector<double> shares;
  for (size_t i = 0; i + 1 < first_.size(); ++i)
    shares.push_back(double(first_[i + 1] - first_[i]) / kPeriod);
  return shares;
}

std::vector<Segment> held_out_segments(const Documents& documents, int64_t max_tokens,
                                       int64_t sequence_length) {
  if (sequence_length < 1) fail("sequence_length is {}; at least 1 was expected", sequence_length);
  const int64_t budget = max_tokens > 0 ? max_tokens : documents.tokens();
  std::vector<int64_t> open = shuffled(documents.size());  // documents that still have tokens
  std::vector<Segment> segments;
  int64_t used = 0;
  for (int64_t begin = 0; !open.empty(); begin += sequence_length) {
    std::erase_if(open, [&](int64_t i) { return documents.document(i).size() <= begin; });
    for (const int64_t i : open) {
      const int64_t length = std::min(sequence_length, documents.document(i).size() - begin);
      if (used + length > budget && !segments.empty()) return in_order(std::move(segments));
      segments.push_back({i, begin, length});
      used += length;
    }
  }
  return in_order(std::move(segments));
}

void read_segment(const Documents& documents, int64_t separator, const Segment& segment,
                  int64_t* tokens) {
  const int64_t begin = documents.begin(segment.document) + segment.begin;
  if (segment.begin) documents.read(begin - 1, 1, tokens);
  else tokens[0] = separator;
  documents.read(begin, segment.length, tokens + 1);
}

}  // namespace assay::data
