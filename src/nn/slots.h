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
#include <set>
#include <string>
#include <vector>

#include "nn/language_model.h"

namespace assay::nn {

class Slots {
 public:
  Slots(LanguageModel& model, int64_t count);  // the model must outlive it

  // Takes the state of one sequence that has read at least one token (a batch of one) into a slot.
  void put(int64_t slot, const ModelState& state);
  void clear(int64_t slot);
  int64_t count() const { return count_; }
  bool used(int64_t slot) const { return state_.positions[size_t(slot)] >= 0; }

  // Each used slot reads its token; those of unused slots are ignored. Returns the logits of the
  // next tokens [count, V] in the model's compute dtype, on its device; the rows of unused slots
  // have no meaning.
  at::Tensor step(const std::vector<int64_t>& tokens);

 private:
  struct Exactly {
    int64_t rows;
  };
  Slots(LanguageModel& model, Exactly number);
  int64_t rows() const { return int64_t(state_.positions.size()); }  // count() or more
  static int64_t rows_for(LanguageModel& model, int64_t count);
  static bool rows_are_alike(LanguageModel& model, int64_t rows);

  LanguageModel& model_;
  ModelState state_;
  std::vector<std::set<std::string>> of_channel_mixer_;  // the names of its tensors, by layer
  int64_t count_;
};

}  // namespace assay::nn
