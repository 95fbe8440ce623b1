// FlashAttention-2 computes two parts of the attention, each as sequences of several lengths:
//   own chunk      a sequence has the queries and keys of a chunk, and is causal
//   chosen chunks  a sequence has the queries that chose a chunk, and the keys of the chunk
// The parts join as README.md derives. FlashAttention's backward pass takes out and logsumexp of
// the whole softmax, so that each part gives its share of the gradients.
#include "ops/attention/top1_chunk/flash.h"

#include <torch/torch.h>

#include "ops/core/tensors.h"

namespace assay::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kMostSequences = 65535;  // the y dimension of a grid

// Sequences that lie one after the other in rows [N, heads, D].
struct Sequences {
  at::Tensor begins;  // [sequences + 1] int32, the end included
  int64_t longest;    // or an upper bound
};

struct Part {
  at::Tensor q;  // [queries, heads, D]
  at::Tensor k;  // [keys, kv_heads, D], and v
  at::Tensor v;
  Sequences queries;
  Sequences keys;
  bool causal;
  double scale;
};

struct PartOutput {
  at::Tensor out;        // as q
  at::Tensor logsumexp;  // [heads, N] float32
};

PartOutput forward(const Part& p) {
  const auto out = at::_flash_attention_forward_symint(
      p.q, p.k, p.v, p.queries.begins, p.keys.begins, p.queries.longest, p.keys.longest, 0.0,
      p.causal, /*return_debug_mask=*/false, p.scale);
  return {std::get<0>(out), std::get<1>(out)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(const Part& p, const at::Tensor& dout,
                                                        const PartOutput& whole) {
  const at::Tensor no_dropout = at::empty({2}, p.queries.begins.options().dtype(at::kUInt64));
  return at::_flash_attention_backward_symint(
      dout, p.q, p.k, p.v, whole.out, whole.logsumexp, p.queries.begins, p.keys.begins,
      p.queries.longest, p.keys.longest, 0.0, p.causal, no_dropout, no_dropout, p.scale);
}

int64_t chunks_of(int64_t time, int64_t chunk_size) { return (time + chunk_size - 1) / chunk_size; }

// The chunks of `count` sequences of `time` positions.
Sequences chunks(int64_t count, int64_t time, int64_t chunk_size, const at::Device& device) {
  const auto integers = at::TensorOptions(at::kInt).device(device);
  const at::Tensor first = at::arange(count, integers).unsqueeze(1) * time;
  const at::Tensor within = at::arange(chunks_of(time, chunk_size), integers) * chunk_size;
  const at::Tensor end = at::full({1}, count * time, integers);
  return {at::cat({(first + within).flatten(), end}), std::min(time, chunk_size)};
}

// [B, T, heads, D] → [B heads T, 1, D], and back.
at::Tensor rows_of(const at::Tensor& x) { return x.transpose(1, 2).reshape({-1, 1, x.size(3)}); }
at::Tensor from_rows(const at::Tensor& rows, const at::Tensor& like) {
  return rows.view({like.size(0), like.size(2), like.size(1), like.size(3)}).transpose(1, 2);
}

Part own_part(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t chunk_size,
              double scale) {
  const Sequences own = chunks(q.size(0), q.size(1), chunk_size, q.device());
  return {q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), own, own, /*causal=*/true, scale};
}

// Pairs of a query and a chunk that it chose, sorted by chunk.
struct Chosen {
  Part part;
  at::Tensor order;    // [pairs]: sorted → place in [B, H, T, top_k]
  at::Tensor queries;  // [pairs]: sorted → row of rows_of(q)
  at::Tensor none;     // [pairs]: sorted → whether no chunk was chosen. These pairs have chunk 0.
};
Chosen chosen_part(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                   const at::Tensor& selected, int64_t chunk_size, double scale) {
  const int64_t heads = q.size(2);
  const int64_t kv_heads = k.size(2);
  const int64_t top_k = selected.size(3);
  const Sequences of_keys = chunks(q.size(0) * kv_heads, q.size(1), chunk_size, q.device());
  const int64_t count = of_keys.begins.size(0) - 1;
  const at::Tensor head = at::arange(q.size(0) * heads, selected.options());
  const at::Tensor first =
      head.floor_divide(heads / kv_heads) * chunks_of(q.size(1), chunk_size);  // of its keys
  const at::Tensor chunk = selected.clamp_min(0) + first.view({q.size(0), heads, 1, 1});
  const auto [sorted, order] =
      chunk.flatten().to(at::kInt).sort(/*stable=*/true, 0, /*descending=*/false);
  const at::Tensor begins = at::searchsorted(sorted, at::arange(count + 1, sorted.options()),
                                             /*out_int32=*/true);
  const at::Tensor queries = order.floor_divide(top_k);
  const Part part{rows_of(q).index_select(0, queries),
                  rows_of(k),
                  rows_of(v),
                  {begins, q.size(1) * top_k * (heads / kv_heads)},
                  of_keys,
                  /*causal=*/false,
                  scale};
  return {part, order, queries, selected.flatten().index_select(0, order) < 0};
}

// Values of sorted pairs [pairs, …] in the order of [B, H, T, top_k].
at::Tensor unsorted(const at::Tensor& x, const at::Tensor& order) {
  return at::empty_like(x).index_copy_(0, order, x);
}

struct FlashTop1Chunk : torch::autograd::Function<FlashTop1Chunk> {
  static variable_list forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k,
                               const at::Tensor& v, const at::Tensor& selected, int64_t chunk_size,
                               double scale) {
    const int64_t batch = q.size(0);
    const int64_t time = q.size(1);
    const int64_t heads = q.size(2);
    const PartOutput own = ops::forward(own_part(q, k, v, chunk_size, scale));
    const Chosen chosen = chosen_part(q, k, v, selected, chunk_size, scale);
    const PartOutput other = ops::forward(chosen.part);
    const at::Tensor own_sums = own.logsumexp.view({heads, batch, time}).transpose(0, 1);
    const at::Tensor other_sums =
        unsorted(other.logsumexp.flatten().masked_fill(chosen.none, -kInfinity), chosen.order)
            .view(selected.sizes());
    const at::Tensor sums = at::cat({own_sums.unsqueeze(-1), other_sums}, -1);
    const at::Tensor logsumexp = at::logsumexp(sums, -1);  // [B, H, T]
    const at::Tensor weights = (sums - logsumexp.unsqueeze(-1)).exp().unsqueeze(-1);
    at::Tensor out = own.out.view(q.sizes()).transpose(1, 2) * weights.select(3, 0);
    const at::Tensor others =
        unsorted(other.out, chosen.order).view({batch, heads, time, selected.size(3), q.size(3)});
    for (int64_t i = 0; i < selected.size(3); ++i)
      out = out + others.select(3, i) * weights.select(3, i + 1);
    out = out.transpose(1, 2).to(q.scalar_type()).contiguous();
    ctx->save_for_backward({q, k, v, out, logsumexp, selected});
    ctx->saved_data["chunk_size"] = chunk_size;
    ctx->saved_data["scale"] = scale;
    ctx->mark_non_differentiable({logsumexp});
    return {out, logsumexp};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const variable_list s = ctx->get_saved_variables();
    const at::Tensor& q = s[0];
    const at::Tensor& k = s[1];
    const at::Tensor& out = s[3];
    const at::Tensor& selected = s[5];
    const int64_t chunk_size = ctx->saved_data["chunk_size"].toInt();
    const double scale = ctx->saved_data["scale"].toDouble();
    const at::Tensor dout = aligned(gradients[0].to(q.scalar_type()).contiguous());
    const PartOutput whole{out.flatten(0, 1),
                           s[4].transpose(0, 1).contiguous().flatten(1)};  // [H, B T]
    auto [dq, dk, dv] =
        ops::backward(own_part(q, k, s[2], chunk_size, scale), dout.flatten(0, 1), whole);

    const Chosen chosen = chosen_part(q, k, s[2], selected, chunk_size, scale);
    const auto of_pairs = [&](const at::Tensor& rows) {
      return rows.index_select(0, chosen.queries);
    };
    // A weight exp(score − ∞) is 0, and so is the gradient of its score.
    const at::Tensor sums = of_pairs(s[4].flatten()).masked_fill(chosen.none, kInfinity);
    const auto [dq_pairs, dk_rows, dv_rows] = ops::backward(
        chosen.part, of_pairs(rows_of(dout)), {of_pairs(rows_of(out)), sums.unsqueeze(0)});
    const at::Tensor dq_rows = unsorted(dq_pairs, chosen.order)
                                   .view({-1, selected.size(3), q.size(3)})
                                   .sum(at::IntArrayRef{1}, /*keepdim=*/true, at::kFloat);
    const auto with = [](const at::Tensor& own, const at::Tensor& rows, const at::Tensor& like) {
      return own.view(like.sizes()) + from_rows(rows, like).to(like.scalar_type());
    };
    return {with(dq, dq_rows, q), with(dk, dk_rows, k), with(dv, dv_rows, k),
            at::Tensor(),         at::Tensor(),         at::Tensor()};
  }
};

}  // namespace

const char* why_no_flash(const at::Tensor& q, const at::Tensor& k, int64_t chunk_size) {
  if (q.scalar_type() != at::kBFloat16) return "takes bfloat16";
  if (q.size(3) % 8 != 0 || q.size(3) > 256) return "takes a head_dim that 8 divides, up to 256";
  if (q.size(1) != k.size(1)) return "takes no earlier keys";
  if (q.size(0) * k.size(2) * chunks_of(q.size(1), chunk_size) > kMostSequences)
    return "takes up to 65535 chunks";
  return nullptr;
}

std::tuple<at::Tensor, at::Tensor> flash_top1_chunk(const at::Tensor& q, const at::Tensor& k,
                                                    const at::Tensor& v, const at::Tensor& selected,
                                                    int64_t chunk_size, double scale) {
  const auto rows = [](const at::Tensor& x) { return aligned(x.contiguous()); };
  const auto out = FlashTop1Chunk::apply(rows(q), rows(k), rows(v), selected, chunk_size, scale);
  return {out[0], out[1]};
}

}  // namespace assay::ops
