#pragma once
// Activation checkpointing: keep a layer's input, compute its inside again in the backward. [Chen
// et al. 2016]
#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <vector>

#include "nn/state.h"

namespace assay::nn {

// layer(x, handed) with the memory of its inputs alone. The layer must be a pure function of them
// and of parameters that need gradients; it may read, add to and replace what is handed on.
at::Tensor recomputed(const std::function<at::Tensor(const at::Tensor& x, Handed& handed)>& layer,
                      const at::Tensor& x, Handed& handed);

// The choices of the first run of a layer, for the second one.
struct Choices {
  std::vector<at::Tensor> made;
  size_t recalled = 0;
  bool again = false;
};
// While it lives, remember() of this thread adds to `choices`, and in the second run recalled()
// reads them.
class WithChoices {
 public:
  WithChoices(Choices& choices, bool again);
  ~WithChoices();
  WithChoices(const WithChoices&) = delete;

 private:
  Choices* outer_;
};

// Results without gradients (a choice) of the first run of a recomputed layer, which the second run
// need not compute again. remember() stores them, and recalled() returns them in the same order.
// Outside of recomputed layers, nothing is stored and recalled() returns no value.
std::optional<at::Tensor> recalled();
void remember(const at::Tensor& found);

}  // namespace assay::nn
