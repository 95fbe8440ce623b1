#pragma once
// The losses at the end of a run, summed by cluster: what the comparison of architectures reads.
// Documents of one source (token_store.h) are not independent, so a source is one cluster. A
// document without a source is a cluster of its own.
#include <nlohmann/json_fwd.hpp>

#include "data/token_store.h"
#include "eval/held_out.h"

namespace assay::eval {

// By set, such as "arxiv.test":
//   loss, recall_loss           nats per token, over all targets and over recall targets
//   bits_per_byte, tokens, documents
//   clustered_by                "source" or "document"
//   clusters                    {"names" (absent when clustered by document), "documents",
//                               "tokens", "nll", "recall_tokens", "recall_nll"}: one element per
//                               cluster; nll in nats, rounded to 1e-4
// Clusters are in order of the first document of each.
nlohmann::json end_losses(const Losses& losses, const data::TokenStore& store);

}  // namespace assay::eval
