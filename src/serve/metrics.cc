#include "serve/metrics.h"

#include <fmt/format.h>

namespace assay::serve {

void Metrics::count_request(const std::string& path, int status) {
  const std::lock_guard lock(mutex_);
  ++requests_[{path, status}];
}

std::string Metrics::prometheus() const {
  std::string out;
  const auto head = [&](const char* name, const char* type, const char* help) {
    out += fmt::format("# HELP assay_{0} {2}\n# TYPE assay_{0} {1}\n", name, type, help);
  };
  const auto add = [&](const char* name, const char* type, const char* help, auto value) {
    head(name, type, help);
    out += fmt::format("assay_{} {}\n", name, value);
  };
  head("http_requests_total", "counter", "Answered requests by path and status.");
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [key, count] : requests_)
      out += fmt::format("assay_http_requests_total{{path=\"{}\",status=\"{}\"}} {}\n", key.first,
                         key.second, count);
  }
  add("requests_queued", "gauge", "Completion requests that wait for a place.", queued.load());
  add("prompts_reading", "gauge", "Prompts that are being read.", reading.load());
  add("prompts_ready", "gauge", "Prompts that were read and wait for a slot.", ready.load());
  add("sequences_decoding", "gauge", "Sequences in slots.", decoding.load());
  add("prompt_tokens_total", "counter", "Tokens of prompts, with those from the prefix cache.",
      prompt_tokens.load());
  add("prompt_tokens_cached_total", "counter", "Tokens of prompts from the prefix cache.",
      cached_tokens.load());
  add("generated_tokens_total", "counter", "Tokens that were made.", generated_tokens.load());
  add("requests_cancelled_total", "counter", "Requests whose client disconnected.",
      cancelled.load());
  add("decode_steps_total", "counter", "Decode steps of the batch.", decode_steps.load());
  add("decode_seconds_total", "counter", "Time in decode steps, sampling included.",
      decode_seconds.load());
  add("prefill_seconds_total", "counter", "Time in reading prompts.", prefill_seconds.load());
  add("prefix_cache_bytes", "gauge", "Bytes of the prefix cache.", cache_bytes.load());
  add("prefix_cache_pages", "gauge", "Pages of the prefix cache.", cache_pages.load());
  head("time_to_first_token_seconds", "summary",
       "Time from a request to the first token of a choice.");
  out += fmt::format("assay_time_to_first_token_seconds_sum {}\n", first_token_seconds.load());
  out += fmt::format("assay_time_to_first_token_seconds_count {}\n", first_tokens.load());
  return out;
}

}  // namespace assay::serve
