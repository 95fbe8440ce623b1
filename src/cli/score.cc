// assay score --model MODEL [FILE]: JSON Lines in, JSON Lines out, in the same order.
// A line that cannot be scored gives {"id", "line", "error"}; the lines after it are scored, and
// the command ends with exit code 1.
#include <torch/torch.h>

#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <numeric>

#include "base/interrupt.h"
#include "base/json.h"
#include "cli/command.h"
#include "cli/model.h"
#include "cli/standard_input.h"

namespace assay::cli {
namespace {

using nlohmann::json;

struct Options {
  ModelOptions model;
  std::string file;
  int64_t batch_tokens = 16384;
};

struct Line {
  int64_t number = 0;
  std::string id = "null";  // as JSON
  std::vector<int64_t> tokens;
  bool from_text = false;
  std::vector<double> logprobs;  // of all tokens but the first
  bool in_float64 = false;       // the model computes in it; else logprobs are those of float32
  std::string error;             // why the line was not scored
};

constexpr int kDeepest = 16;  // copying and printing deeper JSON could overflow the stack

// The text of a number under the key "id" of a JSON object, as it is written there. A parsed number
// would lose digits.
std::string text_of_id(std::string_view object) {
  int depth = 0;
  // of the last value
  size_t begin = 0;
  size_t end = 0;
  bool is_key = true;  // of the next string
  for (size_t i = 0; i < object.size(); ++i) {
    const char c = object[i];
    if (c == '"') {
      const size_t open = i++;
      while (object[i] != '"') i += object[i] == '\\' ? 2 : 1;
      if (depth != 1 || !is_key || json::parse(object.substr(open, i + 1 - open)) != "id") continue;
      begin = object.find_first_not_of(" \t\r\n", object.find(':', i) + 1);
      end = object.find_first_of(" \t\r\n,}", begin);
    } else if (c == '{' || c == '[') {
      ++depth;
    } else if (c == '}' || c == ']') {
      --depth;
    }
    if (depth == 1 && (c == ':' || c == ',')) is_key = c == ',';
  }
  return std::string(object.substr(begin, end - begin));
}

bool has(const json& record, const char* key) {
  return record.contains(key) && !record[key].is_null();
}

json parse_record(const std::string& text) {
  const auto check_depth = [](int depth, json::parse_event_t, json&) {
    if (depth > kDeepest) fail("has values that are nested deeper than {} levels", kDeepest);
    return true;
  };
  json record = json::parse(text, check_depth, /*allow_exceptions=*/false);
  if (record.is_discarded())
    record = json::parse(strict_json(text), check_depth, /*allow_exceptions=*/false);
  if (!record.is_object())
    fail(
        "is not a JSON object; expected {{\"id\": …, \"tokens\": […]}} or {{\"id\": …, \"text\": "
        "…}}");
  return record;
}

int64_t token_of(const json& value) {
  if (!value.is_number_integer()) fail("'tokens' must be a list of integers");
  if (value.is_number_unsigned() && value.get<uint64_t>() > uint64_t(INT64_MAX))
    fail("token {} is outside the model's vocabulary", value.get<uint64_t>());
  return value.get<int64_t>();
}

std::vector<int64_t> tokens_of_text(const json& text, const TrainedModel& model) {
  if (!text.is_string()) fail("'text' must be a string");
  std::vector<int64_t> tokens = model.encode(text.get_ref<const std::string&>());
  if (tokens.empty()) fail("the text is empty; at least one token is needed");
  return tokens;
}

std::vector<int64_t> tokens_of_list(const json& list) {
  if (!list.is_array()) fail("'tokens' must be a list of integers");
  std::vector<int64_t> tokens;
  for (const json& value : list) tokens.push_back(token_of(value));
  return tokens;
}

void read(Line& line, const std::string& text, const TrainedModel& model) {
  const json record = parse_record(text);
  if (record.contains("id"))
    line.id = record["id"].is_number() ? text_of_id(text) : record["id"].dump();
  line.from_text = has(record, "text");
  if (line.from_text == has(record, "tokens")) fail("must have either 'tokens' or 'text'");
  std::vector<int64_t> tokens =
      line.from_text ? tokens_of_text(record["text"], model) : tokens_of_list(record["tokens"]);
  model.check_tokens(tokens);
  const int64_t longest = model.model->max_time();  // the last token is not read
  if (int64_t(tokens.size()) - 1 > longest)
    fail("{} tokens are more than the model's {} positions", tokens.size(), longest);
  line.tokens = std::move(tokens);
}

Line parse(int64_t number, const std::string& text, const TrainedModel& model) {
  Line line{.number = number};
  try {
    read(line, text, model);
  } catch (const BadInput& error) {
    line.error = error.what();
  }
  return line;
}

// Every mixer is causal, so padding past the end of a line changes nothing before it.
void score(const std::vector<Line*>& lines, int64_t length, TrainedModel& model) {
  at::Tensor tokens = at::zeros({int64_t(lines.size()), length}, at::kLong);
  for (size_t i = 0; i < lines.size(); ++i)
    tokens[int64_t(i)]
        .slice(0, 0, int64_t(lines[i]->tokens.size()))
        .copy_(at::tensor(lines[i]->tokens, at::kLong));
  const at::Tensor computed = model.model->token_losses(model.to_device(tokens));
  const at::Tensor losses = computed.to(at::kCPU, at::kDouble).contiguous();
  for (size_t i = 0; i < lines.size(); ++i) {
    const double* row = losses.data_ptr<double>() + int64_t(i) * (length - 1);
    for (size_t t = 0; t + 1 < lines[i]->tokens.size(); ++t) lines[i]->logprobs.push_back(-row[t]);
    lines[i]->in_float64 = computed.scalar_type() == at::kDouble;
  }
}

// Lines of similar length together, at most batch_tokens with their padding.
void score_all(std::vector<Line>& lines, int64_t batch_tokens, TrainedModel& model) {
  std::vector<Line*> order;
  for (Line& line : lines)
    if (line.tokens.size() > 1) order.push_back(&line);
  std::ranges::stable_sort(order, std::ranges::greater{},
                           [](const Line* line) { return line->tokens.size(); });
  for (size_t begin = 0; begin < order.size();) {
    check_interrupt();
    const auto length = int64_t(order[begin]->tokens.size());
    const size_t count =
        std::min<size_t>(order.size() - begin, size_t(std::max<int64_t>(1, batch_tokens / length)));
    score({order.begin() + std::ptrdiff_t(begin), order.begin() + std::ptrdiff_t(begin + count)},
          length, model);
    begin += count;
  }
}

void check_finite(Line& line) {
  for (const double logprob : line.logprobs)
    if (!std::isfinite(logprob))
      line.error = fmt::format("the model gives the log-probability {}", logprob);
}

std::string quoted(const std::string& text) {
  return json(text).dump(-1, ' ', false, json::error_handler_t::replace);
}

std::string as_json(const Line& line) {
  if (!line.error.empty())
    return fmt::format("{{\"id\": {}, \"line\": {}, \"error\": {}}}", line.id, line.number,
                       quoted(line.error));
  double nll = 0;
  std::string out = fmt::format("{{\"id\": {}, \"logprobs\": [null", line.id);
  for (const double logprob : line.logprobs) {
    out += line.in_float64 ? fmt::format(", {}", logprob) : fmt::format(", {}", float(logprob));
    nll -= logprob;
  }
  out += fmt::format("], \"nll\": {}", nll);
  if (line.from_text) out += fmt::format(", \"tokens\": [{}]", fmt::join(line.tokens, ", "));
  return out + "}";
}

// Standard output: one record per line, or one list of all records with --json.
class Records {
 public:
  Records() {
    if (json_wanted()) fmt::print("[");
  }
  void add(const std::string& record) {
    const char* separator = json_wanted() && count_ > 0 ? ",\n" : "";
    fmt::print("{}{}{}", separator, record, json_wanted() ? "" : "\n");
    ++count_;
  }
  // Ends the list, so that it is a whole document even after an error.
  void end() {
    if (!json_wanted()) return;
    fmt::print("]\n");
    document_is_printed();
  }
  int64_t count() const { return count_; }

