#pragma once
// Synthetic domains with a known truth: the positive control of a study. A document draws its
// tokens from an active set of `active` tokens (ranks with Zipf weights r^−zipf); a share
// `bigram` of them follow a table of the domain instead, x_t = table[x_{t−1}]. In the training
// domains known_a, known_b a share `known` of the documents takes one of `known_sets` sets, the
// others a fresh set; in fresh_a, fresh_b, fresh_c all sets are fresh. So a model can lower its
// loss in two ways, by reading the set from the context or by knowing the sets, and only the
// first carries over.
//   p(x_t | x_{t−1}, set) = (1 − bigram)·zipf(rank of x_t) + bigram·[x_t = table(x_{t−1})]
//   p(x_0 | set) = zipf(rank of x_0)
// Ids: 0 separates documents, content is 1 … vocabulary − 1. Bytes of a document = its tokens
// without the separator.
#include <cstdint>
#include <string>

#include "base/files.h"

namespace assay::data {

struct SyntheticOptions {
  int64_t seed = 1;
  int64_t documents = 8000;       // in train of each training domain
  int64_t held_out = 256;         // in each of valid and test of every domain
  int64_t document_length = 256;  // tokens, separator included
  int64_t vocabulary = 256;
  int64_t active = 12;
  int64_t known_sets = 32;
  double zipf = 0.5;
  double known = 0.5;
  double bigram = 0.1;
  void fields(auto&& field) {
    field("seed", seed, "seed of all random numbers");
    field("documents", documents, "training documents of each training domain");
    field("held_out", held_out, "documents in split valid, and in split test, of each domain");
    field("document_length", document_length, "tokens per document, separator included");
    field("vocabulary", vocabulary, "number of token ids");
    field("active", active, "tokens in the set of a document");
    field("zipf", zipf, "exponent of the weights in a set");
    field("known_sets", known_sets, "sets that the training domains reuse");
    field("known", known, "share of training documents that take a known set");
    field("bigram", bigram, "share of tokens that follow the domain's table");
  }
};

// Writes a token store (the manifest's "synthetic" holds the options and, for each domain and
// split, "oracle_loss": the mean −ln p in nats a content token for a reader who knows set and
// table). Deterministic. BadInput on options that cannot be met.
void synthesize(const fs::path& store, SyntheticOptions options, bool overwrite = false);

}  // namespace assay::data
