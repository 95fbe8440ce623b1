#include "train/checkpoint.h"

#include <torch/torch.h>

#include <nlohmann/json.hpp>

#include "nn/model_files.h"

namespace assay::train {
namespace {

using Json = nlohmann::json;

// Every double as its shortest exact text: JSON then reads back the same bits.
template <class Visit>
void visit(auto& p, Visit&& field) {
  field("step", p.step);
  field("interval_loss", p.interval_loss);
  field("interval_steps", p.interval_steps);
  field("evaluation_loss", p.evaluation_loss);
  field("evaluation_steps", p.evaluation_steps);
  field("last_loss", p.last_loss);
  field("mean_loss", p.mean_loss);
  field("seconds", p.seconds);
}

[[noreturn]] void refuse(const fs::path& folder, const std::string& why) {
  fail(
      "{}\n  The checkpoint {} is broken; nothing was changed. "
      "Remove it to go on from the one before it.",
      why, folder.string());
}

}  // namespace

void save_checkpoint(const fs::path& run, const nn::LanguageModel& model, const AdamW& optimizer,
                     const Progressed& progressed) {
  const fs::path folder = run / "checkpoints" / fmt::format("step-{}", progressed.step);
  if (fs::exists(folder)) return;  // the same step of the same run: the same bytes
  const fs::path temporary = run / "checkpoints" / "writing";
  fs::remove_all(temporary);
  make_folder(temporary);
  nn::save_tensors(temporary / "model.safetensors", nn::named_parameters_of(model));
  nn::save_tensors(temporary / "optimizer.safetensors", optimizer.moments());
  Json state;
  visit(progressed, [&](const char* name, const auto& value) { state[name] = value; });
  write_file(temporary / "state.json", state.dump(1) + "\n");
  publish_folder(temporary, folder);
}

Progressed load_checkpoint(const fs::path& folder, nn::LanguageModel& model, AdamW& optimizer) {
  Progressed progressed;
  try {
    const Json state = Json::parse(read_file(folder / "state.json"));
    visit(progressed, [&](const char* name, auto& value) { state.at(name).get_to(value); });
    nn::copy_tensors(nn::load_tensors(folder / "model.safetensors"), nn::named_parameters_of(model),
                     (folder / "model.safetensors").string());
    nn::copy_tensors(nn::load_tensors(folder / "optimizer.safetensors"), optimizer.moments(),
                     (folder / "optimizer.safetensors").string());
  } catch (const Json::exception&) {
    refuse(folder, fmt::format("{}: is not the JSON of a checkpoint's state",
                               (folder / "state.json").string()));
  } catch (const BadInput& error) {
    refuse(folder, error.what());
  }
  return progressed;
}

std::optional<fs::path> newest_checkpoint(const fs::path& run, int64_t last_step) {
  auto found = nn::checkpoints(run);
  found.erase(found.upper_bound(last_step), found.end());
  return found.empty() ? std::nullopt : std::optional(found.rbegin()->second);
}

void prune_checkpoints(const fs::path& run, const std::vector<int64_t>& keep_steps) {
  const auto found = nn::checkpoints(run);
  size_t left = found.size();
  for (const auto& [step, folder] : found)
    if (left-- > 2 && std::ranges::find(keep_steps, step) == keep_steps.end())
      fs::remove_all(folder);
}

}  // namespace assay::train
