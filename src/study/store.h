#pragma once
// The database of a study, study.sqlite. Only the runner writes it. A run is found by its content
// key, not by its name. Losses of single documents stay in the runs' safetensors files; their
// paths are recorded.
#include <map>
#include <optional>

#include "data/overlap.h"
#include "run/finished.h"
#include "study/database.h"
#include "study/plan.h"

namespace assay::study {

// Purpose of a run.
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
  std::string setting;
  std::string model;
  std::string purpose = purpose::kStudy;
  int64_t seed = 0;
  int64_t tokens = 0;        // the budget
  double learning_rate = 0;  // peak
  // MODEL.toml, token store
  fs::path config;
  fs::path data;
  std::string toml;  // what MODEL.toml holds
  // Output of `assay train --dry-run`, with tokens, steps and seconds of this run
  run::Estimate estimate;
  run::Folder folder(const fs::path& study) const {
    return {study / "runs" / (name + "." + key.substr(0, 8))};
  }
};

// How far a run has come.
namespace status {
inline constexpr const char* kPlanned = "planned";
inline constexpr const char* kRunning = "running";
inline constexpr const char* kDone = "done";
inline constexpr const char* kFailed = "failed";
inline constexpr const char* kInterrupted = "interrupted";
inline constexpr const char* kMissing = "missing";  // done elsewhere, and its record was not given
}  // namespace status

// A planned run, as plan.json of a folder of records lists it.
struct StoredRun {
  std::string key;
  std::string name;
  std::string setting;
  std::string model;
  std::string purpose;
  int64_t seed = 0;
  int64_t tokens = 0;
  double learning_rate = 0;
  std::string status;
  std::string reason;
  ASSAY_FIELDS(key, name, setting, model, purpose, seed, tokens, learning_rate, status, reason)
};
// With what the database knows of it.
struct StudyRun : StoredRun {
  // origin: where the record was found; "" when the study trained it
  std::string folder;
  std::string origin;
  std::optional<run::FinishedRun> finished;  // of a run that is done
  ASSAY_MORE_FIELDS(StoredRun, folder, origin)
};

struct StoredSetting {
  std::string name;
  std::vector<std::string> train;
  std::vector<std::string> out_of_domain;
  std::optional<std::vector<std::string>> further;  // absent when the plan names none
  std::string held_out;
  std::string test;
  int64_t sequence_length = 0;
  std::optional<std::vector<run::TaskQuestion>> tasks;  // absent when the plan has none
  ASSAY_FIELDS(name, train, out_of_domain, further, held_out, test, sequence_length, tasks)
};
// Overlap of the test text with the training text, by domain.
using Overlap = std::vector<data::DomainOverlap>;
struct StoredPlan {
  std::string name;
  std::string reference;
  std::string text;
  std::vector<StoredSetting> settings;
  bool has_ladder = false;
  std::vector<std::string> models;
  std::optional<std::vector<VarianceRow>> variances;  // absent when the plan names no table
  ASSAY_FIELDS(name, reference, text, settings, has_ladder, models, variances)
};
using Folders = std::vector<std::string>;
// plan.json of a folder of records. It also has `shared`: what all records of the folder leave out.
struct RecordedPlan : StoredPlan {
  std::vector<StoredRun> runs;
  std::optional<std::map<std::string, Overlap>> overlaps;  // by fingerprint of the data
  // Other folders of records, relative to this one
  std::optional<Folders> records;
  ASSAY_MORE_FIELDS(StoredPlan, runs, overlaps, records)
};

// Records of finished runs, by key. Each *.json file of a folder is one record, and plan.json names
// other folders whose records belong to them; a folder that holds a study.sqlite gives the finished
// runs of that study. BadInput when a folder holds neither.
using Records = std::map<std::string, run::RunRecord>;
Records read_records(const fs::path& folder);
run::RunRecord record_of(const StudyRun& run);  // of a finished run

class Store {
 public:
  explicit Store(const fs::path& study, Database::Mode mode = Database::Mode::write);

  // Records the plan. Runs of earlier plans stay, but no longer count as planned.
  void set_plan(const Plan& plan, const std::vector<PlannedRun>& runs);
  std::string status(const std::string& key);  // status::kPlanned, …; "" for an unknown run
  std::string reason(const std::string& key);  // why a run failed
  void set_status(const std::string& key, const std::string& status,
                  const std::string& reason = "");
  // The folder of a run that is about to start: its name may have changed since it was planned.
  void set_folder(const PlannedRun& run);
  // Reads a finished run's folder; all of it is stored, or nothing. BadInput when the folder is not
  // whole, or its data, configuration or length are not those that were planned.
  void take(const PlannedRun& run, const run::Folder& folder);
  // Takes a finished run of another study. `origin` is recorded: where the record was found.
  void take_record(const std::string& key, const run::RunRecord& record, const std::string& origin);
  // Results of tasks on the final weights of a run, and the folder of the run in the study.
  std::vector<run::TaskResult> tasks(const std::string& key);
  void set_tasks(const std::string& key, const std::vector<run::TaskResult>& results);
  fs::path folder(const std::string& key);
  // A whole study made of records. BadInput when it has runs that it trained or reused.
  void set_records(const RecordedPlan& plan, const Records& records, const std::string& origin);
  // Overlap in the data with that fingerprint; no value if it was not measured.
  std::optional<Overlap> overlap(const std::string& data);
  void set_overlap(const std::string& data, const Overlap& found);

  StoredPlan plan();
  // In the plan's order. A run that serves two purposes, such as a tuning run with the budget of a
  // rung, is there twice, with the same key.
  std::vector<StudyRun> planned_runs();
  run::FinishedRun finished(const std::string& key);

 private:
  void insert(const std::string& key, const run::FinishedRun& run, const std::string& origin);
  void insert_tasks(const std::string& key, const std::vector<run::TaskResult>& results);
  template <class T>
  T parse(const std::string& column) const {
    return parse_record<T>(column, source_);
  }
  std::string source_;  // for messages
  Database database_;
};

}  // namespace assay::study
