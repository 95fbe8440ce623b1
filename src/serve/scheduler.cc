#include "serve/scheduler.h"

#include <torch/torch.h>

#include <cmath>
#include <set>

#include "base/error.h"
#include "ops/core/asynchronous.h"
#include "ops/core/parallel.h"

namespace assay::serve {
namespace {

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// The first line of an error of torch says what happened; the rest is its stack.
std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

// The `count` likeliest tokens of logits [V] in float32, equal ones by id.
std::vector<std::pair<int64_t, float>> likeliest(const at::Tensor& logits, float logsumexp,
                                                 int64_t count) {
  const float* values = logits.data_ptr<float>();
  std::vector<std::pair<int64_t, float>> best;  // by falling logit
  for (int64_t id = 0; id < logits.size(0) && count > 0; ++id) {
    const bool full = int64_t(best.size()) == count;
    if (full && !(values[id] > best.back().second)) continue;
    if (full) best.pop_back();
    const auto place =
        std::ranges::find_if(best, [&](const auto& b) { return values[id] > b.second; });
    best.insert(place, {id, values[id]});
  }
  for (auto& [id, value] : best) value -= logsumexp;
  return best;
}

TokenScore score_of(const at::Tensor& logits, float logsumexp, int64_t token, int64_t top) {
  const float logprob = logits.data_ptr<float>()[token] - logsumexp;
  if (!std::isfinite(logprob)) fail<Error>("the model gives the log-probability {}", logprob);
  return {token, logprob, likeliest(logits, logsumexp, top)};
}

at::Tensor on_device(const std::vector<int64_t>& tokens, int64_t rows,
                     const nn::LanguageModel& model) {
  return ops::to_device(at::tensor(tokens, at::kLong).view({rows, -1}), model.embedding.device());
}

// A shorter piece takes about as long as one of this many tokens.
constexpr int64_t kShortPiece = 64;
// Tokens for which a slot on CUDA has memory from the start.
constexpr int64_t kSlotTokens = 1024;

}  // namespace

Scheduler::Scheduler(nn::LanguageModel& model, const SchedulerOptions& options, Metrics& metrics)
    : model_(model),
      options_(options),
      metrics_(metrics),
      slots_(model, options.slots, std::min(kSlotTokens, model.max_time())),
      cache_(options.cache_bytes),
      running_(size_t(options.slots)) {}

bool Scheduler::submit(TaskPointer task) {
  const std::lock_guard lock(mutex_);
  const int64_t free_places = options_.slots - (places_.use_count() - 1);
  if (queued_ - free_places >= options_.queue) return false;
  ++queued_;
  metrics_.queued = queued_;
  submitted_.push_back(std::move(task));
  changed_.notify_one();
  return true;
}

void Scheduler::stop() {
  const std::lock_guard lock(mutex_);
  stopping_ = true;
  changed_.notify_one();
}

bool Scheduler::idle() const {
  const std::lock_guard lock(mutex_);
  return submitted_.empty() && !working_;
}

void Scheduler::run() {
  const at::NoGradGuard no_grad;
  while (take_queued()) {
    drop_cancelled();
    read_prompts();
    start_samples();
    decode();
    update_metrics();
  }
  fail_all();
}

bool Scheduler::take_queued() {
  std::unique_lock lock(mutex_);
  const auto has_work = [&] {
    const bool in_slot = std::ranges::any_of(running_, [](const auto& r) { return r.has_value(); });
    return in_slot || !reading_.empty() || !ready_.empty() || !waiting_.empty();
  };
  working_ = has_work();
  changed_.wait(lock, [&] { return stopping_ || working_ || !submitted_.empty(); });
  if (stopping_) return false;
  for (TaskPointer& task : submitted_) waiting_.push_back({std::move(task)});
  submitted_.clear();
  working_ = has_work();
  // One prompt of each request in turn, so that a request of many prompts does not block others.
  while (!waiting_.empty() && reading_.size() + ready_.size() < size_t(options_.slots)) {
    Queued next = std::move(waiting_.front());
    waiting_.pop_front();
    queued_ -= next.next_prompt == 0;
    reading_.push_back({.task = next.task, .prompt = next.next_prompt++, .place = places_});
    if (next.next_prompt < next.task->options().prompts.size()) waiting_.push_back(std::move(next));
  }
  metrics_.queued = queued_;
  return true;
}

void Scheduler::drop_cancelled() {
  std::vector<TaskPointer> gone;
  const auto look = [&](const TaskPointer& task) {
    if (task->cancelled() && std::ranges::find(gone, task) == gone.end()) gone.push_back(task);
  };
  for (const auto& running : running_)
    if (running) look(running->task);
  for (const Reading& reading : reading_) look(reading.task);
  for (const Reading& reading : ready_) look(reading.task);
  for (const Queued& queued : waiting_) look(queued.task);
  for (const TaskPointer& task : gone) {
    drop(task);
    ++metrics_.cancelled;
  }
}

void Scheduler::drop(const TaskPointer& task) {
  for (size_t slot = 0; slot < running_.size(); ++slot)
    if (running_[slot] && running_[slot]->task == task) {
      running_[slot].reset();
      slots_.clear(int64_t(slot));
    }
  const auto same = [&](const auto& entry) { return entry.task == task; };
  std::erase_if(reading_, same);
  std::erase_if(ready_, same);
  const std::lock_guard lock(mutex_);
  for (const Queued& queued : waiting_) queued_ -= same(queued) && queued.next_prompt == 0;
  std::erase_if(waiting_, same);
  metrics_.queued = queued_;
}

void Scheduler::fail(const TaskPointer& task, const std::string& message) {
  drop(task);
  task->fail(500, first_line(message));
}

void Scheduler::fail_all() {
  std::set<TaskPointer> tasks;
  for (const auto& running : running_)
    if (running) tasks.insert(running->task);
  for (const Reading& reading : reading_) tasks.insert(reading.task);
  for (const Reading& reading : ready_) tasks.insert(reading.task);
  for (const Queued& queued : waiting_) tasks.insert(queued.task);
  {
    const std::lock_guard lock(mutex_);
    tasks.insert(submitted_.begin(), submitted_.end());
    submitted_.clear();
  }
  for (const TaskPointer& task : tasks) {
    drop(task);
    task->fail(503, "the server is stopping");
  }
}

// Pieces of options_.piece tokens in total, or one.
void Scheduler::read_prompts() {
  if (reading_.empty()) return;
  const auto begin = Clock::now();
  int64_t left = options_.piece;
  do {
    const int64_t rows = rows_for(reading_.front());
    std::vector<Reading> batch = take_batch(size_t(rows));
    left -= rows * std::max(next_tokens(batch[0]), kShortPiece / rows);
    read_batch(batch, rows);
    for (Reading& reading : batch) {
      if (!reading.task) continue;  // it has failed
      const bool whole = reading.position >= tokens_to_read(reading);
      (whole ? ready_ : reading_).push_back(std::move(reading));
    }
  } while (!reading_.empty() && next_tokens(reading_.front()) <= left);
  metrics_.prefill_seconds += seconds_since(begin);
}

int64_t Scheduler::next_tokens(const Reading& reading) const {
  return std::min(options_.piece, tokens_to_read(reading) - reading.position);
}

// Number of rows of the batch in which the next piece is read. It depends on the prompt alone.
int64_t Scheduler::rows_for(const Reading& reading) const {
  const int64_t length = tokens_to_read(reading);
  if (length == 0 || length >= options_.piece) return 1;
  return std::clamp<int64_t>(options_.batch_tokens / length, 1, options_.slots);
}

// The prompt whose turn it is, and up to rows − 1 others that are read in the same batch.
std::vector<Scheduler::Reading> Scheduler::take_batch(size_t rows) {
  const int64_t length = tokens_to_read(reading_.front());
  std::vector<Reading> batch;
  std::deque<Reading> others;
  for (Reading& reading : reading_) {
    const bool joins = batch.empty() || tokens_to_read(reading) == length;
    if (joins && batch.size() < rows) batch.push_back(std::move(reading));
    else others.push_back(std::move(reading));
  }
  reading_ = std::move(others);
  return batch;
}

// Reads the next piece of a prompt, or whole prompts of the same length. Those whose task fails
// have no task afterwards.
void Scheduler::read_batch(std::vector<Reading>& batch, int64_t rows) {
  const auto attempt = [&](const Reading& reading, auto&& work) {
    const TaskPointer task = reading.task;
    try {
      if (task) work();
    } catch (const std::exception& error) {
      for (Reading& other : batch)
        if (other.task == task) other.task = nullptr;
      fail(task, error.what());
    }
  };
  if (rows == 1) return attempt(batch[0], [&] { read_piece(batch[0]); });
  const int64_t length = tokens_to_read(batch[0]);
  std::vector<int64_t> tokens;
  for (const Reading& reading : batch) {
    const std::vector<int64_t>& prompt = reading.task->options().prompts[reading.prompt];
    tokens.insert(tokens.end(), prompt.begin(), prompt.begin() + length);
  }
  tokens.resize(size_t(rows * length), 0);
  nn::ModelState state;
  // [rows, T, d_model], [rows, V]
  at::Tensor hidden;
  at::Tensor logits;
  for (size_t i = 0; i < batch.size(); ++i)
    attempt(batch[i], [&] {
      if (!logits.defined()) {
        state = {};
        hidden = model_.hidden(on_device(tokens, rows, model_), state);
        logits = model_.logits_of_hidden(hidden.select(1, -1));
      }
      Reading& reading = batch[i];
      reading.state = nn::row_of(state, int64_t(i));
      reading.position = length;
      metrics_.prompt_tokens += length;
      const TaskOptions& options = reading.task->options();
      if (options.score_prompts) score_piece(reading, hidden.narrow(0, int64_t(i), 1), 0);
      if (options.max_tokens > 0) finish_reading(reading, logits.narrow(0, int64_t(i), 1));
    });
}

// The last token of a prompt predicts what follows it, so it is not read if nothing follows.
int64_t Scheduler::tokens_to_read(const Reading& reading) {
  const TaskOptions& options = reading.task->options();
  return std::ssize(options.prompts[reading.prompt]) - (options.max_tokens == 0 ? 1 : 0);
}

// Reads the next piece of the prompt, or takes what it leaves from the cache.
void Scheduler::read_piece(Reading& reading) {
  const TaskOptions& options = reading.task->options();
  const std::vector<int64_t>& prompt = options.prompts[reading.prompt];
  const int64_t length = tokens_to_read(reading);
  if (length == 0) return;
  at::Tensor hidden;  // [1, T, d_model]
  do {
    const int64_t begin = reading.position;
    const int64_t end = std::min(begin + options_.piece, length);
    const std::vector<int64_t> tokens(prompt.begin() + begin, prompt.begin() + end);
    const bool whole = end - begin == options_.piece;
    const bool follows = begin == 0 || reading.page;
    const PagePointer page = whole && follows ? cache_.find(reading.page, tokens) : nullptr;
    if (page) {
      reading.page = page;
      hidden = page->hidden;
      metrics_.cached_tokens += end - begin;
    } else {
      compute_piece(reading, tokens, hidden);
      reading.page =
          whole && follows ? cache_.add(reading.page, tokens, reading.state, hidden) : nullptr;
    }
    reading.position = end;
    metrics_.prompt_tokens += end - begin;
    if (options.score_prompts) score_piece(reading, hidden, begin);
    // Pages cost nothing unless their tokens are scored, so the next piece follows at once.
    if (!page || options.score_prompts) break;
  } while (reading.position < length);
  if (reading.position < length || options.max_tokens == 0) return;
  if (options.max_tokens > 1 && reading.state.position < length)
    reading.state = state_after(reading.page);
  finish_reading(reading, model_.logits_of_hidden(hidden.select(1, -1)));
}

void Scheduler::compute_piece(Reading& reading, const std::vector<int64_t>& tokens,
                              at::Tensor& hidden) {
  if (reading.state.position < reading.position) reading.state = state_after(reading.page);
  hidden = model_.hidden(on_device(tokens, 1, model_), reading.state);
}

// The tokens that the piece from `begin` on predicts: those after its own.
void Scheduler::score_piece(Reading& reading, const at::Tensor& hidden, int64_t begin) {
  const TaskOptions& options = reading.task->options();
  const std::vector<int64_t>& prompt = options.prompts[reading.prompt];
  const int64_t count = std::min(hidden.size(1), int64_t(prompt.size()) - begin - 1);
  const int64_t at_once = std::max<int64_t>(16, (int64_t{1} << 22) / model_.spec.config.vocab_size);
  std::vector<TokenScore> scores(static_cast<size_t>(count));
  for (int64_t first = 0; first < count; first += at_once) {
    const int64_t rows = std::min(at_once, count - first);
    const at::Tensor logits = model_.logits_of_hidden(hidden[0].slice(0, first, first + rows))
                                  .to(at::kCPU, at::kFloat)
                                  .contiguous();
    const at::Tensor logsumexp = logits.logsumexp(1);
    const float* normaliser = logsumexp.data_ptr<float>();
    ops::at_parallel_for()(rows, 1, [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; ++i) {
        const int64_t token = prompt[size_t(begin + first + i + 1)];
        scores[size_t(first + i)] =
            score_of(logits[i], normaliser[i], token, options.top.value_or(0));
      }
    });
  }
  if (count > 0) reading.task->add_prompt_scores(reading.prompt, std::move(scores));
}

