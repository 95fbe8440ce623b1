#pragma once
// Probes of a sequence mixer: how it uses the positions before a query. They are measured on real
// inputs through autograd, so that every architecture is asked the same questions. [BC §3: full
// attention's three properties]
//
//   J_{t,j}     = ∂y_t / ∂x_j
//       of one mixer, y = mixer(x), x [T, d_model] what the layer feeds it
//   I_{t,j}     = ‖J_{t,j}‖_F
//       the influence of position j < t, estimated from a few random cotangents c:
//                 E ‖Jᵀ c‖² = ‖J‖²
//                     for c ~ N(0, 1); one vector–Jacobian product gives the rows of all j
//   w_{t,j}     = I_{t,j} / Σ_{j<t} I_{t,j}          the own position is left out
//
//   visibility    share of the positions j < t with I_{t,j} > threshold · max_j I_{t,j}
//   uniformity    −Σ_j w ln w / ln t                 1: all earlier positions alike, 0: one of them
//   real relation Σ_t |w' − w|₁ / Σ_t |πw − w|₁
//       x': positions 2i and 2i + 1 < t with their contents swapped, all i;
//                 w' its influence; πw the old one with the same positions swapped. 1: the
//                 influence goes with the content; 0: it stays with the position. In between: both
//                 count. (Above 1: the swap changes more than who stands where.)
//   Means over queries, which lie evenly in the second half of each sequence.
#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "data/token_store.h"
#include "nn/language_model.h"
#include "run/records.h"

namespace assay::eval {

// Largest length of a context in tokens, unless the user gives another one
inline constexpr int64_t kProbeLength = 1024;
inline constexpr int64_t kProbeLeast = 4;  // positions that a probe needs

struct ProbeOptions {
  // a sequence; a query
  int64_t queries = 8;
  int64_t cotangents = 4;
  double threshold = 1e-3;
  uint64_t seed = 0;  // of the cotangents
};

struct Influence {
  // real_relation: NaN when all influence is uniform or absent
  double visibility;
  double uniformity;
  double real_relation;
};
// x [B, T, d_model], T ≥ 4 or BadInput; `handed`: what earlier layers hand on, [B, T, …], which
// belongs to the contents of its position. Costs two forward and 2 · cotangents backward passes
// over a batch of B · queries sequences.
Influence probe(nn::Mixer& mixer, const at::Tensor& x, const ProbeOptions& options = {},
                const nn::Handed& handed = {});

// Mean of −Σ_j p ln p / ln(t + 1) over the same queries, by head, of softmax weights [B, H, T, T].
// (The own position is one of t + 1.)
std::vector<double> attention_entropy(const at::Tensor& weights, const ProbeOptions& options = {});

// Attention entropy of a model that reads tokens [B, T], by layer, then by head. Empty for a layer
// without softmax weights, and empty as a whole if no layer has any. [BC §3, Figure 4]
std::vector<std::vector<double>> attention_entropy(nn::LanguageModel& model,
                                                   const at::Tensor& tokens,
                                                   const ProbeOptions& options = {});

// Every layer's mixer of a model on tokens [B, T], in the precision of its weights. NaN where
// nothing can be said.
run::Probes probe(nn::LanguageModel& model, const at::Tensor& tokens,
                  const ProbeOptions& options = {});

// tokens [B, T]: the beginnings of the longest texts of "DOMAIN.SPLIT", at most `sequences`, none
// shorter than half the longest; T is at most `length`, and the length of the shortest of them.
at::Tensor probe_tokens(const data::TokenStore& store, const std::string& set, int64_t length,
                        int64_t sequences);

}  // namespace assay::eval
