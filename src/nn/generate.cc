#include "nn/generate.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>

#include "base/random.h"

namespace assay::nn {

ops::Draw draw_of(const Sampling& sampling, double uniform) {
  return {.temperature = sampling.temperature,
          .top_p = sampling.top_p,
          .uniform = uniform,
          .top_k = sampling.top_k};
}

int64_t checked_token(int64_t token) {
  if (token < 0) fail<Error>("the model's logits hold NaN, or the largest one is not finite");
  return token;
}

double uniform_at(uint64_t seed, int64_t position) {
  return Random(seed, "generate", uint64_t(position)).uniform();
}

std::vector<std::vector<int64_t>> generate(LanguageModel& model, const at::Tensor& prompts,
                                           int64_t max_tokens, const Sampling& sampling,
                                           std::span<const uint64_t> seeds, int64_t stop,
                                           const std::function<void(int64_t)>& progress,
                                           ModelState* given) {
  const at::NoGradGuard no_grad;
  ModelState fresh;
  ModelState& state = given ? *given : fresh;
  const int64_t batch = prompts.size(0), length = state.position + prompts.size(1);
  const int64_t longest = model.max_time();
  if (max_tokens < 0) fail("max_tokens = {} must be 0 or more", max_tokens);
  if (max_tokens > longest - length + 1)  // the last token is not read
    fail("a prompt of {} tokens and {} to follow do not fit the model's {} positions", length,
         max_tokens, longest);
  std::vector<std::vector<int64_t>> out(batch);
  std::vector<bool> ended(batch, false);
  at::Tensor next = prompts;
  for (int64_t made = 0; made < max_tokens && std::ranges::find(ended, false) != ended.end();
       ++made) {
    const at::Tensor logits = model.logits_of_hidden(model.hidden(next, state).select(1, -1));
    std::vector<ops::Draw> draws;
    for (int64_t b = 0; b < batch; ++b)
      draws.push_back(draw_of(sampling, uniform_at(seeds[size_t(b)], length + made)));
    const at::Tensor drawn = ops::sample(logits, draws);
    const at::Tensor tokens = drawn.cpu();
    for (int64_t b = 0; b < batch; ++b) {
      const int64_t token = checked_token(tokens.data_ptr<int64_t>()[b]);
      if (!ended[b]) out[b].push_back(token);
      ended[b] = ended[b] || token == stop;
    }
    next = drawn.unsqueeze(1);
    if (progress) progress(made + 1);
  }
  return out;
}

}  // namespace assay::nn
