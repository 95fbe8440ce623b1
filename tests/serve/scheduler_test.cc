// Continuous batching without HTTP.
#include "serve/scheduler.h"

#include <torch/torch.h>

#include <future>
#include <thread>

#include "nn/testing.h"

namespace assay::serve {
namespace {

const std::string kModel = R"([model]
vocab_size = 50
d_model = 48
num_layers = 4
pattern = ["attention", "mamba2", "top1_chunk", "rwkv7"]
[model.attention]
num_heads = 4
[model.mamba2]
state_size = 16
head_dim = 16
[model.top1_chunk]
num_heads = 4
chunk_size = 16
[model.rwkv7]
num_heads = 4
)";

struct Recorded final : Task {
  explicit Recorded(TaskOptions o) : task_options(std::move(o)) {
    choices.resize(task_options.prompts.size() * size_t(task_options.samples));
    prompts.resize(task_options.prompts.size());
  }
  const TaskOptions& options() const override { return task_options; }
  bool cancelled() const override { return is_cancelled; }
  void add_prompt_scores(size_t prompt, std::vector<TokenScore> scores) override {
    for (TokenScore& score : scores) prompts[prompt].push_back(std::move(score));
  }
  bool add_token(size_t choice, TokenScore score) override {
    choices[choice].push_back(std::move(score));
    if (on_token) on_token();
    return true;
  }
  void end(size_t, EndReason) override {
    if (++ended == choices.size()) done.set_value("");
  }
  void fail(int, const std::string& message) override { done.set_value(message); }

  // All that came back, with the bits of the log-probabilities.
  std::string answer() const {
    std::string out;
    const auto add = [&](const std::vector<TokenScore>& scores) {
      for (const TokenScore& score : scores) {
        out += fmt::format("{} {:a}", score.token, score.logprob);
        for (const auto& [token, logprob] : score.top)
          out += fmt::format(" {}:{:a}", token, logprob);
        out += "\n";
      }
      out += "-\n";
    };
    for (const auto& prompt : prompts) add(prompt);
    for (const auto& choice : choices) add(choice);
    return out;
  }

