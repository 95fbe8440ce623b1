// Records of finished runs: Store's part that writes and reads them.
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
  Transaction transaction(database_);
  database_.query("INSERT OR REPLACE INTO plan VALUES (1, ?)", {to_json<StoredPlan>(plan).dump()});
  database_.execute(
      "DELETE FROM planned; DELETE FROM metrics; DELETE FROM evaluations; DELETE FROM runs");
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

Records read_records(const fs::path& folder) {
  if (!fs::is_directory(folder)) fail("{}: is not a folder. Nothing was run.", folder.string());
  Records out;
  if (fs::exists(folder / "study.sqlite")) {
    Store store(folder, Database::Mode::read);
    for (const StudyRun& run : store.planned_runs())
      if (run.finished) out[run.key] = record_of(run);
    return out;
  }
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() != ".json") continue;
    const Json json = parse_json(read_file(entry.path()), entry.path().string());
    if (!run::is_record(json)) continue;
    run::RunRecord record = from_json<run::RunRecord>(json, entry.path().string());
    const std::string key = record.key;  // before the move: the right side comes first
    out[key] = std::move(record);
  }
  if (out.empty())
    fail(
        "{}: holds no study.sqlite and no record of a run (*.json of the format {}). "
        "Nothing was run.",
        folder.string(), run::RunRecord::kFormat);
  return out;
}

}  // namespace assay::study
