#pragma once
// A subcommand adds itself: one file, one registration, no list. It has no logic of its own beyond
// naming options, calling a layer and printing what came back.
//
//   void add(CLI::App& app) {
//     auto options = std::make_shared<Options>();
//     CLI::App* command = subcommand(app, "doctor", "show CPU, GPU and versions");
//     command->add_option("--device", options->device, "cpu or cuda");
//     command->callback([=] { run(*options); });
//   }
//   const bool registered = commands().add("doctor", add);
#include <CLI/CLI.hpp>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "base/registry.h"

namespace assay::cli {

using AddCommand = void (*)(CLI::App&);
Registry<AddCommand>& commands();
// Those of `assay eval`, which register themselves in the same way
Registry<AddCommand>& eval_commands();

// A subcommand of `app` with --json: one JSON document on standard output, everything else
// on standard error. --help ends with the examples, which are written without the program's name.
CLI::App* subcommand(CLI::App& app, const std::string& name, const std::string& what,
                     const std::vector<std::string>& examples = {});

// Checks of option values. Their messages say what was expected: "'x' is not a positive number".
CLI::Validator positive_number();
CLI::Validator non_negative_number();
CLI::Validator in_range(int64_t least, int64_t most);

// Words with commas, in lines of at most 100 columns that begin with `indent` spaces.
std::string wrapped(const std::vector<std::string>& words, size_t indent);

bool json_wanted();  // was --json given?
// The document with --json, else the text
void print(const nlohmann::json& document, const std::string& text);
// For a command that prints its JSON document piece by piece: an error after it goes to standard
// error alone, because standard output holds one document.
void document_is_printed();

}  // namespace assay::cli