  TaskOptions task_options;
  std::vector<std::vector<TokenScore>> choices;
  std::vector<std::vector<TokenScore>> prompts;
  std::function<void()> on_token;
  std::atomic<bool> is_cancelled = false;
  size_t ended = 0;
  std::promise<std::string> done;
};

struct Running {
  explicit Running(nn::LanguageModel& model,
                   SchedulerOptions options = {.slots = 4, .queue = 100, .piece = 16})
      : scheduler(model, options, metrics), thread([this] { scheduler.run(); }) {}
  ~Running() {
    scheduler.stop();
    thread.join();
  }
  std::string run(const std::shared_ptr<Recorded>& task) {
    EXPECT_TRUE(scheduler.submit(task));
    return wait(task);
  }
  static std::string wait(const std::shared_ptr<Recorded>& task) {
    auto done = task->done.get_future();
    if (done.wait_for(std::chrono::seconds(60)) != std::future_status::ready) return "timed out";
    return done.get();
  }
  Metrics metrics;
  Scheduler scheduler;
  std::thread thread;
};

struct SchedulerTest : testing::Test {
  SchedulerTest() {
    model = nn::random_model(kModel);
    model->to(at::kFloat);
  }
  std::vector<int64_t> prompt(int64_t length, const std::string& name) const {
    const at::Tensor tokens = nn::random_tokens(1, length, 50, name);
    return {tokens.data_ptr<int64_t>(), tokens.data_ptr<int64_t>() + length};
  }
  // Prompts of many lengths, half of them with the same first 40 tokens.
  TaskOptions request(int64_t i) const {
    TaskOptions o;
    const std::vector<int64_t> shared = prompt(40, "shared");
    for (int64_t p = 0; p <= i % 3; ++p) {
      std::vector<int64_t> tokens = i % 2 ? shared : std::vector<int64_t>();
      const auto rest = prompt(1 + (7 * i + 13 * p) % 50, fmt::format("{} {}", i, p));
      tokens.insert(tokens.end(), rest.begin(), rest.end());
      o.prompts.push_back(tokens);
    }
    o.samples = 1 + i % 4 / 3;
    o.max_tokens = (5 * i) % 19;
    o.seed = uint64_t(i);
    o.sampling = {
        .temperature = i % 5 ? 1.0 : 0.0, .top_k = i % 7 ? 0 : 5, .top_p = i % 3 ? 1 : 0.9};
    if (i % 2) o.top = i % 4;
    o.score_prompts = i % 4 == 3;
    return o;
  }
  std::vector<std::string> answers(const SchedulerOptions& options, bool together) const {
    Running running(*model, options);
    std::vector<std::shared_ptr<Recorded>> tasks;
    std::vector<std::string> out;
    for (int64_t i = 0; i < 24; ++i) {
      tasks.push_back(std::make_shared<Recorded>(request(i)));
      EXPECT_TRUE(running.scheduler.submit(tasks.back()));
      if (!together) EXPECT_EQ(Running::wait(tasks.back()), "") << i;
    }
    for (const auto& task : tasks) {
      if (together) EXPECT_EQ(Running::wait(task), "");
      out.push_back(task->answer());
    }
    return out;
  }
  // Whatever is computed at the same time, and whatever is in the cache
  void expect_equal_answers() const {
    const SchedulerOptions cached{.slots = 4, .queue = 100, .piece = 16};
    SchedulerOptions uncached = cached;
    SchedulerOptions tight = cached;
    uncached.cache_bytes = 0;
    tight.cache_bytes = 300'000;  // a few pages
    const auto alone = answers(uncached, /*together=*/false);
    EXPECT_EQ(answers(cached, /*together=*/false), alone);
    EXPECT_EQ(answers(cached, /*together=*/true), alone);
    EXPECT_EQ(answers(tight, /*together=*/true), alone);
  }
  // Eight requests with prompts of two lengths, so that prompts are read in batches.
  std::vector<std::shared_ptr<Recorded>> answers_in_batches(bool together) const {
    Running running(*model, {.slots = 4, .queue = 100, .piece = 32, .batch_tokens = 64});
    std::vector<std::shared_ptr<Recorded>> tasks;
    for (int64_t i = 0; i < 8; ++i) {
      TaskOptions o{.samples = 1 + i % 2, .max_tokens = i == 3 ? 0 : 9, .seed = uint64_t(i)};
      o.prompts = {prompt(17, fmt::format("a {}", i)), prompt(30 - i % 2, fmt::format("b {}", i))};
      o.top = 1;
      o.score_prompts = i % 3 == 0;
      tasks.push_back(std::make_shared<Recorded>(o));
      EXPECT_TRUE(running.scheduler.submit(tasks.back()));
      if (!together) EXPECT_EQ(Running::wait(tasks.back()), "") << i;
    }
    for (const auto& task : tasks)
      if (together) EXPECT_EQ(Running::wait(task), "");
    return tasks;
  }
  std::shared_ptr<nn::LanguageModel> model;
};

TEST_F(SchedulerTest, AnswersDoNotDependOnOtherRequestsOrTheCache) { expect_equal_answers(); }

// On a CPU the rows of a batch may be rounded in different ways.
TEST_F(SchedulerTest, PromptsThatAreReadTogetherHaveTheSameAnswers) {
  const auto alone = answers_in_batches(false);
  const auto together = answers_in_batches(true);
  const auto expect_near = [](const std::vector<TokenScore>& a, const std::vector<TokenScore>& b) {
    ASSERT_EQ(a.size(), b.size());
    for (size_t i = 0; i < a.size(); ++i) {
      EXPECT_EQ(a[i].token, b[i].token);
      EXPECT_NEAR(a[i].logprob, b[i].logprob, 1e-5);
    }
  };
  for (size_t i = 0; i < alone.size(); ++i) {
    SCOPED_TRACE(i);
    for (size_t p = 0; p < 2; ++p) expect_near(alone[i]->prompts[p], together[i]->prompts[p]);
    for (size_t c = 0; c < alone[i]->choices.size(); ++c)
      expect_near(alone[i]->choices[c], together[i]->choices[c]);
  }
  const std::vector<int64_t>& tokens = alone[3]->task_options.prompts[0];
  const at::Tensor losses = model->token_losses(at::tensor(tokens, at::kLong).unsqueeze(0));
  ASSERT_EQ(alone[3]->prompts[0].size(), 16u);
  for (size_t i = 0; i < 16; ++i)
    EXPECT_NEAR(alone[3]->prompts[0][i].logprob, -losses[0][int64_t(i)].item<float>(), 1e-4) << i;
}

// SchedulerTest on a GPU, in the precision of serving.
struct SchedulerCudaTest : SchedulerTest {
  void SetUp() override {
    if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device found";
    model->to(at::kCUDA);
    model->compute_dtype = at::kBFloat16;
    model->prepare_inference();
  }
};

TEST_F(SchedulerCudaTest, AnswersDoNotDependOnOtherRequestsOrTheCache) { expect_equal_answers(); }

TEST_F(SchedulerCudaTest, PromptsThatAreReadTogetherHaveTheSameAnswers) {
  const auto alone = answers_in_batches(false);
  const auto together = answers_in_batches(true);
  for (size_t i = 0; i < alone.size(); ++i)
    EXPECT_EQ(alone[i]->answer(), together[i]->answer()) << i;
}

// With mixers whose decode steps are captured.
struct SchedulerCaptured : SchedulerCudaTest {
  SchedulerCaptured() {
    model = nn::random_model(
        "[model]\nvocab_size = 50\nd_model = 48\nnum_layers = 3\n"
        "pattern = [\"attention\", \"mamba2\", \"rwkv7\"]\n[model.attention]\nnum_heads = 3\n"
        "[model.mamba2]\nstate_size = 16\nhead_dim = 16\n[model.rwkv7]\nnum_heads = 4\n");
    model->to(at::kFloat);
  }
};

TEST_F(SchedulerCaptured, OnCudaAnswersDoNotDependOnOtherRequestsOrTheCache) {
  ASSERT_TRUE(nn::steps_can_be_captured(*model));
  expect_equal_answers();
}

// Whether a request wants scores, and so reads each step before the next one.
TEST_F(SchedulerCaptured, OnCudaTokensDoNotDependOnScores) {
  const auto tokens = [&](std::optional<int64_t> top) {
    Running running(*model);
    TaskOptions o{.prompts = {prompt(37, "a"), prompt(5, "b")},
                  .samples = 3,
                  .max_tokens = 40,
                  .seed = 7,
                  .top = top};
    const auto task = std::make_shared<Recorded>(o);
    EXPECT_EQ(running.run(task), "");
    std::vector<std::vector<int64_t>> out;
    for (const auto& choice : task->choices) {
      out.emplace_back();
      for (const TokenScore& score : choice) out.back().push_back(score.token);
    }
    return out;
  };
  EXPECT_EQ(tokens({}), tokens(2));
}

TEST_F(SchedulerCudaTest, PromptScoresAreNearTheModelsLosses) {
  Running running(*model);
  const std::vector<int64_t> tokens = prompt(75, "scored");
  const auto task = std::make_shared<Recorded>(
      TaskOptions{.prompts = {tokens}, .max_tokens = 0, .score_prompts = true});
  ASSERT_EQ(running.run(task), "");
  const at::Tensor whole = at::tensor(tokens, at::kLong).unsqueeze(0).to(at::kCUDA);
  const at::Tensor losses = model->token_losses(whole).cpu();
  for (size_t i = 0; i + 1 < tokens.size(); ++i)
    EXPECT_NEAR(task->prompts[0][i].logprob, -losses[0][int64_t(i)].item<float>(), 0.05) << i;
}

TEST_F(SchedulerTest, SamplesEqualThoseOfGenerate) {
  Running running(*model);
  TaskOptions o{.prompts = {prompt(37, "a")},
                .samples = 6,
                .max_tokens = 25,
                .sampling = {.temperature = 0.9},
                .seed = 11};
  const auto task = std::make_shared<Recorded>(o);
  ASSERT_EQ(running.run(task), "");
  const at::Tensor tokens = at::tensor(o.prompts[0], at::kLong).expand({6, -1});
  const auto expected =
      nn::generate(*model, tokens, 25, o.sampling, std::vector<uint64_t>{11, 12, 13, 14, 15, 16});
  for (size_t i = 0; i < 6; ++i) {
    std::vector<int64_t> made;
    for (const TokenScore& score : task->choices[i]) made.push_back(score.token);
    EXPECT_EQ(made, expected[i]) << "sample " << i;
  }
}

TEST_F(SchedulerTest, PromptScoresEqualTheModelsLosses) {
  Running running(*model);
  const std::vector<int64_t> tokens = prompt(75, "scored");
  TaskOptions o{.prompts = {tokens}, .max_tokens = 0, .top = 3, .score_prompts = true};
  for (int round = 0; round < 2; ++round) {  // the second from pages
    const auto task = std::make_shared<Recorded>(o);
    ASSERT_EQ(running.run(task), "");
    const at::Tensor losses = model->token_losses(at::tensor(tokens, at::kLong).unsqueeze(0));
    ASSERT_EQ(task->prompts[0].size(), 74u);
    for (size_t i = 0; i < 74; ++i) {
      const TokenScore& score = task->prompts[0][i];
      EXPECT_EQ(score.token, tokens[i + 1]);
      EXPECT_NEAR(score.logprob, -losses[0][int64_t(i)].item<float>(), 2e-5) << i;
      ASSERT_EQ(score.top.size(), 3u);
      EXPECT_GE(score.top[0].second, score.top[1].second);
      for (const auto& [token, logprob] : score.top)
        if (token == score.token) EXPECT_EQ(logprob, score.logprob);
    }
    EXPECT_TRUE(task->choices[0].empty());
  }
  EXPECT_EQ(running.metrics.cached_tokens, 64);
}

TEST_F(SchedulerTest, RequestsPastTheQueueAreRefused) {
  Running running(*model, {.slots = 1, .queue = 2, .piece = 16});
  TaskOptions o{.prompts = {prompt(5, "a")}, .max_tokens = 3000};
  std::vector<std::shared_ptr<Recorded>> tasks;
  int refused = 0;
  for (int i = 0; i < 6; ++i) {
    tasks.push_back(std::make_shared<Recorded>(o));
    refused += !running.scheduler.submit(tasks.back());
    if (i == 0)
      while (running.metrics.decoding == 0) std::this_thread::yield();
  }
  EXPECT_EQ(refused, 2);  // one is decoded, one is read and waits for a slot, two wait
  for (const auto& task : tasks) task->is_cancelled = true;
}

TEST_F(SchedulerTest, WithoutAQueueRequestsAreTakenWhileAPlaceIsFree) {
  Running running(*model, {.slots = 1, .queue = 0, .piece = 16});
  for (int64_t i = 0; i < 50; ++i)
    EXPECT_EQ(running.run(std::make_shared<Recorded>(
                  TaskOptions{.prompts = {prompt(20, "a")}, .max_tokens = i % 3})),
              "");
  const TaskOptions o{.prompts = {prompt(5, "a")}, .max_tokens = 3000};
  const auto decoded = std::make_shared<Recorded>(o);
  const auto read = std::make_shared<Recorded>(o);
  const auto third = std::make_shared<Recorded>(o);
  ASSERT_TRUE(running.scheduler.submit(decoded));
  while (running.metrics.decoding == 0) std::this_thread::yield();
  EXPECT_TRUE(running.scheduler.submit(read));
  EXPECT_FALSE(running.scheduler.submit(third));
  while (running.metrics.ready == 0) std::this_thread::yield();
  EXPECT_EQ(running.metrics.reading, 0);
  EXPECT_FALSE(running.scheduler.submit(third));
  decoded->is_cancelled = read->is_cancelled = true;
}

// Nothing follows the last token of a prompt with max_tokens 0, so it needs no position.
TEST_F(SchedulerTest, TheLastTokenOfAPromptIsNotReadWhenNothingFollows) {
  const std::string learned = "[model]\npositions = \"learned\"\nmax_positions = 32\n";
  model = nn::random_model(learned + kModel.substr(std::string("[model]\n").size()));
  model->to(at::kFloat);
  Running running(*model);
  for (const int64_t length : {1, 2, 32, 33}) {
    const auto task = std::make_shared<Recorded>(TaskOptions{
        .prompts = {prompt(length, "a")}, .max_tokens = 0, .top = 0, .score_prompts = true});
    EXPECT_EQ(running.run(task), "") << length;
    EXPECT_EQ(std::ssize(task->prompts[0]), length - 1);
  }
}

TEST_F(SchedulerTest, RequestsThatAreOpenAtTheEndFail) {
  const TaskOptions o{.prompts = {prompt(5, "a")}, .max_tokens = 100000};
  std::vector<std::shared_ptr<Recorded>> tasks;
  {
    Running running(*model, {.slots = 1, .queue = 2, .piece = 16});
    for (int i = 0; i < 3; ++i) {
      tasks.push_back(std::make_shared<Recorded>(o));
      ASSERT_TRUE(running.scheduler.submit(tasks.back()));
    }
    while (running.metrics.decoding == 0) std::this_thread::yield();
  }
  for (const auto& task : tasks) EXPECT_EQ(Running::wait(task), "the server is stopping");
}

TEST_F(SchedulerTest, CancelledRequestsLeaveTheirPlaces) {
  Running running(*model, {.slots = 2, .queue = 100, .piece = 16});
  std::vector<std::shared_ptr<Recorded>> tasks;
  for (int i = 0; i < 8; ++i) {
    tasks.push_back(std::make_shared<Recorded>(
        TaskOptions{.prompts = {prompt(200, "long")}, .samples = 3, .max_tokens = 100000}));
    ASSERT_TRUE(running.scheduler.submit(tasks.back()));
  }
  while (running.metrics.decoding == 0) std::this_thread::yield();
  for (const auto& task : tasks) task->is_cancelled = true;
  const auto last =
      std::make_shared<Recorded>(TaskOptions{.prompts = {prompt(20, "last")}, .max_tokens = 5});
  EXPECT_EQ(running.run(last), "");
  EXPECT_EQ(running.metrics.cancelled, 8);
  while (!running.scheduler.idle()) std::this_thread::yield();
  EXPECT_EQ(running.metrics.queued, 0);
}

// Sequences in slots go on while a long prompt is read.
TEST_F(SchedulerTest, DecodingContinuesWhileALongPromptIsRead) {
  std::atomic<int> made = 0;  // `running` increments it until its destructor
  Running running(*model);
  const auto decoding =
      std::make_shared<Recorded>(TaskOptions{.prompts = {prompt(5, "a")}, .max_tokens = 2000});
  const auto reading =
      std::make_shared<Recorded>(TaskOptions{.prompts = {prompt(1600, "b")}, .max_tokens = 1});
  int before = 0;
  decoding->on_token = [&] { ++made; };
  ASSERT_TRUE(running.scheduler.submit(decoding));
  while (made < 5) std::this_thread::yield();
  reading->on_token = [&] { before = made; };
  ASSERT_EQ(running.run(reading), "");
  EXPECT_GE(before, 100);  // 100 pieces
  decoding->is_cancelled = true;
}

TEST_F(SchedulerTest, AModelThatGivesNaNFailsTheRequestAlone) {
  {
    const at::NoGradGuard no_grad;
    model->embedding[7].fill_(std::numeric_limits<double>::quiet_NaN());
  }
  // The head is the embedding, so every distribution has a NaN; without a token nothing is drawn.
  Running running(*model);
  EXPECT_NE(
      running.run(std::make_shared<Recorded>(TaskOptions{.prompts = {{7, 1}}, .max_tokens = 4}))
          .find("NaN"),
      std::string::npos);
  const auto scored = std::make_shared<Recorded>(
      TaskOptions{.prompts = {{1, 2}}, .max_tokens = 0, .top = 1, .score_prompts = true});
  EXPECT_NE(running.run(scored).find("nan"), std::string::npos);
  EXPECT_EQ(
      running.run(std::make_shared<Recorded>(TaskOptions{.prompts = {{1, 2}}, .max_tokens = 0})),
      "");
}

}  // namespace
}  // namespace assay::serve
