#pragma once
// Does the test text occur in the training text? Exact documents (all tokens equal), and n-grams of tokens within a
// document that occur anywhere in training. Both by 64-bit hashes: of 10⁹ training n-grams a test n-gram is matched
// by chance with probability 5·10⁻¹¹.
#include <cstdint>
#include <string>
#include <vector>

#include "data/token_store.h"

namespace assay::data {

struct OverlapOptions {
  std::string train_split = "train", test_split = "test";
  int64_t n = 13;  // tokens of an n-gram
};
struct DomainOverlap {
  std::string domain;                     // of the test documents
  int64_t documents = 0, duplicates = 0;  // duplicates: test documents that occur in training
  int64_t ngrams = 0, shared = 0;  // shared: test n-grams, counted as often as they stand, that occur in training
  double ngram_share() const { return ngrams ? double(shared) / double(ngrams) : 0; }
};
// One entry a domain of `test` that has the test split, against the training split of all domains of `train`. Memory is
// bounded (test n-grams are taken 16 million at a time). BadInput when the tokenizers differ or a split is nowhere.
std::vector<DomainOverlap> overlap(const TokenStore& train, const TokenStore& test, const OverlapOptions& options = {});

}  // namespace assay::data
