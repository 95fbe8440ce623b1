#include "base/program.h"

#include <dlfcn.h>

#include <fstream>

namespace assay {
namespace {

struct Hosted {
  fs::path script;
  std::vector<std::string> arguments;
};
Hosted& hosted() {
  static Hosted program;
  return program;
}

}  // namespace

void set_hosted_program(const fs::path& script, std::vector<std::string> arguments) {
  hosted() = {script, std::move(arguments)};
}

bool is_hosted() { return !hosted().script.empty(); }

fs::path own_program() {
  return is_hosted() ? hosted().script : fs::read_symlink("/proc/self/exe");
}

std::vector<std::string> own_command_line() {
  std::vector<std::string> words = hosted().arguments;
  if (!is_hosted()) {
    std::ifstream file("/proc/self/cmdline");
    for (std::string word; std::getline(file, word, '\0');) words.push_back(word);
    words.erase(words.begin());
  }
  words.insert(words.begin(), own_program());
  return words;
}

fs::path own_folder() {
  std::error_code none;
  if (!is_hosted()) return fs::read_symlink("/proc/self/exe", none).parent_path();
  Dl_info library{};
  ::dladdr(reinterpret_cast<const void*>(&own_folder), &library);
  return fs::path(library.dli_fname).parent_path();
}

}  // namespace assay
