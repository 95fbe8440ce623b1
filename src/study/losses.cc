#include "study/losses.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <numbers>
#include <optional>
#include <set>

#include "base/files.h"

namespace assay::study {
namespace {

using Json = nlohmann::json;

constexpr double kUsualBytes = 4;       // per token of English text
constexpr double kRounding = 0.01;      // relative, of a loss that is given in two units
constexpr double kHighestLoss = 50;     // nats per token
constexpr double kLowestLoss = 0.05;    // nats per token, as a mean over a run
constexpr double kLeastShare = 1. / 3;  // the same, in proportion to the training loss
constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

struct RunLine {
  std::string model;
  int64_t tokens = 0;
  std::optional<int64_t> seed;
  std::optional<double> epochs;
  std::optional<double> parameters;
  std::optional<std::string> tokenizer;
  std::optional<double> training_loss;
  ASSAY_FIELDS(model, tokens, seed, epochs, parameters, tokenizer, training_loss)
};

// Sums over the documents of one source, or of one document that has no source.
struct Cluster {
  std::string name;   // "source 'example.org'"
  std::string place;  // "losses.jsonl:2", its first line
  std::string last;   // its last line
  int64_t documents = 0;
  double nats = 0;
  double tokens = 0;
  double bytes = 0;
  double recall_nats = 0;
  double recall_tokens = 0;
};
// By "web.valid" or "code.test", then by source.
using Sets = std::map<std::string, std::map<std::string, Cluster>>;

struct ForeignRun {
  RunLine about;
  std::string place;  // "losses.jsonl:1"
  Sets sets;
  // the first lines with and without tokens; a run has only one kind
  std::string with_tokens;
  std::string without_tokens;
  bool has_bytes = true;
  bool has_sources = true;
  bool has_recall = true;

