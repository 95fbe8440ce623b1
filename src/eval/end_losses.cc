#include "eval/end_losses.h"

#include <cmath>

namespace assay::eval {
namespace {

using run::Clusters;

size_t add_cluster(Clusters& clusters) {
  clusters.documents.push_back(0);
  clusters.tokens.push_back(0);
  clusters.recall_tokens.push_back(0);
  clusters.nll.push_back(0);
  clusters.recall_nll.push_back(0);
  clusters.bounded_nll->push_back(0);
  return clusters.documents.size() - 1;
}

Clusters clusters_of(const SetLosses& set, const data::Documents& documents) {
  Clusters out;
  out.bounded_nll.emplace();
  std::map<int64_t, size_t> of_source;
  if (documents.has_sources()) out.names.emplace();
  for (size_t i = 0; i < set.documents.size(); ++i) {
    const int64_t source =
        documents.has_sources() ? documents.source(set.documents[i]) : int64_t{-1};
    size_t cluster = 0;
    const auto found = of_source.find(source);
    if (source >= 0 && found != of_source.end()) {
      cluster = found->second;
    } else {
      cluster = add_cluster(out);
      of_source[source] = cluster;
      if (out.names)
        out.names->push_back(source < 0 ? "" : documents.source_names().at(size_t(source)));
    }
    ++out.documents[cluster];
    out.tokens[cluster] += set.tokens[i];
    out.nll[cluster] += set.nll[i];
    out.recall_tokens[cluster] += set.recall_tokens[i];
    out.recall_nll[cluster] += set.recall_nll[i];
    (*out.bounded_nll)[cluster] += set.bounded_nll[i];
  }
  return out;
}

// Short in JSON. The sums are of the order of 1e5 nats, so nothing that is read from them changes.
std::vector<double> rounded(std::vector<double> values) {
  for (double& value : values) value = std::round(value * 1e4) / 1e4;
  return values;
}

}  // namespace

std::map<std::string, run::EndSet> end_losses(const Losses& losses, const data::TokenStore& store) {
  std::map<std::string, run::EndSet> out;
  for (const auto& [name, set] : losses) {
    const auto [domain, split] = domain_and_split(name);
    const data::Documents& documents = store.documents(domain, split);
    Clusters clusters = clusters_of(set, documents);
    const Sum total = set.total();
    Sum recall;
    for (size_t c = 0; c < clusters.nll.size(); ++c) {
      recall.nll += clusters.recall_nll[c];
      recall.tokens += clusters.recall_tokens[c];
    }
    clusters.nll = rounded(std::move(clusters.nll));
    clusters.recall_nll = rounded(std::move(clusters.recall_nll));
    clusters.bounded_nll = rounded(std::move(*clusters.bounded_nll));
    out[name] = {
        .loss = total.loss(),
        .recall_loss = recall.loss(),
        .bits_per_byte = set.bits_per_byte(),
        .tokens = total.tokens,
        .documents = int64_t(set.nll.size()),
        .clustered_by = documents.has_sources() ? run::EndSet::kBySource : run::EndSet::kByDocument,
        .clusters = std::move(clusters)};
  }
  return out;
}

}  // namespace assay::eval
