// assay generate --model MODEL [--prompt TEXT | --tokens 1,2,3] [--state FILE] [--save-state FILE]
#include "nn/generate.h"

#include <torch/torch.h>

#include <nlohmann/json.hpp>
#include <optional>

#include "base/interrupt.h"
#include "base/progress.h"
#include "cli/command.h"
#include "cli/model.h"
#include "nn/saved_state.h"

namespace assay::cli {
namespace {

using nlohmann::json;

struct Options {
  ModelOptions model;
  std::optional<std::string> prompt;
  std::optional<std::string> tokens;
  std::string state;
  std::string save_state;
  int64_t max_tokens = 100;
  int64_t samples = 1;
  uint64_t seed = 0;
  nn::Sampling sampling;
};

std::vector<int64_t> parse_ids(const std::string& text) {
  const json ids = json::parse("[" + text + "]", nullptr, /*allow_exceptions=*/false);
  if (!ids.is_array() ||
      !std::ranges::all_of(ids, [](const json& id) { return id.is_number_integer(); }))
    fail("--tokens '{}': expected token ids separated by commas, such as 1,2,3", text);
  return ids.get<std::vector<int64_t>>();
}

// Without words and without a past, a document begins: behind a separator.
std::vector<int64_t> prompt_tokens(const Options& options, const TrainedModel& model) {
  const bool goes_on = !options.state.empty();
  if (goes_on && !options.tokens && !options.prompt) return {};
  std::vector<int64_t> tokens =
      options.tokens ? parse_ids(*options.tokens) : model.encode(options.prompt.value_or(""));
  if (tokens.empty() && !options.tokens) tokens = {model.need_tokenizer().separator()};
  model.check_tokens(tokens);
  return tokens;
}

// The saved generation, or none yet, and the prompt behind it.
nn::Generation beginning(const Options& options, const TrainedModel& model) {
  nn::Generation begun;
  if (!options.state.empty())
    begun = nn::load_generation(options.state, *model.model, options.samples);
  const std::vector<int64_t> prompt = prompt_tokens(options, model);
  begun.tokens.insert(begun.tokens.end(), prompt.begin(), prompt.end());
  return begun;
}

// Tokens past the tokenizer's vocabulary, which a padded vocabulary of a model has, have no text.
json describe(const TrainedModel& model, const std::vector<int64_t>& prompt,
              const std::vector<int64_t>& made, uint64_t seed) {
  json sample = {{"seed", seed}, {"tokens", made}};
  if (!model.tokenizer) return sample;
  std::vector<int32_t> all(prompt.begin(), prompt.end());
  all.insert(all.end(), made.begin(), made.end());
  const int64_t separator = model.tokenizer->separator();
  const int64_t size = model.tokenizer->vocab_size();
  std::erase_if(all, [&](int32_t token) { return token == separator || token >= size; });
  sample["text"] = model.tokenizer->decode(all);
  return sample;
}

void run(const Options& options) {
  nn::check(options.sampling);
  if (!options.save_state.empty() && options.samples > 1)
    fail("--save-state keeps one sample, not {}", options.samples);
  if (!options.save_state.empty()) check_output(options.save_state);
  TrainedModel model(options.model);
  nn::Generation begun = beginning(options, model);
  const std::vector<int64_t> prompt = begun.tokens;
  std::vector<uint64_t> seeds;
  for (int64_t i = 0; i < options.samples; ++i) seeds.push_back(options.seed + uint64_t(i));
  const at::Tensor unread = at::tensor(prompt, at::kLong).slice(0, begun.state.position);
  const at::Tensor prompts = model.to_device(unread.expand({options.samples, -1}));
  const bool uses_state = !options.state.empty() || !options.save_state.empty();
  Progress progress;
  const auto made = nn::generate(
      *model.model, prompts, options.max_tokens, options.sampling, seeds,
      model.tokenizer ? model.tokenizer->separator() : -1,
      [&](int64_t count) {
        check_interrupt();
        progress.show(fmt::format("{}/{} tokens", count, options.max_tokens));
      },
      uses_state ? &begun.state : nullptr);
  json samples = json::array();
  std::string text;
  for (size_t i = 0; i < made.size(); ++i) {
    samples.push_back(describe(model, prompt, made[i], seeds[i]));
    text += model.tokenizer ? samples.back()["text"].get<std::string>() + "\n"
                            : fmt::format("{}\n", fmt::join(made[i], " "));
  }
  if (!options.save_state.empty()) {
    begun.tokens.insert(begun.tokens.end(), made[0].begin(), made[0].end());
    nn::save_generation(options.save_state, *model.model, begun);
  }
  print({{"prompt_tokens", prompt}, {"samples", samples}}, text);
}

void add(CLI::App& app) {
  auto o = std::make_shared<Options>();
  CLI::App* command =
      subcommand(app, "generate", "generate text or tokens with a trained model",
                 {"generate --model run --prompt 'Once upon a time' --max-tokens 50"});
  add_model_options(*command, o->model);
  auto* prompt = command->add_option("--prompt", o->prompt,
                                     "text to continue; without it the model begins a document");
  command->add_option("--tokens", o->tokens, "the prompt as token ids: 1,2,3")->excludes(prompt);
  command->add_option("--state", o->state,
                      "saved generation to continue; the prompt, if given, is appended to it");
  command->add_option("--save-state", o->save_state,
                      "file for the tokens and the state of the model after them");
  command
      ->add_option("--max-tokens", o->max_tokens,
                   "most tokens per sample; fewer if the model ends the document")
      ->capture_default_str()
      ->check(in_range(0, 1 << 30));
  command->add_option("--temperature", o->sampling.temperature, "0: always the most likely token")
      ->capture_default_str();
  command->add_option("--top-k", o->sampling.top_k, "sample from the k most likely tokens; 0: all")
      ->capture_default_str();
  command
      ->add_option("--top-p", o->sampling.top_p,
                   "sample from the most likely tokens that reach this probability")
      ->capture_default_str();
  command->add_option("--seed", o->seed, "the same seed gives the same tokens")
      ->capture_default_str();
  command->add_option("--samples", o->samples, "sample i has the seed --seed + i")
      ->capture_default_str()
      ->check(in_range(1, 1 << 20));
  command->callback([o] { run(*o); });
}
[[maybe_unused]] const bool registered = commands().add("generate", add);

}  // namespace
}  // namespace assay::cli
