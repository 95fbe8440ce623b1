#pragma once
// The state that a mixer carries from piece to piece of a sequence, and the context that the layers
// of a model share within one call.
#include <ATen/core/Tensor.h>

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace assay::nn {

using Handed = std::map<std::string, at::Tensor>;  // what layers hand on to later ones, by name

// Where the sequences of a batch stand that advance together, each at a position of its own, by one
// token per call (nn/slots.h). Empty for all other batches.
struct RowPositions {
  std::vector<int64_t> read;  // tokens that each row has read, and -1 for an unused row
  // `read` as [B] i64 on CUDA, otherwise undefined. A captured step reads it in place of `read`,
  // and all positions are below `capacity`.
  at::Tensor on_device;
  int64_t capacity = 0;

  bool empty() const { return read.empty(); }
  bool used(int64_t row) const { return read[size_t(row)] >= 0; }
  int64_t end() const;                               // above all positions
  at::Tensor index(const at::Device& device) const;  // [B] i64; 0 for unused rows
  void advance(int64_t tokens);
};

// Shared by the layers of a model within one call, which lends it to one after the other.
struct Context {
  // Tensors that earlier layers pass to later ones (RWKV-7's first values). They are not carried to
  // the next piece.
  Handed handed;
  // Nothing follows this piece (a whole sequence that is trained on or scored): what it leaves
  // may be anything.
  bool last = false;
  RowPositions rows;

  // A loss that training adds to that of the model. It is in `handed`, summed over the layers so
  // far, while a model trains, and absent otherwise.
  static constexpr const char* kAuxiliaryLoss = "auxiliary_loss";
  bool wants_auxiliary_loss() const { return handed.contains(kAuxiliaryLoss); }
  // loss: a scalar, the mean over the tokens of the piece. Only if one is wanted.
  void add_auxiliary_loss(const at::Tensor& loss);
};

// Tensors that a mixer carries from piece to piece, by name. Empty at the start of a sequence.
class State {
 public:
  std::optional<at::Tensor> find(const std::string& name) const {
    const auto found = tensors_.find(name);
    return found == tensors_.end() ? std::nullopt : std::optional(found->second);
  }
  at::Tensor& operator[](const std::string& name) { return tensors_[name]; }
  const std::map<std::string, at::Tensor>& tensors() const { return tensors_; }
  int64_t bytes() const;  // counted from the tensors, not declared

  // Position of the first token of a piece of `time`, for mixers without a cache to count: the
  // state keeps it as "position". 0 where rows are at positions of their own.
  int64_t advance(int64_t time);

  // Whether the tensor only grows along time, by Cache::append. What it held stays as it was.
  bool grows(const std::string& name) const { return growing_.contains(name); }
  void set_grows(const std::string& name) { growing_.insert(name); }

  Context context;  // of the call

  // The memory of a batch whose context has `rows`.
  struct Rows {
    std::vector<State> states;  // one per row, for a mixer with caches; else empty
    // On CUDA, for such mixers that can be captured, [B, n] i64: where the n caches of the mixer
    // begin. They have room for the new token.
    at::Tensor addresses;
    std::vector<at::Tensor> read_by_graph;  // other tensors that a captured step reads: kept alive
  };
  Rows rows;

 private:
  std::map<std::string, at::Tensor> tensors_;
  std::set<std::string> growing_;
};

}  // namespace assay::nn
