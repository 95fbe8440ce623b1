// Records of finished runs: Store's part that writes and reads them. The format is in store.h.
#include <algorithm>
#include <cmath>

#include "study/store.h"

namespace assay::study {
namespace {

constexpr const char* kRecordFormat = "assay-run-1";

// Every number of a JSON value with a fraction, to that many decimals.
Json rounded(Json value, int decimals) {
  const double scale = std::pow(10.0, decimals);
  if (value.is_number_float()) return std::round(value.get<double>() * scale) / scale;
  if (value.is_structured())
    for (Json& element : value) element = rounded(std::move(element), decimals);
  return value;
}

}  // namespace

Json Store::record(const Json& run) {
  Json training = Json::array(), evaluations = Json::array();
  for (const Json& line : metrics(run["key"]))
    training.push_back({line.at("step"), rounded(line.at("loss"), 4)});
  for (const Json& line : this->evaluations(run["key"])) {
    Json losses = Json::object();
    for (const auto& [set, found] : line.at("evaluation").items())
      losses[set] = rounded(found.at("loss"), 5);
    Json entry = {{"step", line.at("step")}, {"tokens", line.at("tokens")}, {"losses", losses}};
    if (line.contains("attention_entropy"))
      entry["attention_entropy"] = rounded(line["attention_entropy"], 3);
    evaluations.push_back(entry);
  }
  const auto all = this->evaluations(run["key"]);
  Json slices = Json::object();
  if (!all.empty())
    for (const auto& [set, found] : all.back()["evaluation"].items()) {
      const Json of_set = found.value("slices", Json::object());
      for (const auto& [slice, value] : of_set.items())
        slices[set][slice] = {rounded(value.value("loss", 0.0), 4),
                              value.value("tokens", int64_t{0})};
    }
  Json provenance = run["provenance"], outcome = run["outcome"];
  provenance.erase("data_folder");  // a path of the machine says nothing to others
  if (outcome.contains("probes")) outcome["probes"] = rounded(outcome["probes"], 4);
  return {{"format", kRecordFormat},
          {"key", run["key"]},
          {"name", run["name"]},
          {"model", run["model"]},
          {"seed", run["seed"]},
          {"tokens", run["tokens"]},
          {"learning_rate", run["learning_rate"]},
          {"config", run["config"]},
          {"provenance", provenance},
          {"outcome", outcome},
          {"training", training},
          {"evaluations", evaluations},
          {"slices", slices},
          {"end", end(run["key"])}};
}

void Store::take_record(const std::string& key, const Json& record, const std::string& origin) {
  std::vector<Json> lines;
  try {
    for (const Json& pair : record.at("training"))
      lines.push_back({{"step", pair.at(0)}, {"loss", pair.at(1)}});
    for (const Json& entry : record.at("evaluations")) {
      Json line = {{"step", entry.at("step")},
                   {"tokens", entry.at("tokens")},
                   {"evaluation", Json::object()}};
      for (const auto& [set, loss] : entry.at("losses").items())
        line["evaluation"][set] = {{"loss", loss}};
      if (entry.contains("attention_entropy"))
        line["attention_entropy"] = entry["attention_entropy"];
      lines.push_back(line);
    }
    if (!lines.empty() && lines.back().contains("evaluation"))
      for (const auto& [set, slices] : record.at("slices").items()) {
        double tokens = 0;
        for (const auto& [slice, value] : slices.items())
          if (slice == "repeated_bigram" || slice == "other") tokens += value.at(1).get<double>();
        for (const auto& [slice, value] : slices.items())
          lines.back()["evaluation"][set]["slices"][slice] = {
              {"loss", value.at(0)},
              {"tokens", value.at(1)},
              {"share", value.at(1).get<double>() / std::max(1.0, tokens)}};
        lines.back()["evaluation"][set]["tokens"] = tokens;
      }
    Transaction transaction(database_);
    insert_losses(key, lines, origin);
    database_.query(
        "UPDATE runs SET status = 'done', reason = '', origin = ?, config = ?, provenance = ?, "
        "outcome = ?, "
        "end_losses = ? WHERE key = ?",
        {origin, record.at("config").get<std::string>(), record.at("provenance").dump(),
         record.at("outcome").dump(), record.at("end").dump(), key});
    transaction.commit();
  } catch (const Json::exception& error) {
    fail("{}: not a record of a run: {}", origin, error.what());
  }
}

void Store::set_records(const Json& plan, const Records& records, const std::string& origin) try {
  Transaction transaction(database_);
  database_.query("INSERT OR REPLACE INTO plan VALUES (1, ?)", {plan.dump()});
  database_.execute(
      "DELETE FROM planned; DELETE FROM metrics; DELETE FROM evaluations; DELETE FROM runs");
  int64_t position = 0;
  for (const Json& run : plan.at("runs")) {
    database_.query(
        "INSERT INTO runs (key, seed, tokens, learning_rate, status, reason, folder) VALUES (?, ?, "
        "?, ?, ?, ?, '') ON CONFLICT (key) DO NOTHING",
        {run.at("key"), run.at("seed"), run.at("tokens"), run.at("learning_rate"),
         run.at("status") == "done" ? Json("missing") : run.at("status"), run.at("reason")});
    database_.query("INSERT INTO planned VALUES (?, ?, ?, ?, ?, ?)",
                    {position++, run.at("key"), run.at("name"), run.at("setting"), run.at("model"),
                     run.at("purpose")});
  }
  const Json overlaps = plan.value("overlaps", Json::object());
  for (const auto& [data, found] : overlaps.items()) set_overlap(data, found);
  transaction.commit();
  for (const Json& run : plan.at("runs"))
    if (const auto found = records.find(run.at("key")); found != records.end())
      take_record(found->first, found->second, origin);
} catch (const Json::exception& error) {
  fail("{}: its plan.json is not that of a study: {}", origin, error.what());
}

Records read_records(const fs::path& folder) {
  if (!fs::is_directory(folder)) fail("{}: is not a folder. Nothing was run.", folder.string());
  Records out;
  if (fs::exists(folder / "study.sqlite")) {
    Store store(folder, Database::Mode::read);
    for (const Json& run : store.planned_runs())
      if (run["status"] == "done") out[run["key"]] = store.record(run);
    return out;
  }
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() != ".json") continue;
    Json record = parse_file(entry.path());
    if (!record.is_object() || record.value("format", "") != kRecordFormat) continue;
    const std::string key = record.at("key");  // before the move: the right side comes first
    out[key] = std::move(record);
  }
  if (out.empty())
    fail(
        "{}: holds no study.sqlite and no record of a run (*.json of the format {}). "
        "Nothing was run.",
        folder.string(), kRecordFormat);
  return out;
}

}  // namespace assay::study
