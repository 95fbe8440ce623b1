// Native Sparse Attention: a query reads compressed blocks, the blocks that these point to, and a
// window; gates mix the three. [NSA, arXiv 2502.11089, eq. 5–12]
//   out_t      = W_o Σ_c g_c ⊙ attention(q_t, K_c, V_c),   g = sigmoid(W_g x_t), one per head and c
//   compressed:  φ([k_j … k_{j+l−1}]) of every j = i·d whose l positions t has read, φ for keys and
//                one for values; nothing while there are none
//   selected:    num_blocks blocks of block_size: that of t up to t, the one before, the first, and
//                those of the largest importance, the same for all heads that share keys
//   window:      the last `window` positions
//   importance of a block: of each of its strides of d positions, the softmax weights of the
//                compressed blocks that hold it, summed over strides and heads. It has no gradient.
// Each branch has keys and values of its own. The paper leaves open and we choose:
// φ(k) = W₂ gelu(W₁ k + b) on the l·D numbers of a block, shared by the heads (W₁ has a matrix for
// each position of the block, which is its position encoding); gates are linear in x; rotary
// positions turn the queries and keys of the selected and the window branch, not the compressed.
// Memory is O(T). The branches are window_attention and top1_chunk, so in bf16 on a GPU they are
// kernels (docs/operators.md); a later piece of a sequence with gradients, and float32 with
// gradients, take top1_chunk's [T, S] composition there. Compressing, the choice and the gates are
// torch's operators; the choice scores up to 2,048 queries at a time, O(T² / d).
#include <torch/torch.h>

#include <algorithm>
#include <cmath>

#include "nn/initial_values.h"
#include "nn/layers.h"
#include "nn/mixer.h"
#include "nn/recompute.h"
#include "ops/attention/rotary_qkv/rotary_qkv.h"
#include "ops/attention/top1_chunk/top1_chunk.h"
#include "ops/attention/window_attention/window_attention.h"
#include "ops/core/split.h"

namespace assay::nn {
namespace {

// Queries whose scores of compressed blocks are held together. Larger parts of a short sequence
// would score many blocks that their queries have not read; smaller parts of a long one would leave
// a GPU waiting for launches.
int64_t queries_at_once(int64_t time) { return std::clamp<int64_t>(time / 8, 512, 2048); }

// φ: blocks [..., l·D] → [..., D]. It keeps the size of keys and values, so that the compressed
// ones start as large as the others.
struct Compression : Module {
  Compression(int64_t length, int64_t head_dim) {
    const Start start = uniform_by_width(std::sqrt(3));
    hidden = add_linear("hidden", length * head_dim, head_dim, {.bias = true, .start = start});
    out = add_linear("out", head_dim, head_dim, {.start = start});
  }
  at::Tensor forward(const at::Tensor& blocks) const {
    return out->forward(at::gelu(hidden->forward(blocks)));
  }
  std::shared_ptr<Linear> hidden;
  std::shared_ptr<Linear> out;
};

struct NativeSparseAttention final : Mixer, HeadwiseMixer {
  struct Config {
    int64_t num_heads = 4;
    int64_t num_kv_heads = 0;
    int64_t head_dim = 0;
    int64_t compress_length = 32;
    int64_t compress_stride = 16;
    int64_t block_size = 64;
    int64_t num_blocks = 16;
    int64_t window = 512;
    double rope_base = 10000;
    void fields(auto&& field) {
      field("num_heads", num_heads, "query heads");
      field("num_kv_heads", num_kv_heads, "key and value heads; divides num_heads; 0: num_heads");
      field("head_dim", head_dim, "0: d_model / num_heads");
      field("compress_length", compress_length,
            "positions of a compressed block; at most block_size");
      field("compress_stride", compress_stride,
            "positions from one compressed block to the next; divides both lengths");
      field("block_size", block_size, "positions of a selected block");
      field("num_blocks", num_blocks,
            "blocks that a query reads: its own, the one before and the first included");
      field("window", window, "positions of the window, the own one included");
      field("rope_base", rope_base, "base of the rotary frequencies");
    }
  };

  NativeSparseAttention(Config c, int64_t d_model)
      : config(checked(c, d_model)), rotary(config.head_dim, config.rope_base) {
    const int64_t heads = config.num_heads;
    const int64_t kv_heads = config.num_kv_heads;
    const int64_t D = config.head_dim;
    qkv = add_linear("qkv", d_model, (heads + 4 * kv_heads) * D);
    block_proj = add_linear("block_proj", d_model, 2 * kv_heads * D);
    gate_proj = add_linear("gate_proj", d_model, 3 * heads);
    out_proj = add_linear("out_proj", heads * D, d_model, {.role = Role::output});
    const auto compression = [&](const char* name) {
      return register_module(name, std::make_shared<Compression>(config.compress_length, D));
    };
    compress_k = compression("compress_k");
    compress_v = compression("compress_v");
  }

