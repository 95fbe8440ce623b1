// FlashAttention-2 computes two parts of the attention, each as sequences of several lengths:
//   own chunk      a sequence has the queries and keys of a chunk, and is causal
//   chosen chunks  a sequence has the queries that chose a chunk, and the keys of the chunk
// The parts join as README.md derives. FlashAttention's backward pass takes out and logsumexp of
// the whole softmax, so that each part gives its share of the gradients.
#include "ops/attention/top1_chunk/flash.h"

#include <torch/torch.h>

#include "ops/attention/top1_chunk/join.h"
#include "ops/attention/top1_chunk/kernel.h"
#include "ops/core/dispatch.h"
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
at::Tensor by_heads(const at::Tensor& x) { return x.transpose(1, 2).reshape({-1, 1, x.size(3)}); }
at::Tensor from_heads(const at::Tensor& rows, const at::Tensor& like) {
  return rows.view({like.size(0), like.size(2), like.size(1), like.size(3)}).transpose(1, 2);
}

template <class OnCuda>
void launch(const at::Device& device, OnCuda&& on_cuda) {
  dispatch(device, [](const auto&) { fail("top1_chunk: FlashAttention-2 needs a GPU"); }, on_cuda);
}

const int64_t* indices(const at::Tensor& x) { return static_cast<const int64_t*>(data(x)); }
const float* floats(const at::Tensor& x) { return static_cast<const float*>(data(x)); }

// Rows `index` [N] of x [..., D], [N, 1, D].
at::Tensor gathered(const at::Tensor& x, const at::Tensor& index) {
  const int64_t columns = x.size(-1);
  const at::Tensor to = at::empty({index.size(0), 1, columns}, x.options());
  launch(x.device(), [&](auto stream) {
    cuda::gather_rows(data(x), indices(index), index.size(0), columns * x.element_size(), data(to),
                      stream);
  });
  return to;
}

Part own_part(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t chunk_size,
              double scale) {
  const Sequences own = chunks(q.size(0), q.size(1), chunk_size, q.device());
  return {q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), own, own, /*causal=*/true, scale};
}

// Pairs of a query and a chunk that it chose, [B, T, H, top_k], sorted by chunk. Pairs without a
// chunk have chunk 0.
struct Chosen {
  Part part;
  at::Tensor order;    // [pairs]: sorted → place
  at::Tensor queries;  // [pairs]: sorted → row of q [B T H, D]
  at::Tensor none;     // [B, T, H, top_k]: whether no chunk was chosen
  // place → sorted, [B, T, H, top_k]
  at::Tensor place() const { return std::get<1>(order.to(at::kInt).sort()).view(none.sizes()); }
};
Chosen chosen_part(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                   const at::Tensor& selected, int64_t chunk_size, double scale) {
  const int64_t heads = q.size(2);
  const int64_t kv_heads = k.size(2);
  const int64_t top_k = selected.size(3);
  const Sequences of_keys = chunks(q.size(0) * kv_heads, q.size(1), chunk_size, q.device());
  const int64_t count = of_keys.begins.size(0) - 1;
  const at::Tensor pairs = selected.transpose(1, 2).to(at::kInt).contiguous();
  const at::Tensor head = at::arange(q.size(0) * heads, pairs.options());
  const at::Tensor first =
      head.floor_divide(heads / kv_heads) * chunks_of(q.size(1), chunk_size);  // of its keys
  const at::Tensor chunk = pairs.clamp_min(0) + first.view({q.size(0), 1, heads, 1});
  const auto [sorted, order] = chunk.flatten().sort(/*stable=*/true, 0, /*descending=*/false);
  const at::Tensor begins = at::searchsorted(sorted, at::arange(count + 1, sorted.options()),
                                             /*out_int32=*/true);
  const at::Tensor queries = top_k == 1 ? order : order.floor_divide(top_k);
  const Part part{gathered(q, queries),
                  by_heads(k),
                  by_heads(v),
                  {begins, q.size(1) * top_k * (heads / kv_heads)},
                  of_keys,
                  /*causal=*/false,
                  scale};
  return {part, order, queries, pairs < 0};
}

// The sum of rows; out [B, T, H, D].
RowsToJoin rows_to_join(const at::Tensor& own, const at::Tensor& others, const at::Tensor& place,
                        const at::Tensor& out) {
  return {.batch = out.size(0),
          .time = out.size(1),
          .heads = out.size(2),
          .head_dim = out.size(3),
          .top_k = place.size(3),
          .own = data(own),
          .others = data(others),
          .place = indices(place),
          .out = data(out)};
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
    const at::Tensor out = at::empty(q.sizes(), q.options());
    const at::Tensor logsumexp = at::empty({batch, heads, time}, own.logsumexp.options());
    const at::Tensor chunks = selected.contiguous();
    const at::Tensor place = chosen.place();
    RowsToJoin parts = rows_to_join(own.out, other.out, place, out);
    parts.selected = indices(chunks);
    parts.own_sums = floats(own.logsumexp);
    parts.other_sums = floats(other.logsumexp);
    parts.logsumexp = static_cast<float*>(data(logsumexp));
    launch(q.device(), [&](auto stream) { cuda::join_rows(parts, stream); });
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
    // A weight exp(score − ∞) is 0, and so is the gradient of its score.
    const at::Tensor sums = s[4].transpose(1, 2).unsqueeze(-1).masked_fill(chosen.none, kInfinity);
    const at::Tensor of_pairs = sums.flatten().index_select(0, chosen.order).unsqueeze(0);
    const auto [dq_pairs, dk_rows, dv_rows] = ops::backward(
        chosen.part, gathered(dout, chosen.queries), {gathered(out, chosen.queries), of_pairs});
    const at::Tensor dq_whole = at::empty(q.sizes(), q.options());
    const at::Tensor place = chosen.place();
    const RowsToJoin parts = rows_to_join(dq, dq_pairs, place, dq_whole);
    launch(q.device(), [&](auto stream) { cuda::join_rows(parts, stream); });
    return {dq_whole,
            dk.view(k.sizes()) + from_heads(dk_rows, k),
            dv.view(k.sizes()) + from_heads(dv_rows, k),
            at::Tensor(),
            at::Tensor(),
            at::Tensor()};
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
