#pragma once
// What holds for the options of every command: how values are read, and which name a misspelled
// option was to have.
#include <CLI/CLI.hpp>
#include <string>

namespace assay::cli {

// For a command and those below it. Every option takes one value; lists are comma-separated or
// repeat the option. A number is decimal, finite and fits its type. A required value is not empty.
void check_option_values(CLI::App& command);

// "; did you mean '--resume'?" about arguments that `app` did not expect.
std::string hint_for_extra_arguments(const CLI::App& app, int argc, char** argv);
// "; there is no option '--dat'; did you mean '--data'?" for the first unknown option, or "".
std::string hint_for_unknown_option(const CLI::App& app, int argc, char** argv);
// What `app` did not expect, in the order of the command line.
std::string extra_arguments(const CLI::App& app);

}  // namespace assay::cli
