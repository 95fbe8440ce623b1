// Scores from shared states against each row read alone, for every kind of state.
#include "tasks/scorer.h"

#include <torch/torch.h>

#include "data/folder.h"
#include "nn/generate.h"
#include "nn/testing.h"

namespace assay::tasks {
namespace {

constexpr int64_t kVocabulary = 23;

// One layer of each, so that every form of state is copied and gone on from.
const std::string kModel = R"([model]
vocab_size = 23
d_model = 16
num_layers = 9
pattern = ["attention", "mamba1", "mamba2", "rwkv7", "gated_delta_net", "top1_chunk", "longhorn",
  "retention", "rwkv6"]
[model.attention]
num_heads = 2
[model.mamba2]
state_size = 8
head_dim = 8
[model.rwkv7]
num_heads = 2
[model.rwkv6]
num_heads = 2
[model.gated_delta_net]
num_heads = 2
[model.top1_chunk]
num_heads = 2
chunk_size = 8
[model.retention]
num_heads = 2
)";

std::vector<int64_t> tokens(Random& random, int64_t count) {
  std::vector<int64_t> out;
  for (int64_t i = 0; i < count; ++i) out.push_back(int64_t(random.below(kVocabulary)));
  return out;
}

// Items with a common beginning of 40 tokens, and others; 1 to 4 choices of 1 to 5 tokens.
std::vector<std::vector<Row>> items(uint64_t seed) {
  Random random(seed, "items");
  const std::vector<int64_t> examples = tokens(random, 40);
  std::vector<std::vector<Row>> out;
  for (int64_t i = 0; i < 12; ++i) {
    std::vector<int64_t> context = i % 3 ? examples : std::vector<int64_t>();
    for (const int64_t token : tokens(random, 1 + int64_t(random.below(20))))
      context.push_back(token);
    std::vector<Row>& rows = out.emplace_back();
    for (int64_t c = 0; c <= i % 4; ++c) {
      Row row{context, 1 + int64_t(random.below(5))};
      for (const int64_t token : tokens(random, row.scored)) row.tokens.push_back(token);
      rows.push_back(row);
    }
  }
  return out;
}

Likelihood direct(nn::LanguageModel& model, const Row& row) {
  const at::NoGradGuard no_grad;
  nn::ModelState state;
  const at::Tensor all = at::tensor(row.tokens, at::kLong).unsqueeze(0);
  const at::Tensor logs = at::log_softmax(model.logits(all.slice(1, 0, -1), state), -1)[0];
  Likelihood out;
  for (auto i = int64_t(row.tokens.size()) - row.scored; i < int64_t(row.tokens.size()); ++i) {
    out.logprob += logs[i - 1][row.tokens[size_t(i)]].item<double>();
    out.greedy = out.greedy && logs[i - 1].argmax().item<int64_t>() == row.tokens[size_t(i)];
  }
  return out;
}

TEST(TaskScorer, SharedStatesGiveTheScoresOfRowsReadAlone) {
  const auto model = nn::random_model(kModel);
  const auto all = items(7);
  std::vector<std::vector<Likelihood>> expected;
  for (const auto& rows : all) {
    expected.emplace_back();
    for (const Row& row : rows) expected.back().push_back(direct(*model, row));
  }
  for (const bool share : {true, false})
    for (const int64_t batch : {1, 60, 4096}) {
      Scorer scorer(*model, {.batch_tokens = batch, .share = share});
      std::vector<int> answered(all.size());
      scorer.score(all, [&](size_t i, const std::vector<Likelihood>& found) {
        ++answered[i];
        ASSERT_EQ(found.size(), all[i].size());
        for (size_t r = 0; r < found.size(); ++r) {
          EXPECT_NEAR(found[r].logprob, expected[i][r].logprob, 1e-9)
              << "item " << i << " row " << r << " of " << batch;
          EXPECT_EQ(found[r].greedy, expected[i][r].greedy);
        }
      });
      for (size_t i = 0; i < all.size(); ++i) EXPECT_EQ(answered[i], 1) << i;
      if (share) EXPECT_LT(scorer.tokens_read(), scorer.tokens_alone() * (batch == 1 ? 0.9 : 0.6));
      else EXPECT_EQ(scorer.tokens_read(), scorer.tokens_alone());
    }
}

TEST(TaskScorer, GreedyTextIsThatOfGenerate) {
  const auto model = nn::random_model(kModel);
  Random random(3, "prompts");
  std::vector<std::vector<int64_t>> prompts;
  for (const int64_t length : {9, 11, 10, 30, 9}) prompts.push_back(tokens(random, length));
  Scorer scorer(*model, {.batch_tokens = 64});
  std::vector<std::vector<int64_t>> made(prompts.size());
  const auto never = [](size_t, const std::vector<int64_t>&) { return false; };
  scorer.generate(prompts, 7, never,
                  [&](size_t i, std::vector<int64_t> text) { made[i] = std::move(text); });
  for (size_t i = 0; i < prompts.size(); ++i) {
    const std::vector<uint64_t> seeds = {0};
    const auto expected = nn::generate(*model, at::tensor(prompts[i], at::kLong).unsqueeze(0), 7,
                                       {.temperature = 0}, seeds);
    EXPECT_EQ(made[i], expected[0]) << i;
  }
  const auto second = [](size_t, const std::vector<int64_t>& text) { return text.size() == 2; };
  scorer.generate(prompts, 7, second,
                  [&](size_t, const std::vector<int64_t>& text) { EXPECT_EQ(text.size(), 2u); });
}

TEST(TaskScorer, NanIsReported) {
  const auto model = nn::random_model(kModel);
  {
    const at::NoGradGuard no_grad;
    model->norm->parameters()[0].fill_(NAN);
  }
  Scorer scorer(*model, {});
  EXPECT_THROW(scorer.score(items(1), [](size_t, const std::vector<Likelihood>&) {}), Error);
}

TEST(TaskSelectRows, RowsGoOnFromCopiesOfAState) {
  const at::NoGradGuard no_grad;
  const auto model = nn::random_model(kModel);
  const at::Tensor text = nn::random_tokens(3, 20, kVocabulary, "text");
  const at::Tensor more = nn::random_tokens(4, 5, kVocabulary, "more");
  nn::ModelState state;
  model->hidden(text, state);
  const at::Tensor rows = at::tensor({2, 0, 0, 1}, at::kLong);
  nn::ModelState copies = nn::select_rows(state, rows);
  nn::ModelState whole;
  const at::Tensor found = model->hidden(more, copies);
  const at::Tensor expected =
      model->hidden(at::cat({text.index_select(0, rows), more}, 1), whole).slice(1, 20);
  EXPECT_LE(nn::relative_error(found, expected), 1e-10);
  EXPECT_EQ(copies.position, 25);
  EXPECT_EQ(state.position, 20) << "the state that was copied is unchanged";
}

}  // namespace
}  // namespace assay::tasks
