#pragma once
// A task: a TOML file, its documents and the examples before each question.
//
//   kind      = "multiple_choice"
//   documents = "piqa.validation.jsonl"
//   text      = "Question: {{goal}}\nAnswer:"
//   choices   = "{{[sol1, sol2]}}"
//   answer    = "{{label}}"
//
// docs/tasks.md describes every field.
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "tasks/kind.h"

namespace assay::tasks {

struct Task {
  std::string name;
  TaskConfig config;
  std::shared_ptr<Kind> kind;
  std::vector<std::string> metrics;  // that are reported
  std::string definition;            // every field that decides answers or scores, as TOML

  // BadInput with place and nearest name on a wrong field. `few_shot` ≥ 0 replaces the
  // number of examples.
  static Task read(const fs::path& file, int64_t few_shot = -1);
};

// The file of a task that a user names: the file itself, or NAME.toml among the tasks of the
// program (`folders`). BadInput names the nearest.
fs::path find_task(const std::string& name, const std::vector<fs::path>& folders);
std::vector<std::string> task_names(const std::vector<fs::path>& folders);

struct Question {
  size_t index = 0;  // of the document in its file
  Json document;
  std::string before;  // description and examples
  std::string group;   // "" without a field `group`
};
// The documents of a task in order, the first `limit` of them (0: all), each with its examples.
// Examples are drawn for every document in turn, as lm-evaluation-harness does: sample(source, k)
// of one generator per task and group, where the source has other documents; sample(source, k + 1)
// without the document itself where it is among them.
std::vector<Question> questions(const Task& task, const fs::path& data, int64_t limit,
                                Encoder& encoder);

}  // namespace assay::tasks