// `logits` [1, V] are those after the last token of the prompt.
void Scheduler::finish_reading(Reading& reading, const at::Tensor& logits) {
  reading.last_logits = logits;
  if (!reading.task->options().top) return;
  reading.scored = logits[0].to(at::kCPU, at::kFloat).contiguous();
  reading.logsumexp = reading.scored.logsumexp(0).item<float>();
}

void Scheduler::start_samples() {
  std::deque<Reading> waiting;  // for a slot
  while (!ready_.empty()) {
    Reading& first = ready_.front();
    const TaskPointer task = first.task;
    try {
      bool started = true;
      while (started && first.next_sample < task->options().samples) started = start_sample(first);
      if (!started) waiting.push_back(std::move(first));
      ready_.pop_front();
    } catch (const std::exception& error) {
      std::erase_if(waiting, [&](const Reading& reading) { return reading.task == task; });
      fail(task, error.what());
    }
  }
  ready_ = std::move(waiting);
}

std::optional<size_t> Scheduler::free_slot() const {
  for (size_t slot = 0; slot < running_.size(); ++slot)
    if (!running_[slot]) return slot;
  return {};
}

bool Scheduler::start_sample(Reading& reading) {
  const TaskOptions& options = reading.task->options();
  const std::optional<size_t> slot = free_slot();
  if (!slot && options.max_tokens > 1) return false;
  const int64_t sample = reading.next_sample++;
  if (reading.next_sample == options.samples) reading.place.reset();
  Running running{.task = reading.task,
                  .choice = reading.prompt * size_t(options.samples) + size_t(sample),
                  .prompt_length = reading.position,
                  .seed = options.seed + uint64_t(sample),
                  .id = ++last_id_};
  if (options.max_tokens == 0) {
    reading.task->end(running.choice, EndReason::length);
    return true;
  }
  const ops::Draw draw = draw_of(running);
  const at::Tensor token = ops::sample(reading.last_logits, std::span(&draw, 1));
  running.drawn = 1;
  First first{.running = std::move(running),
              .token = nn::DrawnTokens(token),
              .scored = reading.scored,
              .logsumexp = reading.logsumexp};
  if (options.max_tokens > 1) {
    first.slot = slot;
    running_[*slot] = first.running;
    slots_.put(int64_t(*slot), reading.state, token);
  }
  if (is_ahead()) first_tokens_.push_back(std::move(first));
  else accept_first(first);
  return true;
}

