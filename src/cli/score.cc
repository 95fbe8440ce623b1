// assay score --model MODEL [FILE]: JSON Lines in, JSON Lines out, in the same order.
#include <torch/torch.h>

#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <numeric>

#include "base/interrupt.h"
#include "cli/command.h"
#include "cli/model.h"

namespace assay::cli {
namespace {

using nlohmann::json;

struct Options {
  ModelOptions model;
  std::string file;
  int64_t batch_tokens = 16384;
};

struct Line {
  std::string id;  // as JSON
  std::vector<int64_t> tokens;
  bool from_text;
  std::vector<float> logprobs;  // of all tokens but the first
};

Line parse(const std::string& text, const TrainedModel& model) {
  const json record = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!record.is_object())
    fail("is no JSON object; expected {{\"id\": …, \"tokens\": […]}} or {{\"id\": …, \"text\": …}}");
  Line line{record.value("id", json()).dump(), {}, record.contains("text"), {}};
  if (line.from_text == record.contains("tokens")) fail("must have either 'tokens' or 'text'");
  const json& content = record[line.from_text ? "text" : "tokens"];
  if (line.from_text) {
    if (!content.is_string()) fail("'text' must be a string");
    line.tokens = model.encode(content.get<std::string>());
  } else {
    if (!content.is_array() || !std::ranges::all_of(content, [](const json& x) { return x.is_number_integer(); }))
      fail("'tokens' must be a list of integers");
    line.tokens = content.get<std::vector<int64_t>>();
  }
  model.check_tokens(line.tokens);
  const at::Tensor& positions = model.model->positions;
  if (positions.defined() && int64_t(line.tokens.size()) > positions.size(0) + 1)
    fail("{} tokens are more than the model's {} positions", line.tokens.size(), positions.size(0));
  return line;
}

// Padding behind a line's end changes nothing before it: every mixer is causal.
void score(const std::vector<Line*>& lines, int64_t length, TrainedModel& model) {
  at::Tensor tokens = at::zeros({int64_t(lines.size()), length}, at::kLong);
  for (size_t i = 0; i < lines.size(); ++i)
    tokens[int64_t(i)].slice(0, 0, int64_t(lines[i]->tokens.size())).copy_(at::tensor(lines[i]->tokens, at::kLong));
  const at::Tensor losses = model.model->token_losses(model.to_device(tokens)).to(at::kCPU, at::kFloat).contiguous();
  for (size_t i = 0; i < lines.size(); ++i) {
    const float* row = losses.data_ptr<float>() + int64_t(i) * (length - 1);
    for (size_t t = 0; t + 1 < lines[i]->tokens.size(); ++t) lines[i]->logprobs.push_back(-row[t]);
  }
}

// Lines of similar length together, at most batch_tokens with their padding.
void score_all(std::vector<Line>& lines, int64_t batch_tokens, TrainedModel& model) {
  std::vector<Line*> order;
  for (Line& line : lines)
    if (line.tokens.size() > 1) order.push_back(&line);
  std::ranges::stable_sort(order, std::ranges::greater{}, [](const Line* line) { return line->tokens.size(); });
  for (size_t begin = 0; begin < order.size();) {
    check_interrupt();
    const auto length = int64_t(order[begin]->tokens.size());
    const size_t count = std::min<size_t>(order.size() - begin, size_t(std::max<int64_t>(1, batch_tokens / length)));
    score({order.begin() + std::ptrdiff_t(begin), order.begin() + std::ptrdiff_t(begin + count)}, length, model);
    begin += count;
  }
}

std::string as_json(const Line& line) {
  double nll = 0;
  std::string out = fmt::format("{{\"id\": {}, \"logprobs\": [null", line.id);
  for (const float logprob : line.logprobs) {
    if (!std::isfinite(logprob))
      fail<Error>("the model gives the log-probability {} in the line with id {}", logprob, line.id);
    out += fmt::format(", {}", logprob), nll -= logprob;
  }
  out += fmt::format("], \"nll\": {}", nll);
  if (line.from_text) out += fmt::format(", \"tokens\": [{}]", fmt::join(line.tokens, ", "));
  return out + "}";
}

class Scoring {
 public:
  explicit Scoring(const Options& options) : batch_tokens_(options.batch_tokens), model_(options.model) {}

  void run(std::istream& in, const std::string& name) {
    int64_t number = 0;
    if (json_wanted()) fmt::print("[");
    for (std::string text; std::getline(in, text);) {
      ++number;
      if (text.find_first_not_of(" \t\r") == std::string::npos) continue;
      try {
        lines_.push_back(parse(text, model_));
      } catch (const BadInput& error) {
        flush();
        fail("{}:{}: {}. The lines before it were scored.", name, number, error.what());
      }
      waiting_ += int64_t(lines_.back().tokens.size());
      if (waiting_ >= 16 * batch_tokens_ || lines_.size() >= 4096) flush();
    }
    if (in.bad()) fail<Error>("{}: reading stopped after line {}", name, number);
    flush();
    if (json_wanted()) fmt::print("]\n");
  }

 private:
  void flush() {
    score_all(lines_, batch_tokens_, model_);
    for (const Line& line : lines_) {
      if (json_wanted()) fmt::print("{}{}", written_ ? ",\n" : "", as_json(line));
      else fmt::print("{}\n", as_json(line));
      ++written_;
    }
    if (std::fflush(stdout)) fail<Error>("standard output cannot be written");
    lines_.clear();
    waiting_ = 0;
  }

  int64_t batch_tokens_;
  TrainedModel model_;
  std::vector<Line> lines_;
  int64_t waiting_ = 0, written_ = 0;
};

void run(const Options& options) {
  if (options.batch_tokens < 1) fail("--batch-tokens {}: must be positive", options.batch_tokens);
  std::ifstream file(options.file);
  if (!options.file.empty() && (!file || fs::is_directory(options.file))) fail("{}: cannot be read", options.file);
  Scoring scoring(options);
  scoring.run(options.file.empty() ? std::cin : file, options.file.empty() ? "standard input" : options.file);
}

void add(CLI::App& app) {
  auto o = std::make_shared<Options>();
  CLI::App* command = subcommand(app, "score", "log-probabilities of texts or tokens, as JSON Lines");
  add_model_options(*command, o->model);
  command->add_option("FILE", o->file, R"(lines {"id", "tokens": […]} or {"id", "text"}; default: standard input)");
  command
      ->add_option("--batch-tokens", o->batch_tokens, "tokens at once, padding included; lower it when memory runs out")
      ->capture_default_str();
  command->callback([o] { run(*o); });
}
[[maybe_unused]] const bool registered = commands().add("score", add);

}  // namespace
}  // namespace assay::cli
