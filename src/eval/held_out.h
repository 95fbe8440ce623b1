#pragma once
// Held-out language-model loss: per domain, per document, and in slices that tell where a
// difference comes from.
//
// Slices of the predicted tokens ("targets"):
//   frequent, rare, unseen
//       by counts in the pre-training domains: the commonest ids, 90 % of their tokens; the
//                              other ids that occur; the ids that never do
//   repeated_bigram, other
//       whether (previous token, target) stood earlier in the same context: associative recall
//   position_A_B               index in the context, A ≤ index < B
//   above_12_nats              targets whose loss is above 12 nats
#include <ATen/core/Tensor.h>

#include <array>
#include <map>
#include <string>
#include <vector>

#include "data/sampler.h"
#include "data/token_store.h"
#include "nn/language_model.h"
#include "run/records.h"

namespace assay::eval {

inline constexpr const auto& kSlices = run::slice::kAll;

// Nats above the loss of a uniform guess at which the bounded loss of a token ends: few tokens with
// a very large loss otherwise carry a tenth of the loss out of domain and most of its noise.
inline constexpr double kBound = 3;

// "arxiv.test" → arxiv, test. BadInput without a dot.
std::pair<std::string, std::string> domain_and_split(const std::string& set);

struct Sum {
  double nll = 0;  // nats
  int64_t tokens = 0;
  double loss() const { return tokens ? nll / double(tokens) : 0; }
};
// One domain and split. A document counts with the tokens that were predicted; bytes are its bytes
// in that proportion. All vectors have one element per document.
struct SetLosses {
  std::vector<double> nll;  // nats, summed over the predicted tokens
  std::vector<int64_t> tokens;
  std::vector<int64_t> bytes;
  std::vector<int64_t> documents;      // index of the document in its split of the store
  std::vector<double> recall_nll;      // the part of nll on recall targets (slice repeated_bigram)
  std::vector<int64_t> recall_tokens;  // the part of tokens that are recall targets
  std::vector<double> bounded_nll;     // the same as nll, of min(loss, ln V + kBound) per token
  std::array<Sum, kSlices.size()> slices{};
  Sum total() const;
  double bits_per_byte() const;  // 0 when the store has no byte counts
};
using Losses = std::map<std::string, SetLosses>;  // by "<domain>.<split>"

// Prepares what is evaluated once; run() evaluates a model on exactly that, any number of times.
class HeldOut {
 public:
  struct Options {
    std::vector<std::string> sets;           // "<domain>.<split>"
    std::vector<std::string> train_domains;  // whose train split defines frequent, rare, unseen
    int64_t sequence_length = 0;
    int64_t max_tokens = 0;            // a set; 0: all
    int64_t tokens_at_once = 1 << 14;  // of a batch
  };
  HeldOut(const data::TokenStore& store, const Options& options);
  Losses run(nn::LanguageModel& model) const;
  int64_t tokens() const;  // predicted in one run

 private:
  struct Row {
    // Tokens begin … begin + length of `tokens`; the first is context
    int64_t begin;
    int64_t length;
    int64_t document;
  };
  struct Set {
    std::string name;
    std::vector<Row> rows;  // longest first
    std::vector<int64_t> tokens;
    // of each token as a target
    std::vector<uint8_t> frequency;
    std::vector<uint8_t> repeated;
    std::vector<int64_t> documents;
    std::vector<int64_t> document_bytes;
  };
  SetLosses run(nn::LanguageModel& model, const Set& set) const;
  std::vector<Set> sets_;
  int64_t tokens_at_once_;
  double largest_loss_;  // of the bounded loss
};

run::EvaluatedSets summary(const Losses& losses);
// As safetensors: "<set>.nll" F64, "<set>.tokens" I64, "<set>.bytes" I64, one element per document.
void write_losses(const fs::path& file, const Losses& losses);

// "<domain>.<split>" for every valid split of the training domains and every test split
// of the store.
std::vector<std::string> default_sets(const data::TokenStore& store,
                                      const std::vector<std::string>& train_domains);

}  // namespace assay::eval
