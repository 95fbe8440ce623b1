#pragma once
// A plan for a user's own token store, with a comment on every choice that the user may want to change.
#include <string>

#include "data/token_store.h"

namespace assay::study {

// The text of a plan that `assay run` accepts. It trains on the domains with training text and tests on
// those without; when every domain has training text, it trains on the larger half. The size of the
// models and the budgets follow from the tokens of the training text. BadInput when no domain can be trained on.
std::string plan_template(const data::TokenStore& store);

}  // namespace assay::study
