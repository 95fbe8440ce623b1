#include "train/gradient_sum.h"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/torch.h>

#include <bit>
#include <cmath>
#include <functional>
#include <numeric>

#include "base/error.h"

namespace assay::train {
namespace {

// Exchanges that may be under way when the sums of another one are added.
constexpr size_t kUnderWay = 2;
// Gradients that wait are sent when they have at least so many times the elements of those that are
// missing. Links between GPUs stay awake for 50 ms after a transfer (H200), so few bursts let them
// sleep (docs/results/scaling.md).
constexpr int64_t kBurst = 3;

// A rank has whole subtrees, and either slices of one part of the batch or all slices of its parts.
bool can_share(int64_t gradient_slices, int64_t context_slices, int64_t ranks) {
  if (gradient_slices * context_slices % ranks != 0) return false;
  const int64_t each = gradient_slices * context_slices / ranks;
  if (each % context_slices != 0 && context_slices % each != 0) return false;
  return ranks == 1 || std::has_single_bit(uint64_t(each));
}

// On a GPU, work that is given to `next` from now on waits for what `earlier` was given.
void order(const c10::Stream& earlier, const c10::Stream& next) {
  if (earlier.device_type() != at::kCUDA) return;
  c10::Event given(at::kCUDA);
  given.record(earlier);
  given.block(next);
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
                         bool overlap, const std::vector<bool>& rounded)
    : parameters_(std::move(parameters)),
      all_(parameters_.size()),
      pieces_(parameters_, slices, rounded),
      ranks_(ranks),
      side_(c10::impl::VirtualGuardImpl(parameters_.front().device().type())
                .getNewStream(parameters_.front().device())) {
  std::iota(all_.begin(), all_.end(), size_t{0});
  const int64_t size = ranks ? ranks->size() : 1;
  begin_ = (ranks ? ranks->rank() : 0) * (slices / size);
  end_ = begin_ + slices / size;
  if (!ranks) return;
  put_parameters_in_buckets();
  if (!overlap) return;
  for (size_t i = 0; i < parameters_.size(); ++i)
    hooks_.push_back(std::make_shared<Hook>(parameters_[i], [this, i] {
      if (live_) hand_over(i);
    }));
}

GradientSum::~GradientSum() = default;

// One all-gather per bucket then sends its parameters, and one exchange its gradients.
void GradientSum::put_parameters_in_buckets() {
  const at::NoGradGuard no_grad;
  const auto options = parameters_.front().options().requires_grad(false);
  // Memory of all buckets of the kinds for which `has` is true
  const auto make = [&](at::Tensor Bucket::* part, const at::TensorOptions& of, auto&& has) {
    int64_t elements = 0;
    for (const Pieces::Bucket& layout : pieces_.buckets) elements += has(layout) ? layout.size : 0;
    if (elements == 0) return;
    const at::Tensor all = ranks_->exchange_memory(elements, of);
    int64_t begin = 0;
    for (size_t b = 0; b < buckets_.size(); ++b) {
      const Pieces::Bucket& layout = pieces_.buckets[b];
      if (!has(layout)) continue;
      buckets_[b].*part = all.narrow(0, begin, layout.size);
      begin += layout.size;
    }
  };
  const auto is_rounded = [](const Pieces::Bucket& layout) { return layout.rounded; };
  buckets_.resize(pieces_.buckets.size());
  make(&Bucket::parameters, options, std::not_fn(is_rounded));
  make(&Bucket::rounded, options.dtype(at::kBFloat16), is_rounded);
  make(&Bucket::sums, options, [](const Pieces::Bucket&) { return true; });
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const Bucket& bucket = buckets_[pieces_.parts[i].front().bucket];
    places_.push_back(c10::make_intrusive<ops::GradientPlace>());
    places_.back()->memory = place_in(bucket.sums, i);
    rounded_.emplace_back();
    if (bucket.rounded.defined()) {
      rounded_.back() = c10::make_intrusive<ops::RoundedWeight>();
      // A version of its own: other buckets arrive while a graph needs this value
      rounded_.back()->value = place_in(bucket.rounded, i).variable_data();
    } else {
      const at::Tensor place = place_in(bucket.parameters, i);
      place.copy_(parameters_[i]);
      parameters_[i].set_data(place);
    }
  }
}

// The place of a parameter in memory of its bucket.
at::Tensor GradientSum::place_in(const at::Tensor& flat, size_t i) const {
  const int64_t place = pieces_.parts[i].front().place;
  return flat.narrow(0, place, parameters_[i].numel()).view(parameters_[i].sizes());
}

void GradientSum::divide_parameters() {
  if (std::exchange(divided_, true)) return;
  const at::NoGradGuard no_grad;
  const auto options = parameters_.front().options().requires_grad(false);
  const at::Tensor unknown = at::full({}, NAN, options);
  for (size_t b = 0; b < buckets_.size(); ++b) {
    const Pieces::Bucket& layout = pieces_.buckets[b];
    if (!layout.rounded) continue;
    buckets_[b].own = at::zeros({layout.size / ranks_->size()}, options);
    for (const size_t i : layout.parameters) {
      const at::Tensor whole = parameters_[i].detach().view(-1);
      for (const Part& part : pieces_.parts[i])
        if (owns(part)) values(part).copy_(whole.narrow(0, part.begin, part.size));
      rounded_[i]->value.copy_(parameters_[i]);
      parameters_[i].set_data(unknown.expand(parameters_[i].sizes()));
      rounded_[i]->version = int64_t(parameters_[i]._version());
    }
  }
}

void GradientSum::gather_parameters() {
  wait_for_parameters();
  if (!std::exchange(divided_, false)) return;
  const at::NoGradGuard no_grad;
  for (size_t b = 0; b < buckets_.size(); ++b) {
    if (!pieces_.buckets[b].rounded) continue;
    const at::Tensor whole = ranks_->gather(buckets_[b].own).view(-1);
    buckets_[b].own.reset();
    for (const size_t i : pieces_.buckets[b].parameters)
      parameters_[i].set_data(place_in(whole, i));
  }
}

std::vector<at::Tensor> GradientSum::take_gradients(const std::vector<size_t>& parameters) {
  std::vector<at::Tensor> gradients;
  for (const size_t i : parameters) {
    at::Tensor& gradient = parameters_[i].mutable_grad();
    gradients.push_back(gradient.defined()
                            ? gradient
                            : at::zeros(parameters_[i].sizes(), parameters_[i].options()));
    gradient.reset();
  }
  return gradients;
}

// Adds the rest of this rank's tree: the last slice, then the waiting sums, lowest level first.
std::vector<at::Tensor> GradientSum::take_sums(const std::vector<size_t>& parameters) {
  std::vector<at::Tensor> sums = take_gradients(parameters);
  for (std::vector<at::Tensor>& level : levels_) {
    if (level.empty()) continue;
    std::vector<at::Tensor> earlier;
    for (const size_t i : parameters) earlier.push_back(std::exchange(level[i], {}));
    at::_foreach_add_(sums, earlier);
  }
  return sums;
}

void GradientSum::keep() {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> sums = take_gradients(all_);
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

void GradientSum::start_last_slice() {
  for (const auto& place : places_) place->is_free = true;
}

void GradientSum::start_last() {
  handed_.assign(parameters_.size(), false);
  sent_ = 0;
  ready_ = 0;
  added_ = 0;
  for (size_t b = 0; b < buckets_.size(); ++b)
    buckets_[b].missing = pieces_.buckets[b].parameters.size();
  live_ = !hooks_.empty();
}

void GradientSum::hand_over(size_t i) {
  if (handed_[i]) fail<Error>("the gradient of parameter {} came in more than one piece", i);
  handed_[i] = true;
  --buckets_[pieces_.parts[i].front().bucket].missing;
  while (ready_ < buckets_.size() && buckets_[ready_].missing == 0) ++ready_;
  if (is_time_to_send())
    while (sent_ < ready_) send(sent_++);
}

bool GradientSum::is_time_to_send() const {
  if (!ranks_->reads_peer_memory()) return true;
  int64_t waiting = 0;
  int64_t missing = 0;
  for (size_t b = sent_; b < buckets_.size(); ++b)
    (b < ready_ ? waiting : missing) += pieces_.buckets[b].size;
  return waiting >= kBurst * missing;
}

c10::Stream GradientSum::current_stream() const {
  return c10::impl::VirtualGuardImpl(side_.device_type()).getStream(side_.device());
}

void GradientSum::send(size_t index) {
  const at::NoGradGuard no_grad;
  const Pieces::Bucket& layout = pieces_.buckets[index];
  const std::vector<at::Tensor> sums = take_sums(layout.parameters);
  std::vector<at::Tensor> places;
  std::vector<at::Tensor> elsewhere;
  for (size_t j = 0; j < sums.size(); ++j) {
    const at::Tensor& place = places_[layout.parameters[j]]->memory;
    if (sums[j].data_ptr() == place.data_ptr()) continue;
    places.push_back(place);
    elsewhere.push_back(sums[j]);
  }
  if (!places.empty()) at::_foreach_copy_(places, elsewhere);
  order(current_stream(), side_);
  const c10::StreamGuard guard(side_);  // its memory is used again when the sums are added
  Bucket& bucket = buckets_[index];
  const int64_t rows = ranks_->size() - (ranks_->reads_peer_memory() ? 1 : 0);
  bucket.received = at::empty({rows, layout.size / ranks_->size()}, bucket.sums.options());
  bucket.exchanged = ranks_->exchange(bucket.received, bucket.sums);
  if (index >= kUnderWay) receive(buckets_[added_++]);
}

// Level by level, neighbours are added. The sum takes the memory of that of this rank's slices.
void GradientSum::receive(Bucket& bucket) {
  const c10::StreamGuard guard(side_);
  std::exchange(bucket.exchanged, nullptr)();
  std::vector<at::Tensor> rows = bucket.received.unbind();
  bucket.received.reset();
  bucket.sum = bucket.sums.view({ranks_->size(), -1})[ranks_->rank()];
  const auto own = rows.begin() + ranks_->rank();
  if (ranks_->reads_peer_memory()) rows.insert(own, bucket.sum);
  else *own = bucket.sum;
  for (size_t step = 1; step < rows.size(); step *= 2)
    for (size_t i = 0; i + step < rows.size(); i += 2 * step) {
      // The order of two summands does not change the bits
      if (rows[i + step].is_same(bucket.sum)) std::swap(rows[i], rows[i + step]);
      rows[i].add_(rows[i + step]);
    }
}

void GradientSum::finish() {
  const at::NoGradGuard no_grad;
  live_ = false;
  for (const auto& place : places_) place->is_free = false;
  if (!ranks_) {
    const std::vector<at::Tensor> sums = take_sums(all_);
    for (const size_t i : all_) parameters_[i].mutable_grad() = sums[i];
    levels_.clear();
    return;
  }
  for (size_t i = parameters_.size(); i-- > 0;)
    if (!handed_[i]) hand_over(i);
  levels_.clear();
  while (added_ < buckets_.size()) receive(buckets_[added_++]);
  order(side_, current_stream());
}

at::Tensor GradientSum::values(const Part& part) const {
  const Bucket& bucket = buckets_[part.bucket];
  if (!bucket.own.defined()) return bucket.parameters.narrow(0, part.place, part.size);
  return bucket.own.narrow(0, part.place - ranks_->rank() * bucket.own.numel(), part.size);
}

at::Tensor GradientSum::gradient(const Part& part) const {
  const at::Tensor& sum = buckets_[part.bucket].sum;
  return sum.narrow(0, part.place - ranks_->rank() * sum.numel(), part.size);
}

void GradientSum::share(size_t bucket) {
  Bucket& b = buckets_[bucket];
  b.sum.reset();
  const at::Tensor& sent = b.rounded.defined() ? b.rounded : b.parameters;
  b.shared = ranks_->all_gather(sent.view({ranks_->size(), -1}));
}

void GradientSum::wait_for_parameters(size_t bucket) {
  for (size_t b = buckets_.size(); b-- > bucket;)
    if (buckets_[b].shared) std::exchange(buckets_[b].shared, nullptr)();
}

}  // namespace assay::train