 private:
  int64_t count_ = 0;
};

class Scoring {
 public:
  explicit Scoring(const Options& options)
      : batch_tokens_(options.batch_tokens), model_(options.model) {}

  void run(std::istream& in, const std::string& name) {
    Records records;
    try {
      score_lines(in, name, records);
    } catch (const std::exception& error) {
      if (json_wanted()) records.add(fmt::format("{{\"error\": {}}}", quoted(error.what())));
      records.end();
      throw;
    }
    records.end();
    if (failed_ > 0)
      fail<Error>("{} of {} could not be scored; the first is {}:{}: {}", failed_,
                  counted(int64_t(records.count()), "line"), name, first_failed_.number,
                  first_failed_.error);
  }

 private:
  void score_lines(std::istream& in, const std::string& name, Records& records) {
    // tokens of the lines that are not scored yet
    int64_t number = 0;
    int64_t waiting = 0;
    std::vector<Line> lines;
    const auto flush = [&] {
      finish(lines, records);
      lines.clear();
      waiting = 0;
    };
    for (std::string text; read_line(in, text);) {
      check_interrupt();
      ++number;
      if (text.find_first_not_of(" \t\r") == std::string::npos) continue;
      lines.push_back(parse(number, text, model_));
      waiting += int64_t(lines.back().tokens.size());
      if (waiting >= 16 * batch_tokens_ || lines.size() >= 4096) flush();
    }
    check_interrupt();
    if (in.bad()) fail<Error>("{}: reading stopped after line {}", name, number);
    flush();
  }

  void finish(std::vector<Line>& lines, Records& records) {
    score_all(lines, batch_tokens_, model_);
    for (Line& line : lines) {
      check_finite(line);
      if (!line.error.empty() && failed_++ == 0) first_failed_ = line;
      records.add(as_json(line));
    }
    if (std::fflush(stdout)) fail<Error>("standard output cannot be written");
  }

  int64_t batch_tokens_;
  TrainedModel model_;
  Line first_failed_;
  int64_t failed_ = 0;
};

void run(const Options& options) {
  if (options.batch_tokens < 1) fail("--batch-tokens {}: must be positive", options.batch_tokens);
  std::ifstream file(options.file);
  if (!options.file.empty() && (!file || fs::is_directory(options.file)))
    fail("{}: cannot be read", options.file);
  Scoring scoring(options);
  scoring.run(options.file.empty() ? std::cin : file,
              options.file.empty() ? "standard input" : options.file);
}

void add(CLI::App& app) {
  auto o = std::make_shared<Options>();
  CLI::App* command =
      subcommand(app, "score", "compute log-probabilities of texts or tokens, as JSON Lines",
                 {"score --model run lines.jsonl > scores.jsonl"});
  add_model_options(*command, o->model);
  command->add_option("FILE", o->file,
                      R"(lines {"id", "tokens": […]} or {"id", "text"}; default: standard input)");
  command
      ->add_option("--batch-tokens", o->batch_tokens,
                   "tokens per batch, padding included; lower it if memory runs out")
      ->capture_default_str();
  command->callback([o] { run(*o); });
}
[[maybe_unused]] const bool registered = commands().add("score", add);

}  // namespace
}  // namespace assay::cli
