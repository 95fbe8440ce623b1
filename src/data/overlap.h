#pragma once
// Does the test text occur in the training text? Exact documents (all tokens equal), and n-grams of
// tokens within a document that occur anywhere in training. Both by 64-bit hashes: of 10⁹ training
// n-grams a test n-gram is matched by chance with probability 5·10⁻¹¹. N-grams of 64 tokens and
// more have hashes of 61 bits, and the probability is 4·10⁻¹⁰.
#include <cstdint>
#include <string>
#include <vector>

#include "base/record.h"
#include "data/token_store.h"

namespace assay::data {

struct OverlapOptions {
  std::string train_split = "train";
  std::string test_split = "test";
  int64_t n = 13;                               // tokens of an n-gram
  std::vector<std::string> train_domains = {};  // empty: all domains that have the training split
  bool show_progress = true;                    // on standard error
};
struct DomainOverlap {
  std::string domain;  // of the test documents
  // duplicates: test documents that occur in training
  int64_t documents = 0;
  int64_t duplicates = 0;
  // Shared: test n-grams, counted as often as they stand, that occur in training
  int64_t ngrams = 0;
  int64_t shared = 0;
  double document_share() const { return documents ? double(duplicates) / double(documents) : 0; }
  double ngram_share() const { return ngrams ? double(shared) / double(ngrams) : 0; }
  ASSAY_FIELDS(domain, documents, duplicates, ngrams, shared)
};
// One entry per domain of `test` that has the test split, against the training split of the
// domains of `train`. Memory is bounded: test n-grams are taken 16 million at a time. BadInput
// when the tokenizers differ, a split is nowhere, a training domain is unknown or has no training
// split, or an id is outside the vocabulary.
std::vector<DomainOverlap> overlap(const TokenStore& train, const TokenStore& test,
                                   const OverlapOptions& options = {});
// Overlap within one store, for a study: test documents against the text that it trains on.
std::vector<DomainOverlap> overlap(const TokenStore& store, const OverlapOptions& options = {});

}  // namespace assay::data
