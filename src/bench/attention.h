#pragma once
// Operators timed side by side on the device at hand.
#include <c10/core/Device.h>

#include <nlohmann/json_fwd.hpp>
#include <vector>

namespace assay::bench {

struct AttentionBench {
  std::vector<int64_t> lengths = {1024, 4096, 16384};  // T
  int64_t batch = 1;
  int64_t heads = 12;
  int64_t head_dim = 64;
  int64_t window = 256;
  int64_t chunk_size = 128;
  double seconds = 1;  // spent on each length, at least
  // Seconds; a form that takes longer is timed once, and left out at the lengths that follow
  double limit = 10;
};

// Full attention and window attention (as training has them; on CUDA also cuDNN's and
// FlashAttention-2's, which need not give the same bits twice), Top-1 Chunk and Top-1 Element, in
// bf16 on CUDA and fp32 on the CPU; q and k of unit length. Every round times every form once, so
// that a machine that slows down slows all; medians over rounds, three at least, after one that
// warms up. Short calls are timed several in a row, so that the host's part of them overlaps.
// {"dtype", "paths": {op: path}, "rows": [{"time", "form", "forward", "backward"}, …]}
//     seconds a call
// A form that fails has "failure" in the place of its times.
nlohmann::json bench_attention(const AttentionBench& options, c10::Device device);

}  // namespace assay::bench