// The sample may have been dropped since its token was drawn.
void Scheduler::accept_first(First& first) {
  std::optional<Running>* in_slot = first.slot ? &running_[*first.slot] : nullptr;
  if (in_slot && !(*in_slot && (*in_slot)->id == first.running.id)) return;
  Running& running = in_slot ? **in_slot : first.running;
  const TaskPointer task = running.task;
  metrics_.first_token_seconds += seconds_since(task->submitted);
  ++metrics_.first_tokens;
  const int64_t token = first.token.wait()[0];
  Drawn drawn = task->options().top ? scored_token(running, token, first.scored, first.logsumexp)
                                    : plain_token(token);
  if (!drawn.error.empty()) throw std::runtime_error(drawn.error);
  if (accept(running, std::move(drawn)) || !in_slot) return;
  in_slot->reset();
  if (slots_.used(int64_t(*first.slot))) slots_.clear(int64_t(*first.slot));
}

ops::Draw Scheduler::draw_of(const Running& running) const {
  return nn::draw_of(running.task->options().sampling,
                     nn::uniform_at(running.seed, running.prompt_length + running.drawn));
}

Scheduler::Drawn Scheduler::plain_token(int64_t token) try {
  return {{.token = nn::checked_token(token), .logprob = NAN, .top = {}}, ""};
} catch (const std::exception& error) {
  return {{}, error.what()};
}

