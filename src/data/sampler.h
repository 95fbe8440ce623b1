#pragma once
// Training samples and test segments, as pure functions: a checkpoint holds one integer as the
// state of the data.
#include <cstdint>
#include <string>
#include <vector>

#include "data/token_store.h"

namespace assay::data {

// Training. The stream of each domain is cut into blocks of T + 1 tokens at stride T (the last
// token of a block is the first of the next), from an offset that is 0 in the first epoch and
// random in [0, T) after; a permutation per epoch orders the blocks, so every block is seen once an
// epoch. Of each 1024 samples every domain has its exact share (largest remainder, at least one),
// in an order permuted per period.
class Sampler {
 public:
  struct Options {
    std::vector<std::string> domains = {};  // empty: all that have the split
    // Weights of the domains, on any positive scale; empty: by number of tokens
    std::vector<double> weights = {};
    int64_t sequence_length = 0;  // T
    uint64_t seed = 0;
    std::string split = "train";
  };
  // BadInput for unknown domains, weights that do not fit, or a domain with fewer than T + 1
  // tokens. The store must outlive the sampler.
  Sampler(const TokenStore& store, Options options);

  // tokens [batch_size, T + 1]: samples step·batch_size … + batch_size − 1.
  void batch(int64_t step, int64_t batch_size, int64_t* tokens) const;
  void sample(int64_t n, int64_t* tokens) const;  // tokens [T + 1]: sample n

  struct Place {
    int64_t domain;  // position in domains()
    int64_t epoch;   // how often that domain's data was gone through before
    int64_t offset;  // of the block's first token in the domain's stream
  };
  Place place(int64_t n) const;
  const std::vector<std::string>& domains() const { return options_.domains; }
  // Exact, multiples of 1/1024
  std::vector<double> proportions() const;
  int64_t blocks(int64_t domain) const { return blocks_[size_t(domain)]; }  // in an epoch

 private:
  Options options_;
  std::vector<const Documents*> documents_;
  std::vector<int64_t> first_;   // [domains + 1]: slots of the period before each domain
  std::vector<int64_t> blocks_;  // [domains]
};

// Held-out evaluation: tokens begin … begin + length − 1 of a document are predicted. The context
// of the first is the separator when begin is 0, else the token before.
struct Segment {
  int64_t document;
  int64_t begin;
  int64_t length;
};
// At most `max_tokens` tokens (0: all) in segments of at most T, so that as many documents as
// possible are covered: the first segment of every document, then the second ones, and so on,
// documents in a fixed pseudo-random order; returned in order of document and begin. At least one
// segment when there is a document.
std::vector<Segment> held_out_segments(const Documents& documents, int64_t max_tokens,
                                       int64_t sequence_length);
// tokens [length + 1]: the context token, then the tokens to predict.
void read_segment(const Documents& documents, int64_t separator, const Segment& segment,
                  int64_t* tokens);

}  // namespace assay::data
