#include "tasks/results.h"

namespace assay::tasks {
namespace {

constexpr const char* kSchema = R"(
CREATE TABLE IF NOT EXISTS evaluations (
  key TEXT PRIMARY KEY, model TEXT NOT NULL, task TEXT NOT NULL, weights TEXT NOT NULL,
    tokenizer TEXT NOT NULL,
  data TEXT NOT NULL, settings TEXT NOT NULL, definition TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS items (
  evaluation TEXT NOT NULL REFERENCES evaluations(key), item INTEGER NOT NULL,
    grouped TEXT NOT NULL,
  dropped INTEGER NOT NULL, scores TEXT NOT NULL, PRIMARY KEY (evaluation, item)) WITHOUT ROWID;
CREATE VIEW IF NOT EXISTS item_metrics AS
  SELECT e.model, e.task, i.item, i.grouped, j.key AS metric, j.value AS value
  FROM items i JOIN evaluations e ON e.key = i.evaluation, json_each(i.scores, '$.metrics') j;
PRAGMA user_version = 1;
)";

}  // namespace

std::string Evaluation::key() const {
  return sha256(Json{weights, tokenizer, data, settings, definition}.dump());
}

Results::Results(const fs::path& file)
    : database_(file.empty() ? fs::path(":memory:") : file, study::Database::Mode::write) {
  const auto version = database_.query("PRAGMA user_version")[0]["user_version"].get<int64_t>();
  const bool used = !database_.query("SELECT 1 FROM sqlite_master").empty();
  if (used && (version != 1 ||
               database_.query("SELECT 1 FROM sqlite_master WHERE name = 'item_metrics'").empty()))
    fail(
        "{}: not a file of results of tasks, or one of another version of Assay. "
        "Nothing was changed.",
        file.string());
  database_.execute(kSchema);
}

void Results::begin(const Evaluation& e) {
  database_.query(
      "INSERT INTO evaluations VALUES (?, ?, ?, ?, ?, ?, ?, "
      "?) ON CONFLICT (key) DO UPDATE SET model = excluded.model, task = excluded.task",
      {e.key(), e.model, e.task, e.weights, e.tokenizer, e.data, e.settings, e.definition});
}

std::set<size_t> Results::finished(const std::string& key) {
  std::set<size_t> out;
  for (const Json& row : database_.query("SELECT item FROM items WHERE evaluation = ?", {key}))
    out.insert(row["item"].get<size_t>());
  return out;
}

void Results::add(const std::string& key, const std::vector<Item>& items) {
  study::Transaction transaction(database_);
  for (const Item& item : items)
    database_.query("INSERT OR REPLACE INTO items VALUES (?, ?, ?, ?, ?)",
                    {key, item.index, item.group, item.dropped, item.scores.dump()});
  transaction.commit();
}

std::vector<Item> Results::items(const std::string& key) {
  std::vector<Item> out;
  for (const Json& row :
       database_.query("SELECT * FROM items WHERE evaluation = ? ORDER BY item", {key}))
    out.push_back({row["item"].get<size_t>(), row["grouped"].get<std::string>(),
                   Json::parse(row["scores"].get<std::string>()), row["dropped"].get<int64_t>()});
  return out;
}

}  // namespace assay::tasks
