// assay export MODEL -o DIR [--layout NAME]
#include <torch/torch.h>

#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "data/tokenizer.h"
#include "nn/hugging_face/hugging_face.h"
#include "nn/model_files.h"

namespace assay::cli {
namespace {

struct Options {
  std::string model, output, layout;
};

void run(const Options& options) {
  const nn::OpenModel opened = nn::open_model(options.model);
  nlohmann::json settings = nlohmann::json::object();
  if (!opened.tokenizer.empty()) {
    const data::Tokenizer tokenizer(opened.tokenizer);
    settings["eos_token_id"] = tokenizer.separator();
    if (tokenizer.bos() >= 0) settings["bos_token_id"] = tokenizer.bos();
  }
  nn::export_model(options.output, opened, settings, options.layout);
  const std::string family =
      nn::hugging_face_config(opened.model->spec, options.layout)["model_type"];
  print({{"folder", options.output}, {"model_type", family}, {"weights", opened.weights.string()}},
        fmt::format("{}: {} from {}\n", options.output, family, opened.weights.string()));
}

void add(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* command = subcommand(app, "export", "a model to Hugging Face's layout");
  command->add_option("MODEL", options->model, "a run, a checkpoint of one, or an imported model")
      ->required();
  command->add_option("-o,--output", options->output, "the folder to write")->required();
  command->add_option(
      "--layout", options->layout,
      "the layout's model_type where several fit: rwkv7 or rwkv_lm_x070; default: "
      "the first by name");
  command->callback([options] { run(*options); });
}
[[maybe_unused]] const bool registered = commands().add("export", add);

}  // namespace
}  // namespace assay::cli
