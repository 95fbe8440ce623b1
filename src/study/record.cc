// Records of finished runs: Store's part that writes and reads them.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <set>

#include "study/compact.h"
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

namespace {

constexpr double kUnits = 10'000;  // per nat: of the losses of sources
constexpr int kDecimals = 8;       // of the losses of sets

using Numbers = std::vector<double>;

double rounded(double value, int decimals) {
  const double scale = std::pow(10.0, decimals);
  return std::round(value * scale) / scale;
}
double sum(const Numbers& values) { return std::accumulate(values.begin(), values.end(), 0.0); }

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines(1);
  for (const char c : text)
    if (c == '\n') lines.emplace_back();
    else lines.back() += c;
  return lines;
}

// Sums by source as losses: nats per target of the source, in units of 1 / kUnits.
Json losses_of(const Numbers& nats, const Numbers& targets) {
  Json out = Json::array();
  for (size_t c = 0; c < nats.size(); ++c) {
    const double loss = kUnits * nats[c] / std::max(1.0, targets.at(c));
    out.push_back(std::isfinite(loss) ? Json(std::llround(loss)) : Json());
  }
  return out;
}

double number_of(const Json& value) {
  return value.is_null() ? std::numeric_limits<double>::quiet_NaN() : value.get<double>();
}

// The sums again. The targets share what rounding changed, so that the sums add up to `total`.
Numbers nats_of(const Json& losses, const Numbers& targets, double total) {
  Numbers out;
  for (size_t c = 0; c < losses.size(); ++c)
    out.push_back(number_of(losses[c]) / kUnits * std::max(1.0, targets.at(c)));
  const double share = (total - sum(out)) / std::max(1.0, sum(targets));
  for (size_t c = 0; c < out.size(); ++c) out[c] += share * targets[c];
  return out;
}

// The parts that become compact: lines of the configuration, and losses in place of sums by source.
Json short_form(const run::RunRecord& record) {
  Json out = to_json(record);
  out["config"] = lines_of(record.config);
  for (const auto& [name, set] : record.end.sets) {
    const run::Clusters& clusters = set.clusters;
    const Numbers tokens(clusters.tokens.begin(), clusters.tokens.end());
    const Numbers recall_tokens(clusters.recall_tokens.begin(), clusters.recall_tokens.end());
    Json& to = out["end"]["sets"][name];
    if (std::isfinite(set.loss)) to["loss"] = rounded(set.loss, kDecimals);
    if (std::isfinite(set.recall_loss)) to["recall_loss"] = rounded(set.recall_loss, kDecimals);
    to["bits_per_byte"] = rounded(set.bits_per_byte, 5);
    to["clusters"]["nll"] = losses_of(clusters.nll, tokens);
    to["clusters"]["recall_nll"] = losses_of(clusters.recall_nll, recall_tokens);
    if (!clusters.bounded_nll) continue;
    Numbers excess = clusters.nll;
    for (size_t c = 0; c < excess.size(); ++c) excess[c] -= clusters.bounded_nll->at(c);
    to["clusters"]["bounded_nll"] = losses_of(excess, tokens);
    const double bounded = sum(*clusters.bounded_nll) / sum(tokens);
    to["bounded_loss"] = std::isfinite(bounded) ? Json(rounded(bounded, kDecimals)) : Json();
  }
  return out;
}

run::RunRecord from_short_form(Json json, const std::string& file) {
  json["config"] = join(json.at("config").get<std::vector<std::string>>(), "\n");
  for (auto& [name, set] : json.at("end").at("sets").items()) {
    Json& clusters = set.at("clusters");
    const auto tokens = clusters.at("tokens").get<Numbers>();
    const auto recall_tokens = clusters.at("recall_tokens").get<Numbers>();
    const double of_recall = sum(recall_tokens);
    const double recall = of_recall > 0 ? number_of(set.at("recall_loss")) * of_recall : 0;
    const double total = number_of(set.at("loss")) * sum(tokens);
    const Numbers nll = nats_of(clusters.at("nll"), tokens, total);
    clusters["nll"] = nll;
    clusters["recall_nll"] = nats_of(clusters.at("recall_nll"), recall_tokens, recall);
    if (!clusters.contains("bounded_nll")) continue;
    const double excess = total - number_of(set.at("bounded_loss")) * sum(tokens);
    Numbers bounded = nats_of(clusters["bounded_nll"], tokens, excess);
    for (size_t c = 0; c < bounded.size(); ++c) bounded[c] = nll.at(c) - bounded[c];
    clusters["bounded_nll"] = bounded;
  }
  return from_json<run::RunRecord>(json, file);
}

}  // namespace

void write_record_files(const fs::path& folder, const std::vector<run::RunRecord>& records) {
  if (records.empty()) return;
  const Json shared = short_form(records.front());
  write_file(folder / kSharedFile, compact(shared, Json()).dump() + "\n");
  for (const run::RunRecord& record : records) {
    Json json = compact(short_form(record), shared);
    json["format"] = record.format;
    write_file(folder / fmt::format("{}.{}.json", record.name, record.key.substr(0, 8)),
               json.dump() + "\n");
  }
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

run::RunRecord read_record_file(const Json& json, const Json& shared, const std::string& file) try {
  return from_short_form(expand(json, shared), file);
} catch (const std::exception& error) {
  fail(
      "{}: {}\n  `assay report STUDY --records FOLDER` writes the records of a study again. "
      "Nothing was changed.",
      file, error.what());
}

// Keeps the records that `out` has: those of a folder go before those of the folders that its
// plan.json names. `visited`: folders that have been read, because two folders can name each other.
void add_folder(const fs::path& folder, std::set<fs::path>& visited, Records& out) {
  if (!fs::is_directory(folder)) fail("{}: is not a folder. Nothing was run.", folder.string());
  if (!visited.insert(fs::canonical(folder)).second) return;
  if (fs::exists(folder / "study.sqlite")) return add_study(folder, out);
  const fs::path plan_file = folder / "plan.json";
  const fs::path shared_file = folder / kSharedFile;
  Json shared;
  RecordedPlan plan;
  if (fs::exists(plan_file)) plan = read_record<RecordedPlan>(plan_file);
  for (const auto& entry : fs::directory_iterator(folder)) {
    const fs::path& file = entry.path();
    if (file.extension() != ".json" || file == plan_file || file == shared_file) continue;
    const Json json = parse_json(read_file(file), file.string());
    if (!run::is_record(json, file.string())) continue;
    if (shared.is_null() && fs::exists(shared_file))
      shared = expand(parse_json(read_file(shared_file), shared_file.string()), Json());
    run::RunRecord record = read_record_file(json, shared, file.string());
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
