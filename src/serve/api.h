#pragma once
// Requests and answers in OpenAI's JSON format. Needs no torch, so that it can be fuzzed.
#include <chrono>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "data/tokenizer.h"
#include "data/word_encoder.h"
#include "nn/sampling.h"
#include "serve/text.h"

namespace assay::nn {
struct LanguageModel;
}

namespace assay::serve {

// An answer with an HTTP status of 400 and above.
struct ApiError : std::runtime_error {
  ApiError(int http_status, const std::string& text, std::string parameter = "",
           std::string error_code = "")
      : std::runtime_error(text),
        status(http_status),
        message(text),
        param(std::move(parameter)),
        code(std::move(error_code)) {}
  int status;
  std::string message;  // what() ends at U+0000, which a request may hold
  // the field of the request; a word for programs; both may be empty
  std::string param;
  std::string code;
  std::string allow = "";  // with status 405: the methods of the path
};
// {"error": {"message", "type", "param", "code"}}
std::string error_body(int status, const std::string& message, const std::string& param = "",
                       const std::string& code = "");

struct Limits {
  int64_t context = 0;  // tokens of a prompt and what follows it
  int64_t choices = 2048;
  int64_t samples = 128;
  int64_t stop_strings = 64;
  int64_t stop_bytes = 1024;
  int64_t logprobs = 20;
  int64_t logprob_values = 1 << 22;  // of an answer, if it has 'max_tokens' tokens
};

// A loaded model and what requests need of it. The functions are called on one thread.
class ServedModel {
 public:
  ServedModel(std::string name, int64_t vocab_size, std::optional<data::Tokenizer> tokenizer,
              int64_t context);
  std::vector<int64_t> encode(const std::string& text, const std::string& param);
  void check_token(int64_t token, const std::string& param) const;
  const data::Tokenizer& need_tokenizer(const std::string& param) const;
  // "token_id:7" without a tokenizer. `begins_text`: without the space that SentencePiece adds.
  std::string token_name(int64_t token, bool begins_text = false) const;
  int64_t stop_token() const;  // the separator; -1 without a tokenizer

  std::string name;
  int64_t vocab_size;
  std::shared_ptr<nn::LanguageModel> model;  // null where requests are only parsed
  std::optional<data::Tokenizer> tokenizer;
  std::optional<TokenTexts> texts;  // with a tokenizer
  Limits limits;
  int64_t created = std::chrono::duration_cast<std::chrono::seconds>(
                        std::chrono::system_clock::now().time_since_epoch())
                        .count();

 private:
  std::optional<data::WordEncoder> words_;
};

struct CompletionRequest {
  std::vector<std::vector<int64_t>> prompts;
  int64_t max_tokens = 16;
  int64_t n = 1;
  nn::Sampling sampling;
  std::optional<uint64_t> seed;
  std::vector<std::string> stop;
  std::optional<int64_t> logprobs;
  bool echo = false;
  bool stream = false;
  bool include_usage = false;
  bool ignore_eos = false;
  bool return_token_ids = false;
};

// ApiError with status 404 unless the model has this name.
void check_model_name(const std::string& name, const ServedModel& model);
// JSON of a request body; ApiError for anything else than one object of at most 16 levels.
nlohmann::json parse_body(const std::string& body);
// ApiError names the field: a wrong type or value, an unknown field, a limit that is exceeded.
CompletionRequest parse_completion(const nlohmann::json& body, ServedModel& model);
// {"prompt"} → {"tokens", "count", "max_model_len"}; {"tokens"} → {"prompt"}
nlohmann::json tokenize(const nlohmann::json& body, ServedModel& model);
nlohmann::json detokenize(const nlohmann::json& body, const ServedModel& model);
nlohmann::json tokenizer_info(const ServedModel& model);
nlohmann::json model_card(const ServedModel& model);

}  // namespace assay::serve
