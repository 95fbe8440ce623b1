#pragma once
// Progress reports of long work: one line that is updated on a terminal, else plain lines at
// intervals. They go to standard error, so that standard output holds only the text of --json.
#include <chrono>
#include <string>

namespace assay {

class Progress {
 public:
  // `interval`: seconds between plain lines when standard error is no terminal.
  explicit Progress(double interval = 10);
  ~Progress();  // ends the terminal's line
  Progress(const Progress&) = delete;
  // Cheap to call often: a terminal is redrawn at most ten times a second.
  void show(const std::string& line);
  void log(const std::string& line);            // a line that stays
  static std::string duration(double seconds);  // "3:07", "1:02:45"
  static std::string count(double number);      // "12.3k", "4.56M"

 private:
  using Clock = std::chrono::steady_clock;
  bool terminal_;
  bool drawn_ = false;
  double interval_;
  Clock::time_point last_;
};

}  // namespace assay
