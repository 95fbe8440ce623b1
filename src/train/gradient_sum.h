#pragma once
// The gradient of a batch, summed in an order that does not depend on the number of ranks.
//
// The batch is cut into S slices: its sequences are divided, and with context parallelism each
// sequence is cut, too. Their gradients are the leaves of one binary tree: level by level,
// neighbours are added, and an odd last one moves up. Rank r of W computes slices r·S/W up to
// (r+1)·S/W. S/W is a power of two, or W is 1, so each rank computes whole subtrees.
// Each parameter has an owner: the rank that receives its sums from all ranks, adds them by the
// upper levels of the tree, updates the parameter and sends it to all. So a rank holds optimizer
// states of its own parameters only.                                     [ZeRO, stage 1 and 2]
#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

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
  // must get its whole gradient in one piece.
  GradientSum(std::vector<at::Tensor> parameters, int64_t slices, Ranks* ranks, bool overlap);
  ~GradientSum();

  int64_t begin() const { return begin_; }  // first slice of this rank
  int64_t end() const { return end_; }
  bool owns(size_t parameter) const { return !ranks_ || owner(parameter) == ranks_->rank(); }
  int64_t owner(size_t parameter) const { return places_[parameter].owner; }
  Ranks* ranks() const { return ranks_; }

  // For each slice but the last: backward passes, then keep(). For the last: backward passes with
  // start_last() before the very last one, then finish(). After that the parameters that this rank
  // owns have the gradient of the batch, and the others have none.
  void keep();
  void start_last();
  void finish();
  // Sends the parameters that this rank owns to the other ranks.
  void share_parameters() { ranks_->all_gather(rows_); }

 private:
  struct Hook;
  struct Place {
    size_t bucket = 0;
    // in Bucket::sums
    int64_t owner = 0;
    int64_t offset = 0;
  };
  struct Bucket {
    std::vector<size_t> members;
    std::vector<int64_t> counts;  // elements by owner
    at::Tensor sums;
    at::Tensor received;
    size_t missing = 0;
    Ranks::Wait wait;
  };
  void make_buckets();
  void put_parameters_in_rows();
  void hand_over(size_t parameter);
  void send(Bucket& bucket);
  void receive(Bucket& bucket);

  std::vector<at::Tensor> parameters_;
  Ranks* ranks_;
  at::Tensor rows_;  // [ranks, elements]: the parameters, those of an owner in its row
  int64_t begin_;
  int64_t end_;
  std::vector<Place> places_;
  std::vector<Bucket> buckets_;                  // in the order in which they are sent
  std::vector<std::vector<at::Tensor>> levels_;  // sums of 2^level slices; empty: none waits
  std::vector<bool> handed_;
  size_t next_ = 0;    // bucket
  bool live_ = false;  // in the last backward pass
  std::vector<std::shared_ptr<Hook>> hooks_;
};

}  // namespace assay::train
