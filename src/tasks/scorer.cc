#include "tasks/scorer.h"

#include <torch/torch.h>

#include <algorithm>
#include <numeric>

#include "base/interrupt.h"
#include "nn/lm_loss.h"

namespace assay::tasks {
namespace {

constexpr size_t kLeastPrefix =
    32;  // tokens that items must share for their beginning to be read once

size_t common(const std::vector<int64_t>& a, const std::vector<int64_t>& b, size_t most) {
  const size_t limit = std::min({a.size(), b.size(), most});
  size_t i = 0;
  while (i < limit && a[i] == b[i]) ++i;
  return i;
}

// Tokens of the first row that all rows of an item share, and that come before the last token that
// is read for the first prediction of any row.
size_t shared(const std::vector<Row>& rows) {
  size_t cut = rows[0].tokens.size();
  for (const Row& row : rows) {
    cut = common(rows[0].tokens, row.tokens, cut);
    cut = std::min(cut, row.tokens.size() - size_t(row.scored) - 1);
  }
  return cut;
}

constexpr int64_t kShort = 64;  // tokens

size_t longest(const std::vector<Row>& rows) {
  size_t length = 0;
  for (const Row& row : rows) length = std::max(length, row.tokens.size());
  return length;
}

at::Tensor repeated(int64_t count) { return at::zeros({count}, at::kLong); }

}  // namespace

Scorer::Scorer(nn::LanguageModel& model, const ScorerOptions& options)
    : model_(model), options_(options) {
  const bool cuda = model.embedding.is_cuda();
  if (options_.batch_tokens == 0) options_.batch_tokens = cuda ? 65'536 : 8192;
  most_state_bytes_ = double(int64_t{cuda ? 16 : 4} << 30);
  const at::NoGradGuard no_grad;
  nn::ModelState state;
  model.hidden(on_device(at::zeros({1, std::min(kShort, model.max_time())}, at::kLong)), state);
  for (const nn::State& layer : state.layers) short_state_bytes_ += double(layer.bytes());
}

bool Scorer::same_input(const Row& a, const Row& b) const {
  return options_.share && a.scored == b.scored &&
         std::equal(a.tokens.begin(), a.tokens.end() - 1, b.tokens.begin(), b.tokens.end() - 1);
}

size_t Scorer::inputs(const std::vector<Row>& item) const {
  size_t count = 1;
  for (size_t r = 1; r < item.size(); ++r) count += !same_input(item[r - 1], item[r]);
  return count;
}

// The state of a recurrence has one size, and that of attention grows with the tokens.
double Scorer::state_bytes(size_t sequences, size_t cut) const {
  if (cut == 0) return 0;
  return double(sequences) * short_state_bytes_ * std::max(1.0, double(cut) / double(kShort));
}

Scorer::Batch Scorer::batch_of(const std::vector<std::vector<Row>>& items,
                               std::span<const size_t> chosen) const {
  Batch batch;
  for (size_t i = 0; i < chosen.size(); ++i) {
    const std::vector<Row>& item = items[chosen[i]];
    batch.firsts.push_back(&item[0]);
    for (size_t r = 0; r < item.size(); ++r) {
      if (r == 0 || !same_input(item[r - 1], item[r])) {
        batch.inputs.push_back(&item[r]);
        batch.owners.push_back(int64_t(i));
      }
      batch.rows.emplace_back(&item[r], batch.inputs.size() - 1);
    }
  }
  return batch;
}

nn::ModelState Scorer::read_shared(const std::vector<const Row*>& firsts, size_t begin, size_t cut,
                                   const nn::ModelState& before) {
  const auto batch = int64_t(firsts.size());
  const auto length = int64_t(cut - begin);
  nn::ModelState state = nn::select_rows(before, on_device(repeated(batch)));
  if (length == 0) return state;
  const at::Tensor tokens = at::empty({batch, length}, at::kLong);
  for (int64_t b = 0; b < batch; ++b)
    std::copy_n(firsts[size_t(b)]->tokens.begin() + std::ptrdiff_t(begin), length,
                tokens.data_ptr<int64_t>() + b * length);
  tokens_read_ += batch * length;
  model_.hidden(on_device(tokens), state);
  return state;
}

std::vector<Likelihood> Scorer::read_rows(const Batch& batch, size_t cut, nn::ModelState state) {
  size_t length = 0;
  for (const Row* row : batch.inputs) length = std::max(length, row->tokens.size() - 1 - cut);
  const auto width = int64_t(length);
  const at::Tensor tokens = at::zeros({int64_t(batch.inputs.size()), width}, at::kLong);
  for (size_t n = 0; n < batch.inputs.size(); ++n) {
    const std::vector<int64_t>& row = batch.inputs[n]->tokens;
    const size_t count = row.size() - 1 - cut;
    std::copy_n(row.begin() + std::ptrdiff_t(cut), count,
                tokens.data_ptr<int64_t>() + int64_t(n) * width);
    tokens_read_ += int64_t(count);
  }
  std::vector<int64_t> places;
  std::vector<int64_t> targets;
  for (const auto& [row, input] : batch.rows) {
    const size_t size = row->tokens.size();
    for (size_t i = size - size_t(row->scored); i < size; ++i) {
      places.push_back(int64_t(input) * width + int64_t(i - 1 - cut));
      targets.push_back(row->tokens[i]);
    }
    tokens_alone_ += int64_t(size) - 1;
  }
  state.last = true;
  const at::Tensor hidden = model_.hidden(on_device(tokens), state).flatten(0, 1);
  const nn::TokenScores scores =
      nn::score_tokens(hidden.index_select(0, on_device(at::tensor(places, at::kLong))),
                       model_.head_weight(), on_device(at::tensor(targets, at::kLong)), true);
  const at::Tensor losses = scores.losses.to(at::kCPU, at::kDouble);
  const at::Tensor greedy = scores.greedy.to(at::kCPU);
  std::vector<Likelihood> out;
  size_t at = 0;
  for (const auto& [row, input] : batch.rows) {
    Likelihood& likelihood = out.emplace_back();
    for (int64_t i = 0; i < row->scored; ++i, ++at) {
      likelihood.logprob -= losses.data_ptr<double>()[at];
      likelihood.greedy = likelihood.greedy && greedy.data_ptr<bool>()[at];
    }
    if (!std::isfinite(likelihood.logprob))
      fail<Error>("the model gives an answer the log-likelihood {}", likelihood.logprob);
  }
  return out;
}

// `group`: items that share their first `prefix` tokens.
void Scorer::score_group(const std::vector<std::vector<Row>>& items, std::vector<size_t> group,
                         size_t prefix, const Done& done) {
  nn::ModelState begun;
  if (prefix > 0) begun = read_shared({&items[group[0]][0]}, 0, prefix, {});
  std::vector<size_t> cuts(items.size(), prefix);
  if (options_.share)
    for (const size_t i : group)
      if (inputs(items[i]) > 1) cuts[i] = std::max(prefix, shared(items[i]));
  // Sequences with a shorter cut read some tokens of the longer ones again; batches that are
  // few tokens apart are read together, on CUDA more of them, where a batch costs more than tokens.
  const size_t near = model_.embedding.is_cuda() ? 64 : 16;
  std::ranges::stable_sort(group, std::greater{},
                           [&](size_t i) { return std::pair(cuts[i], longest(items[i])); });
  for (size_t begin = 0; begin < group.size();) {
    check_interrupt();
    const size_t largest_cut = cuts[group[begin]];
    size_t end = begin;
    size_t cut = largest_cut;
    size_t rows = 0;
    size_t length = 0;
    for (; end < group.size(); ++end) {
      const std::vector<Row>& item = items[group[end]];
      const size_t lower = cuts[group[end]];
      const size_t longer = std::max(length, longest(item));
      const size_t count = rows + inputs(item);
      const bool far = largest_cut - lower > std::max(near, largest_cut / 8);
      if (end > begin && (far || count * (longer - lower) > size_t(options_.batch_tokens) ||
                          state_bytes(count, largest_cut) > most_state_bytes_))
        break;
      cut = lower;
      rows = count;
      length = longer;
    }
    const Batch batch = batch_of(items, std::span(group).subspan(begin, end - begin));
    const nn::ModelState state =
        cut > prefix ? read_shared(batch.firsts, prefix, cut, begun) : nn::ModelState(begun);
    const at::Tensor from =
        cut > prefix ? at::tensor(batch.owners, at::kLong) : repeated(int64_t(batch.owners.size()));
    std::vector<Likelihood> found = read_rows(batch, cut, nn::select_rows(state, on_device(from)));
    for (size_t i = begin, at = 0; i < end; ++i) {
      const size_t count = items[group[i]].size();
      done(group[i],
           {found.begin() + std::ptrdiff_t(at), found.begin() + std::ptrdiff_t(at + count)});
      at += count;
    }
    begin = end;
  }
}

void Scorer::score(const std::vector<std::vector<Row>>& items, const Done& done) {
  const at::NoGradGuard no_grad;
  std::vector<size_t> order(items.size());
  std::iota(order.begin(), order.end(), size_t{0});
  if (!options_.share) return score_group(items, order, 0, done);
  std::ranges::stable_sort(
      order, {}, [&](size_t i) -> const std::vector<int64_t>& { return items[i][0].tokens; });
  std::vector<size_t> alone;
  for (size_t begin = 0; begin < order.size();) {
    // Items in order of their tokens: those that follow share less and less with the first.
    const std::vector<Row>& first = items[order[begin]];
    size_t prefix = shared(first);
    size_t end = begin + 1;
    for (; end < order.size(); ++end) {
      const std::vector<Row>& item = items[order[end]];
      const size_t both = std::min(common(first[0].tokens, item[0].tokens, prefix), shared(item));
      if (both < kLeastPrefix || 2 * both < prefix) break;
      prefix = both;
    }
    const std::span<const size_t> group(order.begin() + std::ptrdiff_t(begin), end - begin);
    // On CUDA a batch costs as much as some thousands of tokens
    const size_t least_saved = model_.embedding.is_cuda() ? 8192 : 1;
    if ((group.size() - 1) * prefix >= least_saved)
      score_group(items, {group.begin(), group.end()}, prefix, done);
    else alone.insert(alone.end(), group.begin(), group.end());
    begin = end;
  }
  if (!alone.empty()) score_group(items, alone, 0, done);
}

void Scorer::generate(
    const std::vector<std::vector<int64_t>>& prompts, int64_t max_tokens,
    const std::function<bool(size_t prompt, const std::vector<int64_t>& tokens)>& ended,
    const Generated& done) {
  const at::NoGradGuard no_grad;
  std::vector<size_t> order(prompts.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, std::greater{}, [&](size_t i) { return prompts[i].size(); });
  for (size_t begin = 0; begin < order.size();) {
    const size_t longest = prompts[order[begin]].size();
    size_t end = begin + 1;
    while (end < order.size() && (end - begin + 1) * longest <= size_t(options_.batch_tokens) &&
           longest - prompts[order[end]].size() <= std::max<size_t>(4, longest / 32))
      ++end;
    const size_t count = end - begin;
    const size_t shortest = prompts[order[end - 1]].size();
    // All prompts are at the same position: the longer ones are still read while the
    // others are continued.
    nn::ModelState state;
    at::Tensor next = at::empty({int64_t(count), int64_t(shortest)}, at::kLong);
    for (size_t b = 0; b < count; ++b)
      std::copy_n(prompts[order[begin + b]].begin(), shortest,
                  next.data_ptr<int64_t>() + b * shortest);
    std::vector<std::vector<int64_t>> made(count);
    std::vector<bool> finished(count, false);
    for (size_t position = shortest; std::ranges::find(finished, false) != finished.end();
         ++position) {
      check_interrupt();
      tokens_read_ += next.numel();
      tokens_alone_ += next.numel();
      const at::Tensor last = model_.hidden(on_device(next), state).select(1, -1);
      const at::Tensor likeliest =
          model_.logits_of_hidden(last).argmax(1).to(at::kCPU).contiguous();
      next = at::zeros({int64_t(count), 1}, at::kLong);
      for (size_t b = 0; b < count; ++b) {
        const std::vector<int64_t>& prompt = prompts[order[begin + b]];
        int64_t token = likeliest.data_ptr<int64_t>()[b];
        if (position < prompt.size()) {
          token = prompt[position];
        } else if (!finished[b]) {
          made[b].push_back(token);
          finished[b] = int64_t(made[b].size()) == max_tokens || ended(order[begin + b], made[b]);
        }
        next.data_ptr<int64_t>()[b] = token;
      }
    }
    for (size_t b = 0; b < count; ++b) done(order[begin + b], std::move(made[b]));
    begin = end;
  }
}

}  // namespace assay::tasks
