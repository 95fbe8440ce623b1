#pragma once
// Continuous batching: prompts are read in pieces between the decode steps of the sequences that
// are in slots.
//
//   submit() → queue → reading (a few pieces per turn) → ready → slot (one token per step)
//
// Everything below runs on the thread that calls run(); submit() and stop() may be called from any.
// The result of a sequence depends on its prompt, its sampling and its seed only: pieces begin at
// multiples of the piece length, short prompts are read in batches whose number of rows follows
// from their length, and a decode step always computes all slots (nn/slots.h).
//
// On CUDA, a step is launched before the tokens of the step before it are read, so that the device
// does not wait for the host. A sequence that ends by its tokens has then begun one step too many,
// whose token is dropped.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "nn/generate.h"
#include "nn/slots.h"
#include "serve/metrics.h"
#include "serve/prefix_cache.h"

namespace assay::serve {

// A token, its natural log-probability, and the likeliest tokens at its place, likeliest first.
struct TokenScore {
  int64_t token = 0;
  float logprob = 0;
  std::vector<std::pair<int64_t, float>> top;
};

struct TaskOptions {
  std::vector<std::vector<int64_t>> prompts;  // each with at least one token
  int64_t samples = 1;                        // of each prompt; sample i has the seed seed + i
  int64_t max_tokens = 16;                    // of each sample
  nn::Sampling sampling;
  uint64_t seed = 0;
  int64_t stop = -1;           // the token that ends a sample; -1: none
  std::optional<int64_t> top;  // with scores of tokens, and so many of the likeliest at each place
  bool score_prompts = false;  // the prompts' tokens are scored, too
};

enum class EndReason { stop, length };

// A request, as the scheduler sees it. The functions are called on the scheduler's thread; choice
// i is sample i % samples of prompt i / samples.
class Task {
 public:
  virtual ~Task() = default;
  virtual const TaskOptions& options() const = 0;
  virtual bool cancelled() const = 0;
  // Scores of all tokens of the prompt except the first, one piece at a time.
  virtual void add_prompt_scores(size_t prompt, std::vector<TokenScore> scores) = 0;
  // False ends the choice with EndReason::stop. The logprob is NaN unless scores are wanted.
  virtual bool add_token(size_t choice, TokenScore score) = 0;
  virtual void end(size_t choice, EndReason reason) = 0;
  virtual void fail(int status, const std::string& message) = 0;  // of HTTP; nothing follows

  std::chrono::steady_clock::time_point submitted = std::chrono::steady_clock::now();
};
using TaskPointer = std::shared_ptr<Task>;

struct SchedulerOptions {
  int64_t slots = 8;
  int64_t queue = 64;   // requests that wait; more are refused
  int64_t piece = 128;  // tokens of prompts that are read between two decode steps
  // Prompts of the same length L are read in batches of batch_tokens / L rows, used or not, if they
  // have one piece. Without the batches, the time of short prompts on a GPU is that of launches.
  int64_t batch_tokens = 0;
  int64_t cache_bytes = 256 << 20;
};

class Scheduler {
 public:
  Scheduler(nn::LanguageModel& model, const SchedulerOptions& options, Metrics& metrics);
  // False if the task would have to wait and the queue is full.
  bool submit(TaskPointer task);
  void run();  // until stop(); tasks that are not finished fail with status 503
  void stop();
  bool idle() const;  // no task is queued or worked on

 private:
  using Clock = std::chrono::steady_clock;
  struct Queued {
    TaskPointer task;
    size_t next_prompt = 0;
  };
  // A prompt that is being read, or whose samples wait for slots.
  struct Reading {
    TaskPointer task;
    size_t prompt = 0;
    int64_t position = 0;    // tokens read
    nn::ModelState state;    // after `state.position` tokens, which may be less: pages follow
    PagePointer page;        // that ends at `position`, if the cache has one
    at::Tensor last_logits;  // [1, V], after the whole prompt, on the device of the model
    at::Tensor scored;       // the same [V] in float32 on the CPU, if scores are wanted
    float logsumexp = 0;     // of it
    int64_t next_sample = 0;
    std::shared_ptr<const void> place;  // see places_
  };
  struct Running {
    TaskPointer task;
    size_t choice = 0;
    // tokens that were accepted, and those of all steps launched
    int64_t made = 0;
    int64_t drawn = 0;
    int64_t prompt_length = 0;
    uint64_t seed = 0;
    uint64_t id = 0;  // a slot is used by one after the other
  };
  // A decode step that was launched: the ids of the sequences in its slots, 0 for none.
  struct Step {
    nn::DrawnTokens tokens;
    std::vector<uint64_t> ids;
    bool scores = false;
  };
  // The first token of a sample, drawn from the logits of its prompt.
  struct First {
    Running running;
    std::optional<size_t> slot;  // that the sample has taken; none if nothing follows
    nn::DrawnTokens token;
    at::Tensor scored;  // as in Reading
    float logsumexp = 0;
  };
  struct Drawn {
    TokenScore score;
    std::string error;
  };

  static int64_t tokens_to_read(const Reading& reading);
  bool take_queued();  // false when there is nothing to do and stop() was called
  void drop_cancelled();
  void read_prompts();
  int64_t next_tokens(const Reading& reading) const;
  int64_t rows_for(const Reading& reading) const;
  std::vector<Reading> take_batch(size_t rows);
  void read_batch(std::vector<Reading>& batch, int64_t rows);
  void read_piece(Reading& reading);
  void compute_piece(Reading& reading, const std::vector<int64_t>& tokens, at::Tensor& hidden);
  void score_piece(Reading& reading, const at::Tensor& hidden, int64_t begin);
  void finish_reading(Reading& reading, const at::Tensor& logits);
  void start_samples();
  bool start_sample(Reading& reading);  // false: it needs a slot, and none is free
  void accept_first(First& first);
  std::optional<size_t> free_slot() const;
  void decode();
  std::optional<Step> launch_step();
  void accept_step(const Step& step);
  ops::Draw draw_of(const Running& running) const;
  std::vector<Drawn> drawn_by(const Step& step) const;
  bool is_ahead() const { return model_.embedding.is_cuda(); }
  bool takes_part(const Step& step, size_t slot) const;
  static Drawn plain_token(int64_t token);
  static Drawn scored_token(const Running& running, int64_t token, const at::Tensor& row,
                            float logsumexp);
  bool accept(Running& running, Drawn drawn);  // false: the sequence has ended
  void drop(const TaskPointer& task);          // removes all that belongs to it
  void fail(const TaskPointer& task, const std::string& message);
  void fail_all();
  void update_metrics();

  nn::LanguageModel& model_;
  SchedulerOptions options_;
  Metrics& metrics_;
  nn::Slots slots_;
  PrefixCache cache_;
  std::vector<std::optional<Running>> running_;  // by slot
  std::optional<Step> pending_;                  // not accepted yet
  std::vector<First> first_tokens_;              // not accepted yet
  uint64_t last_id_ = 0;
  std::deque<Reading> reading_;
  std::deque<Reading> ready_;
  std::deque<Queued> waiting_;

  // Shared by the prompts that are being read or wait for a slot, at most one per slot. Any thread
  // can count them: use_count() is one more.
  const std::shared_ptr<const void> places_ = std::make_shared<int>();
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<TaskPointer> submitted_;
  int64_t queued_ = 0;  // tasks of submitted_ and waiting_ that no prompt was taken from
  bool stopping_ = false;
  bool working_ = false;
};

}  // namespace assay::serve
