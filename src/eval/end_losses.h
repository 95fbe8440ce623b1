#pragma once
// The losses at the end of a run, summed by cluster: what the comparison of architectures reads.
// Documents of one source (token_store.h) are not independent, so a source is one cluster. A
// document without a source is a cluster of its own.
#include "data/token_store.h"
#include "eval/held_out.h"

namespace assay::eval {

// By set, such as "arxiv.test". Sums of nats are rounded to 1e-4. Clusters are in order of the
// first document of each.
std::map<std::string, run::EndSet> end_losses(const Losses& losses, const data::TokenStore& store);

}  // namespace assay::eval
