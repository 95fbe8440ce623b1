#include "study/store.h"

#include <sstream>

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

// The records of metrics.jsonl. BadInput names the line that is not JSON.
std::vector<Json> parse_lines(const fs::path& file) {
  std::vector<Json> out;
  std::istringstream lines(read_file(file));
  for (std::string line; std::getline(lines, line);) try {
      out.push_back(Json::parse(line));
    } catch (const Json::exception& error) {
      fail("{}:{}: not a line of metrics: {}", file.string(), out.size() + 1, error.what());
    }
  return out;
}

Json settings_json(const Plan& plan) {
  Json out = Json::array();
  for (const Setting& setting : plan.settings)
    out.push_back({{"name", setting.name},
                   {"train", setting.data.train},
                   {"out_of_domain", setting.data.out_of_domain},
                   {"held_out", setting.data.held_out},
                   {"test", setting.data.test},
                   {"sequence_length", setting.data.sequence_length}});
  return out;
}

Json plan_json(const Plan& plan) {
  Json models = Json::array();
  for (const Model& model : plan.models) models.push_back(model.name);
  return {{"name", plan.name},
          {"reference", plan.reference},
          {"text", plan.text},
          {"settings", settings_json(plan)},
          {"has_ladder", plan.has_ladder},
          {"models", models}};
}

}  // namespace

Json parse_file(const fs::path& file) {
  try {
    return Json::parse(read_file(file));
  } catch (const Json::exception& error) {
    fail("{}: broken JSON: {}", file.string(), error.what());
  }
}

constexpr int64_t kVersion = 2;

// BadInput for a study.sqlite that another version of Assay wrote.
void check_version(Database& database, const fs::path& study) {
  const bool fresh = database.query("SELECT 1 FROM sqlite_master WHERE name = 'runs'").empty();
  const int64_t version = database.query("PRAGMA user_version")[0]["user_version"];
  if (!fresh && version != kVersion)
    fail(
        "{}: the study was written by {} version of Assay (format {}; this version reads {}). "
        "Give another output folder. Nothing was changed.",
        (study / "study.sqlite").string(), version < kVersion ? "an earlier" : "a later", version,
        kVersion);
}

Store::Store(const fs::path& study, Database::Mode mode) : database_(study / "study.sqlite", mode) {
  check_version(database_, study);
  if (mode == Database::Mode::write) database_.execute(kSchema);
}

void Store::set_plan(const Plan& plan, const std::vector<PlannedRun>& runs) {
  Transaction transaction(database_);
  database_.query("INSERT OR REPLACE INTO plan VALUES (1, ?)", {plan_json(plan).dump()});
  database_.execute("DELETE FROM planned");
  int64_t position = 0;
  for (const PlannedRun& run : runs) {
    database_.query(
        "INSERT INTO runs (key, seed, tokens, learning_rate, status, folder, estimate, "
        "config) VALUES (?, ?, ?, ?, 'planned', ?, ?, ?) ON CONFLICT (key) DO NOTHING",
        {run.key, run.seed, run.tokens, run.learning_rate, run.folder("").string(),
         run.estimate.dump(), read_file(run.config)});
    database_.query("INSERT INTO planned VALUES (?, ?, ?, ?, ?, ?)",
                    {position++, run.key, run.name, run.setting, run.model, run.purpose});
  }
  transaction.commit();
}

std::string Store::status(const std::string& key) {
  const auto rows = database_.query("SELECT status FROM runs WHERE key = ?", {key});
  return rows.empty() ? "" : rows[0]["status"].get<std::string>();
}

void Store::set_status(const std::string& key, const std::string& status,
                       const std::string& reason) {
  database_.query("UPDATE runs SET status = ?, reason = ? WHERE key = ?", {status, reason, key});
}

