#include "bench/timing.h"

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <vector>

#include "train/device.h"

namespace assay::bench {

double seconds_a_call(c10::Device device, const std::function<void()>& call) {
  constexpr int kInARow = 10;
  const auto now = [&] {
    train::synchronize(device);
    return std::chrono::steady_clock::now();
  };
  std::vector<double> seconds;
  for (int round = 0; round < 5; ++round) {
    const auto start = now();
    for (int i = 0; i < kInARow; ++i) call();
    seconds.push_back(std::chrono::duration<double>(now() - start).count() / kInARow);
  }
  std::ranges::sort(seconds);
  return seconds[seconds.size() / 2];
}

double copy_rate(c10::Device device) {
  const int64_t bytes = device.is_cuda() ? int64_t(1) << 30 : int64_t(1) << 27;
  const at::Tensor from = at::ones({bytes}, at::TensorOptions().device(device).dtype(at::kByte));
  const at::Tensor to = at::empty_like(from);
  return 2 * double(bytes) / seconds_a_call(device, [&] { to.copy_(from); });
}

}  // namespace assay::bench
