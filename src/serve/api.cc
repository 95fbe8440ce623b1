#include "serve/api.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/error.h"

namespace assay::serve {
namespace {

using nlohmann::json;

constexpr int kDeepest = 16;  // copying and printing deeper JSON could overflow the stack

template <class... Args>
[[noreturn]] void refuse(const std::string& param, fmt::format_string<Args...> format,
                         Args&&... args) {
  throw ApiError(400, fmt::format(format, std::forward<Args>(args)...), param);
}

// For a message.
std::string shortened(const std::string& text) {
  constexpr size_t kLongest = 60;
  return text.size() > kLongest ? valid_utf8(text.substr(0, kLongest)) + "…" : text;
}
std::string shown(const json& value) {
  return shortened(value.dump(-1, ' ', false, json::error_handler_t::replace));
}

// The fields of a request. Absent and null are the same.
class Fields {
 public:
  explicit Fields(const json& body) : body_(body) {}

  const json* find(const std::string& name) {
    known_.push_back(name);
    const auto found = body_.find(name);
    return found == body_.end() || found->is_null() ? nullptr : &*found;
  }
  std::optional<int64_t> integer(const std::string& name, int64_t least, int64_t most) {
    const json* value = find(name);
    if (!value) return {};
    const bool fits = value->is_number_integer() && !(value->is_number_unsigned() &&
                                                      value->get<uint64_t>() > uint64_t(INT64_MAX));
    const int64_t number = fits ? value->get<int64_t>() : 0;
    if (!fits || number < least || number > most)
      refuse(name, "'{}' is {}; expected an integer from {} to {}", name, shown(*value), least,
             most);
    return number;
  }
  double number(const std::string& name, double otherwise) {
    const json* value = find(name);
    if (value && !value->is_number())
      refuse(name, "'{}' is {}; expected a number", name, shown(*value));
    return value ? value->get<double>() : otherwise;
  }
  bool boolean(const std::string& name) {
    const json* value = find(name);
    if (value && !value->is_boolean())
      refuse(name, "'{}' is {}; expected true or false", name, shown(*value));
    return value && value->get<bool>();
  }
  std::optional<std::string> string(const std::string& name) {
    const json* value = find(name);
    if (!value) return {};
    if (!value->is_string()) refuse(name, "'{}' is {}; expected a string", name, shown(*value));
    return value->get<std::string>();
  }
  // A field of OpenAI's that has no effect here may only have the value that asks for none. It is
  // not suggested in the place of an unknown field.
  void only(const std::string& name, auto&& is_neutral, const std::string& allowed) {
    const json* value = find(name);
    known_.pop_back();
    unsupported_.push_back(name);
    if (value && !is_neutral(*value))
      refuse(name, "'{}' = {} is not supported; {}", name, shown(*value), allowed);
  }
  void no_others() const {
    for (const auto& [name, value] : body_.items())
      if (!std::ranges::count(known_, name) && !std::ranges::count(unsupported_, name))
        refuse(shortened(name), "unknown field '{}'{}", shortened(name),
               did_you_mean(name, known_));
  }

