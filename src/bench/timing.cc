#include "bench/timing.h"

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <vector>

#include "base/build.h"
#include "train/device.h"
#ifdef ASSAY_CUDA
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#endif

namespace assay::bench {

std::function<void()> captured([[maybe_unused]] c10::Device device,
                               const std::function<void()>& work) {
  work();
#ifdef ASSAY_CUDA
  if (device.is_cuda()) {
    const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool(false, device.index()));
    torch::cuda::synchronize(device.index());
    const auto graph = std::make_shared<at::cuda::CUDAGraph>();
    graph->capture_begin();
    work();
    graph->capture_end();
    return [graph] { graph->replay(); };
  }
#endif
  return work;
}

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
  const at::Tensor from = at::ones({bytes}, at::TensorOptions().device(device).dtype(at::kByte)),
                   to = at::empty_like(from);
  return 2 * double(bytes) / seconds_a_call(device, [&] { to.copy_(from); });
}

}  // namespace assay::bench
