#pragma once
// A learned choice of earlier chunks, and the loss that trains it.
// [MiniMax Sparse Attention, arXiv 2606.13392, with "max"; transformers, MiniMaxM3VLIndexer]
//   a, b    = rotary(rms(W_a x)), rotary(rms(W_b x))   a: `heads` queries; b: one key for all heads
//   score_c = max or mean of a_t·b_j over j in c, for chunks c before that of t
// A choice has no gradient. The indexer learns from the attention of the mixer, and x is detached
// for it, so that its loss trains nothing else:
//   loss    = loss_weight · mean over t and heads of KL(p_t ‖ softmax(a_t·b / √dim))
// p_t is the full attention of the queries at t, the mean over those that share a head of the
// indexer. With "max" it is over positions, as in the warm-up of the paper, which then takes the
// positions that are read; we take all throughout. With "mean", b and p are those of chunks: p has
// its sums over the chunks before that of t, divided by their total.
#include "nn/layers.h"
#include "nn/mixer.h"

namespace assay::nn {

struct IndexerOptions {
  int64_t heads;
  int64_t dim;
  int64_t chunk_size;
  int64_t top_k;
  std::string pooling;
  double rope_base;
  double loss_weight;
};

struct Indexer : Module {
  // For `mixer_heads` query heads of `mixer`. BadInput that names the mixer and the field.
  Indexer(const char* mixer, int64_t d_model, int64_t mixer_heads, const IndexerOptions& options);

  struct Heads {
    at::Tensor q;  // a [B, T, heads, dim]
    at::Tensor k;  // b [B, T, 1, dim]
  };
  // The first token of x is at `position`; or x [1, B, d_model] are rows at positions of their own.
  Heads heads_of(const at::Tensor& x, int64_t position, State& state) const {
    const at::Tensor index = split_heads(proj->forward(x.detach()), options.heads + 1);
    return {rotary(query_norm->forward(index.narrow(2, 0, options.heads)), position, state),
            rotary(key_norm->forward(index.narrow(2, options.heads, 1)), position, state)};
  }
  // The part of all tokens so far that scores read, the first of k at `position`: keys, or their
  // means over full chunks. It is in the state, with the keys of the last chunk.
  at::Tensor all_keys(const at::Tensor& k, int64_t position, State& state) const;
  // The chunks for queries from `position` on, by query head of the mixer [B, H, T, top_k]: best
  // first, −1 for none; ties: the lower chunk.
  at::Tensor choose(const at::Tensor& q, const at::Tensor& keys, int64_t position) const;
  // The loss; p is the softmax of mixer_q [B, T, H, D] times mixer_k [B, S, Hk, D]. It takes O(T S)
  // operations and O(T + S) memory.
  at::Tensor loss(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& mixer_q,
                  const at::Tensor& mixer_k, int64_t position) const;

  bool pools_keys() const { return options.pooling == "mean"; }
  double flops(int64_t time) const;  // of the scores, per token at this sequence length

  IndexerOptions options;
  const Cache past_keys{"index_k"};
  const Cache to_pool{"to_pool"};  // keys of a chunk that is not full
  int64_t sharers;                 // query heads of the mixer that share a choice
  Rotary rotary;
  std::shared_ptr<Linear> proj;
  std::shared_ptr<Norm> query_norm;
  std::shared_ptr<Norm> key_norm;

 private:
  at::Tensor scores(const at::Tensor& q, const at::Tensor& keys, int64_t count) const;
};

}  // namespace assay::nn
