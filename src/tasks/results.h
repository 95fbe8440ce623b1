#pragma once
// Results of tasks, item by item, in one SQLite file. An evaluation that was interrupted goes on
// where it stopped.
#include <map>
#include <set>
#include <string>
#include <vector>

#include "study/database.h"
#include "tasks/task.h"

namespace assay::tasks {

// Conditions that decide the answers of a model to a task.
struct Evaluation {
  std::string model;        // as the user names it
  std::string weights;      // sha256 of the model's configuration and weights
  std::string tokenizer;    // sha256
  std::string data;         // sha256 of the documents and of the source of examples
  std::string settings;     // precision, longest input, tokens before a text
  std::string task;         // its name
  std::string definition;   // of the task
  std::string key() const;  // sha256 of all of it but `model` and `task`
};

// The answer to one document.
struct Item {
  size_t index = 0;
  std::string group;
  Scores scores;
  int64_t dropped =
      0;  // tokens that did not fit and were left out at the beginning, of the worst row
};

class Results {
 public:
  // An empty path keeps them in memory only.
  explicit Results(const fs::path& file);
  void begin(const Evaluation& evaluation);
  std::set<size_t> finished(const std::string& key);  // indices of items
  void add(const std::string& key, const std::vector<Item>& items);
  std::vector<Item> items(const std::string& key);  // in order

 private:
  study::Database database_;
};

}  // namespace assay::tasks
