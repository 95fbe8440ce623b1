#pragma once
// Input of the statistics: the evaluations along the runs of a study.
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace assay::stats {

// The documents of one domain at one evaluation: nll[i] nats summed over the tokens[i] predicted
// tokens of document i. The same documents, in the same order, in every run of a study.
struct DomainLosses {
  std::vector<double> nll;
  std::vector<double> tokens;
};
struct Point {              // one evaluation along a run
  double tokens_seen;       // pre-training tokens so far
  double pretraining_loss;  // nats a token: training loss, or held-out loss of the training domains
  std::map<std::string, DomainLosses> out_of_domain;
};
struct Run {
  int64_t seed;
  std::vector<Point> curve;  // in order of tokens_seen
};
using Runs = std::vector<Run>;  // the seeds of one architecture

}  // namespace assay::stats
