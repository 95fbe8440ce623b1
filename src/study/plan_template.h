#pragma once
// The plan that `assay plan new` writes for a token store.
#include <string>
#include <vector>

#include "data/token_store.h"

namespace assay::study {

struct NewPlan {
  std::string text;  // TOML, with a comment for every choice
  // Sentences about unused domains, too little text and a large vocabulary
  std::vector<std::string> warnings;
};
// The plan compares a window and Mamba-1 with Transformer++, and its sizes and budgets fit the
// tokens of the store.
// Trained on: the domains in `train`, which need the splits train and valid. Without `train`, all
// domains that have both; where each domain with a test split is among them, the larger half, if
// that leaves a domain for testing.
// Out of domain: the other domains that have the split test.
// BadInput when no domain can be trained on, or when one in `train` cannot.
NewPlan plan_template(const data::TokenStore& store, const std::vector<std::string>& train = {});

}  // namespace assay::study
