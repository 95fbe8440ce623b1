#include "train/metrics.h"

#include <nlohmann/json.hpp>
#include <sstream>

#include "base/error.h"
#include "base/safetensors.h"

namespace assay::train {

using Json = nlohmann::json;

Metrics::Metrics(const fs::path& run, int64_t step) : path_(run / "metrics.jsonl") {
  std::string kept;
  if (fs::exists(path_)) {
    std::istringstream lines(read_file(path_));
    for (std::string line; std::getline(lines, line);) {
      // A killed run may leave half a line
      const Json record = Json::parse(line, nullptr, /*allow_exceptions=*/false);
      if (record.is_object() && record.contains("step") && record["step"].is_number() &&
          record["step"] <= step)
        kept += line + "\n";
    }
  }
  write_file(path_, step > 0 ? kept : "");
  file_ = std::fopen(path_.c_str(), "a");
  if (!file_) fail<Error>("{}: cannot be written", path_.string());
}

Metrics::~Metrics() { std::fclose(file_); }

void Metrics::line(const Json& record) {
  const std::string text = record.dump() + "\n";
  if (std::fwrite(text.data(), 1, text.size(), file_) != text.size() || std::fflush(file_))
    fail<Error>("{}: cannot be written (disk full?); checkpoints are untouched", path_.string());
}

Json to_json(const eval::Losses& losses) {
  Json out = Json::object();
  for (const auto& [name, set] : losses) {
    Json slices = Json::object();
    const eval::Sum total = set.total();
    for (size_t s = 0; s < eval::kSlices.size(); ++s)
      if (set.slices[s].tokens)
        slices[eval::kSlices[s]] = {{"loss", set.slices[s].loss()},
                                    {"tokens", set.slices[s].tokens},
                                    {"share", double(set.slices[s].tokens) / double(total.tokens)}};
    out[name] = {{"loss", total.loss()},
                 {"bits_per_byte", set.bits_per_byte()},
                 {"tokens", total.tokens},
                 {"documents", set.nll.size()},
                 {"slices", slices}};
  }
  return out;
}

void write_losses(const fs::path& file, const eval::Losses& losses) {
  std::vector<TensorEntry> entries;
  for (const auto& [name, set] : losses) {
    const std::vector<int64_t> shape = {int64_t(set.nll.size())};
    entries.push_back({name + ".nll", "F64", shape, std::as_bytes(std::span(set.nll))});
    entries.push_back({name + ".tokens", "I64", shape, std::as_bytes(std::span(set.tokens))});
    entries.push_back({name + ".bytes", "I64", shape, std::as_bytes(std::span(set.bytes))});
  }
  write_safetensors(file, entries);
}

}  // namespace assay::train
