#pragma once
// Intervals that hold together: all differences of a study share the reference and the documents.
// Each interval is estimate +- factor * t_v sqrt(V), where estimate +- t_v sqrt(V) is the interval
// of one difference alone (uncertainty.h). The factor is the quantile of max |T_a| / t_a over the
// members, drawn from the estimated variances and their degrees of freedom. Dunnett's test is the
// special case of equal variances and equal numbers of seeds.
#include <cstddef>
#include <vector>

#include "stats/uncertainty.h"

namespace assay::stats {

// One independent source of noise in an estimate, for example the seeds of one rung.
struct Noise {
  size_t source;     // estimates with a common source move together
  size_t estimator;  // variances with a common estimator are wrong together
  double amplitude;  // standard deviation, signed
};
struct Member {
  std::vector<Noise> seeds;
  Variance documents;
};
struct Family {
  std::vector<Member> members;
  std::vector<double> freedom;                     // of every estimator
  std::vector<std::vector<double>> document_link;  // correlation of the document noise
};

// The seeds' variance of one member: sources of one estimator add up first, then Satterthwaite.
Variance seed_variance(const Member& member, const std::vector<double>& freedom);

// At least 1, and exactly 1 for one member. Deterministic. Takes 4 or 16 times as many draws if the
// standard error of the factor is above 0.7 % of it, as it is with few degrees of freedom.
double simultaneous_factor(const Family& family, double level, size_t draws);

}  // namespace assay::stats
