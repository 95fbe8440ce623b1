#pragma once
// Sequences at positions of their own that advance together by one token per step: the decode
// steps of continuous batching.
//
// A slot is a row of the batch. The states of recurrences and of channel mixers are rows of one
// tensor each, and the caches of attention belong to their slots. A step computes all rows, used or
// not. Products and element-wise operations choose their algorithm by the number of rows, so a
// row's bits do not depend on the other rows. On a CPU the last rows of some numbers of rows are
// computed in another way than the others. There, rows are added that are never used, until copies
// of one sequence have the same bits in all rows. If no number that is tried gives this, none are
// added.
//
// On CUDA, where all mixers allow it, a step is a CUDA graph: from the tokens to the logits and the
// next tokens, which stay on the device. The graph reads lengths and addresses of caches from the
// memory of the device, and leaves new states in the memory of the old ones. It is captured again
// when a sequence becomes longer than `capacity`, which then doubles.
#include <c10/core/Event.h>

#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "nn/language_model.h"
#include "ops/dense/sampling/sampling.h"

namespace assay::nn {

// The tokens that a step draws. They may still be computed.
class DrawnTokens {
 public:
  explicit DrawnTokens(const at::Tensor& tokens);  // [count] i64; begins the copy to the host
  std::span<const int64_t> wait() const;

 private:
  at::Tensor tokens_;
  std::optional<c10::Event> copied_;
};

// Whether its decode steps are CUDA graphs.
bool steps_can_be_captured(const LanguageModel& model);

class Slots {
 public:
  // The model must outlive it. A slot has memory for `capacity` tokens from the start.
  Slots(LanguageModel& model, int64_t count, int64_t capacity = 0);
  Slots(const Slots&) = delete;

  // Takes the state of one sequence that has read at least one token (a batch of one) into a slot.
  // The next step reads `token` [1] i64, on any device; −1 stands for 0.
  void put(int64_t slot, const ModelState& state, const at::Tensor& token);
  void clear(int64_t slot);
  int64_t count() const { return count_; }
  bool used(int64_t slot) const { return state_.rows.used(slot); }

  // Each used slot reads its token and draws the next one with its draw; -1 as in ops::sample.
  // Asynchronous on CUDA.
  DrawnTokens step(std::span<const ops::Draw> draws);
  // Logits of the last step, [count, V] in the model's compute dtype, on its device; the rows of
  // unused slots have no meaning. The next step overwrites them.
  const at::Tensor& logits() const { return logits_; }
  // Each used slot reads its token; those of unused slots are ignored. → logits()
  const at::Tensor& step(const std::vector<int64_t>& tokens);

  // The state of the sequences of all slots as one batch. They must all be at one position.
  ModelState batch() const;

 private:
  struct Exactly {
    int64_t rows;
  };
  struct Copies {
    std::vector<at::Tensor> to;
    std::vector<at::Tensor> from;
  };
  Slots(LanguageModel& model, Exactly number, int64_t capacity);
  int64_t rows() const { return int64_t(state_.rows.read.size()); }  // count() or more
  static int64_t rows_for(LanguageModel& model, int64_t count);
  static bool rows_are_alike(LanguageModel& model, int64_t rows);
  void use_device_positions();
  bool has_device_caches(size_t layer) const {
    return state_.layers[layer].rows.addresses.defined();
  }
  int64_t capacity_for(int64_t tokens) const;
  void reserve(size_t slot, int64_t capacity);
  at::Tensor memory_of(const Cache& cache, size_t layer, size_t slot, int64_t capacity,
                       Copies& copies);
  void compute();

  LanguageModel& model_;
  std::function<void()> replay_;  // destroyed after the tensors in its memory
  ModelState state_;
  std::vector<std::set<std::string>> of_channel_mixer_;  // the names of its tensors, by layer
  int64_t count_;
  at::Tensor tokens_;  // [rows], that the next step reads
  at::Tensor draws_;   // [count, sizeof(ops::Draw)]
  // of the last step
  at::Tensor drawn_;
  at::Tensor logits_;
  // State::Rows::addresses of all layers, one after the other; on the host
  at::Tensor caches_;
  at::Tensor places_;
  std::vector<int64_t> first_place_;  // of each layer in these
  bool can_be_captured_ = false;
  bool places_changed_ = false;
  bool warm_ = false;
  int64_t least_capacity_ = 0;
  std::vector<int64_t> capacities_;  // of the caches of each row
  // By layer: the memory of caches for `least_capacity_` tokens, [rows, least_capacity_, …]
  std::vector<std::map<std::string, at::Tensor>> memory_;
};

}  // namespace assay::nn
