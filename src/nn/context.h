#pragma once
// Context parallelism: a sequence is cut into equal consecutive slices, which one or several
// processes compute.
//
// By the law of mixers (nn/mixer.h), a slice needs of the slices before it only the state that they
// left. So every layer hands its state from slice to slice, and the gradient of the state back:
//   forward    layer 0, 1, …    slice s reads state(layer, s − 1) and leaves state(layer, s)
//   backward   layer …, 1, 0    slice s reads ∂state(layer, s) and leaves ∂state(layer, s − 1)
// Everything else of a token is computed where its slice is. While one process computes a layer of
// its slices, the next one computes the layer before (a wavefront).
//
// Each layer of each slice has a graph and a backward pass of its own, which the loops here start.
// So the order of the exchanges is that of the loops, and autograd does not decide about it. A
// tensor that goes from slice to slice is copied in the same way within a process and between
// processes, so the number of processes changes no bit.
#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "nn/language_model.h"
#include "nn/recompute.h"

namespace assay::nn {

// The slices of a sequence, and those that this process computes.
struct ContextSlices {
  int64_t count = 1;
  int64_t begin = 0;
  int64_t end = 1;
};

// The processes with the slices before and after those of this process. What one of them sends, the
// other one must receive, in the same order.
class Neighbours {
 public:
  virtual ~Neighbours() = default;
  // To the process with the next slice, and from that with the slice before. The sizes of the state
  // of a layer, and its tensors of integers, are the same in every call.
  virtual void send(int64_t layer, const Handed& state) = 0;
  virtual Handed receive(int64_t layer) = 0;
  // In the other direction; `gradients` has the sizes of what is received.
  virtual void send_gradients(const std::vector<at::Tensor>& gradients) = 0;
  virtual void receive_gradients(const std::vector<at::Tensor>& gradients) = 0;
  // Waits until the memory of everything that was sent can be used again.
  virtual void finish() = 0;
};

// The forward passes of layers over the slices of this process, then their backward passes.
class SlicedPass {
 public:
  // `neighbours`: not used when this process has all slices. `recompute`: a layer keeps its inputs
  // only, and is computed again before its backward pass.
  SlicedPass(ContextSlices slices, Neighbours* neighbours, bool recompute = false)
      : handed(size_t(slices.end - slices.begin)),
        handed_gradients(handed.size()),
        slices_(slices),
        neighbours_(neighbours),
        recompute_(recompute) {}

  using LayerFunction = std::function<at::Tensor(const at::Tensor& x, State& state)>;
  // x: one tensor per slice of this process, [B, T / count, …]. Returns those of the next layer.
  std::vector<at::Tensor> forward(LayerFunction layer, const std::vector<at::Tensor>& x);
  // The backward pass of the last layer that has not had one, from the gradients of its outputs to
  // those of x. Calls done(i) after the pass of slice begin + i, when the gradients of parameters
  // have been added to grad().
  std::vector<at::Tensor> backward(const std::vector<at::Tensor>& gradients,
                                   const std::function<void(size_t i)>& done);

  // Values that layers hand on to later ones, by slice of this process, and their gradients: those
  // of the last layer before the first backward().
  std::vector<Handed> handed;
  std::vector<Handed> handed_gradients;

 private:
  struct Tensors {
    at::Tensor x;
    Handed handed;
    Handed state;
  };
  struct Passage {  // of one layer over one slice
    Tensors in;
    Tensors out;
    Choices choices;
  };
  struct Layer {
    LayerFunction function;
    std::vector<Passage> passages;
  };
  bool last(size_t i) const { return slices_.begin + int64_t(i) + 1 == slices_.count; }
  Tensors run(const LayerFunction& layer, size_t i, Passage& passage, bool again) const;
  Handed gradients_of_state(const Layer& layer, size_t i) const;

  ContextSlices slices_;
  Neighbours* neighbours_;
  bool recompute_;
  std::vector<Layer> layers_;
};

// Forward and backward of the loss of a batch whose sequences are cut. tokens: those of the slices
// of this process and the one after them, [B, T · (end − begin) / count + 1]. Returns for each
// slice LanguageModel::training_losses of it over `divisor`; done(i) as in SlicedPass.
std::vector<at::Tensor> sliced_loss(LanguageModel& model, const at::Tensor& tokens,
                                    ContextSlices slices, Neighbours* neighbours, double divisor,
                                    const std::function<void(size_t i)>& done);

}  // namespace assay::nn