Scheduler::Drawn Scheduler::scored_token(const Running& running, int64_t token,
                                         const at::Tensor& row, float logsumexp) try {
  return {score_of(row, logsumexp, nn::checked_token(token), *running.task->options().top), ""};
} catch (const std::exception& error) {
  return {{}, error.what()};
}

// A sequence that ended, or was dropped, may have left its slot since the step was launched.
bool Scheduler::takes_part(const Step& step, size_t slot) const {
  return running_[slot] && running_[slot]->id == step.ids[slot];
}

// The tokens of a step. Logits are copied to the host only if scores are wanted.
std::vector<Scheduler::Drawn> Scheduler::drawn_by(const Step& step) const {
  std::vector<Drawn> drawn(running_.size());
  const std::span<const int64_t> tokens = step.tokens.wait();
  const at::Tensor rows =
      step.scores ? slots_.logits().to(at::kCPU, at::kFloat).contiguous() : at::Tensor();
  const at::Tensor logsumexp = step.scores ? rows.logsumexp(1) : at::Tensor();
  ops::at_parallel_for()(slots_.count(), 1, [&](int64_t from, int64_t to) {
    for (int64_t slot = from; slot < to; ++slot) {
      if (!takes_part(step, size_t(slot))) continue;
      const Running& running = *running_[size_t(slot)];
      const int64_t token = tokens[size_t(slot)];
      const bool scored = running.task->options().top.has_value();
      drawn[size_t(slot)] =
          scored ? scored_token(running, token, rows[slot], logsumexp.data_ptr<float>()[slot])
                 : plain_token(token);
    }
  });
  return drawn;
}

