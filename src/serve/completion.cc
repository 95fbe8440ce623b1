#include "serve/completion.h"

#include <torch/torch.h>

#include <nlohmann/json.hpp>
#include <random>

namespace assay::serve {
namespace {

using nlohmann::json;

uint64_t random_number() {
  thread_local std::random_device device;
  return uint64_t(device()) << 32 | device();
}

std::string dump(const json& document) {
  return document.dump(-1, ' ', false, json::error_handler_t::replace);
}

std::string event(const json& document) { return "data: " + dump(document) + "\n\n"; }

TaskOptions options_of(const CompletionRequest& request, const ServedModel& model) {
  TaskOptions options;
  options.prompts = request.prompts;
  options.samples = request.n;
  options.max_tokens = request.max_tokens;
  options.sampling = request.sampling;
  options.seed = request.seed ? *request.seed : random_number();
  options.stop = request.ignore_eos ? -1 : model.stop_token();
  options.top = request.logprobs;
  options.score_prompts = request.echo && request.logprobs;
  return options;
}

}  // namespace

Completion::Completion(CompletionRequest request, std::shared_ptr<const ServedModel> model,
                       std::shared_ptr<Reply> reply, Surroundings surroundings)
    : request_(std::move(request)),
      model_(std::move(model)),
      reply_(std::move(reply)),
      surroundings_(std::move(surroundings)),
      options_(options_of(request_, *model_)),
      id_(fmt::format("cmpl-{:016x}{:016x}", random_number(), random_number())),
      created_(std::chrono::system_clock::to_time_t(std::chrono::system_clock::now())),
      choices_(request_.prompts.size() * size_t(request_.n)),
      prompt_scores_(request_.prompts.size()) {
  if (!model_->texts) return;
  for (size_t i = 0; i < choices_.size(); ++i) {
    const auto& prompt = request_.prompts[prompt_of(i)];
    const bool after_text =
        std::ranges::any_of(prompt, [&](int64_t t) { return !bytes_of(t).empty(); });
    choices_[i].stream.emplace(*model_->texts, after_text, request_.stop);
    if (request_.echo) choices_[i].begin = count_characters(echo(prompt_of(i)).text);
  }
}

void Completion::write(const std::string& event) {
  if (!begun_) reply_->begin_stream("text/event-stream");
  begun_ = true;
  reply_->write(event);
}

const std::string& Completion::bytes_of(int64_t token) const {
  static const std::string none;
  return model_->texts ? model_->texts->bytes(token) : none;
}

void Completion::add_prompt_scores(size_t prompt, std::vector<TokenScore> scores) {
  auto& all = prompt_scores_[prompt];
  all.insert(all.end(), std::make_move_iterator(scores.begin()),
             std::make_move_iterator(scores.end()));
}

bool Completion::add_token(size_t index, TokenScore score) {
  Choice& choice = choices_[index];
  const int64_t token = score.token;
  choice.tokens.push_back(
      {.score = std::move(score), .begins_text = choice.stream && !choice.stream->after_text()});
  if (choice.stream) choice.text += choice.stream->add(token);
  place_tokens(choice);
  if (!choice.stream) {
    if (request_.stream) send_event(index);
    return true;
  }
  const bool stopped = choice.stream->stopped();
  if (request_.stream && !stopped && !choice.text.empty()) send_event(index);
  return !stopped;
}

void Completion::end(size_t index, EndReason reason) {
  Choice& choice = choices_[index];
  choice.ended = true;
  choice.reason = reason == EndReason::stop ? "stop" : "length";
  if (choice.stream && !choice.stream->stopped()) choice.text += choice.stream->finish();
  place_tokens(choice);
  choice.tokens.resize(choice.placed_tokens);
  if (request_.stream) send_event(index);
  if (++ended_ < choices_.size()) return;
  if (!request_.stream)
    return surroundings_.later([self = shared_from_this()] { self->send_whole(); });
  if (request_.include_usage) {
    json last = frame();
    last["choices"] = json::array();
    last["usage"] = usage();
    write(event(last));
  }
  write("data: [DONE]\n\n");
  reply_->end();
  surroundings_.answered(200);
}

void Completion::fail(int status, const std::string& message) {
  const std::string body = error_body(status, message);
  if (begun_) {
    write("data: " + body + "\n\n");
    reply_->end();
  } else {
    reply_->send(status, "application/json", body);
  }
  surroundings_.answered(status);
}

// A token has a place when its text begins to be released. Tokens past the end that a stop string
// has made never have one. The token that ends a document has no text and has a place at the end.
void Completion::place_tokens(Choice& choice) {
  if (!choice.stream) {
    choice.placed_tokens = choice.tokens.size();
    return;
  }
  const std::vector<size_t>& offsets = choice.stream->offsets();
  for (size_t& i = choice.placed_tokens; i < offsets.size(); ++i)
    choice.tokens[i].offset = choice.begin + offsets[i];
}

// The prompt of a choice as part of its answer, with scores where those are wanted.
Completion::Echo Completion::echo(size_t prompt) const {
  Echo out;
  std::optional<TextStream> stream;
  if (model_->texts)
    stream.emplace(*model_->texts, /*after_text=*/false, std::vector<std::string>());
  for (const int64_t token : request_.prompts[prompt]) {
    const size_t i = out.tokens.size();
    Placed placed{.score = {.token = token, .logprob = 0, .top = {}},
                  .scored = i > 0,
                  .begins_text = stream && !stream->after_text()};
    if (i > 0 && i <= prompt_scores_[prompt].size()) placed.score = prompt_scores_[prompt][i - 1];
    out.tokens.push_back(std::move(placed));
    if (stream) out.text += stream->add(token);
  }
  if (!stream) return out;
  out.text += stream->finish();
  for (size_t i = 0; i < out.tokens.size(); ++i) out.tokens[i].offset = stream->offsets()[i];
  return out;
}

json Completion::logprobs_json(const std::vector<Placed>& tokens) const {
  json names = json::array();
  json logprobs = json::array();
  json top = json::array();
  json offsets = json::array();
  for (const auto& [score, scored, begins_text, offset] : tokens) {
    names.push_back(model_->token_name(score.token, begins_text));
    offsets.push_back(offset);
    logprobs.push_back(scored ? json(score.logprob) : json());
    top.push_back(nullptr);
    if (!scored) continue;
    // Several tokens may have one name; the likeliest has it, or else the token itself.
    json likeliest = {{names.back().get<std::string>(), score.logprob}};
    for (const auto& [token, logprob] : score.top) {
      json& place = likeliest[model_->token_name(token, begins_text)];
      if (place.is_null() || place.get<float>() < logprob) place = logprob;
    }
    top.back() = std::move(likeliest);
  }
  return {{"tokens", names},
          {"token_logprobs", logprobs},
          {"top_logprobs", top},
          {"text_offset", offsets}};
}

json Completion::frame() const {
  return {
      {"id", id_}, {"object", "text_completion"}, {"created", created_}, {"model", model_->name}};
}

json Completion::usage() const {
  size_t read = 0;
  size_t made = 0;
  for (const auto& prompt : request_.prompts) read += prompt.size();
  for (const Choice& choice : choices_) made += choice.tokens.size();
  return {{"prompt_tokens", read}, {"completion_tokens", made}, {"total_tokens", read + made}};
}

json Completion::choice_json(size_t index) const {
  const Choice& choice = choices_[index];
  Echo all = request_.echo ? echo(prompt_of(index)) : Echo();
  all.text += choice.text;
  all.tokens.insert(all.tokens.end(), choice.tokens.begin(), choice.tokens.end());
  json out = {{"index", index},
              {"text", all.text},
              {"logprobs", nullptr},
              {"finish_reason", choice.reason}};
  if (request_.logprobs) out["logprobs"] = logprobs_json(all.tokens);
  if (request_.return_token_ids || !model_->texts) {
    out["prompt_token_ids"] = request_.prompts[prompt_of(index)];
    out["token_ids"] = json::array();
    for (const Placed& placed : choice.tokens) out["token_ids"].push_back(placed.score.token);
  }
  return out;
}

// Sends the text and the tokens that were added to a choice since its last event.
void Completion::send_event(size_t index) {
  Choice& choice = choices_[index];
  Echo part = request_.echo && !choice.echo_sent ? echo(prompt_of(index)) : Echo();
  choice.echo_sent = true;
  const auto next = choice.tokens.begin() + std::ptrdiff_t(choice.sent_tokens);
  const auto last = choice.tokens.begin() + std::ptrdiff_t(choice.placed_tokens);
  part.tokens.insert(part.tokens.end(), next, last);
  choice.sent_tokens = choice.placed_tokens;
  part.text += choice.text;
  choice.text.clear();
  json one = {{"index", index}, {"text", part.text}, {"logprobs", nullptr}};
  one["finish_reason"] = choice.ended ? json(choice.reason) : json();
  if (request_.logprobs) one["logprobs"] = logprobs_json(part.tokens);
  if (request_.return_token_ids || !model_->texts) {
    one["token_ids"] = json::array();
    for (auto token = next; token != last; ++token) one["token_ids"].push_back(token->score.token);
  }
  json document = frame();
  document["choices"] = json::array({one});
  write(event(document));
}

// Each choice becomes text before the next one is made: log-probabilities take much more memory as
// JSON values.
void Completion::send_whole() try {
  std::string body = dump(frame());
  body.back() = ',';
  body += "\"choices\":[";
  for (size_t i = 0; i < choices_.size(); ++i) body += (i > 0 ? "," : "") + dump(choice_json(i));
  body += "],\"usage\":" + dump(usage()) + "}";
  reply_->send(200, "application/json", std::move(body));
  surroundings_.answered(200);
} catch (const std::bad_alloc&) {
  fail(500, "out of memory");
}

}  // namespace assay::serve
