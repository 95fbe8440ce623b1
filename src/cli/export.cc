// assay export MODEL -o DIR [--layout NAME]
#include <torch/torch.h>

#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "data/hugging_face_tokenizer.h"
#include "exchange/hugging_face.h"
#include "exchange/model_files.h"
#include "run/model_card.h"

namespace assay::cli {
namespace {

struct Options {
  std::string model;
  fs::path output;
  std::string layout;
};

// Tokenizer files of an exported folder, in addition to tokenizer.model.
struct TokenizerFiles {
  std::map<std::string, std::string>
      contents;        // by file name; empty if they cannot express the model
  std::string reason;  // why they cannot
};

TokenizerFiles tokenizer_files(const data::Tokenizer& tokenizer) {
  try {
    return {{{"tokenizer.json", data::tokenizer_json(tokenizer).dump()},
             {"tokenizer_config.json", data::tokenizer_config_json(tokenizer).dump(2) + "\n"}},
            ""};
  } catch (const BadInput& error) {
    return {{}, error.what()};
  }
}

void run(const Options& options) {
  const exchange::OpenModel opened = exchange::open_model(options.model);
  nlohmann::json settings = nlohmann::json::object();
  TokenizerFiles files;
  if (!opened.tokenizer.empty()) {
    const data::Tokenizer tokenizer(opened.tokenizer);
    settings["eos_token_id"] = tokenizer.separator();
    if (tokenizer.bos() >= 0) settings["bos_token_id"] = tokenizer.bos();
    files = tokenizer_files(tokenizer);
  }
  const std::string family =
      exchange::hugging_face_config(opened.model->spec, options.layout)["model_type"];
  const std::optional<std::string> card =
      run::model_card({opened.weights.front().parent_path()},
                      {.name = fs::absolute(options.output / "").parent_path().filename().string(),
                       .model_type = family,
                       .library = exchange::library_of(family)});
  std::map<std::string, std::string> written = files.contents;
  if (card) written["README.md"] = *card;
  exchange::export_model(options.output, opened, settings, options.layout, written);
  const std::vector<std::string> weights(opened.weights.begin(), opened.weights.end());
  std::string text =
      fmt::format("{}: {} from {}\n", options.output.string(), family, join(weights));
  if (!files.reason.empty())
    text += fmt::format("{}; only tokenizer.model was written\n", files.reason);
  if (card) text += "README.md is a model card with the losses of the run; add a license\n";
  print({{"folder", options.output.string()},
         {"model_type", family},
         {"weights", weights},
         {"tokenizer_json", files.contents.contains("tokenizer.json")},
         {"model_card", card.has_value()}},
        text);
}

void add(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* command = subcommand(app, "export", "convert a model to Hugging Face's layout",
                                 {"export run -o folder"});
  command->add_option("MODEL", options->model, "a run, a checkpoint of one, or an imported model")
      ->required();
  command->add_option("-o,--output", options->output, "the folder to write")->required();
  command->add_option("--layout", options->layout,
                      "model_type of the layout if several fit: rwkv7 or rwkv_lm_x070; default: "
                      "the first by name");
  command->callback([options] { run(*options); });
}
[[maybe_unused]] const bool registered = commands().add("export", add);

}  // namespace
}  // namespace assay::cli
