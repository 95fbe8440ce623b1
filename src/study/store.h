#pragma once
// What a study knows: study.sqlite, written by the runner alone. A run is found by its content
// key, not by its name. Losses of single documents stay in the runs' safetensors files; their
// paths are recorded.
#include <map>

#include "study/database.h"
#include "study/plan.h"

namespace assay::study {

// What a run is for.
namespace purpose {
inline constexpr const char* kStudy = "study";                     // answers the plan's question
inline constexpr const char* kTuning = "tuning";                   // chooses a learning rate
inline constexpr const char* kHalf = "half the learning rate";     // checks that the verdict holds
inline constexpr const char* kDouble = "twice the learning rate";  // the same
}  // namespace purpose

struct PlannedRun {
  std::string key;   // sha256 of the configuration with its defaults, the data's fingerprint, the
                     // seed, the budget, the learning rate and the numerics versions
  std::string name;  // "window.82M.seed-1"; the folder is runs/NAME.first-8-of-key
  std::string setting, model;
  std::string purpose = purpose::kStudy;
  int64_t seed = 0;
  int64_t tokens = 0;        // the budget
  double learning_rate = 0;  // peak
  fs::path config, data;     // MODEL.toml, token store
  // Of `assay train --dry-run`, with tokens, steps and seconds of this run
  Json estimate;
  fs::path folder(const fs::path& study) const {
    return study / "runs" / (name + "." + key.substr(0, 8));
  }
};

// A finished run in a few kB of JSON: configuration, provenance, losses along training, and the
// losses at its end by domain and source. Everything that a report reads, and no weights.
//   {"format": "assay-run-1", "key", "name", "model", "seed", "tokens", "learning_rate", "config",
//    "provenance", "outcome", "training": [[step, loss], …],
//    "evaluations": [{"step", "tokens", "losses": {SET: loss}}, …], "end"}
// Records in a folder, by key. Each *.json file in it is one record; a folder that holds a
// study.sqlite gives the finished runs of that study. BadInput when a folder holds neither.
using Records = std::map<std::string, Json>;
Records read_records(const fs::path& folder);

// A JSON file; BadInput names it when it cannot be parsed.
Json parse_file(const fs::path& file);

class Store {
 public:
  explicit Store(const fs::path& study, Database::Mode mode = Database::Mode::write);

  // Records the plan. Runs of earlier plans stay, but no longer count as planned.
  void set_plan(const Plan& plan, const std::vector<PlannedRun>& runs);
  // "planned", "running", "done", "failed", "interrupted"; "" for none
  std::string status(const std::string& key);
  void set_status(const std::string& key, const std::string& status,
                  const std::string& reason = "");
  // Reads a finished run's folder; all of it is stored, or nothing. BadInput when the folder
  // is not whole.
  void take(const std::string& key, const fs::path& folder);
  // Takes a finished run of another study. `origin` is recorded: where the record was found.
  void take_record(const std::string& key, const Json& record, const std::string& origin);
  // A whole study made of records: `plan` is plan() with the rows of its runs under "runs".
  void set_records(const Json& plan, const Records& records, const std::string& origin);
  Json record(const Json& run);      // of a finished run, a row of planned_runs()
  Json end(const std::string& key);  // end.json of a finished run
  // What the test text shares with the training text, for the data of that fingerprint: [{"domain",
  // "documents", "duplicates", "ngrams", "shared"}, …]; null when it was not measured.
  Json overlap(const std::string& data);
  void set_overlap(const std::string& data, const Json& found);

  // {"name","reference","text","settings":[{"name","train","out_of_domain",…}],"models":[…]}
  Json plan();
  // A row per planned run, in the plan's order, JSON columns parsed. A run that serves two
  // purposes, such as a tuning run with the budget of a rung, has two rows with the same key.
  std::vector<Json> planned_runs();
  std::vector<Json> metrics(const std::string& key);  // training lines, in order
  std::vector<Json> evaluations(
      const std::string& key);  // {"step","tokens","train_loss","evaluation","file"}, in order

 private:
  void insert_losses(const std::string& key, const std::vector<Json>& lines,
                     const fs::path& source);
  Database database_;
};

}  // namespace assay::study
