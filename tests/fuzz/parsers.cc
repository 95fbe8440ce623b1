#include "fuzz/parsers.h"

#include <unistd.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/config.h"
#include "base/safetensors.h"
#include "data/byte_level_bpe.h"
#include "data/compressed.h"
#include "data/hugging_face_tokenizer.h"
#include "data/model_proto.h"
#include "data/reader.h"
#include "data/synthetic.h"
#include "data/token_store.h"
#include "data/tokenizer.h"
#include "data/word_encoder.h"
#include "fuzz/mutation.h"
#include "run/metrics.h"
#include "serve/api.h"
#include "study/losses.h"
#include "study/run_folder.h"
#include "study/store.h"

namespace assay::fuzz {

Registry<Parser>& parsers() {
  static Registry<Parser> registry("parser");
  return registry;
}

const fs::path& scratch() {
  struct Scratch {
    Scratch() {
      const fs::path memory = "/dev/shm";
      path = (fs::exists(memory) ? memory : fs::temp_directory_path()) /
             fmt::format("assay_fuzz{}", ::getpid());
      fs::create_directories(path);
    }
    ~Scratch() {
      std::error_code ignored;
      fs::remove_all(path, ignored);
    }
    fs::path path;
  };
  static const Scratch folder;
  return folder.path;
}

fs::path put(const fs::path& path, std::string_view contents) {
  std::ofstream(path, std::ios::binary).write(contents.data(), std::streamsize(contents.size()));
  return path;
}

std::string try_parser(const Parser& parser, std::string_view input) {
  try {
    parser.parse(scratch(), input);
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

std::string mutated(const Parser& parser, std::string_view input, Random& random) {
  if (!parser.json) return mutated_bytes(std::string(input), random);
  const size_t prefix = std::min(parser.prefix, input.size());
  return std::string(input.substr(0, prefix)) +
         mutated_json(std::string(input.substr(prefix)), random);
}

namespace {

// Keeps the compiler from removing reads.
volatile int64_t sink;

std::string raw(auto value) { return {reinterpret_cast<const char*>(&value), sizeof value}; }

// ---- base ----

std::vector<std::string> safetensors_seeds() {
  const std::vector<float> values = {1, 2, 3, 4};
  const fs::path file = scratch() / "seed";
  write_safetensors(file,
                    {{"a", "F32", {2, 2}, std::as_bytes(std::span(values))}, {"b", "U8", {0}, {}}},
                    {{"k", "v"}});
  return {read_file(file)};
}

void parse_safetensors(const fs::path& folder, std::string_view input) {
  const Safetensors file(put(folder / "file", input));
  for (const TensorEntry& tensor : file.tensors())
    for (const std::byte byte : file.at(tensor.name).bytes) sink = sink + int64_t(byte);
}

struct Settings {
  bool flag = false;
  int64_t steps = 1;
  double rate = 1;
  std::string name;
  std::vector<std::string> models;
  std::vector<int64_t> seeds;
  void fields(auto&& field) {
    field("flag", flag);
    field("steps", steps);
    field("rate", rate);
    field("name", name);
    field("models", models);
    field("seeds", seeds);
  }
};

std::vector<std::string> toml_seeds() {
  return {R"(flag = true
steps = 20_000
rate = 2e-3
name = "a\u00e9"
models = ["a", 'b']
seeds = [1, 2]
)",
          R"(a.c = 'x'
# comment
[a.b]
x = { y = 1, z = [[1], [2.5]] }
[[c]]
d = 2026-01-01T00:00:00Z
"q k" = '''l
m'''
)"};
}

void parse_toml(const fs::path&, std::string_view input) {
  ConfigNode node = ConfigNode::parse(input, "file.toml");
  sink = sink + int64_t(ConfigNode::merged({node, node}).toml("all").size());
  for (const std::string& key : node.keys()) {
    sink = sink + int64_t(node.value(key).size() + node.where(key).size());
    if (node.is_table(key)) sink = sink + int64_t(node.child(key).keys().size());
  }
  Settings settings;
  node.read(settings, node.keys());
  node.set(input.substr(0, input.find('\n')));
}

const bool base_parsers = parsers().add("safetensors", {safetensors_seeds, parse_safetensors}) &&
                          parsers().add("toml", {toml_seeds, parse_toml});

// ---- data ----

// A token store of 8 documents, made once.
const fs::path& small_store() {
  static const fs::path store = [] {
    const fs::path folder = scratch() / "store";
    data::synthesize(folder,
                     {.documents = 4, .held_out = 2, .document_length = 16, .vocabulary = 64});
    return folder;
  }();
  return store;
}

// An input is the length of the .idx file in 4 bytes, the .idx file and the .bin file.
std::vector<std::string> index_seeds() {
  const std::string idx = read_file(small_store() / "known_a.train.idx");
  return {raw(uint32_t(idx.size())) + idx + read_file(small_store() / "known_a.train.bin")};
}

void parse_index(const fs::path& folder, std::string_view input) {
  uint32_t length = 0;
  std::memcpy(&length, input.data(), std::min<size_t>(4, input.size()));
  input.remove_prefix(std::min<size_t>(4, input.size()));
  put(folder / "part.idx", input.substr(0, length));
  put(folder / "part.bin", input.substr(std::min<size_t>(length, input.size())));
  const data::Documents documents(folder / "part", 64);
  for (int64_t i = 0; i < std::min<int64_t>(documents.size(), 100); ++i) {
    const data::Tokens tokens = documents.document(i);
    for (int64_t t = 0; t < tokens.size(); ++t) sink = sink + tokens[t];
  }
  std::vector<int64_t> ids(size_t(documents.tokens()));
  documents.read(0, documents.tokens(), ids.data());
  documents.verify(64);
}

std::vector<std::string> manifest_seeds() { return {read_file(small_store() / "manifest.json")}; }

void parse_manifest(const fs::path&, std::string_view input) {
  static const fs::path folder = [] {
    const fs::path copy = scratch() / "manifest";
    fs::copy(small_store(), copy, fs::copy_options::recursive);
    return copy;
  }();
  put(folder / "manifest.json", input);
  const data::TokenStore store(folder);
  const nlohmann::json copy = store.manifest();
  sink = sink + int64_t(store.fingerprint().size() + copy.dump().size());
  for (const std::string& domain : store.domains())
    for (const std::string& split : store.splits(domain))
      sink = sink + store.documents(domain, split).tokens();
  store.verify();
}

std::vector<std::string> sentencepiece_seeds() {
  const fs::path text = put(scratch() / "text.txt", [] {
    std::string lines;
    for (int i = 0; i < 200; ++i)
      lines += fmt::format("a text about sequence {} and model {}\n", i, i * i);
    return lines;
  }());
  const fs::path model = scratch() / "seed.model";
  data::train_tokenizer({.inputs = {text}, .vocab_size = 300}, model);
  return {read_file(model)};
}

void parse_sentencepiece(const fs::path&, std::string_view input) {
  const auto tokenizer = data::Tokenizer::from_contents(std::string(input), "file.model");
  const std::string text = "a model  of\nsequences \u65e5 2024";
  const auto ids = tokenizer.encode(text);
  sink =
      sink + int64_t(tokenizer.decode(ids).size() + data::parse_model_proto(input).pieces.size());
  data::WordEncoder words(tokenizer);
  std::vector<int32_t> by_word;
  words.encode(text, by_word);
  sink = sink + int64_t(data::tokenizer_json(tokenizer).dump().size());
}

std::vector<std::string> tokenizer_json_seeds() {
  const auto golden =
      nlohmann::json::parse(read_file(ASSAY_SOURCE_DIR "/tests/data/byte_level_bpe.json"));
  return {golden.at("qwen").at("tokenizer").dump(), golden.at("gpt2").at("tokenizer").dump()};
}

void parse_tokenizer_json(const fs::path&, std::string_view input) {
  const data::ByteLevelBpe tokenizer(input, "tokenizer.json");
  const auto ids = tokenizer.encode("a text's  of\n123 \u65e5 cafe\u0301 <think>");
  sink = sink + int64_t(tokenizer.decode(ids).size());
}

// An input is one byte for the kind of the file, and the file.
const std::vector<std::string> kTextFiles = {"a.jsonl", "a.jsonl.zst", "a.jsonl.gz", "a.txt",
                                             "a.txt.zst"};

std::vector<std::string> text_seeds() {
  const std::string lines =
      R"({"text": "one\u00e9", "meta": {"redpajama_set_name": "RedPajamaC4", "source": "s"}}

{"text": 3}
not JSON
{"text": "two", "meta": {"source": [1]}})";
  return {'\0' + lines, '\1' + data::zstd(lines), '\2' + data::gzip(lines), '\3' + lines,
          '\4' + data::zstd(lines)};
}

void parse_text(const fs::path& folder, std::string_view input) {
  const size_t kind =
      input.empty() ? 0 : size_t(static_cast<unsigned char>(input[0])) % kTextFiles.size();
  data::BlockReader reader(
      put(folder / kTextFiles[kind], input.substr(std::min<size_t>(1, input.size()))));
  data::DocumentParser parser("meta.redpajama_set_name", "meta.source");
  data::ReadCounts counts;
  for (data::Block block; reader.next(block);)
    parser.parse(block, counts, [&](const data::Document& document) {
      sink = sink + int64_t(document.text.size() + document.domain.size() + document.source.size());
      if (block.json) sink = sink + int64_t(parser.string_fields().size());
    });
  sink = sink + int64_t(counts.left_out().size());
}

const bool data_parsers =
    parsers().add("index", {index_seeds, parse_index}) &&
    parsers().add("manifest", {manifest_seeds, parse_manifest, /*json=*/true}) &&
    parsers().add("sentencepiece", {sentencepiece_seeds, parse_sentencepiece}) &&
    parsers().add("tokenizer_json", {tokenizer_json_seeds, parse_tokenizer_json}) &&
    parsers().add("text", {text_seeds, parse_text});

// ---- study ----

std::vector<std::string> plan_seeds() {
  std::vector<std::string> seeds;
  for (const char* name : {"demo", "recurrent"})
    seeds.push_back(read_file(fs::path(ASSAY_SOURCE_DIR) / "plans" / fmt::format("{}.toml", name)));
  return seeds;
}

void parse_plan(const fs::path& folder, std::string_view input) {
  static const bool linked = [&] {
    fs::create_directory_symlink(fs::path(ASSAY_SOURCE_DIR) / "plans" / "models",
                                 folder / "models");
    return true;
  }();
  sink = sink + linked;
  const study::Plan plan = study::read_plan(put(folder / "plan.toml", input));
  for (const study::Setting& setting : plan.settings)
    for (const study::Model& model : plan.models)
      sink = sink + int64_t(study::compose(model, setting, {.seed = 1}).toml().size());
}

// Valid records, with every member that may be absent.
run::Probes probes() {
  run::Probes probes{.sequence_length = 8, .step = 4, .set = "a.test"};
  probes.layers.push_back({.mixer = "attention", .visibility = 0.5, .attention_entropy = {1, NAN}});
  return probes;
}
run::End end() {
  const run::Clusters clusters{.names = std::vector<std::string>{"a", "b"},
                               .documents = {1, 1},
                               .tokens = {4, 5},
                               .recall_tokens = {0, 1},
                               .nll = {17, 20},
                               .recall_nll = {0, 2}};
  return {.step = 4,
          .tokens = 1600,
          .sets = {{"a.test", {.loss = 4.2, .clustered_by = "source", .clusters = clusters}}}};
}
run::TaskResults task_results() {
  return {
      .results = {{.name = "piqa",
                   .key = "k",
                   .items = 6,
                   .metrics = {{.name = "acc", .bits = "84"},
                               {.name = "perplexity", .sums = {{-1, -2}}, .weights = {{3, 3}}}}},
                  {.name = "race", .key = "k", .problem = "no memory"}}};
}
std::string metrics() {
  const run::TrainingLine training{.step = 4, .loss = 4.1, .tokens = 1600, .mfu = 0.5};
  const std::map<std::string, run::Slice> slices = {{run::slice::kOther, {.loss = 4, .tokens = 9}}};
  const run::EvaluationLine evaluation{
      .step = 4,
      .tokens = 1600,
      .evaluation = {{"a.test", {.loss = 4.2, .tokens = 9, .slices = slices}}},
      .held_out_loss = 4.2,
      .attention_entropy = run::Entropies{{1.5, 2}}};
  return to_json(training).dump() + "\n" + to_json(evaluation).dump() + "\n";
}

// A study with one finished run. An input is one byte that chooses a file of the run, and the file.
struct RunFile {
  fs::path path;
  std::string contents;
};
const std::vector<RunFile>& run_files() {
  static const run::Folder folder{scratch() / "study" / "run"};
  static const std::vector<RunFile> files = {
      {folder.provenance().path,
       to_json(run::Provenance{.numerics = {{"glu", 1}}, .data_folder = "x"}).dump()},
      {folder.outcome().path, to_json(run::Outcome{.steps = 4, .held_out_loss = 4.2}).dump()},
      {folder.end().path, to_json(end()).dump()},
      {folder.probes().path, to_json(probes()).dump()},
      {folder.tasks().path, to_json(task_results()).dump()},
      {folder.metrics(), metrics()}};
  return files;
}

std::vector<std::string> run_seeds() {
  std::vector<std::string> seeds;
  for (size_t i = 0; i < run_files().size(); ++i)
    seeds.push_back(char(i) + run_files()[i].contents);
  return seeds;
}

study::PlannedRun planned_run() {
  study::PlannedRun run;
  run.key = "key";
  run.name = "full.seed-1";
  run.model = "full";
  run.config = scratch() / "study" / "run" / "config.toml";
  run.estimate.steps = 4;
  run.estimate.numerics = {{"glu", 1}};
  return run;
}

study::Store& study_of_one_run() {
  static const auto store = [] {
    const fs::path folder = scratch() / "study";
    const fs::path run = folder / "run";
    fs::create_directories(run);
    put(run / "config.toml", "[model]\nd_model = 8\n");
    auto made = std::make_unique<study::Store>(folder);
    study::Plan plan;
    plan.name = "plan";
    plan.reference = "full";
    made->set_plan(plan, {planned_run()});
    return made;
  }();
  return *store;
}

void read_runs(study::Store& store) {
  for (const study::StudyRun& run : store.planned_runs())
    if (run.finished) {
      sink = sink + int64_t(to_json(study::record_of(run)).dump().size());
      for (const run::TaskResult& result : run.finished->tasks)
        for (const run::TaskMetric& metric : result.metrics)
          if (metric.bits) sink = sink + int64_t(run::values_of(*metric.bits, result.items).size());
    }
}

void parse_run(const fs::path&, std::string_view input) {
  study::Store& store = study_of_one_run();
  const run::Folder folder{run_files()[0].path.parent_path()};
  for (const RunFile& file : run_files()) put(file.path, file.contents);
  if (!input.empty())
    put(run_files()[size_t(static_cast<unsigned char>(input[0])) % run_files().size()].path,
        input.substr(1));
  const run::Newest newest = run::newest_metrics(folder);
  sink = sink + newest.training.has_value() + int64_t(study::last_line(folder.metrics()).size());
  store.take(planned_run(), folder);
  sink = sink + int64_t(study::summary(folder).size());
  read_runs(store);
}

std::vector<std::string> record_seeds() {
  parse_run(scratch(), "");
  return {to_json(study::record_of(study_of_one_run().planned_runs().at(0))).dump()};
}

void parse_record(const fs::path& folder, std::string_view input) {
  study::Store& store = study_of_one_run();
  const fs::path records = folder / "records";
  fs::create_directories(records);
  put(records / "record.json", input);
  for (const auto& [key, record] : study::read_records(records))
    store.take_record("key", record, "record.json");
  read_runs(store);
}

// plan.json of a folder of records.
std::vector<std::string> recorded_plan_seeds() {
  study::RecordedPlan plan{{.name = "plan", .reference = "full", .models = {"full"}}};
  plan.settings.push_back({.train = {"a"}, .held_out = "valid", .test = "test"});
  plan.settings.back().tasks = {{.name = "piqa", .key = "k", .metrics = {"acc"}, .items = 6}};
  for (const char* key : {"key", "missing"})
    plan.runs.push_back({.key = key, .name = "full.seed-1", .model = "full", .status = "done"});
  plan.overlaps.emplace()["data"].push_back({.domain = "a", .documents = 8});
  plan.records.emplace().push_back("../other");
  return {to_json(plan).dump()};
}

void parse_recorded_plan(const fs::path& folder, std::string_view input) {
  static study::Store store = [] {
    fs::create_directories(scratch() / "recorded");
    return study::Store(scratch() / "recorded");
  }();
  static const study::Records records = [] {
    const fs::path known = scratch() / "known";
    fs::create_directories(known);
    put(known / "record.json", record_seeds()[0]);
    return study::read_records(known);
  }();
  store.set_records(read_record<study::RecordedPlan>(put(folder / "plan.json", input)), records,
                    "records");
  sink = sink + int64_t(store.plan().models.size());
  read_runs(store);
}

// Two budgets of the reference, one of them with two seeds, and one run of another model; three
// documents of each role.
std::vector<std::string> losses_seeds() {
  std::string lines;
  for (const auto& [model, seed, tokens] :
       {std::tuple{"full", 1, 1000}, {"full", 2, 1000}, {"full", 1, 2000}, {"mine", 1, 2000}}) {
    lines += fmt::format(R"({{"run": {{"model": "{}", "seed": {}, "tokens": {}, "epochs": 0.5, )"
                         R"("training_loss": 3}}}})",
                         model, seed, tokens);
    for (const char* role : {"held_out", "out_of_domain"})
      for (int i = 0; i < 3; ++i)
        lines += fmt::format(
            "\n"
            R"({{"role": "{0}", "domain": "{0}_text", "source": "s{1}", "document": "{1}", )"
            R"("nats": {2}, "tokens": 16, "bytes": 71, "recall_nats": 2.5, "recall_tokens": 2}})",
            role, i, 50.5 + i - 0.001 * tokens);
    lines += "\n";
  }
  return {lines};
}

void parse_losses(const fs::path& folder, std::string_view input) {
  const study::ForeignLosses found =
      study::read_losses({put(folder / "losses.jsonl", input)}, "full");
  sink = sink + int64_t(found.records.size() + found.notes.size());
}

const bool study_parsers =
    parsers().add("losses", {losses_seeds, parse_losses}) &&
    parsers().add("plan", {plan_seeds, parse_plan}) &&
    parsers().add("run", {run_seeds, parse_run, /*json=*/true, /*prefix=*/1}) &&
    parsers().add("record", {record_seeds, parse_record, /*json=*/true}) &&
    parsers().add("recorded_plan", {recorded_plan_seeds, parse_recorded_plan, /*json=*/true});

// ---- serve ----

// An input is one byte that chooses the route, and the body of the request.
std::vector<std::string> request_seeds() {
  return {std::string("\0", 1) + R"({"model": "m", "prompt": "a text", "max_tokens": 4, "n": 2,
            "temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": -1, "stop": ["x", "\u00e9"],
            "logprobs": 3, "echo": true, "stream": true, "ignore_eos": true, "user": "u",
            "stream_options": {"include_usage": true}, "return_token_ids": true, "best_of": 2,
            "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "suffix": ""})",
          std::string("\0", 1) + R"({"prompt": [[1, 2], [3]], "stop": "end", "logprobs": null})",
          std::string("\0", 1) + R"({"prompt": ["one", "two", ""]})",
          std::string("\0", 1) + R"({"prompt": [5, 6, 7]})",
          "\1"
          R"({"prompt": "a\u65e5\ud83d\ude00", "return_token_strs": true})",
          "\2"
          R"({"tokens": [4, 5, 299], "model": "m"})"};
}

void parse_request(const fs::path&, std::string_view input) try {
  static serve::ServedModel model = [] {
    auto tokenizer = data::Tokenizer::from_contents(sentencepiece_seeds()[0], "m");
    const int64_t size = tokenizer.vocab_size();
    return serve::ServedModel("m", size, std::move(tokenizer), /*context=*/64);
  }();
  const size_t route = input.empty() ? 0 : size_t(static_cast<unsigned char>(input[0])) % 3;
  const auto body = serve::parse_body(std::string(input.substr(std::min<size_t>(1, input.size()))));
  if (route == 0) {
    const serve::CompletionRequest request = serve::parse_completion(body, model);
    for (const auto& prompt : request.prompts)
      for (const int64_t token : prompt) sink = sink + int64_t(model.texts->bytes(token).size());
  } else {
    const auto answer = route == 1 ? serve::tokenize(body, model) : serve::detokenize(body, model);
    sink = sink + int64_t(answer.dump().size());
  }
} catch (const serve::ApiError& error) {
  const auto body = serve::error_body(error.status, error.what(), error.param, error.code);
  fail("{}", nlohmann::json::parse(body)["error"]["message"].get<std::string>());
}

const bool serve_parsers =
    parsers().add("request", {request_seeds, parse_request, /*json=*/true, /*prefix=*/1});

}  // namespace
}  // namespace assay::fuzz
