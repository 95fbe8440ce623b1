// Attention to the own chunk and to earlier chunks that a learned indexer chooses.
// [MiniMax Sparse Attention, arXiv 2606.13392]
//   q, k, v = W x, with norm, scale and rotation as in top1.cc
//   c_t     = the top_k chunks before that of t that the indexer scores best (nn/indexer.h)
//       out = W_o attention(q_t, k_j, v_j) over j ≤ t in the own chunk and in c_t
// "max" is the indexer of MiniMax-M3, whose top-k counts the own chunk. With "mean" the state grows
// by one index key per chunk. Training also computes full attention, from which the indexer learns;
// mixing_flops does not count it.
#include <torch/torch.h>

#include "nn/indexer.h"
#include "nn/layers.h"
#include "nn/mixer.h"
#include "nn/recompute.h"
#include "ops/attention/rotary_qkv/rotary_qkv.h"
#include "ops/attention/top1_chunk/top1_chunk.h"

namespace assay::nn {
namespace {

struct BlockSelection final : Mixer {
  struct Config {
    int64_t num_heads = 4;
    int64_t num_kv_heads = 0;
    int64_t chunk_size = 128;
    int64_t top_k = 1;
    std::string pooling = "mean";
    int64_t index_heads = 0;
    int64_t index_dim = 0;
    double loss_weight = 1;
    double rope_base = 10000;
    void fields(auto&& field) {
      field("num_heads", num_heads, "query heads; divides d_model");
      field("num_kv_heads", num_kv_heads, "key and value heads; divides num_heads; 0: num_heads");
      field("chunk_size", chunk_size, "positions of a chunk");
      field("top_k", top_k, "earlier chunks that a query reads in addition to its own");
      field("pooling", pooling, "mean or max: score of a chunk from those of its positions");
      field("index_heads", index_heads, "choices per token; divides num_heads; 0: num_kv_heads");
      field("index_dim", index_dim, "channels of an index head; 0: those of a head");
      field("loss_weight", loss_weight, "of the loss that trains the indexer");
      field("rope_base", rope_base, "base of the rotary frequencies");
    }
  };

  BlockSelection(const Config& c, int64_t d_model)
      : config(c),
        head_dim(head_width("block_selection", d_model, c.num_heads)),
        rotary(head_dim, c.rope_base) {
    if (c.num_kv_heads == 0) config.num_kv_heads = c.num_heads;
    if (c.index_heads == 0) config.index_heads = config.num_kv_heads;
    if (c.index_dim == 0) config.index_dim = head_dim;
    if (config.num_kv_heads < 1 || c.num_heads % config.num_kv_heads)
      fail("block_selection: num_kv_heads = {} must divide num_heads = {}", c.num_kv_heads,
           c.num_heads);
    if (head_dim % 2) fail("block_selection: num_heads = {} gives odd heads", c.num_heads);
    qkv = add_linear("qkv", d_model, d_model + 2 * config.num_kv_heads * head_dim);
    out_proj = add_linear("out_proj", d_model, d_model, {.role = Role::output});
    scale = add_parameter("scale", torch::full({c.num_heads}, 20.0), {.learning_rate = 40});
    const IndexerOptions options{config.index_heads, config.index_dim, c.chunk_size, c.top_k,
                                 c.pooling,          c.rope_base,      c.loss_weight};
    indexer = register_module(
        "indexer", std::make_shared<Indexer>("block_selection", d_model, c.num_heads, options));
  }

  using Heads = std::array<at::Tensor, 5>;  // q, k, v, and q, k of the indexer, [B, T, heads, D]
  // The first token of x is at `position`; or x [1, B, d_model] are rows at positions of their own.
  Heads heads_of(const at::Tensor& x, int64_t position, State& state) const {
    const auto [cos, sin] = rotary.angles(x, position, state);
    const auto [q, k, v] =
        ops::rotary_qkv_(qkv->forward(x), config.num_heads, config.num_kv_heads, cos, sin, scale);
    const auto [index_q, index_k] = indexer->heads_of(x, position, state);
    return {q, k, v, index_q, index_k};
  }

  at::Tensor forward(const at::Tensor& x, State& state) override {
    const Heads heads = heads_of(x, past_k.length(state), state);
    const auto body = [this](const Heads& of, State& own) { return read(of, own); };
    return out_proj->forward(by_sequence(heads, state, body).flatten(2));
  }

  // [B, T, H, D]; puts the past of the state before keys and values, and these into the state.
  at::Tensor read(const Heads& heads, State& state) const {
    const auto& [q, new_k, new_v, index_q, new_index_k] = heads;
    const int64_t past = past_k.length(state);
    const at::Tensor k = past_k.append(state, new_k);
    const at::Tensor v = past_v.append(state, new_v);
    const at::Tensor index_k = indexer->all_keys(new_index_k, past, state);
    const auto known = recalled();
    const at::Tensor chosen = known ? *known : indexer->choose(index_q, index_k, past);
    remember(chosen);
    if (state.context.wants_auxiliary_loss())
      state.context.add_auxiliary_loss(indexer->loss(index_q, index_k, q, k, past));
    return std::get<0>(
        ops::top1_chunk(q, k, v, config.chunk_size, 1, "exact", config.top_k, chosen));
  }
  bool has_auxiliary_loss() const override { return true; }

  at::Tensor attention_weights(const at::Tensor& x) const override {
    State none;
    const auto [q, k, v, index_q, index_k] = heads_of(x, 0, none);
    const at::Tensor chosen = indexer->choose(index_q, indexer->all_keys(index_k, 0, none), 0);
    return std::get<0>(ops::top1_chunk_reference(q, k, values_of_positions(k), config.chunk_size, 1,
                                                 "exact", config.top_k, chosen))
        .transpose(1, 2);
  }

  double mixing_flops(int64_t time) const override {
    double read = 0;
    for (int64_t t = 0; t < time; ++t)
      read += double(t % config.chunk_size + 1 +
                     std::min(config.top_k, t / config.chunk_size) * config.chunk_size);
    return 4 * double(config.num_heads * head_dim) * read / double(time) + indexer->flops(time);
  }

  Config config;
  const Cache past_k = add_cache("k");
  const Cache past_v = add_cache("v");
  int64_t head_dim;
  Rotary rotary;
  std::shared_ptr<Linear> qkv;
  std::shared_ptr<Linear> out_proj;
  std::shared_ptr<Indexer> indexer;
  at::Tensor scale;
};

const RegisterMixer<BlockSelection> registered(
    "block_selection",
    "softmax over the own chunk and the top_k earlier chunks of the best learned score, "
    "the max or mean of a_t·b_j over a chunk [MiniMax Sparse Attention]",
    {{.chunk_size = 16},
     {.num_heads = 6, .num_kv_heads = 2, .chunk_size = 16, .pooling = "max"},
     {.num_heads = 6, .num_kv_heads = 3, .chunk_size = 10, .top_k = 3, .index_heads = 2},
     {.chunk_size = 7, .top_k = 2, .pooling = "max", .index_heads = 1, .index_dim = 4}});

}  // namespace
}  // namespace assay::nn
