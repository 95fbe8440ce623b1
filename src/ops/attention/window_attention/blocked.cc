// Window attention from tensor arithmetic in O(T) memory: a block of queries meets all keys that
// any of them sees; the backward computes the weights again from logsumexp.
#include <torch/torch.h>

#include "ops/attention/window_attention/window_attention.h"
#include "ops/core/dispatch.h"
#include "ops/core/tensors.h"

namespace assay::ops {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Problem {
  // [B, T, H, D], [B, S, Hkv, D] twice, [H] or undefined twice, [B, S, H] or undefined
  Tensor q;
  Tensor k;
  Tensor v;
  Tensor slopes;
  Tensor sinks;
  Tensor decay_sums;
  int64_t window;
  double scale;
  at::ScalarType real;
  at::ScalarType operand;  // of products, whose sums are real: bf16 where a GPU has it
  int64_t first_position() const { return k.size(1) - q.size(1); }
};

Problem problem(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& slopes,
                const Tensor& sinks, const Tensor& decay_sums, int64_t window, double scale) {
  const at::ScalarType dtype = sequence_dtype({q, k, v});
  const at::ScalarType real = real_dtype(dtype);
  const bool half = on_gpu(q.device()) && dtype == at::kBFloat16;
  return {q, k, v, slopes, sinks, decay_sums, window, scale, real, half ? dtype : real};
}

// a [B, G, M, K] b [B, G, K, N], real
Tensor product(const Problem& p, const Tensor& a, const Tensor& b) {
  if (p.operand == p.real) return a.matmul(b);
  const auto matrices = [&](const Tensor& x) { return x.to(p.operand).flatten(0, 1); };
  return at::bmm(matrices(a), matrices(b), p.real).unflatten(0, {a.size(0), a.size(1)});
}

struct Block {
  // queries [row, row + rows), keys [key, key + keys)
  int64_t row;
  int64_t rows;
  int64_t key;
  int64_t keys;
};

std::vector<Block> blocks_of(const Problem& p) {
  constexpr int64_t kScores = 1 << 26;  // in memory at once, a fourth of them in copies
  const int64_t time = p.q.size(1);
  const int64_t sequences = p.q.size(0) * p.q.size(2);
  int64_t rows = 512;
  while (rows > 16 && sequences * rows * std::min(p.k.size(1), p.window + rows) > kScores)
    rows /= 2;
  std::vector<Block> blocks;
  for (int64_t row = 0; row < time; row += rows) {
    const int64_t count = std::min(rows, time - row);
    const int64_t first = p.first_position() + row;
    const int64_t key = std::max<int64_t>(0, first - p.window + 1);
    blocks.push_back({row, count, key, first + count - key});
  }
  return blocks;
}

// [B, T, H, D] to the rows of a block, those of the heads that share keys one after another: [B,
// Hkv, H/Hkv · rows, D].
Tensor rows_of(const Tensor& x, const Block& b, const Problem& p) {
  const int64_t kv_heads = p.k.size(2);
  return x.narrow(1, b.row, b.rows)
      .to(p.operand)
      .unflatten(2, {kv_heads, -1})
      .permute({0, 2, 3, 1, 4})
      .flatten(2, 3);
}
Tensor rows_back(const Tensor& rows, const Block& b) {  // → [B, rows, H, D]
  return rows.unflatten(2, {-1, b.rows}).permute({0, 3, 1, 2, 4}).flatten(2, 3);
}
Tensor keys_of(const Tensor& x, const Block& b, const Problem& p) {  // → [B, Hkv, keys, D]
  return x.narrow(1, b.key, b.keys).to(p.operand).transpose(1, 2);
}

Tensor distance(const Block& b, const Problem& p) {  // [rows, keys]
  const auto options = p.q.options().dtype(p.real);
  const int64_t first = p.first_position() + b.row;
  return at::arange(first, first + b.rows, options).unsqueeze(1) -
         at::arange(b.key, b.key + b.keys, options);
}

// [B, H, rows, keys]
Tensor log_decays(const Problem& p, const Block& b) {
  const Tensor sums = p.decay_sums.to(p.real).transpose(1, 2);
  return sums.narrow(2, p.first_position() + b.row, b.rows).unsqueeze(3) -
         sums.narrow(2, b.key, b.keys).unsqueeze(2);
}

// [B, Hkv, H/Hkv · rows, keys]
Tensor scores(const Problem& p, const Block& b, const Tensor& q, const Tensor& k) {
  const Tensor apart = distance(b, p);
  Tensor s = product(p, q, k.transpose(-2, -1)).mul_(p.scale).view({q.size(0), -1, b.rows, b.keys});
  if (p.slopes.defined()) s.sub_(p.slopes.to(p.real).view({-1, 1, 1}) * apart);
  if (p.decay_sums.defined()) s.add_(log_decays(p, b));
  s.masked_fill_((apart < 0).logical_or(apart >= double(p.window)), -INFINITY);
  return s.view({q.size(0), k.size(1), -1, b.keys});
}

// [Hkv, H/Hkv · rows, 1]
Tensor sinks_of_rows(const Problem& p, const Block& b) {
  return p.sinks.to(p.real).view({p.k.size(2), -1, 1}).repeat_interleave(b.rows, 1);
}

struct Blocked : torch::autograd::Function<Blocked> {
  static Tensor forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v,
                        const OptionalTensor& slopes, const OptionalTensor& sinks,
                        const OptionalTensor& decay_sums, int64_t window, double scale) {
    const Problem p = problem(q, k, v, or_undefined(slopes), or_undefined(sinks),
                              or_undefined(decay_sums), window, scale);
    const Tensor out = at::empty_like(q, at::MemoryFormat::Contiguous);
    std::vector<Tensor> logsumexp;
    for (const Block& b : blocks_of(p)) {
      const Tensor s = scores(p, b, rows_of(q, b, p), keys_of(k, b, p));
      logsumexp.push_back(s.logsumexp(-1, true));
      if (sinks) logsumexp.back() = at::logaddexp(logsumexp.back(), sinks_of_rows(p, b));
      const Tensor weights = s.sub_(logsumexp.back()).exp_();
      out.narrow(1, b.row, b.rows).copy_(rows_back(product(p, weights, keys_of(v, b, p)), b));
    }
    variable_list saved{q, k, v, p.slopes, p.sinks, p.decay_sums, out};
    saved.insert(saved.end(), logsumexp.begin(), logsumexp.end());
    ctx->save_for_backward(saved);
    ctx->saved_data["window"] = window;
    ctx->saved_data["scale"] = scale;
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const variable_list s = ctx->get_saved_variables();
    const Problem p = problem(s[0], s[1], s[2], s[3], s[4], s[5], ctx->saved_data["window"].toInt(),
                              ctx->saved_data["scale"].toDouble());
    const auto real = p.q.options().dtype(p.real);
    const Tensor dq = at::empty_like(p.q, at::MemoryFormat::Contiguous);
    const Tensor dk = at::zeros(p.k.sizes(), real);
    const Tensor dv = at::zeros(p.v.sizes(), real);
    const Tensor dslopes = p.slopes.defined() ? at::zeros({p.q.size(2)}, real) : Tensor();
    const Tensor dsinks = p.sinks.defined() ? at::zeros({p.q.size(2)}, real) : Tensor();
    const Tensor dsums = p.decay_sums.defined() ? at::zeros(p.decay_sums.sizes(), real) : Tensor();
    size_t index = 7;
    for (const Block& b : blocks_of(p)) {
      const Tensor q = rows_of(p.q, b, p);
      const Tensor k = keys_of(p.k, b, p);
      const Tensor v = keys_of(p.v, b, p);
      const Tensor out = rows_of(s[6], b, p);
      const Tensor dout = rows_of(gradients[0], b, p);
      const Tensor logsumexp = s[index++];
      const Tensor weights = scores(p, b, q, k).sub_(logsumexp).exp_();
      const Tensor delta = (dout.to(p.real) * out).sum(-1, true);
      const auto add = [&](const Tensor& to, const Tensor& x) {
        to.narrow(1, b.key, b.keys).add_(x.transpose(1, 2));
      };
      add(dv, product(p, weights.transpose(-2, -1), dout));
      const Tensor ds = product(p, dout, v.transpose(-2, -1)).sub_(delta).mul_(weights);
      if (dsinks.defined())
        dsinks.sub_(((sinks_of_rows(p, b) - logsumexp).exp() * delta)
                        .view({q.size(0), -1, b.rows})
                        .sum(at::IntArrayRef{0, 2}));
      if (dslopes.defined())
        dslopes.sub_((ds.view({q.size(0), -1, b.rows, b.keys}) * distance(b, p))
                         .sum(at::IntArrayRef{0, 2, 3}));
      if (dsums.defined()) {
        const Tensor gradient = ds.view({q.size(0), -1, b.rows, b.keys});
        dsums.narrow(1, p.first_position() + b.row, b.rows).add_(gradient.sum(3).transpose(1, 2));
        dsums.narrow(1, b.key, b.keys).sub_(gradient.sum(2).transpose(1, 2));
      }
      ds.mul_(p.scale);
      add(dk, product(p, ds.transpose(-2, -1), q));
      dq.narrow(1, b.row, b.rows).copy_(rows_back(product(p, ds, k), b));
    }
    const auto like = [](const Tensor& x, const Tensor& to) {
      return x.defined() ? x.to(to.scalar_type()) : x;
    };
    return {dq,
            like(dk, p.k),
            like(dv, p.v),
            like(dslopes, p.slopes),
            like(dsinks, p.sinks),
            like(dsums, p.decay_sums),
            Tensor(),
            Tensor()};
  }
};

}  // namespace

Tensor window_attention_blocked(const Tensor& q, const Tensor& k, const Tensor& v, int64_t window,
                                double scale, const OptionalTensor& alibi_slopes,
                                const OptionalTensor& sinks, const OptionalTensor& decay_sums) {
  return Blocked::apply(q, k, v, alibi_slopes, sinks, decay_sums, window, scale);
}

}  // namespace assay::ops
