#pragma once
// Degradation along training, the secondary number: the verdict of a study comes from
// ladder.h. [BC §2]
//   Δ(a) = mean over the pre-training losses p that both reach of OOD loss of a at p − OOD loss of
//   the reference at p
//
// Every run is reduced to one number, the mean of its curve over the shared range (curves.h); Δ is
// the difference of the means over seeds. Its interval counts both levels at which a study samples:
// seeds, independent between architectures, and documents, the same in every run and therefore
// paired (uncertainty.h). Two or three seeds cannot be resampled: the percentile interval of a
// bootstrap over them covers the truth far less often than it says, so the variance of that
// hierarchical bootstrap is computed in closed form, without its bias, and used with quantiles of
// Student's t. Why, and the coverage simulated: docs/statistics.md.
#include <cstdint>
#include <map>
#include <span>
#include <string>

#include "stats/runs.h"
#include "stats/uncertainty.h"

namespace assay::stats {

struct Options {
  double level = 0.95;
  // Evaluations up to here are not part of a curve. 0 leaves out the untrained model, whose loss
  // says nothing about its architecture; the tokens of the warm-up leave that out, too.
  double after_tokens = 0;
};
// The architectures of a study from which the variance between seeds is estimated, as one variance
// common to all. The pair compared is always among them, and may be listed. With two seeds an
// architecture this is worth a lot: a pair has 2 degrees of freedom and its t is 4.30, five
// architectures have 5 and 2.57.
using Pool = std::span<const Runs* const>;

struct Degradation {
  // Why nothing can be said ("" otherwise): the curves share no range of loss, …
  std::string problem;
  // the shared range of pre-training loss
  double loss_low = 0;
  double loss_high = 0;
  Interval average{};  // mean over the domains, nats a token
  std::map<std::string, Interval> domains;
  // 0: no architecture has two seeds, the intervals count documents only
  double seed_freedom = 0;
  // standard errors of `average` from each level
  double seed_error = 0;
  double document_error = 0;
};
// Throws BadInput, naming the domain, where the documents are not the same in every evaluation
// of every run.
Degradation degradation(const Runs& architecture, const Runs& reference, const Options& = {},
                        Pool = {});

struct Convergence {
  std::string problem;
  // The pre-training loss at which speed is compared: the lowest that every run of both reaches
  double loss = 0;
  Interval tokens{};        // tokens the architecture needs for it, geometric mean over seeds
  Interval ratio{};         // the same over the reference's; below 1: faster
  double seed_freedom = 0;  // 0: no architecture has two seeds, and low = estimate = high
};
Convergence convergence(const Runs& architecture, const Runs& reference, const Options& = {},
                        Pool = {});

}  // namespace assay::stats
