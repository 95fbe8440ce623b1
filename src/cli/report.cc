// assay report STUDY
#include "report/report.h"

#include <nlohmann/json.hpp>

#include "cli/command.h"

namespace assay::cli {
namespace {

void add(CLI::App& app) {
  auto study = std::make_shared<std::string>();
  CLI::App* command = subcommand(app, "report", "rebuild a study's report.html, figures/*.svg and tables/*.csv");
  command->add_option("STUDY", *study, "the study's folder")->required();
  command->callback([=] {
    const std::string page = report::write_report(*study).string();
    print({{"report", page}}, fmt::format("Report: {}\n", page));
  });
}

const bool registered = commands().add("report", add);

}  // namespace
}  // namespace assay::cli
