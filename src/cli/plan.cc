// assay plan new --data STORE [-o FILE]
#include <nlohmann/json.hpp>

#include "base/files.h"
#include "base/progress.h"
#include "cli/command.h"
#include "study/plan_template.h"

namespace assay::cli {
namespace {

struct Options {
  std::string data;
  std::string output;
  std::vector<std::string> train;
};

void write_new_plan(const Options& options) {
  const data::TokenStore store(options.data);
  const auto [plan, warnings] = study::plan_template(store, options.train);
  std::string text = plan;
  if (!options.output.empty()) {
    if (fs::exists(options.output))
      fail("{}: exists already; choose another file. Nothing was written.", options.output);
    check_output(options.output);
    write_file(options.output, plan);
    text = fmt::format("{0}: written. Next: assay run {0} -o STUDY --dry-run\n", options.output);
  }
  for (const std::string& warning : warnings) Progress().log("warning: " + warning);
  print({{"plan", plan}, {"file", options.output}}, text);
}

void add(CLI::App& app) {
  CLI::App* plan = app.add_subcommand("plan", "make plans of studies");
  plan->require_subcommand(1);
  auto options = std::make_shared<Options>();
  CLI::App* command = subcommand(
      *plan, "new", "write a plan for a token store, to be edited and given to assay run",
      {"plan new --data store -o mine.toml"});
  command->add_option("--data", options->data, "token store (`assay data prepare`)")->required();
  command
      ->add_option("--train", options->train,
                   "domains to train on, such as web,news; default: chosen by splits")
      ->delimiter(',');
  command->add_option("-o,--output", options->output,
                      "the file to write; default: standard output");
  command->callback([options] { write_new_plan(*options); });
}
const bool registered = commands().add("plan", add);

}  // namespace
}  // namespace assay::cli
