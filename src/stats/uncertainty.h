#pragma once
// The uncertainty of a difference between two architectures, from the two levels of a
// study: seeds, and documents that are the same in every run. Derivation and the coverage
// that was simulated: docs/statistics.md.
#include <span>
#include <vector>

namespace assay::stats {

struct Interval {
  double estimate;
  double low;
  double high;
};

// A variance and the degrees of freedom it was estimated with (0: nothing was there to
// estimate it from).
struct Variance {
  double value = 0;
  double freedom = 0;
};

// One number a run, by architecture: [architecture][seed]. The variance between seeds of one
// architecture, taken to be equal in all of them:
//   s² = Σ_a Σ_s (x_as − x̄_a)² / ν,   ν = Σ_a (n_a − 1)
using ByRun = std::vector<std::vector<double>>;
Variance seed_variance(const ByRun&);
double mean(std::span<const double>);
// Its share in the difference of the means of architectures 0 and 1: s² (1/n_0 + 1/n_1).
Variance seed_variance_of_difference(const ByRun&);

// A ratio Σ y_i / Σ t_i over the documents of a domain, y_i summed losses (or differences of them),
// t_i tokens. Its variance over documents, with w_i = t_i / Σ t and residuals u_i = (y_i − ratio ·
// t_i) / Σ t:
//   V = Σ u_i² / (1 − 2 w_i + Σ_j w_j²)
//       unbiased when the losses per token vary equally from document to document
//   ν = max(1, 1 / Σ w_i² − 1)               the effective number of documents, less one
double ratio(std::span<const double> y, std::span<const double> tokens);
Variance document_variance(std::span<const double> y, std::span<const double> tokens);
// u_i / √(1 − 2 w_i + Σ_j w_j²), whose squares add up to V. All zero when fewer than two
// documents have tokens.
std::vector<double> document_influence(std::span<const double> y, std::span<const double> tokens);

// The sum of independent variances of the same kind (Satterthwaite): ν = (Σ V)² / Σ (V² / ν).
Variance sum(std::span<const Variance>);

// estimate ± t_ν √V,  V = seeds + documents,
//     1/ν = (seeds/V) / ν_seeds + (documents/V)² / ν_documents.
// Satterthwaite's rule squares the share of the seeds, too, and covers too little with 2 to 4
// degrees of freedom.
Interval interval(double estimate, Variance seeds, Variance documents, double level);

}  // namespace assay::stats
