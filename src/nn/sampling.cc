#include "nn/sampling.h"

#include <cmath>

#include "base/error.h"

namespace assay::nn {

void check(const Sampling& s) {
  if (!(s.temperature >= 0) || !std::isfinite(s.temperature))
    fail("temperature = {} must be a finite number, 0 or more", s.temperature);
  if (s.top_k < 0) fail("top_k = {} must be positive, or 0 for all tokens", s.top_k);
  if (!(s.top_p > 0 && s.top_p <= 1)) fail("top_p = {} must be above 0 and at most 1", s.top_p);
}

}  // namespace assay::nn
