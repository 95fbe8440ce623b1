#include "cli/options.h"

#include <charconv>
#include <cmath>
#include <limits>
#include <string_view>

#include "base/error.h"

namespace assay::cli {
namespace {

// CLI11 reads "010" as octal, "" as 0 and numbers past the range as the nearest limit.
template <class T>
bool is_number(const std::string& text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return false;
  if constexpr (std::is_floating_point_v<T>) return std::isfinite(value);
  const size_t digits = text.starts_with('-') ? 1 : 0;
  return text[digits] != '0' || text.size() == digits + 1;
}

template <class T>
std::string check_number(const std::string& text) {
  if (is_number<T>(text)) return "";
  if constexpr (std::is_floating_point_v<T>) return fmt::format("'{}' is not a number", text);
  else
    return fmt::format("'{}' is not an integer from {} to {} in decimal digits", text,
                       std::numeric_limits<T>::min(), std::numeric_limits<T>::max());
}

std::string check_not_empty(const std::string& text) {
  return text.empty() ? "the value is empty" : "";
}

// The type that CLI11 shows in --help, without its checks: "INT" of "INT:POSITIVE".
std::string type_of(const CLI::Option& option) {
  const std::string name = option.get_type_name();
  return name.substr(0, name.find(':'));
}

// An option that is followed by several words would swallow the positional argument after it.
void check_values(CLI::Option& option) {
  if (option.nonpositional() && option.get_allow_extra_args())
    option.expected(1)->take_all()->allow_extra_args(false);
  if (option.get_type_size_max() == 0) return;  // a flag
  const std::string type = type_of(option);
  std::function<std::string(const std::string&)> check;
  if (type == "INT") check = check_number<int64_t>;
  else if (type == "UINT") check = check_number<uint64_t>;
  else if (type == "FLOAT") check = check_number<double>;
  else if (option.get_required()) check = check_not_empty;
  if (check) option.check(check);
}

const CLI::App& parsed_command(const CLI::App& app) {
  const CLI::App* command = &app;
  while (!command->get_subcommands().empty()) command = command->get_subcommands().front();
  return *command;
}

}  // namespace

void check_option_values(CLI::App& command) {
  for (CLI::Option* option : command.get_options([](CLI::Option*) { return true; }))
    check_values(*option);
  for (CLI::App* sub : command.get_subcommands([](CLI::App*) { return true; }))
    check_option_values(*sub);
}

std::string unknown_option(const CLI::App& app, int argc, char** argv) {
  std::vector<std::string> names;
  std::vector<std::string> with_value;
  for (const CLI::Option* option : parsed_command(app).get_options())
    for (const std::string& name : option->get_lnames()) {
      names.push_back("--" + name);
      if (option->get_type_size_max() > 0) with_value.push_back("--" + name);
    }
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const std::string name = word.substr(0, word.find('='));
    if (word == "--") return "";
    if (!word.starts_with("--")) continue;
    if (!std::ranges::count(names, name))
      return fmt::format("unknown option '{}'{}", name, did_you_mean(name, names));
    if (name == word && std::ranges::count(with_value, name)) ++i;
  }
  return "";
}

// "--set a=1 b=2 MODEL" takes b=2 as MODEL, and then MODEL is not expected.
std::string hint_for_extra_arguments(int argc, char** argv) {
  for (int i = 3; i < argc; ++i) {
    const std::string value = argv[i];
    if (std::string_view(argv[i - 2]) != "--set" || value.find('=') == std::string::npos) continue;
    if (!value.starts_with('-')) return "; --set takes one KEY=VALUE: write --set " + value;
  }
  return "";
}

std::string extra_arguments(const CLI::App& app) {
  return join(parsed_command(app).remaining(), " ");
}

}  // namespace assay::cli
