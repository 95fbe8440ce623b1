#include "base/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>

namespace assay {
namespace {

// Work goes on when standard error cannot be written, as on a full disk.
void write(const std::string& text) {
  std::fputs(text.c_str(), stderr);
  std::fflush(stderr);
}

}  // namespace

Progress::Progress(double interval)
    : terminal_(::isatty(STDERR_FILENO)), interval_(terminal_ ? 0.1 : interval) {}

Progress::~Progress() {
  if (drawn_) std::fputs("\n", stderr);
}

void Progress::show(const std::string& line) {
  const Clock::time_point now = Clock::now();
  if (last_ != Clock::time_point{} &&
      std::chrono::duration<double>(now - last_).count() < interval_)
    return;
  last_ = now;
  write(fmt::format("{}{}{}", terminal_ ? "\r\x1b[K" : "", line, terminal_ ? "" : "\n"));
  drawn_ = terminal_;
}

void Progress::log(const std::string& line) {
  write(fmt::format("{}{}\n", drawn_ ? "\r\x1b[K" : "", line));
  drawn_ = false;
}

std::string Progress::duration(double seconds) {
  // A record may hold any number
  if (!(std::abs(seconds) < 1e15)) return fmt::format("{} s", seconds);
  const auto s = static_cast<long>(seconds + 0.5);
  return s >= 3600 ? fmt::format("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60)
                   : fmt::format("{}:{:02}", s / 60, s % 60);
}

std::string Progress::count(double number) {
  if (number >= 1e9) return fmt::format("{:.2f}G", number / 1e9);
  if (number >= 1e6) return fmt::format("{:.2f}M", number / 1e6);
  if (number >= 1e3) return fmt::format("{:.1f}k", number / 1e3);
  return fmt::format("{:.0f}", number);
}

}  // namespace assay
