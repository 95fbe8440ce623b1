// Records of finished runs: Store's part that writes and reads them.
#include <set>

#include "study/store.h"

namespace assay::study {

run::RunRecord record_of(const StudyRun& run) {
  run::RunRecord out = run::record_of(*run.finished);
  out.key = run.key;
  out.name = run.name;
  out.model = run.model;
  out.seed = run.seed;
  out.tokens = run.tokens;
  out.learning_rate = run.learning_rate;
  return out;
}

void Store::set_records(const RecordedPlan& plan, const Records& records,
                        const std::string& origin) {
  // The runs of a study have a folder
  if (!database_.query("SELECT 1 FROM runs WHERE folder != '' LIMIT 1").empty())
    fail(
        "{}: The study was not made from records, and its results would be lost. "
        "Give another folder. Nothing was changed.",
        source_);
  Transaction transaction(database_);
  database_.query("INSERT OR REPLACE INTO plan VALUES (1, ?)", {to_json<StoredPlan>(plan).dump()});
  database_.execute(
      "DELETE FROM planned; DELETE FROM metrics; DELETE FROM evaluations; "
      "DELETE FROM task_results; DELETE FROM runs");
  int64_t position = 0;
  for (const StoredRun& run : plan.runs) {
    database_.query(
        "INSERT INTO runs (key, seed, tokens, learning_rate, status, reason, folder) VALUES (?, ?, "
        "?, ?, ?, ?, '') ON CONFLICT (key) DO NOTHING",
        {run.key, run.seed, run.tokens, run.learning_rate,
         run.status == status::kDone ? status::kMissing : run.status, run.reason});
    database_.query("INSERT INTO planned VALUES (?, ?, ?, ?, ?, ?)",
                    {position++, run.key, run.name, run.setting, run.model, run.purpose});
  }
  if (plan.overlaps)
    for (const auto& [data, found] : *plan.overlaps) set_overlap(data, found);
  transaction.commit();
  for (const StoredRun& run : plan.runs)
    if (const auto found = records.find(run.key); found != records.end())
      take_record(found->first, found->second, origin);
}

namespace {

void add_study(const fs::path& folder, Records& out) {
  Store store(folder, Database::Mode::read);
  for (const StudyRun& run : store.planned_runs())
    if (run.finished) out.try_emplace(run.key, record_of(run));
}

Json read_json_of_record(const fs::path& file) try {
  return parse_json(read_file(file), file.string());
} catch (const BadInput& error) {
  fail(
      "{}\n  `assay report STUDY --records FOLDER` writes the records of a study again. "
      "Nothing was changed.",
      error.what());
}

// Keeps the records that `out` has: those of a folder go before those of the folders that its
// plan.json names. `visited`: folders that have been read, because two folders can name each other.
void add_folder(const fs::path& folder, std::set<fs::path>& visited, Records& out) {
  if (!fs::is_directory(folder)) fail("{}: is not a folder. Nothing was run.", folder.string());
  if (!visited.insert(fs::canonical(folder)).second) return;
  if (fs::exists(folder / "study.sqlite")) return add_study(folder, out);
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() != ".json") continue;
    const Json json = read_json_of_record(entry.path());
    if (!run::is_record(json, entry.path().string())) continue;
    run::RunRecord record = from_json<run::RunRecord>(json, entry.path().string());
    const std::string key = record.key;
    out.try_emplace(key, std::move(record));
  }
  const fs::path plan = folder / "plan.json";
  if (!fs::exists(plan)) return;
  for (const std::string& other : read_record<RecordedPlan>(plan).records.value_or(Folders{}))
    add_folder(folder / other, visited, out);
}

}  // namespace

Records read_records(const fs::path& folder) {
  Records out;
  std::set<fs::path> visited;
  add_folder(folder, visited, out);
  if (out.empty())
    fail(
        "{}: holds no study.sqlite and no record of a run (*.json of the format {}). "
        "Nothing was run.",
        folder.string(), run::RunRecord::kFormat);
  return out;
}

}  // namespace assay::study