  bool has_tokens() const { return without_tokens.empty(); }
};

const char* kHeldOut = "held_out";
const char* kOutOfDomain = "out_of_domain";

// The first of these keys that the line has, as a text.
std::optional<std::string> text_of(const Json& line, std::initializer_list<const char*> keys) {
  for (const char* key : keys) {
    const auto found = line.find(key);
    if (found == line.end() || found->is_null()) continue;
    return found->is_string() ? found->get<std::string>() : found->dump();
  }
  return std::nullopt;
}

std::optional<double> number_of(const Json& line, const char* key, const std::string& place) {
  const auto found = line.find(key);
  if (found == line.end() || found->is_null()) return std::nullopt;
  if (!found->is_number() || !std::isfinite(found->get<double>()))
    fail("{}: '{}' must be a finite number. Nothing was written.", place, key);
  return found->get<double>();
}

// The log-likelihood of a sample of lm-evaluation-harness: filtered_resps = [[-512.3]] or [-512.3].
std::optional<double> sample_nats(const Json& line) {
  const auto found = line.find("filtered_resps");
  if (found == line.end()) return std::nullopt;
  const Json* value = &*found;
  while (value->is_array() && !value->empty()) value = &value->front();
  if (!value->is_number()) return std::nullopt;
  return -value->get<double>();
}

// The bytes of its text where bits_per_byte is [log-likelihood, bytes], as such a sample has it.
std::optional<double> metric_bytes(const Json& line) {
  const auto metric = line.find("bits_per_byte");
  if (metric == line.end() || !metric->is_array() || metric->size() != 2) return std::nullopt;
  if (!(*metric)[1].is_number()) return std::nullopt;
  return (*metric)[1].get<double>();
}

// Bytes of the text of such a sample: those that its metric counts, or else those of its target.
std::optional<double> sample_bytes(const Json& line) {
  if (const auto bytes = metric_bytes(line)) return bytes;
  const auto found = line.find("target");
  if (found == line.end() || !found->is_string()) return std::nullopt;
  return double(found->get_ref<const std::string&>().size());
}

double nats_of(const Json& line, std::optional<double> tokens, std::optional<double> bytes,
               const std::string& place) {
  std::vector<std::pair<const char*, double>> given;
  if (const auto nats = number_of(line, "nats", place)) given.emplace_back("nats", *nats);
  if (const auto loss = number_of(line, "loss", place); loss && tokens)
    given.emplace_back("loss", *loss * *tokens);
  const auto bits = metric_bytes(line) ? std::nullopt : number_of(line, "bits_per_byte", place);
  if (bits && bytes) given.emplace_back("bits_per_byte", *bits * *bytes * std::numbers::ln2);
  if (given.empty())
    if (const auto nats = sample_nats(line)) given.emplace_back("filtered_resps", *nats);
  if (given.empty())
    fail(
        "{}: The line has no loss. Give nats, or loss with tokens, or bits_per_byte with bytes. "
        "Nothing was written.",
        place);
  const auto& [name, nats] = given.front();
  for (const auto& [other, value] : given)
    if (std::abs(value - nats) > kRounding * std::abs(nats))
      fail(
          "{}: '{}' means {:.6g} nats for the document, and '{}' means {:.6g}. "
          "nats is a sum, loss is nats per token, bits_per_byte is per byte. Nothing was written.",
          place, name, nats, other, value);
  return nats;
}

// Losses outside these limits have another unit. A uniform guess among 2^64 tokens is 44 nats.
void check_unit(double nats, std::optional<double> tokens, const std::string& place) {
  if (!tokens || nats <= kHighestLoss * *tokens) return;
  fail(
      "{}: The loss is {:.4g} nats per token, which is impossible for a language model. "
      "nats is a sum over the document, and loss is nats per token. Nothing was written.",
      place, nats / *tokens);
}

// The set of a line: "web.valid" or "code.test".
std::string set_of(const Json& line, const Json& defaults, const std::string& place) {
  const auto text = [&](std::initializer_list<const char*> keys) {
    const auto own = text_of(line, keys);
    return own ? own : text_of(defaults, keys);
  };
  const auto role = text({"role"});
  if (!role || (*role != kHeldOut && *role != kOutOfDomain))
    fail("{}: 'role' is {}; expected \"{}\" or \"{}\". Nothing was written.", place,
         role ? '"' + *role + '"' : "missing", kHeldOut, kOutOfDomain);
  const auto domain = text({"domain", "corpus_id", "task"});
  if (!domain || domain->empty())
    fail("{}: 'domain' is missing: the name of the kind of text. Nothing was written.", place);
  return *domain + (*role == kHeldOut ? ".valid" : ".test");
}

void add_document(ForeignRun& run, const Json& line, const Json& defaults,
                  const std::string& place) {
  const auto tokens = number_of(line, "tokens", place);
  auto bytes = number_of(line, "bytes", place);
  if (!bytes) bytes = sample_bytes(line);
  const double nats = nats_of(line, tokens, bytes, place);
  if (nats < 0) fail("{}: The loss must not be negative. Nothing was written.", place);
  for (const auto& [key, value] : {std::pair("tokens", tokens), {"bytes", bytes}})
    if (value && !(*value > 0 && *value == std::floor(*value)))
      fail("{}: '{}' must be a positive whole number. Nothing was written.", place, key);
  if (!tokens && !bytes)
    fail("{}: The line has neither tokens nor bytes. Nothing was written.", place);
  check_unit(nats, tokens, place);
  const auto recall_nats = number_of(line, "recall_nats", place);
  const auto recall_tokens = number_of(line, "recall_tokens", place);
  const auto is_part = [](std::optional<double> part, double whole) {
    return !part || (*part >= 0 && *part <= whole * (1 + kRounding));
  };
  if (!is_part(recall_nats, nats) || (tokens && !is_part(recall_tokens, *tokens)))
    fail(
        "{}: recall_nats and recall_tokens must be parts of the nats and tokens of the line. "
        "Nothing was written.",
        place);
  const auto source = text_of(line, {"source"});
  const auto document = text_of(line, {"document", "doc_id"});
  if (!source && !document)
    fail(
        "{}: The line has neither source nor document, so it cannot be paired. "
        "Nothing was written.",
        place);
  std::string& first = tokens ? run.with_tokens : run.without_tokens;
  if (first.empty()) first = place;
  if (!run.with_tokens.empty() && !run.without_tokens.empty())
    fail(
        "{} has no tokens, and {} has. Give tokens in all lines of a run, or in none. "
        "Nothing was written.",
        run.without_tokens, run.with_tokens);
  run.has_bytes = run.has_bytes && bytes;
  run.has_sources = run.has_sources && source;
  run.has_recall = run.has_recall && recall_nats && recall_tokens;
  Cluster& cluster = run.sets[set_of(line, defaults, place)][source ? *source : "#" + *document];
  if (cluster.documents == 0) {
    cluster.name = source ? fmt::format("source '{}'", *source)
                          : fmt::format("document '{}' (it has no source)", *document);
    cluster.place = place;
  }
  cluster.last = place;
  ++cluster.documents;
  cluster.nats += nats;
  cluster.tokens += tokens.value_or(0);
  cluster.bytes += bytes.value_or(0);
  cluster.recall_nats += recall_nats.value_or(0);
  cluster.recall_tokens += recall_tokens.value_or(0);
}

std::vector<ForeignRun> read_runs(const fs::path& file) {
  if (fs::is_directory(file))
    fail("{}: expected a file of losses, and this is a folder. Nothing was written.",
         file.string());
  std::ifstream in(file);
  if (!in)
    fail("{}: The file {}. Nothing was written.", file.string(),
         fs::exists(file) ? "cannot be read" : "does not exist");
  std::vector<ForeignRun> runs;
  Json defaults;
  std::string text;
  for (int64_t number = 1; std::getline(in, text); ++number) {
    if (text.find_first_not_of(" \t\r") == std::string::npos) continue;
    const std::string place = fmt::format("{}:{}", file.string(), number);
    const Json line = parse_json(text, place);
    if (!line.is_object()) fail("{}: expected a JSON object. Nothing was written.", place);
    if (line.contains("run")) {
      ForeignRun& run = runs.emplace_back();
      run.about = from_json<RunLine>(line["run"], place);
      run.place = place;
      if (run.about.model.empty())
        fail("{}: 'model' must be the name of a model. Nothing was written.", place);
      if (run.about.tokens <= 0)
        fail("{}: 'tokens' is {}; the training tokens must be positive. Nothing was written.",
             place, run.about.tokens);
      if (run.about.epochs && !(*run.about.epochs > 0))
        fail("{}: 'epochs' must be positive. Nothing was written.", place);
      defaults = line;
    } else if (runs.empty()) {
      fail(
          "{}: The first line must be about the run, for example {{\"run\": {{\"model\": "
          "\"mine\", \"seed\": 1, \"tokens\": 81920000}}}}. Nothing was written.",
          place);
    } else {
      add_document(runs.back(), line, defaults, place);
    }
  }
  if (runs.empty()) fail("{}: The file is empty. Nothing was written.", file.string());
  return runs;
}

// Names the first source or document whose number of lines differs between the runs.
void check_documents(const ForeignRun& first, const ForeignRun& run) {
  const auto missing = [](const Sets& from, const Sets& in, const std::string& place) {
    for (const auto& [set, sources] : from) {
      const auto found = in.find(set);
      if (found == in.end())
        fail("{}: The run has no losses of {}. Nothing was written.", place, set);
      for (const auto& [source, cluster] : sources) {
        const auto other = found->second.find(source);
        const int64_t count = other == found->second.end() ? 0 : other->second.documents;
        const char* rule = "All runs must be evaluated on the same documents. Nothing was written.";
        if (count == 0)
          fail(
              "{}: In {}, the run has no line about the {}. "
              "Another run has {}, the first at {}. {}",
              place, set, cluster.name, cluster.documents, cluster.place, rule);
        if (count < cluster.documents)  // more than one line: the last may be a duplicate
          fail("{}: In {}, the run has {} about the {}, and the run at {} has {}. {}", cluster.last,
               set, counted(cluster.documents, "line"), cluster.name, place, count, rule);
      }
    }
  };
  missing(first.sets, run.sets, run.place);
  missing(run.sets, first.sets, first.place);
}

bool per_byte(const std::vector<ForeignRun>& runs) {
  std::set<std::optional<std::string>> tokenizers;
  for (const ForeignRun& run : runs) tokenizers.insert(run.about.tokenizer);
  const bool same = tokenizers.size() == 1;
  if (same && std::ranges::all_of(runs, &ForeignRun::has_tokens)) return false;
  if (std::ranges::all_of(runs, &ForeignRun::has_bytes)) return true;
  fail(
      "{}: {}, so the losses must be compared per byte, and not every line has bytes. "
      "Nothing was written.",
      runs.front().place,
      same ? "Not every line has tokens" : "The runs have different tokenizers");
}

// Mean over the text of the run; `kUsualBytes` if it does not say its tokens.
double bytes_per_token(const ForeignRun& run) {
  if (!run.has_tokens()) return kUsualBytes;
  double bytes = 0;
  double tokens = 0;
  for (const auto& [set, sources] : run.sets)
    for (const auto& [name, cluster] : sources) {
      bytes += cluster.bytes;
      tokens += cluster.tokens;
    }
  return bytes / tokens;
}

// How losses are counted: per token, or per `unit_bytes` bytes.
struct Counting {
  double unit_bytes = 0;  // 0: per token
  bool sourced = true;
  bool recall = true;
};

run::EndSet end_set(const std::map<std::string, Cluster>& sources, const Counting& counting) {
  const auto [unit_bytes, sourced, recall] = counting;
  const double scale = unit_bytes > 0 ? unit_bytes : 1;  // of nats per byte
  run::EndSet out{.clustered_by = sourced ? run::EndSet::kBySource : run::EndSet::kByDocument};
  if (sourced) out.clusters.names.emplace();
  double nats = 0;
  double units = 0;
  double bytes = 0;
  double recall_nats = 0;
  double recall_tokens = 0;
  for (const auto& [name, cluster] : sources) {
    const double size = unit_bytes > 0 ? cluster.bytes : cluster.tokens;
    if (sourced) out.clusters.names->push_back(name);
    out.clusters.documents.push_back(cluster.documents);
    out.clusters.tokens.push_back(int64_t(size));
    out.clusters.nll.push_back(scale * cluster.nats);
    out.clusters.recall_tokens.push_back(recall ? int64_t(cluster.recall_tokens) : 0);
    out.clusters.recall_nll.push_back(recall ? cluster.recall_nats : 0);
    out.documents += cluster.documents;
    nats += cluster.nats;
    units += size;
    bytes += cluster.bytes;
    recall_nats += cluster.recall_nats;
    recall_tokens += cluster.recall_tokens;
  }
  out.tokens = int64_t(units);
  out.loss = scale * nats / units;
  out.recall_loss = recall && recall_tokens > 0 ? recall_nats / recall_tokens : kNone;
  out.bits_per_byte = bytes > 0 ? nats / bytes / std::numbers::ln2 : 0;
  return out;
}

// Pairs of runs need the same number of tokens, or bytes, in each source.
void check_sizes(const std::map<std::string, run::EndSet>& first,
                 const std::map<std::string, run::EndSet>& own, const std::string& unit,
                 const std::string& place) {
  for (const auto& [set, end] : own) {
    const run::Clusters& expected = first.at(set).clusters;
    if (end.clusters.tokens == expected.tokens &&
        end.clusters.recall_tokens == expected.recall_tokens)
      continue;
    fail(
        "{}: "
        "The sources of {} have another number of {}s or of recall tokens than in the first run. "
        "All runs must be evaluated on the same text with the same context. Nothing was written.",
        place, set, unit);
  }
}

std::string name_of(const RunLine& about) {
  return fmt::format("{}.{:.0f}M.seed-{}", about.model, double(about.tokens) / 1e6,
                     about.seed.value_or(0));
}

// The record of the run. `data` stands for the documents, which are those of all runs.
run::RunRecord record_of(const ForeignRun& run, const Counting& counting, const std::string& data) {
  const RunLine& about = run.about;
  run::RunRecord out;
  out.name = name_of(about);
  out.model = about.model;
  out.seed = about.seed.value_or(0);
  out.tokens = about.tokens;
  out.config = {{"model", {{"pattern", fmt::format("[{}]", Json(about.model).dump())}}},
                {"train", {}}};
  out.provenance.parameters = int64_t(about.parameters.value_or(0));
  out.provenance.device = "trained elsewhere";
  out.provenance.data = data;
  if (about.epochs) out.provenance.train_tokens = int64_t(double(about.tokens) / *about.epochs);
  out.outcome.steps = 1;
  out.outcome.tokens = about.tokens;
  double training_loss = about.training_loss.value_or(kNone);
  if (counting.unit_bytes > 0)  // from nats per own token
    training_loss *= run.has_tokens() ? counting.unit_bytes / bytes_per_token(run) : kNone;
  out.outcome.final_loss = training_loss;
  out.end.step = 1;
  out.end.tokens = about.tokens;
  for (const auto& [set, sources] : run.sets) out.end.sets[set] = end_set(sources, counting);
  out.evaluations = {.step = {1}, .training_loss = {training_loss}};
  for (const auto& [set, end] : out.end.sets) out.evaluations.losses[set] = {end.loss};
  out.key = sha256(fmt::format("{} {} {} {}", about.model, out.seed, about.tokens, data));
  return out;
}

StoredSetting setting_of(const Sets& sets) {
  StoredSetting setting{.held_out = "valid", .test = "test"};
  for (const auto& [set, sources] : sets) {
    const std::string domain = set.substr(0, set.rfind('.'));
    (set.ends_with(".valid") ? setting.train : setting.out_of_domain).push_back(domain);
  }
  return setting;
}

void check_roles(const ForeignRun& run) {
  const StoredSetting setting = setting_of(run.sets);
  if (setting.train.empty())
    fail("{}: The run has no line with the role \"{}\". Nothing was written.", run.place, kHeldOut);
  if (setting.out_of_domain.empty())
    fail("{}: The run has no line with the role \"{}\". Nothing was written.", run.place,
         kOutOfDomain);
  for (const std::string& domain : setting.out_of_domain)
    if (std::ranges::find(setting.train, domain) != setting.train.end())
      fail(
          "{}: The domain '{}' is {} and {} in this run. A domain is unseen or trained on; "
          "give one of the two another name. Nothing was written.",
          run.place, domain, kHeldOut, kOutOfDomain);
}

// A mean that is written as a sum would make all models equal.
void check_sums(const ForeignRun& run) {
  if (!run.has_tokens()) return;
  double nats = 0;
  double tokens = 0;
  for (const auto& [set, sources] : run.sets)
    for (const auto& [name, cluster] : sources) {
      nats += cluster.nats;
      tokens += cluster.tokens;
    }
  const double lowest = std::max(kLowestLoss, kLeastShare * run.about.training_loss.value_or(0));
  if (nats >= lowest * tokens) return;
  fail(
      "{}: The loss of the run is {:.4f} nats per token. "
      "nats must be the sum over a document; a mean over its tokens is called loss. "
      "Nothing was written.",
      run.place, nats / tokens);
}

void check_budgets(const std::vector<ForeignRun>& runs, const std::string& reference) {
  std::set<int64_t> budgets;
  for (const ForeignRun& run : runs)
    if (run.about.model == reference) budgets.insert(run.about.tokens);
  if (budgets.size() > 1) return;
  fail(
      "--reference {}: All of its runs have {} training tokens, "
      "and two or more budgets with two or more seeds each are needed. Nothing was written.",
      reference, *budgets.begin());
}

std::vector<std::string> models_of(const std::vector<ForeignRun>& runs,
                                   const std::string& reference) {
  std::vector<std::string> models;
  for (const ForeignRun& run : runs)
    if (std::ranges::find(models, run.about.model) == models.end())
      models.push_back(run.about.model);
  const auto found = std::ranges::find(models, reference);
  if (found == models.end())
    fail("--reference {}: no run has this model{}\n  There are: {}. Nothing was written.",
         reference, did_you_mean(reference, models), join(models));
  std::rotate(models.begin(), found, found + 1);
  return models;
}

// `unit_of_reference`: unit_bytes is the mean length of a token of the reference.
std::vector<std::string> notes_of(const std::vector<ForeignRun>& runs, const std::string& reference,
                                  double unit_bytes, bool unit_of_reference) {
  std::vector<std::string> notes;
  if (unit_bytes > 0)
    notes.push_back(fmt::format("The losses are compared in nats per {:.2f} bytes, {}.", unit_bytes,
                                unit_of_reference ? "the mean length of a token of the reference"
                                                  : "a usual length of a token"));
  if (std::ranges::all_of(runs,
                          [&](const ForeignRun& run) { return run.about.model == reference; }))
    notes.push_back(
        fmt::format("The files have no model but {}, so nothing is compared.", reference));
  if (unit_bytes > 0 && std::ranges::all_of(runs, &ForeignRun::has_recall))
    notes.push_back(
        "Recall targets depend on the tokenizer, "
        "so the recall of the models and the maturity of the reference are not checked.");
  if (!std::ranges::all_of(runs, &ForeignRun::has_recall))
    notes.push_back(
        "Not every line has recall_nats and recall_tokens, "
        "so the recall of the models and the maturity of the reference are not checked.");
  if (!std::ranges::all_of(runs, &ForeignRun::has_sources))
    notes.push_back(
        "Not every line names a source, so documents count as independent, "
        "and the intervals hold for these texts only.");
  const auto no_epochs = [](const ForeignRun& run) { return !run.about.epochs; };
  if (std::ranges::any_of(runs, no_epochs))
    notes.push_back(
        "Not every run says its epochs, "
        "so it is not checked whether repeated text biases the comparison.");
  const auto repeats = [](const ForeignRun& run) { return run.about.epochs.value_or(0) > 1; };
  const auto no_training_loss = [](const ForeignRun& run) { return !run.about.training_loss; };
  if (std::ranges::any_of(runs, repeats) && std::ranges::any_of(runs, no_training_loss))
    notes.push_back(
        "Not every run says its training_loss, "
        "so a model that has read its text more than once is taken to memorise it.");
  return notes;
}

}  // namespace

ForeignLosses read_losses(const std::vector<fs::path>& files, const std::string& reference) {
  std::vector<ForeignRun> runs;
  for (const fs::path& file : files)
    for (ForeignRun& run : read_runs(file)) runs.push_back(std::move(run));
  ForeignLosses out;
  out.plan.models = models_of(runs, reference);
  for (const ForeignRun& run : runs) {
    check_roles(run);
    check_sums(run);
    check_documents(runs.front(), run);
  }
  const bool by_byte = per_byte(runs);
  // The limits of verdicts are in nats per token
  const auto of_reference = std::ranges::find_if(
      runs, [&](const ForeignRun& run) { return run.about.model == reference; });
  const Counting counting{.unit_bytes = by_byte ? bytes_per_token(*of_reference) : 0,
                          .sourced = std::ranges::all_of(runs, &ForeignRun::has_sources),
                          .recall = !by_byte && std::ranges::all_of(runs, &ForeignRun::has_recall)};
  out.unit = by_byte ? "byte" : "token";
  out.notes = notes_of(runs, reference, counting.unit_bytes, of_reference->has_tokens());
  out.plan.name = files.front().stem().string();
  out.plan.reference = reference;
  out.plan.has_ladder = true;
  out.plan.settings = {setting_of(runs.front().sets)};
  std::string documents;
  for (const auto& [set, sources] : runs.front().sets)
    for (const auto& [source, cluster] : sources) documents += set + "\n" + source + "\n";
  const std::string data = sha256(documents);
  std::map<std::string, run::EndSet> first;
  for (const ForeignRun& run : runs) {
    run::RunRecord record = record_of(run, counting, data);
    if (first.empty()) first = record.end.sets;
    check_sizes(first, record.end.sets, out.unit, run.place);
    if (out.records.contains(record.key))
      fail("{}: Seed {} of {} with {} tokens occurs twice. Nothing was written.", run.place,
           record.seed, record.model, record.tokens);
    out.plan.runs.push_back({.key = record.key,
                             .name = record.name,
                             .setting = "",
                             .model = record.model,
                             .purpose = purpose::kStudy,
                             .seed = record.seed,
                             .tokens = record.tokens,
                             .learning_rate = 0,
                             .status = status::kDone,
                             .reason = ""});
    out.records.emplace(record.key, std::move(record));
  }
  check_budgets(runs, reference);
  return out;
}

}  // namespace assay::study
