#include "nn/generate.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "base/random.h"
#include "nn/cache.h"
#include "nn/slots.h"

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

namespace {

// Tokens of a piece of a batch of prompts, at least one sequence, so that the memory that reading
// needs does not grow with the batch.
constexpr int64_t kPieceTokens = 1 << 16;

// The answers of a batch.
class Answers {
 public:
  Answers(int64_t batch, int64_t stop)
      : tokens(size_t(batch)), ended_(size_t(batch)), stop_(stop) {}
  void add(std::span<const int64_t> drawn) {
    for (size_t b = 0; b < tokens.size(); ++b) {
      const int64_t token = checked_token(drawn[b]);
      if (!ended_[b]) tokens[b].push_back(token);
      ended_[b] = ended_[b] || token == stop_;
    }
  }
  bool all_ended() const { return std::ranges::find(ended_, false) == ended_.end(); }
  std::vector<std::vector<int64_t>> tokens;

 private:
  std::vector<bool> ended_;
  int64_t stop_;
};

// Puts the state of a few sequences into rows `first`, … of the state of `count` sequences. What
// grows by every token has memory for `capacity` tokens there.
void put_rows(ModelState& batch, const ModelState& rows, int64_t first, int64_t count,
              int64_t capacity) {
  batch.position = rows.position;
  batch.layers.resize(rows.layers.size());
  for (size_t i = 0; i < rows.layers.size(); ++i) {
    State& layer = batch.layers[i];
    for (const auto& [name, tensor] : rows.layers[i].tensors()) {
      at::Tensor& all = layer[name];
      if (tensor.dim() == 0) {
        all = tensor;
        continue;
      }
      if (rows.layers[i].grows(name)) layer.set_grows(name);
      const bool grows = layer.grows(name) && tensor.size(1) == rows.position;
      if (!all.defined()) all = with_room(tensor, count, grows ? capacity : tensor.size(1));
      all.narrow(0, first, tensor.size(0)).copy_(tensor);
    }
  }
}

}  // namespace

std::vector<std::vector<int64_t>> generate(LanguageModel& model, const at::Tensor& prompts,
                                           int64_t max_tokens, const Sampling& sampling,
                                           std::span<const uint64_t> seeds, int64_t stop,
                                           const std::function<void(int64_t)>& progress,
                                           ModelState* given) {
  const at::NoGradGuard no_grad;
  ModelState fresh;
  ModelState& state = given ? *given : fresh;
  const int64_t batch = prompts.size(0);
  const int64_t length = state.position + prompts.size(1);
  const int64_t longest = model.max_time();
  if (max_tokens < 0) fail("max_tokens = {} must be 0 or more", max_tokens);
  if (max_tokens > longest - length + 1)  // the last token is not read
    fail("a prompt of {} tokens and {} to follow do not fit the model's {} positions", length,
         max_tokens, longest);
  Answers answers(batch, stop);
  if (max_tokens == 0) return answers.tokens;
  const auto draws = [&](int64_t made) {
    std::vector<ops::Draw> out;
    for (const uint64_t seed : seeds)
      out.push_back(draw_of(sampling, uniform_at(seed, length + made)));
    return out;
  };
  const auto read = [&](const at::Tensor& tokens, ModelState& of_tokens,
                        std::span<const ops::Draw> drawn) {
    const at::Tensor hidden = model.hidden(tokens, of_tokens).select(1, -1);
    return ops::sample(model.logits_of_hidden(hidden), drawn);
  };
  const auto accept = [&](std::span<const int64_t> drawn, int64_t made) {
    answers.add(drawn);
    if (progress) progress(made);
  };
  std::optional<Slots> slots;
  if (max_tokens > 1 && steps_can_be_captured(model))
    slots.emplace(model, batch, length + max_tokens - 1);
  const int64_t piece =
      state.position > 0 ? batch : std::max<int64_t>(1, kPieceTokens / prompts.size(1));
  const std::vector<ops::Draw> first_draws = draws(0);
  at::Tensor next = at::empty({batch}, prompts.options());
  for (int64_t first = 0; first < batch; first += piece) {
    const int64_t count = std::min(piece, batch - first);
    ModelState few;
    ModelState& of_rows = count == batch ? state : few;
    next.narrow(0, first, count)
        .copy_(read(prompts.narrow(0, first, count), of_rows,
                    std::span(first_draws).subspan(size_t(first), size_t(count))));
    if (slots)
      for (int64_t b = 0; b < count; ++b)
        slots->put(first + b, row_of(of_rows, b), next.narrow(0, first + b, 1));
    else if (count < batch && (max_tokens > 1 || given))
      put_rows(state, few, first, batch, length + std::min(length, max_tokens));
  }
  accept(DrawnTokens(next).wait(), 1);
  if (slots) {
    state = {};
    // The host reads tokens one step late, so one step may follow the end. It must not be in the
    // state.
    const bool ahead = !given || stop < 0;
    std::optional<DrawnTokens> late;
    for (int64_t made = 1; made < max_tokens && !answers.all_ended(); ++made) {
      DrawnTokens drawn = slots->step(draws(made));
      if (late) accept(late->wait(), made);
      late.reset();
      if (ahead) late.emplace(std::move(drawn));
      else accept(drawn.wait(), made + 1);
    }
    if (late && !answers.all_ended()) accept(late->wait(), max_tokens);
    if (given) *given = slots->batch();
    return answers.tokens;
  }
  for (int64_t made = 1; made < max_tokens && !answers.all_ended(); ++made) {
    next = read(next.unsqueeze(1), state, draws(made));
    accept(DrawnTokens(next).wait(), made + 1);
  }
  return answers.tokens;
}

}  // namespace assay::nn
