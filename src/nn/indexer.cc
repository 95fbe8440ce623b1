#include "nn/indexer.h"

#include <torch/torch.h>

#include <cmath>

#include "nn/cache.h"

namespace assay::nn {
namespace {

constexpr int64_t kQueriesAtOnce = 512;  // whose scores are held together
constexpr double kUnseen = -1e30;        // a score with weight zero

// Positions first, first + 1, … as a column.
at::Tensor column(int64_t first, int64_t count, const at::Tensor& like) {
  return at::arange(first, first + count, like.options().dtype(at::kLong)).unsqueeze(1);
}

// Attention of queries [B, T, H, D] at t [T, 1] to keys [B, S, Hk, D], the mean over the queries of
// each of `heads` heads: [B, heads, T, S].
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& t, int64_t heads) {
  const at::Tensor by_key_head = q.transpose(1, 2).unflatten(1, {k.size(2), -1});
  const at::Tensor keys = k.permute({0, 2, 3, 1}).unsqueeze(2);  // [B, Hk, 1, D, S]
  at::Tensor score = wide(at::matmul(by_key_head, keys)).flatten(1, 2);
  score.masked_fill_(at::arange(k.size(1), t.options()) > t, -INFINITY);
  const at::Tensor weight = at::softmax(score, -1);
  return weight.size(1) == heads ? weight : weight.unflatten(1, {heads, -1}).mean(2);
}

}  // namespace

Indexer::Indexer(const char* mixer, int64_t d_model, int64_t mixer_heads, const IndexerOptions& o)
    : options(o), rotary(o.dim, o.rope_base) {
  if (o.heads < 1 || mixer_heads % o.heads)
    fail("{}: index_heads = {} must divide num_heads = {}", mixer, o.heads, mixer_heads);
  if (o.dim < 2 || o.dim % 2) fail("{}: index_dim = {} must be positive and even", mixer, o.dim);
  if (o.chunk_size < 1) fail("{}: chunk_size = {} must be positive", mixer, o.chunk_size);
  if (o.top_k < 1) fail("{}: top_k = {} must be positive", mixer, o.top_k);
  one_of(mixer, "pooling", o.pooling, {"mean", "max"});
  if (!(o.loss_weight > 0)) fail("{}: loss_weight = {} must be positive", mixer, o.loss_weight);
  sharers = mixer_heads / o.heads;
  proj = add_linear("proj", d_model, (o.heads + 1) * o.dim);
  const auto norm = [&] { return std::make_shared<Norm>("zero_centered_rmsnorm", o.dim, 1e-6); };
  query_norm = register_module("query_norm", norm());
  key_norm = register_module("key_norm", norm());
}

at::Tensor Indexer::all_keys(const at::Tensor& k, int64_t position, State& state) const {
  if (!pools_keys()) return past_keys.append(state, k);
  const int64_t size = options.chunk_size;
  const int64_t end = position + k.size(1);
  const int64_t added = end / size - position / size;
  const at::Tensor pending = to_pool.append(state, k, end % size);
  if (added == 0) return state.find("index_k").value_or(k.slice(1, 0, 0));
  return past_keys.append(state,
                          pending.slice(1, 0, added * size).unflatten(1, {added, size}).mean(2));
}

// a·b / √dim of the first `count` keys, [B, heads, T, count]
at::Tensor Indexer::scores(const at::Tensor& q, const at::Tensor& keys, int64_t count) const {
  const at::Tensor k = keys.slice(1, 0, count).permute({0, 2, 3, 1});
  return wide(at::matmul(q.transpose(1, 2), k)) / std::sqrt(double(options.dim));
}

