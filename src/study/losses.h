#pragma once
// Losses that any trainer measured, as JSON Lines, and the study that they make. A file holds one
// or more runs. A run is a line about it and one line per document, or per source:
//
//   {"run": {"model": "mine", "seed": 1, "tokens": 81920000, "epochs": 0.5, "parameters": 34e6,
//            "tokenizer": "bpe16k", "training_loss": 3.2}}
//   {"role": "held_out", "domain": "web", "source": "example.org", "document": "17", "nats": 512.3,
//    "tokens": 160, "bytes": 701, "recall_nats": 20.1, "recall_tokens": 14}
//
//   role     held_out: text of the training domains that was not trained on; out_of_domain: text of
//            domains that were never seen. A run line may give role and domain for all its lines.
//   tokens   in the run: training tokens; only `model` and `tokens` of a run are required
//   nats     −ln p, summed over the predicted tokens. In place of it: loss (nats per token), or
//            bits_per_byte with bytes
//   source   documents of one source are not independent; without it, each document is its own
//   recall_… the part of nats and tokens on targets that a repeated bigram predicts
// Names of other programs are understood: doc_id (document), corpus_id (domain), and the lines of
// lm-evaluation-harness' samples of rolling tasks (doc_id, filtered_resps).
// The unit is a token if all runs name one tokenizer or none does, else as many bytes as a token of
// the reference has on average, because the limits of verdicts are in nats per token.
#include <string>
#include <vector>

#include "study/store.h"

namespace assay::study {

struct ForeignLosses {
  RecordedPlan plan;
  Records records;
  std::string unit;                // "token" or "byte"
  std::vector<std::string> notes;  // what the files do not say, and what follows from that
};

// BadInput, with file and line, for a line that cannot be read, runs of other documents than the
// first run, a reference without two budgets, and numbers that are not finite.
ForeignLosses read_losses(const std::vector<fs::path>& files, const std::string& reference);

}  // namespace assay::study
