#pragma once
// One completion request: its choices as they grow, and its answer, whole or as a stream.
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "serve/api.h"
#include "serve/http.h"
#include "serve/metrics.h"
#include "serve/scheduler.h"

namespace assay::serve {

class Completion final : public Task, public std::enable_shared_from_this<Completion> {
 public:
  // `later` runs work on another thread than the scheduler's: writing a large answer takes time.
  // `answered` is told the status of the answer once.
  struct Surroundings {
    std::function<void(std::function<void()>)> later;
    std::function<void(int status)> answered;
  };
  Completion(CompletionRequest request, std::shared_ptr<const ServedModel> model,
             std::shared_ptr<Reply> reply, Surroundings surroundings);

  const TaskOptions& options() const override { return options_; }
  bool cancelled() const override { return reply_->client_gone(); }
  void add_prompt_scores(size_t prompt, std::vector<TokenScore> scores) override;
  bool add_token(size_t choice, TokenScore score) override;
  void end(size_t choice, EndReason reason) override;
  void fail(int status, const std::string& message) override;

 private:
  // A token of an answer, with its place in the text.
  struct Placed {
    TokenScore score;
    bool scored = true;        // false for the first token of a prompt
    bool begins_text = false;  // no token before it has text
    size_t offset = 0;         // characters before it, with an echo
  };
  struct Echo {
    std::string text;
    std::vector<Placed> tokens;
  };
  struct Choice {
    std::optional<TextStream> stream;
    std::string text;  // released, without an echo; of a stream: and not sent
    std::vector<Placed> tokens;
    size_t begin = 0;          // characters of the echo
    size_t placed_tokens = 0;  // whose text has begun to be released
    size_t sent_tokens = 0;    // of a stream
    bool echo_sent = false;
    bool ended = false;
    const char* reason = "length";
  };

  size_t prompt_of(size_t choice) const { return choice / size_t(options_.samples); }
  const std::string& bytes_of(int64_t token) const;
  Echo echo(size_t prompt) const;
  static void place_tokens(Choice& choice);
  nlohmann::json logprobs_json(const std::vector<Placed>& tokens) const;
  nlohmann::json frame() const;  // the fields that every answer and event has
  nlohmann::json usage() const;
  nlohmann::json choice_json(size_t index) const;
  void write(const std::string& event);  // begins the stream, too
  void send_event(size_t index);
  void send_whole();

  const CompletionRequest request_;
  const std::shared_ptr<const ServedModel> model_;
  const std::shared_ptr<Reply> reply_;
  const Surroundings surroundings_;
  TaskOptions options_;
  std::string id_;
  int64_t created_;
  std::vector<Choice> choices_;
  std::vector<std::vector<TokenScore>> prompt_scores_;  // by prompt, without the first token
  size_t ended_ = 0;
  bool begun_ = false;
};

}  // namespace assay::serve
