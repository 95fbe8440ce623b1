#include "study/store.h"

namespace assay::study {
namespace {

constexpr const char* kSchema = R"(
CREATE TABLE IF NOT EXISTS plan (id INTEGER PRIMARY KEY CHECK (id = 1), plan TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS runs (
  key TEXT PRIMARY KEY, seed INTEGER NOT NULL, tokens INTEGER NOT NULL, learning_rate REAL NOT NULL,
  status TEXT NOT NULL, reason TEXT NOT NULL DEFAULT '', folder TEXT NOT NULL,
    origin TEXT NOT NULL DEFAULT '',
  estimate TEXT, config TEXT, provenance TEXT, outcome TEXT, end_losses TEXT);
CREATE TABLE IF NOT EXISTS planned (
  position INTEGER PRIMARY KEY, run TEXT NOT NULL REFERENCES runs(key), name TEXT NOT NULL,
    setting TEXT NOT NULL,
  model TEXT NOT NULL, purpose TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS task_results (
  run TEXT NOT NULL REFERENCES runs(key), task TEXT NOT NULL, result TEXT NOT NULL,
    PRIMARY KEY (run, task)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS overlaps (data TEXT PRIMARY KEY, found TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS metrics (
  run TEXT NOT NULL REFERENCES runs(key), step INTEGER NOT NULL, line TEXT NOT NULL,
    PRIMARY KEY (run, step)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS evaluations (
  run TEXT NOT NULL REFERENCES runs(key), step INTEGER NOT NULL, line TEXT NOT NULL,
    file TEXT NOT NULL,
  PRIMARY KEY (run, step)) WITHOUT ROWID;
PRAGMA user_version = 2;
CREATE VIEW IF NOT EXISTS losses AS
  SELECT p.name, p.setting, p.model, r.seed, e.step, e.line ->> '$.tokens' AS tokens,
    e.line ->> '$.train_loss' AS train_loss,
         j.key AS data, j.value ->> '$.loss' AS loss, j.value ->> '$.bits_per_byte' AS bits_per_byte
  FROM evaluations e JOIN runs r ON r.key = e.run JOIN planned p ON p.run = e.run,
    json_each(e.line, '$.evaluation') j;
)";

StoredPlan stored(const Plan& plan) {
  StoredPlan out{.name = plan.name,
                 .reference = plan.reference,
                 .text = plan.text,
                 .has_ladder = plan.has_ladder};
  for (const Setting& setting : plan.settings) {
    out.settings.push_back({.name = setting.name,
                            .train = setting.data.train,
                            .out_of_domain = setting.data.out_of_domain,
                            .further = {},
                            .held_out = setting.data.held_out,
                            .test = setting.data.test,
                            .sequence_length = setting.data.sequence_length});
    if (!setting.data.further.empty()) out.settings.back().further = setting.data.further;
    if (plan.tasks) out.settings.back().tasks = setting.tasks;
  }
  for (const Model& model : plan.models) out.models.push_back(model.name);
  if (!plan.variances.empty()) out.variances = plan.variances;
  return out;
}

std::string text_of(const auto& record) { return to_json(record).dump(); }

constexpr int64_t kVersion = 2;

constexpr const char* kIfDamaged =
    "Remove study.sqlite and repeat the command that wrote it. Finished runs are kept.";

// BadInput for a study.sqlite that another version of Assay wrote, and for an empty one that is to
// be read.
void check_version(Database& database, const fs::path& study, Database::Mode mode) {
  const bool fresh = database.query("SELECT 1 FROM sqlite_master WHERE name = 'runs'").empty();
  if (fresh && mode == Database::Mode::read) database.refuse();
  const int64_t version = database.query("PRAGMA user_version")[0]["user_version"];
  if (!fresh && version != kVersion)
    fail(
        "{}: the study was written by {} version of Assay (format {}; this version reads {}). "
        "Give another output folder. Nothing was changed.",
        (study / "study.sqlite").string(), version < kVersion ? "an earlier" : "a later", version,
        kVersion);
}

// BadInput when a finished run is not the one that was planned: its key would name the results of
// another run.
void check_result(const PlannedRun& planned, const run::FinishedRun& found,
                  const fs::path& folder) {
  const run::Estimate& plan = planned.estimate;
  const run::Provenance& done = found.provenance;
  std::string difference;
  if (done.data != plan.data)
    difference = fmt::format(
        "They come from other data (fingerprint {:.8}, and {:.8} was planned). "
        "Was the token store changed while the study was run?",
        done.data, plan.data);
  else if (done.device == plan.device && done.numerics != plan.numerics)
    difference =
        "The numerics versions of the program differ. "
        "Was the program replaced while the study was run?";
  else if (found.outcome.steps != plan.steps || found.outcome.tokens != plan.tokens)
    difference = fmt::format("They end after {} steps and {} tokens; planned were {} and {}.",
                             found.outcome.steps, found.outcome.tokens, plan.steps, plan.tokens);
  if (!difference.empty())
    fail(
        "{}: The results are not those of the planned run. {} They were not stored. "
        "Remove the folder, and the same command trains the run again.",
        folder.string(), difference);
}

}  // namespace

Store::Store(const fs::path& study, Database::Mode mode)
    : source_((study / "study.sqlite").string()),
      database_(study / "study.sqlite", mode, kIfDamaged) {
  check_version(database_, study, mode);
  if (mode != Database::Mode::read) database_.execute(kSchema);
}

void Store::set_plan(const Plan& plan, const std::vector<PlannedRun>& runs) {
  // set_records() leaves runs without a folder
  if (!database_.query("SELECT 1 FROM runs WHERE folder = '' LIMIT 1").empty())
    fail("{}: The study was made from records. Give another folder. Nothing was trained.", source_);
  Transaction transaction(database_);
  database_.query("INSERT OR REPLACE INTO plan VALUES (1, ?)", {text_of(stored(plan))});
  database_.execute("DELETE FROM planned");
  int64_t position = 0;
  for (const PlannedRun& run : runs) {
    database_.query(
        "INSERT INTO runs (key, seed, tokens, learning_rate, status, folder, estimate, "
        "config) VALUES (?, ?, ?, ?, 'planned', ?, ?, ?) ON CONFLICT (key) DO NOTHING",
        {run.key, run.seed, run.tokens, run.learning_rate, run.folder("").path.string(),
         text_of(run.estimate), read_file(run.config)});
    database_.query("INSERT INTO planned VALUES (?, ?, ?, ?, ?, ?)",
                    {position++, run.key, run.name, run.setting, run.model, run.purpose});
  }
  transaction.commit();
}

std::string Store::status(const std::string& key) {
  const auto rows = database_.query("SELECT status FROM runs WHERE key = ?", {key});
  return rows.empty() ? "" : rows[0]["status"].get<std::string>();
}

std::string Store::reason(const std::string& key) {
  return database_.query("SELECT reason FROM runs WHERE key = ?", {key}).at(0)["reason"];
}

void Store::set_status(const std::string& key, const std::string& status,
                       const std::string& reason) {
  database_.query("UPDATE runs SET status = ?, reason = ? WHERE key = ?", {status, reason, key});
}

void Store::set_folder(const PlannedRun& run) {
  database_.query("UPDATE runs SET folder = ? WHERE key = ?",
                  {run.folder("").path.string(), run.key});
}

void Store::take(const PlannedRun& run, const run::Folder& folder) {
  const run::FinishedRun found = run::read_finished(folder);
  check_result(run, found, folder.path);
  set_folder(run);
  insert(run.key, found, "");
}

void Store::take_record(const std::string& key, const run::RunRecord& record,
                        const std::string& origin) {
  insert(key, run::run_of(record), origin);
}

void Store::insert(const std::string& key, const run::FinishedRun& run, const std::string& origin) {
  Transaction transaction(database_);
  database_.query("DELETE FROM metrics WHERE run = ?", {key});
  database_.query("DELETE FROM evaluations WHERE run = ?", {key});
  for (const run::TrainingLine& line : run.metrics.training)
    database_.query("INSERT OR REPLACE INTO metrics VALUES (?, ?, ?)",
                    {key, line.step, text_of(line)});
  for (const run::EvaluationLine& line : run.metrics.evaluations)
    database_.query(
        "INSERT OR REPLACE INTO evaluations VALUES (?, ?, ?, ?)",
        {key, line.step, text_of(line), run::Folder().document_losses(line.step).string()});
  database_.query(
      "UPDATE runs SET status = ?, reason = '', origin = ?, config = ?, provenance = ?, "
      "outcome = ?, end_losses = ? "
      "WHERE key = ?",
      {status::kDone, origin, run.config, text_of(run.provenance), text_of(run.outcome),
       text_of(run.end), key});
  insert_tasks(key, run.tasks);
  transaction.commit();
}

void Store::insert_tasks(const std::string& key, const std::vector<run::TaskResult>& results) {
  database_.query("DELETE FROM task_results WHERE run = ?", {key});
  for (const run::TaskResult& result : results)
    database_.query("INSERT OR REPLACE INTO task_results VALUES (?, ?, ?)",
                    {key, result.name, text_of(result)});
}

void Store::set_tasks(const std::string& key, const std::vector<run::TaskResult>& results) {
  Transaction transaction(database_);
  insert_tasks(key, results);
  transaction.commit();
}

std::vector<run::TaskResult> Store::tasks(const std::string& key) {
  std::vector<run::TaskResult> out;
  // A study of an earlier version has no such table
  const std::string exists = "SELECT 1 FROM sqlite_master WHERE name = 'task_results'";
  if (database_.query(exists).empty()) return out;
  for (const Json& row : database_.query("SELECT result FROM task_results WHERE run = ?", {key}))
    out.push_back(parse<run::TaskResult>(row["result"]));
  return out;
}

fs::path Store::folder(const std::string& key) {
  return database_.query("SELECT folder FROM runs WHERE key = ?", {key})
      .at(0)["folder"]
      .get<std::string>();
}

std::optional<Overlap> Store::overlap(const std::string& data) {
  const auto rows = database_.query("SELECT found FROM overlaps WHERE data = ?", {data});
  return rows.empty() ? std::nullopt : std::optional(parse<Overlap>(rows[0]["found"]));
}

void Store::set_overlap(const std::string& data, const Overlap& found) {
  database_.query("INSERT OR REPLACE INTO overlaps VALUES (?, ?)", {data, text_of(found)});
}

StoredPlan Store::plan() {
  const auto rows = database_.query("SELECT plan FROM plan");
  if (rows.empty()) fail("the study holds no plan yet; `assay run PLAN.toml -o STUDY` records one");
  return parse<StoredPlan>(rows[0]["plan"]);
}

std::vector<StudyRun> Store::planned_runs() {
  std::vector<StudyRun> out;
  for (const Json& row :
       database_.query("SELECT * FROM planned JOIN runs ON key = run ORDER BY position")) {
    StudyRun& run = out.emplace_back(from_json<StudyRun>(row, source_));
    if (run.status == status::kDone) run.finished = finished(run.key);
  }
  return out;
}

run::FinishedRun Store::finished(const std::string& key) {
  const Json row =
      database_
          .query("SELECT config, provenance, outcome, end_losses FROM runs WHERE key = ?", {key})
          .at(0);
  run::FinishedRun out{.config = row["config"],
                       .provenance = parse<run::Provenance>(row["provenance"]),
                       .outcome = parse<run::Outcome>(row["outcome"]),
                       .end = parse<run::End>(row["end_losses"]),
                       .tasks = tasks(key)};
  for (const Json& line :
       database_.query("SELECT line FROM metrics WHERE run = ? ORDER BY step", {key}))
    out.metrics.training.push_back(parse<run::TrainingLine>(line["line"]));
  for (const Json& line :
       database_.query("SELECT line FROM evaluations WHERE run = ? ORDER BY step", {key}))
    out.metrics.evaluations.push_back(parse<run::EvaluationLine>(line["line"]));
  return out;
}

}  // namespace assay::study