  static Config checked(Config c, int64_t d_model) {
    if (c.head_dim == 0) c.head_dim = head_width("nsa", d_model, c.num_heads);
    if (c.num_kv_heads == 0) c.num_kv_heads = c.num_heads;
    if (c.num_heads < 1 || c.num_kv_heads < 1 || c.num_heads % c.num_kv_heads)
      fail("nsa: num_kv_heads = {} must divide num_heads = {}, both positive", c.num_kv_heads,
           c.num_heads);
    if (c.head_dim < 2 || c.head_dim % 2)
      fail("nsa: head_dim = {} must be positive and even", c.head_dim);
    if (c.compress_stride < 1 || c.compress_length < 1 || c.compress_length % c.compress_stride ||
        c.block_size % c.compress_stride)
      fail("nsa: compress_stride = {} must divide compress_length = {} and block_size = {}",
           c.compress_stride, c.compress_length, c.block_size);
    if (c.block_size < c.compress_length)
      fail("nsa: block_size = {} must be compress_length = {} or more", c.block_size,
           c.compress_length);
    if (c.num_blocks < 3) fail("nsa: num_blocks = {} must be 3 or more", c.num_blocks);
    if (c.window < 1) fail("nsa: window = {} must be positive", c.window);
    return c;
  }

  // q, turned q, k, v, the keys and values to compress, all [B, T, heads, D], and the gates
  // [B, T, H, 3]. k and v hold the heads of the selected branch, then those of the window.
  using Heads = std::array<at::Tensor, 6>;
  // The first token of x is at `position`; or x [1, B, d_model] are rows at positions of their own.
  Heads project(const at::Tensor& x, int64_t position, State& state) const {
    const int64_t heads = config.num_heads;
    const int64_t kv_heads = config.num_kv_heads;
    const auto part = ops::split(qkv->forward(x), {(heads + 2 * kv_heads) * config.head_dim,
                                                   2 * kv_heads * config.head_dim});
    const at::Tensor qk = split_heads(part[0], heads + 2 * kv_heads);
    const auto [cos, sin] = rotary.angles(x, position, state);
    const auto [turned, k] = ops::rotary_qk(qk, 2 * kv_heads, cos, sin);
    return {qk.narrow(2, 0, heads),
            turned,
            k,
            split_heads(part[1], 2 * kv_heads),
            split_heads(block_proj->forward(x), 2 * kv_heads),
            at::sigmoid(split_heads(gate_proj->forward(x), heads))};
  }

  at::Tensor forward(const at::Tensor& x, State& state) override {
    const Heads heads = project(x, past_k.length(state), state);
    const auto body = [this](const Heads& of, State& own) { return read(of, own); };
    return output(by_sequence(heads, state, body).flatten(2), {});
  }
  // Both halves of keys, values and what is compressed are cut into as many parts as the queries.
  HeadInputs head_inputs(const at::Tensor& x, int64_t position, State& state) const override {
    const auto [q, turned, k, v, raw, gates] = project(x, position, state);
    HeadInputs in{{q, turned}, {}};
    for (const at::Tensor& both : {k, v, raw}) {
      const auto [first, second] = halves(both);
      in.heads.insert(in.heads.end(), {first, second});
    }
    in.heads.push_back(gates);
    return in;
  }
  size_t num_head_inputs() const override { return 9; }
  bool divides_heads(int64_t parts) const override { return config.num_kv_heads % parts == 0; }
  at::Tensor attend_whole(const HeadList& heads, int64_t /*first*/) override {
    const auto both = [&](size_t i) { return at::cat({heads[i], heads[i + 1]}, 2); };
    State whole;
    whole.context.last = true;
    return read({heads[0], heads[1], both(2), both(4), both(6), heads[8]}, whole);
  }
  at::Tensor output(const at::Tensor& y, const at::Tensor& /*gate*/) const override {
    return out_proj->forward(y);
  }
  // [B, T, H, D]; puts the past of the state before keys and values, and these into the state.
  at::Tensor read(const Heads& heads, State& state) const {
    const auto& [q, turned, all_k, all_v, raw, gates] = heads;
    const int64_t past = past_k.length(state);
    const auto [block_k, block_v] = halves(compressed(raw, past, state));
    const at::Tensor by_block = read_blocks(q, block_k, block_v, past);

    const auto [new_k, new_window_k] = halves(all_k);
    const auto [new_v, new_window_v] = halves(all_v);
    const at::Tensor k = past_k.append(state, new_k);
    const at::Tensor v = past_v.append(state, new_v);
    const auto known = recalled();
    const at::Tensor selected = known ? *known : choose(q, block_k, past);
    remember(selected);
    const at::Tensor by_choice = std::get<0>(ops::top1_chunk(
        turned, k, v, config.block_size, scale(), "exact", selected.size(-1), selected));

    const at::Tensor window_k = past_window_k.append(state, new_window_k);
    const at::Tensor window_v = past_window_v.append(state, new_window_v);
    const at::Tensor by_window =
        ops::window_attention(turned, window_k, window_v, config.window, scale());

    const auto gate = gates.split(1, -1);
    return gate[0] * by_block + gate[1] * by_choice + gate[2] * by_window;
  }