 private:
  const json& body_;
  std::vector<std::string> known_;
  std::vector<std::string> unsupported_;
};

std::vector<int64_t> token_list(const json& list, const std::string& param,
                                const ServedModel& model) {
  if (list.empty())
    refuse(param, "'{}' has an empty list of tokens; at least one is needed", param);
  std::vector<int64_t> tokens;
  for (const json& value : list) {
    if (!value.is_number_integer())
      refuse(param, "'{}' has {} in a list of tokens; expected integers", param, shown(value));
    if (value.is_number_unsigned() && value.get<uint64_t>() > uint64_t(INT64_MAX))
      refuse(param, "'{}': token {} is outside the model's vocabulary", param, shown(value));
    model.check_token(value.get<int64_t>(), param);
    tokens.push_back(value.get<int64_t>());
  }
  return tokens;
}

// A document begins after a separator, so this is what an empty text is replaced with.
std::vector<int64_t> text_tokens(const std::string& text, ServedModel& model) {
  std::vector<int64_t> tokens = model.encode(text, "prompt");
  if (tokens.empty()) tokens = {model.need_tokenizer("prompt").separator()};
  return tokens;
}

std::vector<std::vector<int64_t>> parse_prompts(const json* prompt, ServedModel& model) {
  constexpr auto kExpected =
      "a string, a list of strings, a list of token ids, or a list of such lists";
  if (!prompt) return {text_tokens("", model)};
  if (prompt->is_string()) return {text_tokens(prompt->get_ref<const std::string&>(), model)};
  if (!prompt->is_array() || prompt->empty())
    refuse("prompt", "'prompt' is {}; expected {}", shown(*prompt), kExpected);
  if (prompt->front().is_number()) return {token_list(*prompt, "prompt", model)};
  if (int64_t(prompt->size()) > model.limits.choices)
    refuse("prompt", "'prompt' has {} prompts; at most {} are allowed", prompt->size(),
           model.limits.choices);
  std::vector<std::vector<int64_t>> prompts;
  for (const json& one : *prompt) {
    if (one.is_string() && prompt->front().is_string())
      prompts.push_back(text_tokens(one.get_ref<const std::string&>(), model));
    else if (one.is_array() && prompt->front().is_array())
      prompts.push_back(token_list(one, "prompt", model));
    else refuse("prompt", "'prompt' has {} in a list; expected {}", shown(one), kExpected);
  }
  return prompts;
}

std::vector<std::string> parse_stop(const json* stop, const ServedModel& model) {
  if (!stop) return {};
  const json list = stop->is_array() ? *stop : json::array({*stop});
  if (int64_t(list.size()) > model.limits.stop_strings)
    refuse("stop", "'stop' has {} strings; at most {} are allowed", list.size(),
           model.limits.stop_strings);
  std::vector<std::string> words;
  for (const json& word : list) {
    if (!word.is_string())
      refuse("stop", "'stop' has {}; expected a string or a list of strings", shown(word));
    words.push_back(word.get<std::string>());
    if (words.back().empty() || int64_t(words.back().size()) > model.limits.stop_bytes)
      refuse("stop", "'stop' has a string of {} bytes; expected 1 to {}", words.back().size(),
             model.limits.stop_bytes);
  }
  if (!words.empty()) model.need_tokenizer("stop");
  return words;
}

void check_sampling(const std::string& param, const nn::Sampling& sampling) {
  try {
    nn::check(sampling);
  } catch (const BadInput& error) {
    throw ApiError(400, error.what(), param);
  }
}

void check_model(Fields& fields, const ServedModel& model) {
  if (const auto name = fields.string("model")) check_model_name(*name, model);
}

void refuse_unsupported(Fields& fields, int64_t n) {
  const auto zero = [](const json& value) { return value.is_number() && value.get<double>() == 0; };
  const auto empty = [](const json& value) { return value.empty() || value == ""; };
  fields.only("frequency_penalty", zero, "leave it out, or give 0");
  fields.only("presence_penalty", zero, "leave it out, or give 0");
  fields.only("logit_bias", empty, "leave it out");
  fields.only("suffix", empty, "leave it out");
  fields.only("best_of", [n](const json& value) { return value == n; }, "give the value of 'n'");
  fields.string("user");
}

// The last token of an answer is not read, nor is that of a prompt that nothing follows.
void check_lengths(const CompletionRequest& request, const ServedModel& model) {
  for (const auto& prompt : request.prompts) {
    const auto length = int64_t(prompt.size());
    if (length - 1 + request.max_tokens <= model.limits.context) continue;
    const std::string message =
        fmt::format("maximum context length is {} tokens; the prompt has {}, 'max_tokens' is {}",
                    model.limits.context, length, request.max_tokens);
    throw ApiError(400, message, "prompt", "context_length_exceeded");
  }
}

// The largest answer takes a few hundred megabytes while it is written.
void check_logprobs(const CompletionRequest& request, const ServedModel& model) {
  if (!request.logprobs) return;
  int64_t tokens = 0;
  for (const auto& prompt : request.prompts)
    tokens += request.n * (request.max_tokens + (request.echo ? int64_t(prompt.size()) : 0));
  const int64_t values = tokens * (*request.logprobs + 1);
  if (values > model.limits.logprob_values)
    refuse("logprobs",
           "the answer could have {} log-probabilities; at most {} are allowed. "
           "Ask for fewer choices, fewer tokens or a smaller 'logprobs'",
           values, model.limits.logprob_values);
}

}  // namespace

std::string error_body(int status, const std::string& message, const std::string& param,
                       const std::string& code) {
  const auto or_null = [](const std::string& text) { return text.empty() ? json() : json(text); };
  std::string type = status >= 500 ? "server_error" : "invalid_request_error";
  if (status == 401) type = "authentication_error";
  if (status == 429) type = "rate_limit_error";
  const json error = {
      {"message", message}, {"type", type}, {"param", or_null(param)}, {"code", or_null(code)}};
  return json({{"error", error}}).dump(-1, ' ', false, json::error_handler_t::replace);
}

ServedModel::ServedModel(std::string served_name, int64_t tokens,
                         std::optional<data::Tokenizer> text_tokenizer, int64_t context)
    : name(std::move(served_name)), vocab_size(tokens), tokenizer(std::move(text_tokenizer)) {
  limits.context = context;
  if (!tokenizer) return;
  texts.emplace(*tokenizer);
  words_.emplace(*tokenizer);
}

const data::Tokenizer& ServedModel::need_tokenizer(const std::string& param) const {
  if (!tokenizer)
    refuse(param,
           "the model '{}' has no tokenizer; send token ids, or start the server with --tokenizer",
           name);
  return *tokenizer;
}

std::vector<int64_t> ServedModel::encode(const std::string& text, const std::string& param) {
  need_tokenizer(param);
  std::vector<int32_t> ids;
  if (!words_->encode(text, ids))
    refuse(param, "'{}' has more than 2 MiB of text without a place to divide it into words",
           param);
  for (const int32_t id : ids) check_token(id, param);
  return {ids.begin(), ids.end()};
}

void ServedModel::check_token(int64_t token, const std::string& param) const {
  if (token < 0 || token >= vocab_size)
    refuse(param, "'{}': token {} is outside the model's vocabulary of {}", param, token,
           vocab_size);
}

std::string ServedModel::token_name(int64_t token, bool begins_text) const {
  if (!texts) return fmt::format("token_id:{}", token);
  std::string name = texts->name(token);
  if (begins_text && texts->drops_first_space() && name.starts_with(' ')) name.erase(0, 1);
  return name;
}

int64_t ServedModel::stop_token() const { return tokenizer ? tokenizer->separator() : -1; }

void check_model_name(const std::string& name, const ServedModel& model) {
  if (name == model.name) return;
  const std::string message = fmt::format("the model '{}' is not served here; this server has '{}'",
                                          shortened(name), model.name);
  throw ApiError(404, message, "model", "model_not_found");
}

json parse_body(const std::string& body) {
  const auto check_depth = [](int depth, json::parse_event_t, json&) {
    if (depth > kDeepest)
      throw ApiError(400, fmt::format("the JSON is nested deeper than {} levels", kDeepest));
    return true;
  };
  json parsed;
  try {
    parsed = json::parse(body, check_depth);
  } catch (const json::exception& error) {
    // "[json.exception.parse_error.101] parse error at …"
    const std::string what = valid_utf8(error.what());
    throw ApiError(400, "the body is not JSON: " + what.substr(what.find("] ") + 2));
  }
  if (!parsed.is_object()) throw ApiError(400, "the body is not a JSON object");
  return parsed;
}

CompletionRequest parse_completion(const json& body, ServedModel& model) {
  Fields fields(body);
  const Limits& limits = model.limits;
  CompletionRequest request;
  check_model(fields, model);
  request.n = fields.integer("n", 1, limits.samples).value_or(1);
  request.max_tokens = fields.integer("max_tokens", 0, INT32_MAX).value_or(16);
  request.sampling.temperature = fields.number("temperature", 1);
  request.sampling.top_p = fields.number("top_p", 1);
  request.sampling.top_k = std::max<int64_t>(0, fields.integer("top_k", -1, INT32_MAX).value_or(0));
  if (const auto seed = fields.integer("seed", INT64_MIN, INT64_MAX))
    request.seed = uint64_t(*seed);
  request.logprobs = fields.integer("logprobs", 0, limits.logprobs);
  request.echo = fields.boolean("echo");
  request.stream = fields.boolean("stream");
  request.ignore_eos = fields.boolean("ignore_eos");
  request.return_token_ids = fields.boolean("return_token_ids");
  request.stop = parse_stop(fields.find("stop"), model);
  if (const json* options = fields.find("stream_options")) {
    if (!request.stream || !options->is_object())
      refuse("stream_options", "'stream_options' is {}; expected an object, with 'stream': true",
             shown(*options));
    Fields inner(*options);
    request.include_usage = inner.boolean("include_usage");
    inner.no_others();
  }
  refuse_unsupported(fields, request.n);
  const json* prompt = fields.find("prompt");
  fields.no_others();
  check_sampling("temperature", {.temperature = request.sampling.temperature});
  check_sampling("top_p", {.top_p = request.sampling.top_p});
  request.prompts = parse_prompts(prompt, model);
  const int64_t choices = int64_t(request.prompts.size()) * request.n;
  if (choices > limits.choices)
    refuse("n", "{} prompts with 'n' = {} are {} choices; at most {} are allowed",
           request.prompts.size(), request.n, choices, limits.choices);
  check_lengths(request, model);
  check_logprobs(request, model);
  return request;
}

// A whole text that is a control token is that token: clients learn the ids of "</s>" and "<s>" in
// this way. In longer texts control tokens are ordinary text.
json tokenize(const json& body, ServedModel& model) {
  Fields fields(body);
  check_model(fields, model);
  const auto text = fields.string("prompt");
  fields.boolean("add_special_tokens");  // texts have no special tokens here
  const bool names = fields.boolean("return_token_strs");
  fields.no_others();
  if (!text) refuse("prompt", "'prompt' is missing; expected a string");
  const data::Tokenizer& tokenizer = model.need_tokenizer("prompt");
  std::vector<int64_t> tokens = model.encode(*text, "prompt");
  for (const int64_t id : {tokenizer.separator(), tokenizer.bos()})
    if (id >= 0 && *text == tokenizer.piece(int32_t(id))) tokens = {id};
  json out = {
      {"tokens", tokens}, {"count", tokens.size()}, {"max_model_len", model.limits.context}};
  if (!names) return out;
  for (const int64_t token : tokens) out["token_strs"].push_back(model.token_name(token));
  return out;
}

json detokenize(const json& body, const ServedModel& model) {
  Fields fields(body);
  check_model(fields, model);
  const json* list = fields.find("tokens");
  fields.no_others();
  if (!list || !list->is_array())
    refuse("tokens", "'tokens' is missing; expected a list of token ids");
  const data::Tokenizer& tokenizer = model.need_tokenizer("tokens");
  std::vector<int32_t> ids;
  if (!list->empty())
    for (const int64_t token : token_list(*list, "tokens", model)) {
      if (token >= tokenizer.vocab_size())
        refuse("tokens", "'tokens': token {} is outside the tokenizer's vocabulary of {}", token,
               tokenizer.vocab_size());
      ids.push_back(int32_t(token));
    }
  return {{"prompt", valid_utf8(tokenizer.decode(ids))}};
}

json tokenizer_info(const ServedModel& model) {
  const data::Tokenizer& tokenizer = model.need_tokenizer("");
  const auto piece = [&](int64_t id) {
    return id < 0 ? json() : json(tokenizer.piece(int32_t(id)));
  };
  return {{"tokenizer_class", "SentencePiece"},
          {"vocab_size", tokenizer.vocab_size()},
          {"model_max_length", model.limits.context},
          {"bos_token", piece(tokenizer.bos())},
          {"eos_token", piece(tokenizer.separator())},
          {"pad_token", nullptr},
          {"chat_template", nullptr},
          {"sha256", tokenizer.sha256()}};
}

json model_card(const ServedModel& model) {
  return {{"id", model.name},
          {"object", "model"},
          {"created", model.created},
          {"owned_by", "assay"},
          {"max_model_len", model.limits.context},
          {"vocab_size", model.vocab_size}};
}

}  // namespace assay::serve
