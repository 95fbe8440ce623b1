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

SourcesBySet sources_of(const run::End& end) {
  SourcesBySet out;
  for (const auto& [set, losses] : end.sets)
    out[set] = {.names = losses.clusters.names,
                .documents = losses.clusters.documents,
                .tokens = losses.clusters.tokens,
                .recall_tokens = losses.clusters.recall_tokens};
  return out;
}

nlohmann::json to_compact_json(const run::RunRecord& record, const SourcesBySet& sources) {
  nlohmann::json out = to_json(record);
  for (const auto& [set, own] : sources_of(record.end)) {
    const auto shared = sources.find(set);
    const nlohmann::json own_json = to_json(own);
    if (shared == sources.end() || to_json(shared->second) != own_json) continue;
    nlohmann::json& clusters = out["end"]["sets"][set]["clusters"];
    for (const auto& [key, value] : own_json.items()) clusters.erase(key);
  }
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

// Puts back what to_compact_json() left out.
void expand(nlohmann::json& record, const SourcesBySet& sources) {
  if (!record.contains("end") || !record["end"].contains("sets")) return;
  for (auto& [set, losses] : record["end"]["sets"].items()) {
    const auto shared = sources.find(set);
    if (shared == sources.end() || losses["clusters"].contains("tokens")) continue;
    losses["clusters"].update(to_json(shared->second));
  }
}

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
  const fs::path plan_file = folder / "plan.json";
  RecordedPlan plan;
  if (fs::exists(plan_file)) plan = read_record<RecordedPlan>(plan_file);
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() != ".json" || entry.path() == plan_file) continue;
    Json json = read_json_of_record(entry.path());
    if (!run::is_record(json, entry.path().string())) continue;
    expand(json, plan.sources.value_or(SourcesBySet()));
    run::RunRecord record = from_json<run::RunRecord>(json, entry.path().string());
    const std::string key = record.key;
    out.try_emplace(key, std::move(record));
  }
  for (const std::string& other : plan.records.value_or(Folders{}))
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
