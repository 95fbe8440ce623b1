// assay import DIR -o MODEL
#include <torch/torch.h>

#include <nlohmann/json.hpp>

#include "base/progress.h"
#include "cli/command.h"
#include "data/tokenizer.h"
#include "exchange/model_files.h"

namespace assay::cli {
namespace {

struct Options {
  std::string folder;
  std::string output;
  std::string tokenizer;
};

void run(const Options& options) {
  exchange::OpenModel opened = exchange::open_model(options.folder);
  if (!options.tokenizer.empty()) opened.tokenizer = options.tokenizer;
  if (!opened.tokenizer.empty()) data::Tokenizer{opened.tokenizer};  // refuses other files
  exchange::save_model(options.output, opened);
  const int64_t parameters = opened.model->parameter_count();
  print({{"model", options.output},
         {"parameters", parameters},
         {"tokenizer", !opened.tokenizer.empty()}},
        fmt::format("{}: {} parameters, {} tokenizer\n", options.output,
                    Progress::count(double(parameters)),
                    opened.tokenizer.empty() ? "without a" : "with its"));
}

void add(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* command =
      subcommand(app, "import", "convert a model from Hugging Face's layout to Assay's",
                 {"import folder -o model"});
  command->add_option("DIR", options->folder, "folder with config.json and model.safetensors")
      ->required();
  command->add_option("-o,--output", options->output, "the folder to write")->required();
  command->add_option("--tokenizer", options->tokenizer,
                      "SentencePiece model to store with it; default: tokenizer.model of DIR");
  command->callback([options] { run(*options); });
}
[[maybe_unused]] const bool registered = commands().add("import", add);

}  // namespace
}  // namespace assay::cli
