#pragma once
// What a study knows: study.sqlite, written by the runner alone. A run is found by its content key, not by its name.
// Losses of single documents stay in the runs' safetensors files; their paths are recorded.
#include "study/database.h"
#include "study/plan.h"

namespace assay::study {

struct PlannedRun {
  std::string
      key;  // sha256 of the configuration with its defaults, the data's fingerprint, the seed, numerics versions
  std::string name;  // "window.seed-1", "long.window.seed-1"; the folder is runs/NAME.first-8-of-key
  std::string setting, model;
  int64_t seed = 0;
  fs::path config, data;  // MODEL.toml, token store
  Json estimate;          // of `assay train --dry-run`: parameters, flops_per_token, tokens, steps, estimated_seconds
  fs::path folder(const fs::path& study) const { return study / "runs" / (name + "." + key.substr(0, 8)); }
};

class Store {
 public:
  explicit Store(const fs::path& study, Database::Mode mode = Database::Mode::write);

  // Records the plan. Runs of earlier plans stay, but no longer count as planned.
  void set_plan(const Plan& plan, const std::vector<PlannedRun>& runs);
  std::string status(const std::string& key);  // "planned", "running", "done", "failed", "interrupted"; "" for none
  void set_status(const std::string& key, const std::string& status, const std::string& reason = "");
  // Reads a finished run's folder; all of it is stored, or nothing. BadInput when the folder is not whole.
  void take(const std::string& key, const fs::path& folder);

  Json plan();  // {"name","reference","text","settings":[{"name","train","out_of_domain",…}],"models":[…]}
  std::vector<Json> planned_runs();                   // rows of `runs`, in the plan's order, JSON columns parsed
  std::vector<Json> metrics(const std::string& key);  // training lines, in order
  std::vector<Json> evaluations(
      const std::string& key);  // {"step","tokens","train_loss","evaluation","file"}, in order

 private:
  void take_metrics(const std::string& key, const fs::path& folder);
  Database database_;
};

}  // namespace assay::study
