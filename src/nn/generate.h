#pragma once
// Sampling from a language model, one token at a time from its state.
#include <functional>
#include <span>
#include <vector>

#include "nn/language_model.h"
#include "nn/sampling.h"
#include "ops/dense/sampling/sampling.h"

namespace assay::nn {

// `uniform` in [0, 1) picks the token.
ops::Draw draw_of(const Sampling& sampling, double uniform);
// A token of ops::sample. Error where it is −1: a logit is NaN, or the largest is not finite.
int64_t checked_token(int64_t token);
// The number that picks the token at this position of a sequence (the prompt counts).
double uniform_at(uint64_t seed, int64_t position);

// prompts [B, T ≥ 1] → the tokens that follow each, at most max_tokens; a sequence ends behind its
// `stop` (−1: none). What row b becomes depends on its prompt and seeds[b] only, not on the rest of
// the batch (up to the rounding of the logits). `progress` is called with the number of tokens made
// so far. `state`, where given, is what the prompts follow, and is left behind all that was read:
// everything but the last token made. Cut anywhere, the draws are the same. Prompts of more than
// 65,536 tokens in total are read a few sequences at a time, unless a state that is not fresh is
// given.
std::vector<std::vector<int64_t>> generate(LanguageModel& model, const at::Tensor& prompts,
                                           int64_t max_tokens, const Sampling& sampling,
                                           std::span<const uint64_t> seeds, int64_t stop = -1,
                                           const std::function<void(int64_t)>& progress = {},
                                           ModelState* state = nullptr);

}  // namespace assay::nn
