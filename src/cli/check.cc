// assay check FILE.py:CLASS: a command of the Python package (python/assay/_check.py), which takes
// the whole command line before it reaches this file.
#include "cli/command.h"

namespace assay::cli {
namespace {

void add(CLI::App& app) {
  CLI::App* command = subcommand(
      app, "check", "check whether a PyTorch module can be a mixer in a plan (Python package)");
  command->allow_extras();
  command->callback([] {
    fail(
        "`assay check` needs Python, which this program does not have. "
        "Install the Python package: `pip install .` in the folder of the repository. "
        "Then give the same command to its program `assay`.");
  });
}
const bool registered = commands().add("check", add);

}  // namespace
}  // namespace assay::cli
