#pragma once
// Joins what a query has of its own chunk with what it has of the chunks that it chose, where both
// come from torch's FlashAttention-2 (flash.cc).
#include "ops/core/kernel.h"

namespace assay::ops {

// Rows of bf16 whose addresses are multiples of 16 bytes. Without own_sums: out = own + Σ_i other_i
// over the chosen chunks i. With them, the parts are those of one softmax:
//   R   = log(e^own_sums + Σ_i e^other_sums_i)
//   out = e^(own_sums − R) own + Σ_i e^(other_sums_i − R) other_i
struct RowsToJoin {
  // B, T, H, D, top_k; D is a multiple of 8
  int64_t batch;
  int64_t time;
  int64_t heads;
  int64_t head_dim;
  int64_t top_k;
  const void* own;          // in  [B, T, H, D]
  const void* others;       // in  [pairs, D], in any order
  const int64_t* place;     // in  [B, T, H, top_k]: where in `others` a query's chosen chunks are
  void* out;                // out [B, T, H, D]
  const float* own_sums;    // in  [H, B, T] or null
  const float* other_sums;  // in  [pairs]
  const int64_t* selected;  // in  [B, H, T, top_k]: a negative number is no chunk
  float* logsumexp;         // out [B, H, T]: R
};

namespace cuda {
void join_rows(const RowsToJoin&, Stream);
}  // namespace cuda

}  // namespace assay::ops
