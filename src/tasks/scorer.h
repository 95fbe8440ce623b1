#pragma once
// Log-likelihoods and greedy texts of many requests, with what they share read once.
//
// The rows of an item (its choices) share their first tokens: the context. The model reads the
// shared part once and keeps its state, and each row goes on from a copy of the state. Items that
// begin alike (the same examples) share that beginning in the same way. Every mixer gives the
// same output wherever a sequence is cut, so the result does not depend on sharing up to the
// rounding of sums.
//
//   items that begin alike:   read P once              (one sequence)
//   a batch of them:
//       read up to the cut c ≥ P (one sequence per item), c: what all rows of each item share
//   their rows:
//       read the rest, zero-padded at the end (one sequence per row); logits where needed only
//
// The last token of a row is predicted and not read. Rows that differ in it alone (the choices A,
// B, C and D) are one sequence.
//
// Items of one batch have similar lengths, since the cut is at the same position in all of them.
#include <functional>
#include <span>
#include <vector>

#include "nn/language_model.h"
#include "tasks/encoder.h"
#include "tasks/kind.h"

namespace assay::tasks {

struct ScorerOptions {
  int64_t batch_tokens = 0;  // read at once, padding included; 0: 65,536 on CUDA, else 8,192
  bool share = true;         // false: every row is read from its first token
};

class Scorer {
 public:
  Scorer(nn::LanguageModel& model, const ScorerOptions& options);

  // items[i]: the rows of one item, none of them longer than the model reads. done(i, likelihoods
  // of its rows) is called once for each item, in any order; between batches.
  using Done = std::function<void(size_t item, std::vector<Likelihood> likelihoods)>;
  void score(const std::vector<std::vector<Row>>& items, const Done& done);

  // The greedy text after each prompt, until ended(prompt, tokens so far) is true,
  // at most max_tokens.
  using Generated = std::function<void(size_t prompt, std::vector<int64_t> tokens)>;
  void generate(const std::vector<std::vector<int64_t>>& prompts, int64_t max_tokens,
                const std::function<bool(size_t prompt, const std::vector<int64_t>& tokens)>& ended,
                const Generated& done);

  int64_t tokens_read() const { return tokens_read_; }    // by the model, without padding
  int64_t tokens_alone() const { return tokens_alone_; }  // that it would have read without sharing

 private:
  void score_group(const std::vector<std::vector<Row>>& items, std::vector<size_t> group,
                   size_t prefix, const Done& done);
  // Rows and what the model reads for them.
  struct Batch {
    std::vector<const Row*> firsts;                   // of each item
    std::vector<const Row*> inputs;                   // a row of each sequence
    std::vector<int64_t> owners;                      // the item of each sequence
    std::vector<std::pair<const Row*, size_t>> rows;  // each with the number of its sequence
  };
  Batch batch_of(const std::vector<std::vector<Row>>& items, std::span<const size_t> chosen) const;
  size_t inputs(const std::vector<Row>& item) const;
  bool same_input(const Row& a, const Row& b) const;
  // Estimated bytes of the states of `sequences` sequences after `cut` tokens.
  double state_bytes(size_t sequences, size_t cut) const;
  std::vector<Likelihood> read_rows(const Batch& batch, size_t cut, nn::ModelState state);
  nn::ModelState read_shared(const std::vector<const Row*>& firsts, size_t begin, size_t cut,
                             const nn::ModelState& before);
  at::Tensor on_device(const at::Tensor& tokens) const {
    return tokens.to(model_.embedding.device());
  }

  nn::LanguageModel& model_;
  ScorerOptions options_;
  // of one sequence of kShort tokens
  double most_state_bytes_ = 0;
  double short_state_bytes_ = 0;
  int64_t tokens_read_ = 0;
  int64_t tokens_alone_ = 0;
};

}  // namespace assay::tasks
