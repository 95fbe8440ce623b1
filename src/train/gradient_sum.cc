#include "train/gradient_sum.h"

#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/torch.h>

#include <bit>
#include <numeric>

#include "base/error.h"

namespace assay::train {
namespace {

constexpr int64_t kBucketElements = int64_t{8} << 20;
// Every gradient begins where a vectorized load may: norms of aligned and of other tensors are
// summed in different orders.
constexpr int64_t kAlignment = 64;

int64_t aligned(int64_t elements) { return (elements + kAlignment - 1) / kAlignment * kAlignment; }

// A rank has whole subtrees, and either slices of one part of the batch or all slices of its parts.
bool can_share(int64_t gradient_slices, int64_t context_slices, int64_t ranks) {
  if (gradient_slices * context_slices % ranks != 0) return false;
  const int64_t each = gradient_slices * context_slices / ranks;
  if (each % context_slices != 0 && context_slices % each != 0) return false;
  return ranks == 1 || std::has_single_bit(uint64_t(each));
}

}  // namespace

at::Tensor tree_sum(std::vector<at::Tensor> leaves) {
  while (leaves.size() > 1) {
    std::vector<at::Tensor> sums;
    for (size_t i = 0; i + 1 < leaves.size(); i += 2) sums.push_back(leaves[i] + leaves[i + 1]);
    if (leaves.size() % 2 == 1) sums.push_back(leaves.back());
    leaves = std::move(sums);
  }
  return leaves.front();
}

void check_shares(int64_t batch_size, int64_t gradient_slices, int64_t context_slices,
                  int64_t ranks) {
  if (batch_size % gradient_slices != 0)
    fail(
        "train.batch_size = {} cannot be cut into train.gradient_slices = {} equal slices. "
        "Choose a number that divides it, or another number of ranks. Nothing was changed.",
        batch_size, gradient_slices);
  if (can_share(gradient_slices, context_slices, ranks)) return;
  std::vector<std::string> possible;
  for (int64_t number = 1; number <= gradient_slices * context_slices; ++number)
    if (can_share(gradient_slices, context_slices, number))
      possible.push_back(std::to_string(number));
  const std::string with_context =
      context_slices == 1 ? "" : fmt::format(" with train.context_slices = {}", context_slices);
  fail(
      "{} ranks cannot share train.gradient_slices = {}{}; the possible numbers of ranks are {}. "
      "Nothing was changed.",
      ranks, gradient_slices, with_context, join(possible));
}

// Calls `work` after each accumulation into the gradient of a parameter.
struct GradientSum::Hook {
  std::shared_ptr<torch::autograd::Node> accumulator;
  uintptr_t key;

  Hook(const at::Tensor& parameter, const std::function<void()>& work)
      : accumulator(torch::autograd::impl::grad_accumulator(parameter)) {
    using torch::autograd::variable_list;
    using torch::autograd::utils::LambdaPostHook;
    key = accumulator->add_post_hook(std::make_unique<LambdaPostHook>(
        [work](const variable_list& outputs, const variable_list&) {
          work();
          return outputs;
        }));
  }
  ~Hook() { accumulator->del_post_hook(key); }
};

GradientSum::GradientSum(std::vector<at::Tensor> parameters, int64_t slices, Ranks* ranks,
                         bool overlap)
    : parameters_(std::move(parameters)), ranks_(ranks), places_(parameters_.size()) {
  const int64_t size = ranks ? ranks->size() : 1;
  begin_ = (ranks ? ranks->rank() : 0) * (slices / size);
  end_ = begin_ + slices / size;
  if (!ranks) return;
  make_buckets();
  put_parameters_in_rows();
  if (!overlap) return;
  for (size_t i = 0; i < parameters_.size(); ++i)
    hooks_.push_back(std::make_shared<Hook>(parameters_[i], [this, i] {
      if (live_) hand_over(i);
    }));
}

GradientSum::~GradientSum() = default;

// Gradients come in about the reverse order of the parameters. Within a bucket the largest
// parameter is given to the rank that owns least.
void GradientSum::make_buckets() {
  std::vector<int64_t> owned(size_t(ranks_->size()));
  const auto close = [&](Bucket& bucket) {
    std::ranges::stable_sort(bucket.members, std::greater<>(),
                             [&](size_t i) { return parameters_[i].numel(); });
    bucket.counts.assign(owned.size(), 0);
    for (const size_t i : bucket.members) {
      const size_t owner = size_t(std::ranges::min_element(owned) - owned.begin());
      places_[i] = {buckets_.size(), int64_t(owner), bucket.counts[owner]};
      bucket.counts[owner] += aligned(parameters_[i].numel());
      owned[owner] += parameters_[i].numel();
    }
    std::vector<int64_t> begin(owned.size());
    std::exclusive_scan(bucket.counts.begin(), bucket.counts.end(), begin.begin(), int64_t{0});
    for (const size_t i : bucket.members) places_[i].offset += begin[size_t(places_[i].owner)];
    buckets_.push_back(std::move(bucket));
    bucket = {};
  };
  // A matrix has one owner, so a bucket of a large model needs several matrices for several owners.
  int64_t all = 0;
  for (const at::Tensor& parameter : parameters_) all += parameter.numel();
  const int64_t least = std::max(kBucketElements, all / 32);
  Bucket bucket;
  int64_t elements = 0;
  for (size_t i = parameters_.size(); i-- > 0;) {
    bucket.members.push_back(i);
    elements += parameters_[i].numel();
    if (elements < least && i > 0) continue;
    close(bucket);
    elements = 0;
  }
}

// One all-gather of the rows then sends all parameters.
void GradientSum::put_parameters_in_rows() {
  const at::NoGradGuard no_grad;
  std::vector<int64_t> used(size_t(ranks_->size()));
  std::vector<int64_t> offsets;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    int64_t& end = used[size_t(owner(i))];
    offsets.push_back(end);
    end += aligned(parameters_[i].numel());
  }
  rows_ = at::zeros({ranks_->size(), std::ranges::max(used)},
                    parameters_.front().options().requires_grad(false));
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor place = rows_[owner(i)].narrow(0, offsets[i], parameters_[i].numel());
    place.copy_(parameters_[i].reshape(-1));
    parameters_[i].set_data(place.view_as(parameters_[i]));
  }
}

