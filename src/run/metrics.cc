#include "run/metrics.h"

#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <sstream>
#include <variant>

namespace assay::run {
namespace {

using Line = std::variant<TrainingLine, EvaluationLine>;

Line parse_line(const std::string& text, const std::string& source) {
  const nlohmann::json json = parse_json(text, source);
  if (json.is_object() && json.contains(EvaluationLine::kSets))
    return from_json<EvaluationLine>(json, source);
  return from_json<TrainingLine>(json, source);
}

// None for half a line, which a killed run may leave.
std::optional<Line> try_parse_line(const std::string& text) {
  try {
    return parse_line(text, "");
  } catch (const BadInput&) {
    return std::nullopt;
  }
}

int64_t step_of(const Line& line) {
  return std::visit([](const auto& kind) { return kind.step; }, line);
}

std::vector<std::string> split_lines(const std::string& text) {
  std::vector<std::string> out;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) out.push_back(line);
  return out;
}

}  // namespace

Metrics read_metrics(const Folder& folder) {
  Metrics out;
  int64_t number = 0;
  for (const std::string& text : split_lines(read_file(folder.metrics()))) {
    ++number;
    Line line = parse_line(text, fmt::format("{}:{}", folder.metrics().string(), number));
    if (auto* training = std::get_if<TrainingLine>(&line)) out.training.push_back(*training);
    else out.evaluations.push_back(std::get<EvaluationLine>(std::move(line)));
  }
  return out;
}

double mean_entropy_of(const EvaluationLine& line) {
  if (line.mean_attention_entropy) return *line.mean_attention_entropy;
  double sum = 0;
  double count = 0;
  for (const auto& heads : line.attention_entropy.value_or(Entropies{}))
    for (const double entropy : heads) {
      sum += entropy;
      ++count;
    }
  return sum / count;
}

Newest newest_metrics(const Folder& folder) {
  constexpr int64_t kBytes = 1 << 16;
  Newest out;
  for (const std::string& text : split_lines(tail(folder.metrics(), kBytes))) {
    const std::optional<Line> line = try_parse_line(text);
    if (!line) continue;
    if (const auto* training = std::get_if<TrainingLine>(&*line)) {
      out.training = *training;
    } else if (const auto loss = std::get<EvaluationLine>(*line).held_out_loss;
               loss && std::isfinite(*loss)) {
      out.held_out_loss = loss;
    }
  }
  return out;
}

MetricsWriter::MetricsWriter(const Folder& folder, int64_t step) : path_(folder.metrics()) {
  std::string kept;
  if (step > 0 && fs::exists(path_))
    for (const std::string& text : split_lines(read_file(path_)))
      if (const auto line = try_parse_line(text); line && step_of(*line) <= step) {
        kept += text + "\n";
        if (std::holds_alternative<TrainingLine>(*line)) last_step_ = step_of(*line);
      }
  write_file(path_, kept);
  file_ = std::fopen(path_.c_str(), "a");
  if (!file_) fail<Error>("{}: cannot be written", path_.string());
}

MetricsWriter::~MetricsWriter() { std::fclose(file_); }

void MetricsWriter::write_line(const std::string& text) {
  const std::string line = text + "\n";
  if (std::fwrite(line.data(), 1, line.size(), file_) != line.size() || std::fflush(file_))
    fail<Error>("{}: cannot be written (disk full?); checkpoints are untouched", path_.string());
}

void MetricsWriter::sync() {
  if (::fsync(::fileno(file_)))
    fail<Error>("{}: cannot be written: {}", path_.string(), std::strerror(errno));
}

std::string tail(const fs::path& file, int64_t bytes) {
  std::ifstream in(file, std::ios::binary | std::ios::ate);
  if (!in) return "";
  const int64_t size = in.tellg();
  const int64_t from = std::max<int64_t>(0, size - bytes);
  std::string text(size_t(size - from), '\0');
  in.seekg(from).read(text.data(), int64_t(text.size()));
  text.resize(size_t(in.gcount()));
  return text;
}

}  // namespace assay::run
