#include "study/run_folder.h"

#include <chrono>
#include <thread>

#include "base/error.h"
#include "base/progress.h"

namespace assay::study {

std::unique_ptr<FolderLock> lock_when_free(const fs::path& folder) {
  for (int tries = 0;; ++tries) try {
      return std::make_unique<FolderLock>(folder);
    } catch (const BadInput&) {
      if (tries == 600) throw;
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
}

std::string last_line(const fs::path& file) {
  std::string text = run::tail(file, 1 << 12);
  text.resize(text.find_last_not_of(" \n\r\t") + 1);
  return text.empty() ? "no output" : text.substr(text.find_last_of("\n\r") + 1);
}

std::string summary(const run::Folder& folder) {
  const run::Outcome outcome = folder.outcome().read();
  std::string losses;
  for (const auto& [name, set] : folder.end().read().sets)
    losses += fmt::format("{} {:.3f}, ", name, set.loss);
  return fmt::format("{}{} tokens/s, {}", losses, Progress::count(outcome.tokens_per_second),
                     Progress::duration(outcome.seconds));
}

std::string progress_text(const std::string& name, const run::Newest& newest, int64_t steps) {
  if (!newest.training) return name + " starting";
  const std::string loss =
      newest.held_out_loss ? fmt::format(" held-out loss {:.3f}", *newest.held_out_loss) : "";
  return fmt::format("{} step {}/{}{} {} tokens/s", name, newest.training->step, steps, loss,
                     Progress::count(newest.training->tokens_per_second.value_or(0)));
}

bool begin_or_resume(const run::Folder& folder) {
  const auto lock = lock_when_free(folder.path);
  if (!folder.checkpoints().empty()) return true;
  for (const auto& entry : fs::directory_iterator(folder.path))
    if (entry.path() != folder.log() && entry.path() != folder.lock()) fs::remove_all(entry.path());
  return false;
}

}  // namespace assay::study