at::Tensor Indexer::choose(const at::Tensor& q, const at::Tensor& keys, int64_t position) const {
  const at::NoGradGuard no_grad;
  const int64_t size = options.chunk_size;
  const int64_t top_k = options.top_k;
  std::vector<at::Tensor> chosen;
  for (const at::Tensor& part : q.split(kQueriesAtOnce, 1)) {
    const at::Tensor t = column(position, part.size(1), q);
    position += part.size(1);
    const int64_t chunks = (position - 1) / size;
    at::Tensor score = scores(part, keys, pools_keys() ? chunks : chunks * size);
    if (!pools_keys()) score = score.unflatten(-1, {chunks, size}).amax(-1);
    score.masked_fill_(at::arange(chunks, t.options()) >= t.floor_divide(size), -INFINITY);
    const auto [value, order] = at::sort(score, /*stable=*/true, -1, /*descending=*/true);
    const at::Tensor best = order.masked_fill(value == -INFINITY, -1).slice(-1, 0, top_k);
    chosen.push_back(at::constant_pad_nd(best, {0, top_k - best.size(-1)}, -1));
  }
  return at::cat(chosen, 2).repeat_interleave(sharers, 1);
}

double Indexer::flops(int64_t time) const {
  const int64_t size = options.chunk_size;
  double scored = 0;
  for (int64_t t = 0; t < time; ++t) scored += double(t / size * (pools_keys() ? 1 : size));
  return 2 * double(options.heads * options.dim) * scored / double(time);
}

// The gradient by a and b is computed with the value, so that nothing of size T S is kept.
at::Tensor Indexer::loss(const at::Tensor& queries, const at::Tensor& all_keys,
                         const at::Tensor& mixer_q, const at::Tensor& mixer_k,
                         int64_t position) const {
  const at::Tensor q = wide(queries.detach());
  const at::Tensor keys = wide(all_keys.detach());
  at::Tensor sum = at::zeros({}, q.options());
  at::Tensor dk = at::zeros_like(keys);
  std::vector<at::Tensor> dq;
  const double factor = options.loss_weight / double(q.size(0) * q.size(1) * q.size(2));
  for (int64_t first = 0; first < q.size(1); first += kQueriesAtOnce) {
    const at::NoGradGuard no_grad;
    const int64_t count = std::min(kQueriesAtOnce, q.size(1) - first);
    const int64_t size = options.chunk_size;
    const int64_t begin = position + first;
    const int64_t end = begin + count;
    const int64_t units = pools_keys() ? (end - 1) / size : end;
    const at::Tensor t = column(begin, count, q);
    const at::Tensor j = at::arange(units, t.options());
    const at::Tensor unseen = pools_keys() ? j >= t.floor_divide(size) : j > t;
    at::Tensor target =
        attention(mixer_q.narrow(1, first, count), mixer_k.slice(1, 0, end), t, options.heads);
    if (pools_keys())
      target = target.slice(-1, 0, units * size)
                   .unflatten(-1, {units, size})
                   .sum(-1)
                   .masked_fill_(unseen, 0);
    target = target / target.sum(-1, /*keepdim=*/true).clamp_min(1e-30);
    const at::Tensor part = q.narrow(1, first, count);
    const at::Tensor b = keys.slice(1, 0, units);
    const at::Tensor log_weight =
        at::log_softmax(scores(part, keys, units).masked_fill_(unseen, kUnseen), -1);
    sum += factor * (at::xlogy(target, target) - target * log_weight).sum();
    const at::Tensor ds = (log_weight.exp() * target.sum(-1, /*keepdim=*/true) - target) *
                          (factor / std::sqrt(double(options.dim)));
    dq.push_back(at::matmul(ds, b.transpose(1, 2)).transpose(1, 2));
    dk.slice(1, 0, units)
        .add_(at::matmul(ds.transpose(-2, -1), part.transpose(1, 2)).sum(1).unsqueeze(2));
  }
  // Its value is that of `sum`, and its gradient that of the loss.
  const at::Tensor linear = (wide(queries) * at::cat(dq, 1)).sum() + (wide(all_keys) * dk).sum();
  return sum + (linear - linear.detach());
}

}  // namespace assay::nn
