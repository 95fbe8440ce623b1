// The program: parses the command line, runs one subcommand, turns errors into one message and an exit code.
#include <algorithm>
#include <cstdio>
#include <exception>
#include <new>
#include <nlohmann/json.hpp>

#include "base/interrupt.h"
#include "base/version.h"
#include "cli/command.h"

namespace assay::cli {
namespace {

bool json_flag = false;

int report(int code, const std::string& message) {
  if (json_flag) fmt::print("{}\n", nlohmann::json{{"error", message}, {"exit_code", code}}.dump());
  fmt::print(stderr, "assay: {}\n", message);
  return code;
}

// A command that has commands of its own names the nearest, too.
void check_subcommand(CLI::App& command, const std::string& word) {
  std::vector<std::string> names;
  for (const CLI::App* sub : command.get_subcommands([](CLI::App*) { return true; })) names.push_back(sub->get_name());
  if (names.empty() || word.starts_with('-') || std::ranges::count(names, word)) return;
  fail("{} takes one of {}{}{}", command.get_name(), join(names), word.empty() ? "" : "; there is no '" + word + "'",
       did_you_mean(word, names));
}

int run(int argc, char** argv) {
  CLI::App app{"Assay: does this architecture keep the base capabilities of a Transformer?", "assay"};
  app.set_version_flag("--version", version());
  app.require_subcommand(1);
  app.fallthrough(false);
  for (const std::string& name : commands().names()) commands().at(name)(app);
  try {
    if (argc > 1 && argv[1][0] != '-') {
      commands().at(argv[1]);  // names the nearest
      check_subcommand(*app.get_subcommand(argv[1]), argc > 2 ? argv[2] : "");
    }
    app.parse(argc, argv);
    return std::fflush(stdout) ? report(kFailed, "standard output cannot be written") : kDone;
  } catch (const CLI::ParseError& error) {
    const int code = error.get_exit_code();
    if (code == 0) return app.exit(error);
    return report(kBadInput, fmt::format("{} (--help shows the usage)", error.what()));
  } catch (const Error& error) {
    return report(error.exit_code, error.what());
  } catch (const std::bad_alloc&) {
    return report(kFailed, "out of memory; lower batch_size or sequence_length");
  } catch (const std::exception& error) {
    const std::string what = error.what();  // torch appends its own stack; the first line says what happened
    return report(kFailed, what.substr(0, what.find('\n')));
  }
}

}  // namespace

Registry<AddCommand>& commands() {
  static Registry<AddCommand> registry("command");
  return registry;
}

Registry<AddCommand>& eval_commands() {
  static Registry<AddCommand> registry("command of eval");
  return registry;
}

CLI::App* subcommand(CLI::App& app, const std::string& name, const std::string& what) {
  CLI::App* command = app.add_subcommand(name, what);
  command->add_flag("--json", json_flag, "one JSON document on standard output");
  return command;
}

bool json_wanted() { return json_flag; }

void print(const nlohmann::json& document, const std::string& text) {
  if (json_flag) fmt::print("{}\n", document.dump(2));
  else fmt::print("{}", text);
}

}  // namespace assay::cli

int main(int argc, char** argv) {
  assay::catch_interrupts();
  return assay::cli::run(argc, argv);
}
