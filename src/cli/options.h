#pragma once
// Rules for the options of every command: how values are read, and which option name is suggested
// for a misspelled one.
#include <CLI/CLI.hpp>
#include <string>

namespace assay::cli {

// For a command and those below it. Every option takes one value; lists are comma-separated or
// repeat the option. A number is decimal, finite and fits its type. A required value is not empty.
void check_option_values(CLI::App& command);

// "unknown option '--dat'; did you mean '--data'?" about the first one, or "".
std::string unknown_option(const CLI::App& app, int argc, char** argv);
// How to write two values of --set, which the command did not expect; or "".
std::string hint_for_extra_arguments(int argc, char** argv);
// The arguments that `app` did not expect, in the order of the command line.
std::string extra_arguments(const CLI::App& app);

}  // namespace assay::cli
