// assay tokenizer train | encode | decode
#include "data/tokenizer.h"

#include <iostream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/interrupt.h"
#include "cli/command.h"
#include "cli/standard_input.h"

namespace assay::cli {
namespace {

struct Options {
  std::vector<std::string> files;
  std::string model;
  int64_t vocab_size = 0;
  int64_t max_sentences = 1'000'000;
  bool overwrite = false;
};

std::vector<std::string> names_of(const std::vector<fs::path>& files) {
  return {files.begin(), files.end()};
}

// One line per file, at most 20.
std::string lines_of(const std::vector<std::string>& files, const char* what) {
  constexpr size_t kMost = 20;
  std::string text;
  for (size_t i = 0; i < std::min(files.size(), kMost); ++i)
    text += fmt::format("{} {}\n", what, files[i]);
  if (files.size() > kMost) text += fmt::format("{} {} more files\n", what, files.size() - kMost);
  return text;
}

void train(const Options& options) {
  if (fs::exists(options.model) && !options.overwrite)
    fail("{}: exists; nothing was changed. Choose another place or give --overwrite.",
         options.model);
  const data::TokenizerTraining training{.inputs = {options.files.begin(), options.files.end()},
                                         .vocab_size = options.vocab_size,
                                         .max_sentences = options.max_sentences};
  const data::TrainingFiles files = data::train_tokenizer(training, options.model);
  const data::Tokenizer tokenizer{fs::path(options.model)};
  std::string text = fmt::format("{}: {} pieces, sha256 {}\n", options.model,
                                 tokenizer.vocab_size(), tokenizer.sha256());
  std::vector<std::string> learned;
  std::vector<std::string> learned_lines;
  std::vector<std::string> without_text;
  for (size_t i = 0; i < files.used.size(); ++i) {
    const std::string file = files.used[i].string();
    const std::string left_out = files.counts[i].left_out();
    const std::string line =
        left_out.empty() ? file : fmt::format("{} (left out: {})", file, left_out);
    if (files.counts[i].documents == 0) {
      without_text.push_back(line);
      continue;
    }
    learned.push_back(file);
    learned_lines.push_back(line);
  }
  text += lines_of(learned_lines, "learned from");
  text += lines_of(names_of(files.left_out), "left out, of split valid or test:");
  text += lines_of(without_text, "warning: no text was found in");
  text += lines_of(names_of(files.held_out_used),
                   "warning: the tokenizer learned from a file of split valid or test:");
  print({{"model", options.model},
         {"vocab_size", tokenizer.vocab_size()},
         {"sha256", tokenizer.sha256()},
         {"files", learned},
         {"without_text", without_text},
         {"left_out", names_of(files.left_out)},
         {"held_out_used", names_of(files.held_out_used)}},
        text);
}

// Answers each line of standard input with answer(line): a line of text, or all answers as
// one JSON list.
void answer_lines(auto&& answer, auto&& as_text) {
  auto answers = nlohmann::json::array();
  int64_t number = 0;
  for (std::string line; read_line(std::cin, line);) {
    ++number;
    check_interrupt();
    try {
      auto reply = answer(line);
      if (json_wanted()) answers.push_back(std::move(reply));
      else fmt::print("{}\n", as_text(reply));
    } catch (const BadInput& error) {
      fail("line {}: {}", number, error.what());
    }
  }
  check_interrupt();
  print(answers, "");
}

void encode(const Options& options) {
  const data::Tokenizer tokenizer{fs::path(options.model)};
  answer_lines(
      [&](const std::string& line) { return tokenizer.encode(line); },
      [](const std::vector<int32_t>& ids) { return fmt::format("{}", fmt::join(ids, " ")); });
}

std::vector<int32_t> parse_ids(const std::string& line) {
  std::vector<int32_t> ids;
  std::istringstream words(line);
  for (std::string word; words >> word;) {
    size_t used = 0;
    int id = -1;
    try {
      id = std::stoi(word, &used);
    } catch (const std::exception&) {
    }
    if (used != word.size())
      fail("'{}' is not a token id; expected integers separated by spaces", word);
    ids.push_back(id);
  }
  return ids;
}

void decode(const Options& options) {
  const data::Tokenizer tokenizer{fs::path(options.model)};
  answer_lines([&](const std::string& line) { return tokenizer.decode(parse_ids(line)); },
               [](const std::string& text) { return text; });
}

void add(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* tokenizer =
      app.add_subcommand("tokenizer", "train SentencePiece tokenizers, encode and decode text");
  tokenizer->require_subcommand(1);

  CLI::App* command = subcommand(
      *tokenizer, "train", "learn a BPE model (byte fallback, digits split, no normalisation)",
      {"tokenizer train corpus/ --vocab 16000 -o t.model"});
  command
      ->add_option("FILE", options->files,
                   "JSON Lines or text, plain, .zst or .gz; folders are searched for train files")
      ->required();
  command
      ->add_option("--vocab", options->vocab_size,
                   "number of pieces, with the 256 bytes and 3 control pieces")
      ->required();
  command->add_option("-o,--output", options->model, "the model file to write")->required();
  command
      ->add_option("--max-sentences", options->max_sentences,
                   "lines of text to learn from, sampled evenly")
      ->capture_default_str();
  command->add_flag("--overwrite", options->overwrite, "replace an existing file");
  command->callback([=] { train(*options); });

  command =
      subcommand(*tokenizer, "encode", "convert lines of text on standard input to lines of ids",
                 {"tokenizer encode t.model < lines.txt"});
  command->add_option("MODEL", options->model, "SentencePiece model")->required();
  command->callback([=] { encode(*options); });

  command = subcommand(*tokenizer, "decode", "convert lines of ids on standard input to text",
                       {"tokenizer decode t.model < ids.txt"});
  command->add_option("MODEL", options->model, "SentencePiece model")->required();
  command->callback([=] { decode(*options); });
}
[[maybe_unused]] const bool registered = commands().add("tokenizer", add);

}  // namespace
}  // namespace assay::cli