  double scale() const { return 1 / std::sqrt(double(config.head_dim)); }
  // Compressed blocks among so many positions.
  int64_t blocks_of(int64_t positions) const {
    if (positions < config.compress_length) return 0;
    return (positions - config.compress_length) / config.compress_stride + 1;
  }
  std::pair<at::Tensor, at::Tensor> halves(const at::Tensor& x) const {
    const int64_t heads = x.size(2) / 2;
    return {x.narrow(2, 0, heads), x.narrow(2, heads, heads)};
  }

  // All compressed keys and values so far [B, blocks, 2 Hk, D]. The state holds them, and the
  // positions that blocks still to come need.
  at::Tensor compressed(const at::Tensor& raw, int64_t past, State& state) const {
    const int64_t stride = config.compress_stride;
    const int64_t per_block = config.compress_length / stride;
    const int64_t known = blocks_of(past);
    const int64_t total = past + raw.size(1);
    const int64_t added = blocks_of(total) - known;
    const at::Tensor pending = to_compress.append(state, raw, total - (known + added) * stride);
    if (added == 0) {
      const auto sizes = {raw.size(0), int64_t{0}, raw.size(2), raw.size(3)};
      return state.find("compressed").value_or(raw.new_empty(sizes));
    }
    const at::Tensor strides = pending.narrow(1, 0, (added + per_block - 1) * stride)
                                   .unflatten(1, {-1, stride})
                                   .transpose(2, 3);  // [B, strides, 2 Hk, stride, D]
    std::vector<at::Tensor> parts;
    for (int64_t i = 0; i < per_block; ++i) parts.push_back(strides.narrow(1, i, added));
    const auto [k, v] = halves(at::cat(parts, 3).flatten(3));
    return past_blocks.append(state, at::cat({compress_k->forward(k), compress_v->forward(v)}, 2));
  }

  // Attention to the compressed blocks that each query has read, 0 where there are none. The
  // `stride` queries from one block's end to the next see the same blocks, so they are heads of one
  // query: causal attention over blocks with H · stride heads, without a [T, blocks] matrix.
  at::Tensor read_blocks(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         int64_t past) const {
    const int64_t stride = config.compress_stride;
    const int64_t end = past + q.size(1);
    const int64_t first = std::max(past, config.compress_length - 1);  // to see a block
    if (first >= end) return at::zeros_like(q);
    const int64_t groups = end / stride - (first + 1) / stride + 1;
    const int64_t before = groups == 1 ? 0 : (first + 1) % stride;  // queries without a token
    const int64_t after = groups == 1 ? 0 : groups * stride - before - (end - first);
    const at::Tensor padded =
        at::constant_pad_nd(q.slice(1, first - past), {0, 0, 0, 0, before, after});
    const at::Tensor grouped = padded.unflatten(1, {groups, -1}).transpose(2, 3);
    const at::Tensor out = ops::window_attention(grouped.flatten(2, 3), k, v, -1, scale())
                               .unflatten(2, {q.size(2), -1})
                               .transpose(2, 3)
                               .flatten(1, 2)
                               .narrow(1, before, end - first);
    return at::constant_pad_nd(out, {0, 0, 0, 0, first - past, 0});
  }