void Store::take(const std::string& key, const fs::path& folder) {
  const Json provenance = parse_file(folder / "run.json");
  Json outcome = parse_file(folder / "done.json");
  if (!fs::exists(folder / "end.json"))
    fail(
        "{}: holds no end.json, the losses at the end of the run; "
        "an earlier version of Assay trained it. Remove the folder, "
        "and the same command trains it again.",
        folder.string());
  const Json end = parse_file(folder / "end.json");
  if (fs::exists(folder / "probes.json")) outcome["probes"] = parse_file(folder / "probes.json");
  const std::string config = read_file(folder / "config.toml");
  const auto lines = parse_lines(folder / "metrics.jsonl");
  Transaction transaction(database_);
  insert_losses(key, lines, folder / "metrics.jsonl");
  database_.query(
      "UPDATE runs SET status = 'done', reason = '', config = ?, provenance = ?, outcome = ?, "
      "end_losses = ? "
      "WHERE key = ?",
      {config, provenance.dump(), outcome.dump(), end.dump(), key});
  transaction.commit();
}

void Store::insert_losses(const std::string& key, const std::vector<Json>& lines,
                          const fs::path& source) {
  database_.query("DELETE FROM metrics WHERE run = ?", {key});
  database_.query("DELETE FROM evaluations WHERE run = ?", {key});
  int64_t number = 0;
  for (const Json& line : lines) try {
      ++number;
      const int64_t step = line.at("step");
      const std::string losses = fs::path("evaluations") / fmt::format("step-{}.safetensors", step);
      if (line.contains("evaluation"))
        database_.query("INSERT OR REPLACE INTO evaluations VALUES (?, ?, ?, ?)",
                        {key, step, line.dump(), losses});
      else
        database_.query("INSERT OR REPLACE INTO metrics VALUES (?, ?, ?)",
                        {key, step, line.dump()});
    } catch (const Json::exception& error) {
      fail("{}:{}: not a line of metrics: {}", source.string(), number, error.what());
    }
}

Json Store::overlap(const std::string& data) {
  const auto rows = database_.query("SELECT found FROM overlaps WHERE data = ?", {data});
  return rows.empty() ? Json() : Json::parse(rows[0]["found"].get<std::string>());
}

void Store::set_overlap(const std::string& data, const Json& found) {
  database_.query("INSERT OR REPLACE INTO overlaps VALUES (?, ?)", {data, found.dump()});
}

Json Store::end(const std::string& key) {
  const auto rows = database_.query("SELECT end_losses FROM runs WHERE key = ?", {key});
  return rows.empty() || rows[0]["end_losses"].is_null()
             ? Json::object()
             : Json::parse(rows[0]["end_losses"].get<std::string>());
}

Json Store::plan() {
  const auto rows = database_.query("SELECT plan FROM plan");
  if (rows.empty()) fail("the study holds no plan yet; `assay run PLAN.toml -o STUDY` records one");
  return Json::parse(rows[0]["plan"].get<std::string>());
}

std::vector<Json> Store::planned_runs() {
  auto rows = database_.query("SELECT * FROM planned JOIN runs ON key = run ORDER BY position");
  for (Json& row : rows)
    for (const char* column : {"estimate", "provenance", "outcome", "end_losses"})
      row[column] =
          row[column].is_null() ? Json::object() : Json::parse(row[column].get<std::string>());
  return rows;
}

std::vector<Json> Store::metrics(const std::string& key) {
  std::vector<Json> out;
  for (const Json& row :
       database_.query("SELECT line FROM metrics WHERE run = ? ORDER BY step", {key}))
    out.push_back(Json::parse(row["line"].get<std::string>()));
  return out;
}

std::vector<Json> Store::evaluations(const std::string& key) {
  std::vector<Json> out;
  for (const Json& row :
       database_.query("SELECT line, file FROM evaluations WHERE run = ? ORDER BY step", {key})) {
    out.push_back(Json::parse(row["line"].get<std::string>()));
    out.back()["file"] = row["file"];
  }
  return out;
}

}  // namespace assay::study
