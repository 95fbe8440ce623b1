// Parses the command line, runs one subcommand, turns errors into one message and an exit code.
#include "cli/main.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <exception>
#include <iostream>
#include <new>
#include <nlohmann/json.hpp>
#include <string_view>

#include "base/config.h"
#include "base/interrupt.h"
#include "base/program.h"
#include "base/truncated_files.h"
#include "base/version.h"
#include "cli/command.h"
#include "cli/options.h"

namespace assay::cli {
namespace {

bool json_flag = false;
bool document_printed = false;

// Text that is not UTF-8, such as the name of a file, has U+FFFD for each wrong byte.
std::string dump(const nlohmann::json& document, int indent = -1) {
  return document.dump(indent, ' ', /*ensure_ascii=*/false,
                       nlohmann::json::error_handler_t::replace);
}

// Does not throw, whatever the state of the streams.
int report(int code, const std::string& message,
           nlohmann::json document = nlohmann::json::object()) {
  document["error"] = message;
  document["exit_code"] = code;
  if (json_flag && !document_printed) std::fputs((dump(document) + "\n").c_str(), stdout);
  std::fputs(fmt::format("assay: {}\n", message).c_str(), stderr);
  return code;
}

// A command that has commands of its own names the nearest, too.
void check_subcommand(CLI::App& command, const std::string& word) {
  std::vector<std::string> names;
  for (const CLI::App* sub : command.get_subcommands([](CLI::App*) { return true; }))
    names.push_back(sub->get_name());
  if (names.empty() || word.starts_with('-') || std::ranges::count(names, word)) return;
  fail("{} takes one of {}{}{}", command.get_name(), join(names),
       word.empty() ? "" : "; there is no '" + word + "'", did_you_mean(word, names));
}

CLI::Validator number_check(const std::string& name, const std::string& expected, auto&& accepts) {
  const auto check = [=](const std::string& text) -> std::string {
    double number = 0;
    if (CLI::detail::lexical_cast(text, number) && accepts(number)) return "";
    return fmt::format("'{}' is not {}", text, expected);
  };
  return CLI::Validator(check, name);
}

// kFailed when not everything was printed. An earlier flush may have failed, which the last one
// does not say.
int end_output() {
  std::cout.flush();
  if (std::fflush(stdout) || std::ferror(stdout) || !std::cout)
    return report(kFailed, "standard output cannot be written");
  return kDone;
}

int run(int argc, char** argv) {
  CLI::App app{"Assay: does this architecture keep the base capabilities of a Transformer?",
               "assay"};
  app.set_version_flag("--version", version());
  app.require_subcommand(1);
  app.fallthrough(false);
  // An error in the arguments before --json is a document, too
  for (int i = 1; i < argc; ++i) json_flag = json_flag || std::string_view(argv[i]) == "--json";
  for (const std::string& name : commands().names()) commands().at(name)(app);
  check_option_values(app);
  try {
    if (argc == 1) {
      std::fputs(app.help().c_str(), stderr);
      return kBadInput;
    }
    if (argv[1] == std::string_view("help")) {  // as `assay COMMAND --help`
      const CLI::App* command = &app;
      for (int i = 2; i < argc; ++i) command = command->get_subcommand(argv[i]);
      std::cout << command->help();
      return end_output();
    }
    if (argc > 1 && argv[1][0] != '-') {
      commands().at(argv[1]);  // names the nearest
      check_subcommand(*app.get_subcommand(argv[1]), argc > 2 ? argv[2] : "");
    }
    app.parse(argc, argv);
    return end_output();
  } catch (const CLI::ExtrasError& error) {
    std::string problem = unknown_option(app, argc, argv);
    if (problem.empty())
      problem = fmt::format("not expected: {}{}", extra_arguments(app),
                            hint_for_extra_arguments(argc, argv));
    return report(kBadInput, problem + " (--help shows the usage)");
  } catch (const CLI::ParseError& error) {
    const int code = error.get_exit_code();
    if (code == 0) {  // --help, --version
      app.exit(error);
      return end_output();
    }
    const std::string unknown = unknown_option(app, argc, argv);
    return report(kBadInput, fmt::format("{} (--help shows the usage)",
                                         unknown.empty() ? error.what() : unknown));
  } catch (const ConfigError& error) {
    return report(error.exit_code, error.what(),
                  {{"table", error.table}, {"key", error.key}, {"problem", error.problem}});
  } catch (const Error& error) {
    return report(error.exit_code, error.what());
  } catch (const std::bad_alloc&) {
    return report(kFailed, "out of memory; lower the batch, the lengths or the samples");
  } catch (const std::exception& error) {
    // Torch appends its own stack; the first line says what happened
    const std::string what = error.what();
    return report(kFailed, what.substr(0, what.find('\n')));
  }
}

// A closed descriptor would be that of the next file that is opened, and what is meant for standard
// error would be written into it. /dev/null takes its place; writing to standard output fails as
// before.
void open_standard_descriptors() {
  for (const int descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (::fcntl(descriptor, F_GETFD) == -1 && errno == EBADF)
      ::open("/dev/null", descriptor == STDERR_FILENO ? O_WRONLY : O_RDONLY);
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

CLI::App* subcommand(CLI::App& app, const std::string& name, const std::string& what,
                     const std::vector<std::string>& examples) {
  CLI::App* command = app.add_subcommand(name, what);
  std::string footer = examples.size() == 1 ? "Example:" : "Examples:";
  for (const std::string& example : examples) footer += "\n  assay " + example;
  if (!examples.empty()) command->footer(footer);
  command->add_flag("--json", json_flag, "one JSON document on standard output");
  return command;
}

std::string wrapped(const std::vector<std::string>& words, size_t indent) {
  constexpr size_t kColumns = 100;
  std::string text;
  std::string line(indent, ' ');
  for (size_t i = 0; i < words.size(); ++i) {
    const std::string word = words[i] + (i + 1 < words.size() ? "," : "");
    if (line.size() > indent && line.size() + 1 + word.size() > kColumns) {
      text += line + "\n";
      line.assign(indent, ' ');
    }
    line += (line.size() > indent ? " " : "") + word;
  }
  return text + line + "\n";
}

CLI::Validator positive_number() {
  return number_check("POSITIVE", "a positive number", [](double x) { return x > 0; });
}
CLI::Validator non_negative_number() {
  return number_check("NONNEGATIVE", "zero or a positive number", [](double x) { return x >= 0; });
}

CLI::Validator in_range(int64_t least, int64_t most) {
  return CLI::Range(least, most, fmt::format("{} to {}", least, most));
}

bool json_wanted() { return json_flag; }
void document_is_printed() { document_printed = true; }

void print(const nlohmann::json& document, const std::string& text) {
  if (json_flag) fmt::print("{}\n", dump(document, /*indent=*/2));
  else fmt::print("{}", text);
}

}  // namespace assay::cli

int assay_main(int argc, char** argv) {
  assay::cli::open_standard_descriptors();
  assay::catch_interrupts();
  assay::catch_truncated_files();
  std::signal(SIGXFSZ, SIG_IGN);  // a limit of the file size is an error of write() then
  return assay::cli::run(argc, argv);
}

int assay_hosted_main(const char* script, int argc, char** argv) {
  assay::set_hosted_program(script, {argv + 1, argv + argc});
  return assay_main(argc, argv);
}
