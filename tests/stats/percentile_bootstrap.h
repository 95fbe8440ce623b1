#pragma once
// The plain hierarchical bootstrap: seeds drawn with replacement in each architecture, documents in
// each domain, the same ones in all runs, and Δ computed anew. The yardstick of the closed form:
// its variance is right once it is multiplied by n / (n − 1) over the seeds, and its percentiles
// are too narrow for few seeds.
#include <algorithm>

#include "simulation.h"

namespace assay::stats {

using Draw = std::map<std::string, std::vector<size_t>>;  // documents of each domain

inline Draw draw_documents(const Run& run, Random& random) {
  Draw draw;
  for (const auto& [domain, losses] : run.curve[0].out_of_domain)
    for (size_t i = 0; i < losses.tokens.size(); ++i)
      draw[domain].push_back(random.below(losses.tokens.size()));
  return draw;
}

inline Run with_documents(Run run, const Draw& draw) {
  for (Point& point : run.curve)
    for (auto& [domain, losses] : point.out_of_domain) {
      const DomainLosses all = losses;
      for (size_t i = 0; i < all.tokens.size(); ++i) {
        losses.nll[i] = all.nll[draw.at(domain)[i]];
        losses.tokens[i] = all.tokens[draw.at(domain)[i]];
      }
    }
  return run;
}

inline Runs resampled(const Runs& runs, const Draw& draw, Random& random) {
  Runs sample;
  for (size_t s = 0; s < runs.size(); ++s)
    sample.push_back(with_documents(runs[random.below(runs.size())], draw));
  return sample;
}

inline std::vector<double> percentile_bootstrap(const Study& study, int resamples, uint64_t seed) {
  Random random(seed, "bootstrap");
  std::vector<double> draws;
  for (int b = 0; b < resamples; ++b) {
    const Draw draw = draw_documents(study.architecture[0], random);
    const Runs architecture = resampled(study.architecture, draw, random);
    draws.push_back(
        degradation(architecture, resampled(study.reference, draw, random)).average.estimate);
  }
  return draws;
}

}  // namespace assay::stats
