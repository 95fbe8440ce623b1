#pragma once
// Draws one token per row of logits.
//   w_i = exp((x_i − max x) / temperature); the tokens are ordered by falling x_i, equal ones by i
//   top_k: only the first k of the order; top_p: then only its shortest prefix whose weight exceeds
//   the share top_p of what is left; the token is the first whose running weight exceeds `uniform`
//   times the weight of what is left. With neither top_k nor top_p the running weight is in the
//   order of i.
// A temperature of 0 takes the first token of the order.                          [Holtzman 2020]
#include <span>

#include "ops/core/kernel.h"

namespace assay::ops {

// The parameters of one row.
struct Draw {
  double temperature = 1;  // 0 or more
  double top_p = 1;        // in (0, 1]
  double uniform = 0;      // in [0, 1)
  int64_t top_k = 0;       // 0: all tokens
};

struct Sampling {
  DType dtype;  // dtype of logits: f32 or bf16
  // size: 1 to 2^31 − 1 tokens; on CUDA to kMaxTokens
  int64_t rows;
  int64_t size;
  const void* logits;  // in  [rows, size], contiguous
  const Draw* draws;   // in  [rows]
  int64_t* tokens;     // out [rows]; −1 where a logit is NaN or the largest one is not finite
};

namespace cpu {
int64_t sample_row(std::span<const float> logits, const Draw& draw);  // as Sampling::tokens
}

// On CUDA a weight is an integer, w_i 2^40 rounded, so that sums do not depend on their order and
// results repeat bit by bit. A token lighter than 2^−41 of the likeliest one is not drawn.
namespace cuda {
// The sum of the weights of more tokens may not fit 64 bits: sample() throws Unsupported.
constexpr int64_t kMaxTokens = (1 << 24) - 1;
void sample(const Sampling& args, Stream stream);
}  // namespace cuda

}  // namespace assay::ops
