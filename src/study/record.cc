// Records of finished runs: Store's part that writes and reads them.
#include <algorithm>
#include <cmath>
#include <set>

#include "study/runner.h"

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

// In plan.json: the members that its records leave out. In a record: their checksum.
constexpr const char* kShared = "shared";
std::string checksum(const Json& shared) { return sha256(shared.dump()).substr(0, 8); }

// The members that are equal in both.
Json common(const Json& a, const Json& b) {
  Json out = Json::object();
  for (const auto& [key, value] : a.items())
    if (b.contains(key) && value == b[key]) out[key] = value;
    else if (b.contains(key) && value.is_object() && b[key].is_object())
      out[key] = common(value, b[key]);
  return out;
}
// `shared` has no member that `own` lacks.
void remove_shared(Json& own, const Json& shared) {
  for (const auto& [key, value] : shared.items())
    if (own[key] == value) own.erase(key);
    else remove_shared(own[key], value);
}
void add_shared(Json& own, const Json& shared) {
  for (const auto& [key, value] : shared.items())
    if (!own.contains(key)) own[key] = value;
    else if (own[key].is_object() && value.is_object()) add_shared(own[key], value);
}

// Numbers as short as reports need them: integers without ".0", others with six digits.
void shorten_numbers(Json& value) {
  if (value.is_structured())
    for (Json& element : value) shorten_numbers(element);
  if (!value.is_number_float()) return;
  const double number = value;
  if (!std::isfinite(number)) value = nullptr;
  else if (std::abs(number) < 1e15 && number == std::round(number)) value = int64_t(number);
  else value = std::stod(fmt::format("{:.6g}", number));
}

// Removes what reports of the setting do not read: further domains along training, and all but the
// losses of the sets that it does not judge by.
void keep_judged(run::RunRecord& record, const StoredSetting& setting) {
  const auto contains = [](const std::vector<std::string>& domains, const std::string& set) {
    return std::ranges::count(domains, set.substr(0, set.rfind('.'))) > 0;
  };
  const auto& tested = setting.out_of_domain.empty() ? setting.train : setting.out_of_domain;
  const auto further = setting.further.value_or(std::vector<std::string>());
  std::erase_if(record.evaluations.losses, [&](auto& set) { return contains(further, set.first); });
  std::erase_if(record.slices, [&](auto& set) { return !contains(tested, set.first); });
  for (auto& [set, losses] : record.end.sets) {
    losses.recall_loss = NAN;
    if (contains(further, set)) losses.clusters.recall_nll.clear();
    if (contains(tested, set)) continue;
    losses.bits_per_byte = NAN;
    losses.clusters.bounded_nll.reset();
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
  Json shared = Json::object();
  if (fs::exists(plan_file)) {
    const Json json = parse_json(read_file(plan_file), plan_file.string());
    plan = from_json<RecordedPlan>(json, plan_file.string());
    shared = json.value(kShared, shared);
  }
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() != ".json" || entry.path() == plan_file) continue;
    Json json = read_json_of_record(entry.path());
    if (!run::is_record(json, entry.path().string())) continue;
    if (json.contains(kShared) && json[kShared] != checksum(shared))
      fail(
          "{}: The record was written with another plan.json than that of its folder. "
          "Remove it, or write all records with `assay report STUDY --records FOLDER`. "
          "Nothing was changed.",
          entry.path().string());
    add_shared(json, shared);
    auto record = from_json<run::RunRecord>(json, entry.path().string());
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

int64_t write_records(const fs::path& study, const fs::path& folder,
                      const std::vector<fs::path>& elsewhere) {
  Store store(study, Database::Mode::read);
  RecordedPlan plan{store.plan()};
  make_folder(folder);
  std::set<std::string> known;
  std::map<std::string, Json> records;  // by name of the file
  for (const fs::path& other : elsewhere) {
    for (const auto& [key, record] : read_records(other)) known.insert(key);
    if (!plan.records) plan.records.emplace();
    plan.records->push_back(fs::relative(other, folder).string());
  }
  for (const StudyRun& run : store.planned_runs()) {
    plan.runs.push_back(run);
    if (!run.finished) continue;
    const std::string data = run.finished->provenance.data;
    if (const auto overlap = store.overlap(data)) {
      if (!plan.overlaps) plan.overlaps.emplace();
      (*plan.overlaps)[data] = *overlap;
    }
    if (!known.insert(run.key).second) continue;
    run::RunRecord record = record_of(run);
    for (const StoredSetting& setting : plan.settings)
      if (setting.name == run.setting) keep_judged(record, setting);
    Json& json = records[fmt::format("{}.{}.json", run.name, run.key.substr(0, 8))];
    json = to_json(record);
    shorten_numbers(json);
    if (record.tasks) json["tasks"] = to_json(*record.tasks);  // with all digits
  }
  Json shared = Json::object();
  if (records.size() > 1) shared = records.begin()->second;
  for (const auto& [name, record] : records) shared = common(shared, record);
  shared.erase("format");
  for (auto& [name, record] : records) {
    remove_shared(record, shared);
    record[kShared] = checksum(shared);
    write_file(folder / name, record.dump() + "\n");
  }
  Json json = to_json(plan);
  json[kShared] = shared;
  write_file(folder / "plan.json", json.dump() + "\n");
  return int64_t(records.size());
}

}  // namespace assay::study
