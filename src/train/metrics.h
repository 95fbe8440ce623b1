#pragma once
// metrics.jsonl and evaluations/step-N.safetensors of a run.
#include <nlohmann/json_fwd.hpp>

#include "base/files.h"
#include "eval/held_out.h"

namespace assay::train {

// Appends lines; a resumed run drops those of steps it will do again.
class Metrics {
 public:
  Metrics(const fs::path& run, int64_t step);
  ~Metrics();
  void line(const nlohmann::json& record);

 private:
  fs::path path_;
  std::FILE* file_;
};

nlohmann::json to_json(
    // {"arxiv.test": {"loss", "bits_per_byte", "tokens", "documents", "slices"}}
    const eval::Losses& losses);
// "<set>.nll" F64, "<set>.tokens" I64, "<set>.bytes" I64, a document an element.
void write_losses(const fs::path& file, const eval::Losses& losses);

}  // namespace assay::train
