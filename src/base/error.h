#pragma once
// Errors that a user can act on. The message says what was wrong, where, what was expected and what
// was left untouched.
#include <fmt/format.h>

#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace assay {

enum ExitCode { kDone = 0, kFailed = 1, kBadInput = 2, kInterrupted = 130 };

// Something failed that was asked for rightly (a full disk, a diverged run). Exit code 1.
struct Error : std::runtime_error {
  explicit Error(const std::string& message, ExitCode code = kFailed)
      : std::runtime_error(message), exit_code(code) {}
  ExitCode exit_code;
};
// Wrong usage or bad input; nothing was changed. Exit code 2.
struct BadInput : Error {
  explicit BadInput(const std::string& message) : Error(message, kBadInput) {}
};
// Ctrl-C or SIGTERM; the state was saved. Exit code 130.
struct Interrupted : Error {
  explicit Interrupted(const std::string& message) : Error(message, kInterrupted) {}
};
// A kernel was asked for a shape or dtype it has no code for; thrown before anything is written.
struct Unsupported : Error {
  explicit Unsupported(const std::string& message) : Error(message, kBadInput) {}
};

template <class E = BadInput, class... Args>
[[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) {
  throw E(fmt::format(format, std::forward<Args>(args)...));
}

// "; did you mean 'chunk_size'?" for the candidate nearest to `name` by edit distance, "" when
// none is near.
std::string did_you_mean(std::string_view name, std::span<const std::string> candidates);
// "1 text", "2 texts"
std::string counted(int64_t count, std::string_view noun);
std::string join(std::span<const std::string> words, std::string_view separator = ", ");

}  // namespace assay
