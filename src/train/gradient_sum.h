#pragma once
// The gradient of a batch, summed in an order that does not depend on the number of ranks.
//
// The batch is cut into S slices: its sequences are divided, and with context parallelism each
// sequence is cut, too. Their gradients are the leaves of one binary tree: level by level,
// neighbours are added, and an odd last one moves up. Rank r of W computes slices r·S/W up to
// (r+1)·S/W. S/W is a power of two, or W is 1, so each rank computes whole subtrees.
// Each rank receives its pieces of the sums (pieces.h) from all ranks, adds them by the upper
// levels of the tree, updates the parameters in them and sends these to all. So a rank holds
// optimizer states of its own pieces only.                                    [ZeRO, stage 1 and 2]
// Weights that products read in bfloat16 are sent in bfloat16, and each rank holds the float32
// values of its own pieces only.
#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <memory>
#include <vector>

#include "ops/dense/linear/linear.h"
#include "train/pieces.h"
#include "train/ranks.h"

namespace assay::train {

at::Tensor tree_sum(std::vector<at::Tensor> leaves);  // at least one
// BadInput, with the numbers that are possible, unless `ranks` can share the batch. Each of its
// `gradient_slices` is cut into `context_slices` along the sequence.
void check_shares(int64_t batch_size, int64_t gradient_slices, int64_t context_slices,
                  int64_t ranks);

class GradientSum {
 public:
  // `parameters`: contiguous, in one order on all ranks. `ranks`: null when one process computes
  // all slices. `overlap`: sums are sent during the last backward pass, in which every parameter
  // must get its whole gradient in one piece. `rounded`: as in pieces.h; these are float32.
  GradientSum(std::vector<at::Tensor> parameters, int64_t slices, Ranks* ranks, bool overlap,
              const std::vector<bool>& rounded = {});
  ~GradientSum();

  int64_t begin() const { return begin_; }  // first slice of this rank
  int64_t end() const { return end_; }
  const Pieces& pieces() const { return pieces_; }
  Ranks* ranks() const { return ranks_; }

  // For each slice but the last: backward passes, then keep(). For the last: start_last_slice(),
  // backward passes with start_last() before the very last one, then finish(). After that
  // gradient() has that of the batch for the parts that this rank owns; without ranks the
  // parameters have it.
  void keep();
  void start_last_slice();  // optional: gradients are then made where they are sent from
  void start_last();
  void finish();

  // With ranks:
  // Before a step: frees the values of parameters that are sent rounded, but for the parts that
  // this rank owns. Reading such a parameter gives NaN until gather_parameters(), which all ranks
  // call together.
  void divide_parameters();
  void gather_parameters();
  // Products read it in place of a parameter that is sent rounded; null for another one.
  const c10::intrusive_ptr<ops::RoundedWeight>& rounded(size_t parameter) const {
    return rounded_[parameter];
  }
  // The values of a part that this rank owns, for its update.
  at::Tensor values(const Part& part) const;
  // Where the gradient of a parameter is sent from.
  const c10::intrusive_ptr<ops::GradientPlace>& place(size_t parameter) const {
    return places_[parameter];
  }
  bool owns(const Part& part) const {
    return part.piece * ranks_->size() / pieces_.count == ranks_->rank();
  }
  at::Tensor gradient(const Part& part) const;
  // Starts to send the updated parts that this rank owns to the other ranks. All ranks call it for
  // the buckets in the order of the next forward pass: the last bucket first. Frees the gradients.
  void share(size_t bucket);
  // Before parameters of this bucket, or of buckets after it, are read.
  void wait_for_parameters(size_t bucket = 0);

 private:
  struct Hook;
  struct Bucket {
    at::Tensor parameters;  // flat; those of the model are views of it, unless it is rounded
    at::Tensor rounded;     // bfloat16, flat: what is sent in a rounded bucket
    at::Tensor own;         // float32: the pieces of this rank, while parameters are divided
    at::Tensor sums;        // of the slices of this rank, in the same places
    at::Tensor received;    // [ranks, elements]: the sums of all ranks, of the pieces of this one;
                            // without the row of this rank if ranks read peer memory
    at::Tensor sum;         // of all slices, of the pieces of this rank; a part of `sums`
    size_t missing = 0;     // gradients
    Ranks::Wait exchanged;
    Ranks::Wait shared;
  };
  void put_parameters_in_buckets();
  at::Tensor place_in(const at::Tensor& flat, size_t parameter) const;
  std::vector<at::Tensor> take_gradients(const std::vector<size_t>& parameters);
  std::vector<at::Tensor> take_sums(const std::vector<size_t>& parameters);
  void hand_over(size_t parameter);
  bool is_time_to_send() const;
  c10::Stream current_stream() const;
  void send(size_t bucket);
  void receive(Bucket& bucket);

  std::vector<at::Tensor> parameters_;
  std::vector<size_t> all_;  // indices of the parameters
  Pieces pieces_;
  Ranks* ranks_;
  c10::Stream side_;  // on a GPU, sums are received and added on it, under the backward pass
  int64_t begin_;
  int64_t end_;
  std::vector<Bucket> buckets_;  // in the order in which they are sent
  std::vector<c10::intrusive_ptr<ops::GradientPlace>> places_;   // by parameter, in `sums`
  std::vector<c10::intrusive_ptr<ops::RoundedWeight>> rounded_;  // by parameter, in `rounded`
  bool divided_ = false;
  std::vector<std::vector<at::Tensor>> levels_;  // sums of 2^level slices; empty: none waits
  std::vector<bool> handed_;
  // buckets
  size_t sent_ = 0;
  size_t ready_ = 0;
  size_t added_ = 0;
  bool live_ = false;  // in the last backward pass
  std::vector<std::shared_ptr<Hook>> hooks_;
};

}  // namespace assay::train
