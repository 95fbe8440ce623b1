#pragma once
// What a study found: the runs of each architecture in each setting, and the statistics drawn from them.
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/files.h"
#include "stats/degradation.h"

namespace assay::report {

using Json = nlohmann::json;

// The pre-training loss at which architectures are compared [spec of the study: both are reported].
enum class Kind { held_out, training };  // held-out text of the training domains; the text trained on
const char* name(Kind kind);             // "held-out", "training"

struct Evaluation {
  int64_t step;
  double tokens;                                       // seen so far
  double training_loss;                                // mean since the evaluation before; NaN at the first
  double held_out_loss;                                // mean over the training domains
  double test_loss;                                    // mean over the test domains
  std::map<std::string, double> test_losses;           // by test domain
  Json sets;                                           // {"cc.test": {"loss", "bits_per_byte", "slices", …}, …}
  std::vector<std::vector<double>> attention_entropy;  // by layer and head; empty without softmax weights
  double pretraining_loss(Kind kind) const { return kind == Kind::training ? training_loss : held_out_loss; }
};

struct Run {
  Json row;  // of the store: name, seed, key, folder, provenance, outcome, config (TOML)
  int64_t seed;
  std::vector<Json> metrics;
  std::vector<Evaluation> evaluations;
};

struct Comparison {
  Kind kind;
  stats::Degradation degradation;
  stats::Convergence convergence;
  std::vector<std::pair<double, double>> profile;  // (pre-training loss, difference there); Δ is its mean
};

struct Architecture {
  std::string name;
  int style;  // 0 the reference, then 1, 2, …: colour and symbol in every figure
  std::vector<Run> runs;
  std::vector<Comparison> comparisons;  // with the reference; none for itself
  std::vector<std::string> warnings;    // what should make a reader doubt the comparison
};

struct Setting {
  std::string name;                         // "" when the study has one
  std::vector<std::string> train, test;     // domains; test = train in the mixed-domain setting
  std::vector<std::string> left_out;        // domains to test with fewer than two documents: nothing to resample
  std::string held_out, split;              // of the training domains; of the domains tested
  bool mixed;                               // nothing is out of domain
  std::vector<Kind> kinds;                  // the first is the one that answers
  std::vector<Architecture> architectures;  // the reference first; those with a finished run
  const Architecture& reference() const { return architectures.front(); }
};

struct Study {
  std::string name, reference;
  Json plan;
  std::vector<Setting> settings;
  std::vector<Json> runs;  // every planned run's row
};

Study analyse(const fs::path& folder);

// Every hyper-parameter of an architecture and its value, ("model.d_model", "64"), in the order of its configuration;
// without the seed.
using Hyperparameters = std::vector<std::pair<std::string, std::string>>;
Hyperparameters hyperparameters(const Architecture& architecture);
// Mean over the layers and heads that have softmax weights; NaN without.
double mean_attention_entropy(const Evaluation& evaluation);

// Mean over runs; NaN for none.
template <class Get>
double mean_over(const std::vector<Run>& runs, Get&& get) {
  double sum = 0;
  for (const Run& run : runs) sum += get(run);
  return runs.empty() ? std::numeric_limits<double>::quiet_NaN() : sum / double(runs.size());
}

}  // namespace assay::report
