#include "eval/end_losses.h"

#include <cmath>
#include <nlohmann/json.hpp>

namespace assay::eval {
namespace {

using Json = nlohmann::json;

struct Clusters {
  std::vector<std::string> names;
  std::vector<int64_t> documents, tokens, recall_tokens;
  std::vector<double> nll, recall_nll;

  size_t add(const std::string& name) {
    names.push_back(name);
    documents.push_back(0);
    tokens.push_back(0);
    recall_tokens.push_back(0);
    nll.push_back(0);
    recall_nll.push_back(0);
    return names.size() - 1;
  }
};

Clusters clusters_of(const SetLosses& set, const data::Documents& documents) {
  Clusters out;
  std::map<int64_t, size_t> of_source;
  for (size_t i = 0; i < set.documents.size(); ++i) {
    const int64_t source =
        documents.has_sources() ? documents.source(set.documents[i]) : int64_t{-1};
    size_t cluster = 0;
    if (source < 0) {
      cluster = out.add("");
    } else if (const auto found = of_source.find(source); found != of_source.end()) {
      cluster = found->second;
    } else {
      cluster = of_source[source] = out.add(documents.source_names().at(size_t(source)));
    }
    ++out.documents[cluster];
    out.tokens[cluster] += set.tokens[i];
    out.nll[cluster] += set.nll[i];
    out.recall_tokens[cluster] += set.recall_tokens[i];
    out.recall_nll[cluster] += set.recall_nll[i];
  }
  return out;
}

// Short in JSON. The sums are of the order of 1e5 nats, so nothing that is read from them changes.
std::vector<double> rounded(std::vector<double> values) {
  for (double& value : values) value = std::round(value * 1e4) / 1e4;
  return values;
}

}  // namespace

Json end_losses(const Losses& losses, const data::TokenStore& store) {
  Json out = Json::object();
  for (const auto& [name, set] : losses) {
    const auto [domain, split] = domain_and_split(name);
    const data::Documents& documents = store.documents(domain, split);
    const Clusters clusters = clusters_of(set, documents);
    const Sum total = set.total();
    Sum recall;
    for (size_t c = 0; c < clusters.nll.size(); ++c) {
      recall.nll += clusters.recall_nll[c];
      recall.tokens += clusters.recall_tokens[c];
    }
    Json by_cluster = {{"documents", clusters.documents},
                       {"tokens", clusters.tokens},
                       {"nll", rounded(clusters.nll)},
                       {"recall_tokens", clusters.recall_tokens},
                       {"recall_nll", rounded(clusters.recall_nll)}};
    if (documents.has_sources()) by_cluster["names"] = clusters.names;
    out[name] = {{"loss", total.loss()},
                 {"recall_loss", recall.loss()},
                 {"bits_per_byte", set.bits_per_byte()},
                 {"tokens", total.tokens},
                 {"documents", set.nll.size()},
                 {"clustered_by", documents.has_sources() ? "source" : "document"},
                 {"clusters", by_cluster}};
  }
  return out;
}

}  // namespace assay::eval
