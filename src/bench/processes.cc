#include "bench/processes.h"

#include <signal.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "base/interrupt.h"
#include "base/progress.h"
#include "study/process.h"

namespace assay::bench {
namespace {

using Json = nlohmann::json;

fs::path temporary_files() {
  std::error_code error;
  const fs::path folder = fs::temp_directory_path(error);
  if (error)
    fail("no folder for temporary files: TMPDIR = {}: {}", folder.string(), error.message());
  return folder;
}

struct Folder {
  Folder() : path(temporary_files() / fmt::format("assay_bench.{}", ::getpid())) {
    make_folder(path);
  }
  ~Folder() { fs::remove_all(path); }
  const fs::path path;
};

study::Ending wait_politely(pid_t child) {
  study::Ending ending;
  while (!study::ended(child, ending)) {
    ::usleep(50'000);
    if (interrupted()) ::kill(child, SIGTERM);
  }
  return ending;
}

std::string why(const study::Ending& ending, const Json& answer) {
  if (interrupted()) return "interrupted";
  if (answer.is_object() && answer.contains("error")) return answer["error"];
  return ending.text() + (ending.code == 128 + SIGKILL ? ", as when memory runs out" : "");
}

Json row_of(const fs::path& program, const std::string& model,
            const std::vector<std::string>& arguments) {
  if (interrupted()) return {{"model", model}, {"failure", "interrupted"}};
  const Folder folder;
  study::Command command{
      {program, "bench", "models", model, "--json"}, folder.path / "out", folder.path / "errors"};
  command.arguments.insert(command.arguments.end(), arguments.begin(), arguments.end());
  const study::Ending ending = wait_politely(study::start(command));
  const Json answer = Json::parse(read_file(command.output), nullptr, /*allow_exceptions=*/false);
  if (ending.code == 0 && answer.is_object()) return answer["rows"][0];
  return {{"model", model}, {"failure", why(ending, answer)}};
}

}  // namespace

Json model_rows(const fs::path& program, const std::vector<std::string>& models,
                const std::vector<std::string>& arguments) {
  Json rows = Json::array();
  Progress progress;
  for (const std::string& model : models) {
    progress.show(fmt::format("{}/{} {}", rows.size() + 1, models.size(), model));
    rows.push_back(row_of(program, model, arguments));
  }
  return rows;
}

}  // namespace assay::bench
