#include "run/folder.h"

#include <charconv>

#include "base/safetensors.h"

namespace assay::run {
namespace {

constexpr std::string_view kStep = "step-";

fs::path checkpoints_of(const fs::path& run) { return run / "checkpoints"; }
std::string step_name(int64_t step) { return fmt::format("{}{}", kStep, step); }

// 20 of "step-20"; none for other names.
std::optional<int64_t> step_of(const std::string& name) {
  if (!name.starts_with(kStep)) return std::nullopt;
  int64_t step = 0;
  const char* begin = name.data() + kStep.size();
  const char* end = name.data() + name.size();
  const auto [last, error] = std::from_chars(begin, end, step);
  const bool is_number = error == std::errc() && last == end && step >= 0;
  return is_number ? std::optional(step) : std::nullopt;
}

void check(const fs::path& file, const std::optional<std::string>& checksum) {
  if (checksum && *checksum != Safetensors(file).checksum())
    fail(
        "{}: the file is damaged: its bytes are not those that were written. "
        "An earlier checkpoint of the run can be used in its place.",
        file.string());
}

}  // namespace

void Checkpoint::check_weights() const {
  if (state().exists()) check(weights(), state().read().weights_checksum);
}

void Checkpoint::check_moments() const {
  if (state().exists()) check(moments(), state().read().moments_checksum);
}

fs::path Folder::document_losses(int64_t step) const {
  return path / "evaluations" / (step_name(step) + ".safetensors");
}

std::map<int64_t, Checkpoint> Folder::checkpoints() const {
  std::map<int64_t, Checkpoint> found;
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(checkpoints_of(path), none))
    if (const auto step = step_of(entry.path().filename())) found[*step] = {entry.path()};
  return found;
}

Checkpoint Folder::checkpoint(int64_t step) const {
  return {checkpoints_of(path) / step_name(step)};
}

fs::path Folder::unfinished_checkpoints() const { return checkpoints_of(path) / "writing"; }

fs::path Folder::removed_checkpoint() const { return checkpoints_of(path) / "removing"; }

void check_output_folder(const fs::path& folder, const fs::path& own) {
  std::error_code none;  // a folder that cannot be read is refused by those who write into it
  if (fs::exists(own, none)) return;
  for (const auto& [file, content] : {std::pair{"manifest.json", "a token store"},
                                      {"study.sqlite", "a study"},
                                      {"run.json", "a run"},
                                      {"plan.json", "records of runs"}})
    if (fs::exists(folder / file, none))
      fail("{}: The folder holds {} ({}). Choose another one. Nothing was written.",
           folder.string(), content, file);
}

std::optional<Folder> enclosing_run(const fs::path& path) {
  const fs::path of_checkpoint = fs::absolute(path / "").parent_path().parent_path().parent_path();
  for (const Folder& folder : {Folder{path}, Folder{of_checkpoint}})
    if (fs::exists(folder.config())) return folder;
  return std::nullopt;
}

}  // namespace assay::run
