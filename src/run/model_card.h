#pragma once
// README.md of an exported model, as the Hugging Face Hub reads it: YAML metadata, then Markdown.
#include <optional>
#include <string>

#include "run/folder.h"

namespace assay::run {

// Properties of the exported folder that the run does not know.
struct CardModel {
  std::string name;        // of the folder
  std::string model_type;  // of config.json
  std::string library;     // the Hub's name of the library that reads it; empty if none
};

// The card of the weights at `checkpoint`, from the files of their run alone: training, and losses
// and tasks of these weights. They are those at the end of the run, or the losses of the evaluation
// at their step. None where `checkpoint` is not in a run. The license is left to the owner of the
// weights.
std::optional<std::string> model_card(const Checkpoint& checkpoint, const CardModel& model);

}  // namespace assay::run
