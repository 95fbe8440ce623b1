#pragma once
// How the parameters of a model are divided between ranks.
//
// Buckets hold the parameters in about the order of a backward pass: the last one first. A bucket
// is padded, and cut into P equal pieces, as many as there can be ranks. Rank r of W owns pieces
// r·P/W up to (r+1)·P/W of every bucket. A part of a parameter lies in one piece. Norms are rounded
// per part and optimizers work by parts, so results depend on P and not on W.
// Parameters that are sent rounded have buckets of their own.
#include <ATen/core/Tensor.h>

#include <vector>

namespace assay::train {

struct Part {
  size_t parameter = 0;
  size_t bucket = 0;
  int64_t piece = 0;
  // elements: [begin, begin + size) of the flat parameter, from `place` in the bucket
  int64_t begin = 0;
  int64_t size = 0;
  int64_t place = 0;
};

struct Pieces {
  // `rounded`: of each parameter, whether it is sent rounded; empty: none is. With one piece, parts
  // are whole parameters, and there is one bucket of each kind.
  Pieces(const std::vector<at::Tensor>& parameters, int64_t pieces,
         const std::vector<bool>& rounded = {});

  struct Bucket {
    std::vector<size_t> parameters;
    std::vector<int64_t> places;  // of their first elements
    int64_t size = 0;             // elements, a multiple of `count`
    bool rounded = false;
  };
  int64_t count;
  std::vector<Bucket> buckets;
  // By parameter, in the order of its elements; at least one.
  std::vector<std::vector<Part>> parts;
};

}  // namespace assay::train