void GradientSum::keep() {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> sums;
  for (at::Tensor& parameter : parameters_) {
    sums.push_back(parameter.grad().defined() ? parameter.grad() : at::zeros_like(parameter));
    parameter.mutable_grad().reset();
  }
  for (std::vector<at::Tensor>& level : levels_) {
    if (level.empty()) {
      level = std::move(sums);
      return;
    }
    at::_foreach_add_(sums, level);
    level.clear();
  }
  levels_.push_back(std::move(sums));
}

void GradientSum::start_last() {
  handed_.assign(parameters_.size(), false);
  next_ = 0;
  for (Bucket& bucket : buckets_) {
    const int64_t elements =
        std::accumulate(bucket.counts.begin(), bucket.counts.end(), int64_t{0});
    bucket.sums = at::empty({elements}, parameters_[bucket.members.front()].options());
    bucket.missing = bucket.members.size();
  }
  live_ = !hooks_.empty();
}

// Adds the rest of this rank's tree: the last slice, then the waiting sums, lowest level first.
void GradientSum::hand_over(size_t i) {
  if (handed_[i]) fail<Error>("the gradient of parameter {} came in more than one piece", i);
  const at::NoGradGuard no_grad;
  handed_[i] = true;
  at::Tensor& parameter = parameters_[i];
  at::Tensor sum = parameter.grad().defined() ? parameter.grad() : at::zeros_like(parameter);
  for (std::vector<at::Tensor>& level : levels_)
    if (!level.empty()) sum = std::exchange(level[i], {}).add_(sum);
  if (!ranks_) {
    parameter.mutable_grad() = sum;
    return;
  }
  parameter.mutable_grad().reset();
  Bucket& bucket = buckets_[places_[i].bucket];
  bucket.sums.narrow(0, places_[i].offset, sum.numel()).copy_(sum.reshape(-1));
  --bucket.missing;
  while (next_ < buckets_.size() && buckets_[next_].missing == 0) send(buckets_[next_++]);
}

void GradientSum::send(Bucket& bucket) {
  const int64_t own = bucket.counts[size_t(ranks_->rank())];
  bucket.received = at::empty({ranks_->size() * own}, bucket.sums.options());
  bucket.wait = ranks_->exchange(bucket.received, bucket.sums,
                                 std::vector<int64_t>(size_t(ranks_->size()), own), bucket.counts);
}

void GradientSum::receive(Bucket& bucket) {
  bucket.wait();
  const size_t rank = size_t(ranks_->rank());
  const int64_t own = bucket.counts[rank];
  const int64_t before = std::accumulate(bucket.counts.begin(),
                                         bucket.counts.begin() + std::ptrdiff_t(rank), int64_t{0});
  if (own > 0) {
    const at::Tensor sum = tree_sum(bucket.received.split(own));
    for (const size_t i : bucket.members)
      if (owns(i))
        parameters_[i].mutable_grad() =
            sum.narrow(0, places_[i].offset - before, parameters_[i].numel())
                .view_as(parameters_[i]);
  }
  bucket.sums.reset();
  bucket.received.reset();
  bucket.wait = nullptr;
}

void GradientSum::finish() {
  const at::NoGradGuard no_grad;
  live_ = false;
  for (size_t i = parameters_.size(); i-- > 0;)
    if (!handed_[i]) hand_over(i);
  levels_.clear();
  for (Bucket& bucket : buckets_) receive(bucket);
}

}  // namespace assay::train
