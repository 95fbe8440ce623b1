#pragma once
// Operators timed side by side on the device at hand.
#include <c10/core/Device.h>

#include <nlohmann/json_fwd.hpp>
#include <vector>

namespace assay::eval {

struct AttentionBench {
  std::vector<int64_t> lengths = {1024, 4096, 16384};  // T
  int64_t batch = 1, heads = 12, head_dim = 64, window = 256, chunk_size = 128;
  double seconds = 1;  // spent on each length, at least
};

// Full and window attention, Top-1 Chunk (Approx.) and (Exact), in bf16 on CUDA and fp32 on the CPU; q and k of unit
// length. Every round times every form once, so that a machine that slows down slows all; medians over rounds, three at
// least, after one that warms up.
// {"dtype", "paths": {op: path}, "rows": [{"time", "form", "forward", "backward"}, …]}      seconds a call
nlohmann::json bench_attention(const AttentionBench& options, c10::Device device);

}  // namespace assay::eval
