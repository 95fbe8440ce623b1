#pragma once
// Counters of the server, for GET /metrics.
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

namespace assay::serve {

struct Metrics {
  std::atomic<int64_t> queued = 0;  // requests
  // prompts
  std::atomic<int64_t> reading = 0;
  std::atomic<int64_t> ready = 0;
  std::atomic<int64_t> decoding = 0;  // sequences
  std::atomic<int64_t> prompt_tokens = 0;
  std::atomic<int64_t> cached_tokens = 0;
  std::atomic<int64_t> generated_tokens = 0;
  std::atomic<int64_t> cancelled = 0;
  std::atomic<int64_t> decode_steps = 0;
  std::atomic<int64_t> cache_bytes = 0;
  std::atomic<int64_t> cache_pages = 0;
  std::atomic<double> prefill_seconds = 0;
  std::atomic<double> decode_seconds = 0;
  std::atomic<double> first_token_seconds = 0;  // from the request to the first token, summed
  std::atomic<int64_t> first_tokens = 0;        // of so many sequences

  void count_request(const std::string& path, int status);
  std::string prometheus() const;  // text exposition format 0.0.4

 private:
  mutable std::mutex mutex_;
  std::map<std::pair<std::string, int>, int64_t> requests_;
};

}  // namespace assay::serve
