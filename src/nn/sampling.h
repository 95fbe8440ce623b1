#pragma once
#include <cstdint>

namespace assay::nn {

// How a token is drawn from the logits.
struct Sampling {
  double temperature = 1;  // 0: always the likeliest token, the lowest id among equals
  int64_t top_k = 0;       // only the k likeliest; 0: all
  double top_p = 1;        // then only the likeliest that together hold this share of what is left
};
void check(const Sampling& sampling);  // BadInput names the value

}  // namespace assay::nn
