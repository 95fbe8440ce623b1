#pragma once
// The curve of a run: OOD loss as a function of pre-training loss.
//
// The measured pre-training loss is noisy and may rise, so the evaluations are first made one
// decreasing sequence by isotonic regression of loss on tokens (pool adjacent violators):
// evaluations out of order become one stretch, at the mean of their losses. Means keep the noise
// centred; a running minimum would follow its lowest excursions instead. Between stretches the
// curve is straight. Everything read from it is linear in the OOD losses, with these weights.
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "stats/runs.h"

namespace assay::stats {

struct Stretch {  // neighbouring evaluations with one pre-training loss
  // their means
  double loss;
  double log_tokens;
  // run.curve[first … first + count − 1]
  size_t first;
  size_t count;
};
using Curve = std::vector<Stretch>;  // loss strictly falling; empty when no evaluation is left

// Curve of the evaluations with tokens_seen > after_tokens. Throws BadInput when they are not in
// order of tokens_seen.
Curve curve_of(const Run& run, double after_tokens);

// The pre-training losses that all of these curves reach: [max of the ends, min of the beginnings].
struct Range {
  double low = 0;
  double high = 0;
  double width() const { return high - low; }
};
Range shared_range(std::span<const Curve> curves);

// Why a mean over the shared range says nothing ("" when it does): no shared range, or one narrower
// than a tenth of the widest curve, or fewer than two stretches of an architecture in it.
std::string range_problem(std::span<const Curve> architecture, std::span<const Curve> reference);

// w[k] for every evaluation k of the run, Σ w = 1: Σ w[k] L[k] is the mean over `range` of
// the interpolated L.
std::vector<double> mean_weights(const Curve&, size_t evaluations, Range range);

// The logarithm of the tokens at which the curve reaches `loss`, which must lie within it.
double log_tokens_at(const Curve&, double loss);

}  // namespace assay::stats
