// Commands of the Python package, which takes the whole command line before it reaches this file:
// assay check FILE.py:CLASS (python/assay/_check.py) and assay track STUDY (_track.py).
#include "cli/command.h"

namespace assay::cli {
namespace {

void refuse(CLI::App& app, const std::string& name, const std::string& about) {
  CLI::App* command = subcommand(app, name, about + " (Python package)");
  command->allow_extras();
  command->callback([name] {
    fail(
        "`assay {}` needs Python, which this program does not have. "
        "Install the Python package: `pip install .` in the folder of the repository. "
        "Then give the same command to its program `assay`.",
        name);
  });
}

void add_check(CLI::App& app) {
  refuse(app, "check", "check whether a PyTorch module can be a mixer in a plan");
}
void add_track(CLI::App& app) {
  refuse(app, "track", "write the metrics of runs for TensorBoard, wandb, Trackio or MLflow");
}

const bool registered = commands().add("check", add_check) && commands().add("track", add_track);

}  // namespace
}  // namespace assay::cli