  // The blocks that each query reads besides its own, [B, H, T, num_blocks − 1], −1 for none.
  at::Tensor choose(const at::Tensor& q, const at::Tensor& block_k, int64_t past) const {
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> chosen;
    for (const at::Tensor& part : q.split(queries_at_once(q.size(1)), 1)) {
      const at::Tensor seen = block_k.narrow(1, 0, blocks_of(past + part.size(1)));
      chosen.push_back(best(part, seen, past));
      past += part.size(1);
    }
    return at::cat(chosen, 2).repeat_interleave(config.num_heads / config.num_kv_heads, 1);
  }
  // [B, Hk, T, num_blocks − 1]; ties: the lower block. The first query is at `position`.
  at::Tensor best(const at::Tensor& q, const at::Tensor& block_k, int64_t position) const {
    const int64_t time = q.size(1);
    const int64_t others = config.num_blocks - 1;
    const int64_t candidates = (position + time - 1) / config.block_size;
    const auto integers = q.options().dtype(at::kLong);
    if (candidates == 0) return at::full({q.size(0), block_k.size(2), time, others}, -1, integers);
    const at::Tensor t = at::arange(position, position + time, integers).unsqueeze(1);
    const at::Tensor own = t.floor_divide(config.block_size);
    const at::Tensor j = at::arange(candidates, integers);
    const at::Tensor score = importance(q, block_k, t, j)
                                 .masked_fill_((j == 0) | (j == own - 1), INFINITY)
                                 .masked_fill_(j >= own, -1);
    const auto [value, order] = at::sort(score, /*stable=*/true, -1, /*descending=*/true);
    const at::Tensor chosen = order.masked_fill(value < 0, -1).slice(-1, 0, others);
    return at::constant_pad_nd(chosen, {0, others - chosen.size(-1)}, -1);
  }
  // [B, Hk, T, J] of the blocks j [J] to the queries at t [T, 1]. A compressed block counts for
  // each stride that it shares with the block.
  at::Tensor importance(const at::Tensor& q, const at::Tensor& block_k, const at::Tensor& t,
                        const at::Tensor& j) const {
    const int64_t kv_heads = block_k.size(2);
    const int64_t length = config.compress_length;
    const at::Tensor queries = q.transpose(1, 2).reshape({q.size(0), kv_heads, -1, q.size(3)});
    const at::Tensor score = wide(at::matmul(queries, block_k.permute({0, 2, 3, 1}))) * scale();
    const at::Tensor begin = at::arange(block_k.size(1), t.options()) * config.compress_stride;
    const at::Tensor unread = begin + length > t + 1;  // [T, blocks]
    const at::Tensor weight =
        at::softmax(score.unflatten(2, {-1, q.size(1)}).masked_fill_(unread, -INFINITY), -1);
    const at::Tensor from = begin.unsqueeze(1);
    const at::Tensor to = j * config.block_size;
    const at::Tensor shared =
        at::minimum(from + length, to + config.block_size) - at::maximum(from, to);
    // A query that has read no block has weights 0 / 0.
    return at::matmul(weight.masked_fill(unread, 0).sum(2),
                      shared.clamp_min(0).floor_divide(config.compress_stride).to(weight));
  }

  // Mean over positions: φ, the compressed blocks (read, and scored again for the choice), and the
  // positions of the other branches.
  double mixing_flops(int64_t time) const override {
    const double width = double(config.head_dim);
    const double heads = double(config.num_heads);
    double scored = 0;
    double read = 0;
    for (int64_t t = 0; t < time; ++t) {
      const int64_t others = std::min(config.num_blocks - 1, t / config.block_size);
      scored += double(blocks_of(t + 1));
      read += double(t % config.block_size + 1 + others * config.block_size +
                     std::min(config.window, t + 1));
    }
    // The model counts φ once per token, but it runs once per block and head.
    const double runs = double(blocks_of(time) * config.num_kv_heads - time);
    const double compressing = 4 * runs * width * width * double(config.compress_length + 1);
    return (compressing + heads * width * (6 * scored + 4 * read)) / double(time);
  }

  // 2: more than 4,096 tokens are scored in larger parts, whose sums are rounded otherwise.
  int numerics() const override { return 2; }

  Config config;
  const Cache past_k = add_cache("k");
  const Cache past_v = add_cache("v");
  const Cache past_window_k = add_cache("window_k", {.window = config.window});
  const Cache past_window_v = add_cache("window_v", {.window = config.window});
  const Cache past_blocks = add_cache("compressed", {.tokens = config.compress_stride});
  const Cache to_compress{"to_compress"};
  Rotary rotary;
  std::shared_ptr<Linear> qkv;
  std::shared_ptr<Linear> block_proj;
  std::shared_ptr<Linear> gate_proj;
  std::shared_ptr<Linear> out_proj;
  std::shared_ptr<Compression> compress_k;
  std::shared_ptr<Compression> compress_v;
};

const RegisterMixer<NativeSparseAttention> registered(
    "nsa",
    "out_t = Σ_c g_c attention(q_t, K_c, V_c), c: compressed, chosen, recent [NSA, eq. 5–12]",
    {{},
     {.num_heads = 6,
      .num_kv_heads = 2,
      .compress_length = 8,
      .compress_stride = 4,
      .block_size = 8,
      .num_blocks = 4,
      .window = 10},
     {.num_kv_heads = 2,
      .compress_length = 5,
      .compress_stride = 5,
      .block_size = 10,
      .num_blocks = 3,
      .window = 1},
     {.num_heads = 3,
      .head_dim = 6,
      .compress_length = 6,
      .compress_stride = 2,
      .block_size = 8,
      .num_blocks = 5,
      .window = 3}});

}  // namespace
}  // namespace assay::nn
