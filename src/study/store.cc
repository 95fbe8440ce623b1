#include "study/store.h"

#include <sstream>

namespace assay::study {
namespace {

constexpr const char* kSchema = R"(
CREATE TABLE IF NOT EXISTS plan (id INTEGER PRIMARY KEY CHECK (id = 1), plan TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS runs (
  key TEXT PRIMARY KEY, position INTEGER, name TEXT NOT NULL, setting TEXT NOT NULL, model TEXT NOT NULL,
  seed INTEGER NOT NULL, status TEXT NOT NULL, reason TEXT NOT NULL DEFAULT '', folder TEXT NOT NULL,
  estimate TEXT, config TEXT, provenance TEXT, outcome TEXT);
CREATE TABLE IF NOT EXISTS metrics (
  run TEXT NOT NULL REFERENCES runs(key), step INTEGER NOT NULL, line TEXT NOT NULL, PRIMARY KEY (run, step)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS evaluations (
  run TEXT NOT NULL REFERENCES runs(key), step INTEGER NOT NULL, line TEXT NOT NULL, file TEXT NOT NULL,
  PRIMARY KEY (run, step)) WITHOUT ROWID;
CREATE VIEW IF NOT EXISTS losses AS
  SELECT r.name, r.setting, r.model, r.seed, e.step, e.line ->> '$.tokens' AS tokens, e.line ->> '$.train_loss' AS train_loss,
         j.key AS data, j.value ->> '$.loss' AS loss, j.value ->> '$.bits_per_byte' AS bits_per_byte
  FROM evaluations e JOIN runs r ON r.key = e.run, json_each(e.line, '$.evaluation') j;
)";

Json parse_file(const fs::path& file) {
  try {
    return Json::parse(read_file(file));
  } catch (const Json::exception& error) {
    fail("{}: broken JSON: {}", file.string(), error.what());
  }
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
          {"models", models}};
}

}  // namespace

Store::Store(const fs::path& study, Database::Mode mode) : database_(study / "study.sqlite", mode) {
  if (mode == Database::Mode::write) database_.execute(kSchema);
}

void Store::set_plan(const Plan& plan, const std::vector<PlannedRun>& runs) {
  Transaction transaction(database_);
  database_.query("INSERT OR REPLACE INTO plan VALUES (1, ?)", {plan_json(plan).dump()});
  database_.execute("UPDATE runs SET position = NULL");
  int64_t position = 0;
  for (const PlannedRun& run : runs)
    database_.query(
        "INSERT INTO runs (key, position, name, setting, model, seed, status, folder, estimate, config) "
        "VALUES (?, ?, ?, ?, ?, ?, 'planned', ?, ?, ?) ON CONFLICT (key) DO UPDATE SET position = excluded.position",
        {run.key, position++, run.name, run.setting, run.model, run.seed, run.folder("").string(), run.estimate.dump(),
         read_file(run.config)});
  transaction.commit();
}

std::string Store::status(const std::string& key) {
  const auto rows = database_.query("SELECT status FROM runs WHERE key = ?", {key});
  return rows.empty() ? "" : rows[0]["status"].get<std::string>();
}

void Store::set_status(const std::string& key, const std::string& status, const std::string& reason) {
  database_.query("UPDATE runs SET status = ?, reason = ? WHERE key = ?", {status, reason, key});
}

void Store::take(const std::string& key, const fs::path& folder) {
  const Json provenance = parse_file(folder / "run.json");
  Json outcome = parse_file(folder / "done.json");
  if (fs::exists(folder / "probes.json")) outcome["probes"] = parse_file(folder / "probes.json");
  const std::string config = read_file(folder / "config.toml");
  Transaction transaction(database_);
  take_metrics(key, folder);
  database_.query("UPDATE runs SET status = 'done', reason = '', config = ?, provenance = ?, outcome = ? WHERE key = ?",
                  {config, provenance.dump(), outcome.dump(), key});
  transaction.commit();
}

void Store::take_metrics(const std::string& key, const fs::path& folder) {
  database_.query("DELETE FROM metrics WHERE run = ?", {key});
  database_.query("DELETE FROM evaluations WHERE run = ?", {key});
  const fs::path file = folder / "metrics.jsonl";
  std::istringstream lines(read_file(file));
  int64_t number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    try {
      const Json json = Json::parse(line);
      const int64_t step = json.at("step");
      const std::string losses = fs::path("evaluations") / fmt::format("step-{}.safetensors", step);
      if (json.contains("evaluation"))
        database_.query("INSERT OR REPLACE INTO evaluations VALUES (?, ?, ?, ?)", {key, step, line, losses});
      else database_.query("INSERT OR REPLACE INTO metrics VALUES (?, ?, ?)", {key, step, line});
    } catch (const Json::exception& error) {
      fail("{}:{}: not a line of metrics: {}", file.string(), number, error.what());
    }
  }
}

Json Store::plan() {
  const auto rows = database_.query("SELECT plan FROM plan");
  if (rows.empty()) fail("the study holds no plan yet; `assay run PLAN.toml -o STUDY` records one");
  return Json::parse(rows[0]["plan"].get<std::string>());
}

std::vector<Json> Store::planned_runs() {
  auto rows = database_.query("SELECT * FROM runs WHERE position IS NOT NULL ORDER BY position");
  for (Json& row : rows)
    for (const char* column : {"estimate", "provenance", "outcome"})
      row[column] = row[column].is_null() ? Json::object() : Json::parse(row[column].get<std::string>());
  return rows;
}

std::vector<Json> Store::metrics(const std::string& key) {
  std::vector<Json> out;
  for (const Json& row : database_.query("SELECT line FROM metrics WHERE run = ? ORDER BY step", {key}))
    out.push_back(Json::parse(row["line"].get<std::string>()));
  return out;
}

std::vector<Json> Store::evaluations(const std::string& key) {
  std::vector<Json> out;
  for (const Json& row : database_.query("SELECT line, file FROM evaluations WHERE run = ? ORDER BY step", {key})) {
    out.push_back(Json::parse(row["line"].get<std::string>()));
    out.back()["file"] = row["file"];
  }
  return out;
}

}  // namespace assay::study
