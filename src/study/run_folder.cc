#include "study/run_folder.h"

#include <chrono>
#include <fstream>
#include <thread>

#include "base/error.h"
#include "base/progress.h"

namespace assay::study {
namespace {

using Json = nlohmann::json;

std::string tail(const fs::path& file, int64_t bytes) {
  std::ifstream in(file, std::ios::binary | std::ios::ate);
  if (!in) return "";
  const int64_t size = in.tellg(), from = std::max<int64_t>(0, size - bytes);
  std::string text(size_t(size - from), '\0');
  in.seekg(from).read(text.data(), int64_t(text.size()));
  text.resize(size_t(in.gcount()));
  return text;
}

// A run killed together with its runner may still be saving.
void wait_until_free(const fs::path& folder) {
  for (int tries = 0;; ++tries) try {
      const FolderLock lock(folder);
      return;
    } catch (const BadInput&) {
      if (tries == 600) throw;
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
}

bool has_checkpoint(const fs::path& folder) {
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(folder / "checkpoints", none))
    if (entry.path().filename().string().starts_with("step-") && entry.path().extension().empty())
      return true;
  return false;
}

}  // namespace

Json last_metrics_line(const fs::path& folder, const std::string& key) {
  std::string text = tail(folder / "metrics.jsonl", 1 << 16);
  while (!text.empty()) {
    const size_t end = text.find_last_not_of('\n'),
                 begin = end == std::string::npos ? end : text.find_last_of('\n', end);
    const std::string line = text.substr(begin == std::string::npos ? 0 : begin + 1);
    Json json = Json::parse(line, nullptr, false);
    if (json.is_object() && json.contains(key) && json[key].is_number()) return json;
    text.resize(begin == std::string::npos ? 0 : begin);
  }
  return Json::object();
}

std::string last_line(const fs::path& file) {
  std::string text = tail(file, 1 << 12);
  text.resize(text.find_last_not_of(" \n\r\t") + 1);
  return text.empty() ? "no output" : text.substr(text.find_last_of("\n\r") + 1);
}

std::string summary(const fs::path& folder) {
  const Json done = Json::parse(read_file(folder / "done.json"), nullptr, false);
  const Json end = Json::parse(read_file(folder / "end.json"), nullptr, false);
  if (!done.is_object() || !end.is_object()) return "";
  std::string losses;
  for (const auto& [set, found] : end.value("sets", Json::object()).items())
    losses += fmt::format("{} {:.3f}, ", set, found.value("loss", 0.0));
  return fmt::format("{}{} tokens/s, {}", losses,
                     Progress::count(done.value("tokens_per_second", 0.0)),
                     Progress::duration(done.value("seconds", 0.0)));
}

bool begin_or_resume(const fs::path& folder) {
  wait_until_free(folder);
  if (has_checkpoint(folder)) return true;
  for (const auto& entry : fs::directory_iterator(folder))
    if (entry.path().filename() != "log.txt") fs::remove_all(entry.path());
  return false;
}

}  // namespace assay::study
