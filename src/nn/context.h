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
// The state of full attention would be all keys and values. Its heads are divided instead, into as
// many equal shares as there are slices: the process of slice s gets share s of the queries, keys
// and values of all slices, attends, and sends the results back. [Jacobs et al. 2023, arXiv
// 2309.14509: DeepSpeed-Ulysses] This needs a HeadwiseMixer whose heads can be divided so. A share
// has two groups of heads if they can be divided so: one attends while the other one is sent.
//
// Attention over a window needs the last keys and values of the slice before, which are there
// before any slice attends. So no slice waits for the attention of another one.
//
// Each stage of a layer has, for each slice, a graph and a backward pass of its own, which the
// loops here start. So the order of the exchanges is that of the loops, and autograd does not
// decide about it. A tensor that goes from slice to slice is copied in the same way within a
// process and between processes, so the number of processes changes no bit.
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
  // Starts to send the contiguous blocks [slices here, all slices, …] of every process. What is
  // returned waits and gives the same shape, with block (s, u) of the processes' slices where
  // (u, s) was.
  virtual std::function<at::Tensor()> transpose(const at::Tensor& blocks) = 0;
  // Waits until the memory of everything that was sent can be used again.
  virtual void finish() = 0;
};

// A layer that computes a slice x [B, T / count, …] and returns one of the same shape.
struct SlicedLayer {
  // The state goes from slice to slice.
  std::function<at::Tensor(const at::Tensor& x, State& state)> forward;
  // Not null if attends_at_once(). Then these two are called in place of `forward`, before
  // attend_whole() and after it, with `attended` [B, T / count, H D].
  HeadwiseMixer* attention = nullptr;
  std::function<HeadwiseMixer::HeadInputs(const at::Tensor& x, State& state)> head_inputs = {};
  std::function<at::Tensor(const at::Tensor& x, const at::Tensor& attended, const at::Tensor& gate,
                           State& state)>
      after_attention = {};
};

// Whether all of `count` slices of `time` tokens can attend at the same time. Else, or if attention
// is null, the state goes from slice to slice.
bool attends_at_once(const HeadwiseMixer* attention, int64_t count, int64_t time);

// The forward passes of layers over the slices of this process, then their backward passes.
class SlicedPass {
 public:
  // `neighbours`: not used when this process has all slices. `recompute`: a layer keeps its inputs
  // only, and is computed again before its backward pass. The results of attention are kept where
  // slices attend at the same time; where they divide heads, queries, keys and values, too.
  SlicedPass(ContextSlices slices, Neighbours* neighbours, bool recompute = false)
      : handed(size_t(slices.end - slices.begin)),
        handed_gradients(handed.size()),
        slices_(slices),
        neighbours_(neighbours),
        recompute_(recompute) {}

  // x: one tensor per slice of this process. Returns those of the next layer.
  std::vector<at::Tensor> forward(const SlicedLayer& layer, const std::vector<at::Tensor>& x);
  // The backward pass of the last layer that has not had one, from the gradients of its outputs to
  // those of x. Calls done(i) after passes of slice begin + i, when the gradients of parameters
  // have been added to grad().
  std::vector<at::Tensor> backward(const std::vector<at::Tensor>& gradients,
                                   const std::function<void(size_t i)>& done);

  // Values that layers hand on to later ones, by slice of this process, and their gradients: those
  // of the last layer before the first backward().
  std::vector<Handed> handed;
  std::vector<Handed> handed_gradients;

 private:
  using List = std::vector<at::Tensor>;
  using Wait = std::function<at::Tensor()>;
  using Function = std::function<List(const List& x, State& state)>;
  struct Tensors {
    List x;
    Handed handed;
    Handed state;
  };
  struct Passage {  // of one stage over one slice
    Tensors in;
    Tensors out;
    Choices choices;
  };
  struct Stage {
    Function function;
    std::vector<Passage> passages;
  };
  // Attention of a share of the heads, over all tokens: `in` has the share of each input. Or of a
  // slice: in[0] has queries, and in[1] keys and values from those of `past` on.
  struct Attended {
    List in;
    at::Tensor out;
    at::Tensor past;  // keys and values before the slice; undefined if there are none
  };
  struct Layer {
    std::vector<Stage> stages;  // one, or those before and after attention
    HeadwiseMixer* attention = nullptr;
    std::vector<Attended> attended;             // by slice
    std::vector<std::vector<Attended>> shares;  // of the heads, by group of them
  };
  bool divides_heads(const Layer& layer) const {
    return layer.attention->divides_heads(slices_.count);
  }
  bool last(size_t i) const { return slices_.begin + int64_t(i) + 1 == slices_.count; }
  Tensors run(const Function& function, size_t i, Passage& passage, bool again) const;
  std::vector<List> forward(Layer& layer, Function function, const std::vector<List>& x);
  std::vector<List> backward(Stage stage, const std::vector<List>& gradients,
                             const std::function<void(size_t i)>& done);
  std::vector<at::Tensor> attend_with_shares(Layer& layer, const std::vector<List>& lists);
  std::vector<List> attend_with_shares_backward(const Layer& layer,
                                                const std::vector<at::Tensor>& gradients,
                                                const std::function<void(size_t i)>& done);
  std::vector<at::Tensor> attend_within_reach(Layer& layer, const std::vector<List>& lists);
  std::vector<List> attend_within_reach_backward(Layer& layer,
                                                 const std::vector<at::Tensor>& gradients,
                                                 const std::function<void(size_t i)>& done);
  at::Tensor attend(const Layer& layer, const List& of_slice, Attended& attended) const;
  Wait transpose(const at::Tensor& blocks) const;
  Wait start_shares(const List& slices, int64_t groups, int64_t group) const;
  List shares_of(const Wait& wait) const;
  Wait start_slices(const List& shares) const;
  List slices_of(const std::vector<Wait>& groups) const;
  Handed gradients_of_state(const Stage& stage, size_t i) const;

  ContextSlices slices_;
  Neighbours* neighbours_;
  bool recompute_;
  std::vector<Layer> layers_;
  int64_t exchanges_ = 0;  // of the forward passes of layers_
};

// Forward and backward of the loss of a batch whose sequences are cut. tokens: those of the slices
// of this process and the one after them, [B, T · (end − begin) / count + 1]. Returns for each
// slice LanguageModel::training_losses of it over `divisor`; done(i) as in SlicedPass.
std::vector<at::Tensor> sliced_loss(LanguageModel& model, const at::Tensor& tokens,
                                    ContextSlices slices, Neighbours* neighbours, double divisor,
                                    const std::function<void(size_t i)>& done);

}  // namespace assay::nn