bool Scheduler::accept(Running& running, Drawn drawn) {
  const TaskOptions& options = running.task->options();
  const int64_t token = drawn.score.token;
  ++running.made;
  ++metrics_.generated_tokens;
  const bool goes_on = running.task->add_token(running.choice, std::move(drawn.score));
  const bool stopped = !goes_on || token == options.stop;
  if (!stopped && running.made < options.max_tokens) return true;
  running.task->end(running.choice, stopped ? EndReason::stop : EndReason::length);
  return false;
}

// The next token of every slot in use.
void Scheduler::decode() {
  const auto begin = Clock::now();
  try {
    const std::optional<Step> before = std::exchange(pending_, launch_step());
    if (before) accept_step(*before);
    for (First& first : std::exchange(first_tokens_, {})) {
      try {
        accept_first(first);
      } catch (const std::exception& error) {
        fail(TaskPointer(first.running.task), error.what());
      }
    }
    // Scores need the logits, which the next step overwrites.
    if (pending_ && (pending_->scores || !is_ahead())) accept_step(*std::exchange(pending_, {}));
  } catch (const std::exception& error) {  // out of memory, for example: nobody's step was made
    pending_.reset();
    for (const First& first : std::exchange(first_tokens_, {}))
      if (!first.slot) fail(TaskPointer(first.running.task), error.what());
    for (size_t slot = 0; slot < running_.size(); ++slot)
      if (running_[slot]) fail(TaskPointer(running_[slot]->task), error.what());
  }
  metrics_.decode_seconds += seconds_since(begin);
}

std::optional<Scheduler::Step> Scheduler::launch_step() {
  std::vector<ops::Draw> draws(running_.size(), {.temperature = 0});
  std::vector<uint64_t> ids(running_.size(), 0);
  bool any = false;
  bool scores = false;
  for (size_t slot = 0; slot < running_.size(); ++slot) {
    if (!running_[slot] || !slots_.used(int64_t(slot))) continue;
    Running& running = *running_[slot];
    any = true;
    scores = scores || running.task->options().top;
    draws[slot] = draw_of(running);
    ids[slot] = running.id;
    ++running.drawn;
  }
  if (!any) return {};
  Step step{.tokens = slots_.step(draws), .ids = std::move(ids), .scores = scores};
  for (size_t slot = 0; slot < running_.size(); ++slot)
    if (step.ids[slot] && running_[slot]->drawn == running_[slot]->task->options().max_tokens)
      slots_.clear(int64_t(slot));  // nothing reads its last token
  return step;
}

void Scheduler::accept_step(const Step& step) {
  std::vector<Drawn> drawn = drawn_by(step);
  for (size_t slot = 0; slot < running_.size(); ++slot) {
    if (!takes_part(step, slot)) continue;
    if (!drawn[slot].error.empty()) {
      fail(TaskPointer(running_[slot]->task), drawn[slot].error);
    } else if (!accept(*running_[slot], std::move(drawn[slot]))) {
      running_[slot].reset();
      if (slots_.used(int64_t(slot))) slots_.clear(int64_t(slot));
    }
  }
  ++metrics_.decode_steps;
}

void Scheduler::update_metrics() {
  metrics_.reading = int64_t(reading_.size());
  metrics_.ready = int64_t(ready_.size());
  metrics_.decoding = std::ranges::count_if(running_, [](const auto& r) { return r.has_value(); });
  metrics_.cache_bytes = cache_.bytes();
  metrics_.cache_pages = cache_.pages();
}

}  // namespace assay::serve
