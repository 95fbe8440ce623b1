#include "ops/core/asynchronous.h"

#include <torch/torch.h>

#include <memory>

#include "base/build.h"
#ifdef ASSAY_CUDA
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#endif

namespace assay::ops {
namespace {
thread_local int states_in_place = 0;
}  // namespace

StatesInPlace::StatesInPlace() { ++states_in_place; }
StatesInPlace::~StatesInPlace() { --states_in_place; }
at::Tensor next_state(const at::Tensor& state) {
  return states_in_place > 0 ? state : at::empty_like(state);
}

at::Tensor to_device(const at::Tensor& tensor, c10::Device device) {
  if (!device.is_cuda()) return tensor.to(device);
  return tensor.pin_memory().to(tensor.options().device(device), /*non_blocking=*/true);
}

#ifdef ASSAY_CUDA
namespace {
// A graph may still be running. torch would keep its memory for graphs that do not come.
void wait_and_delete(at::cuda::CUDAGraph* graph) try {
  torch::cuda::synchronize();
  const auto pool = graph->pool();
  delete graph;
  c10::cuda::CUDACachingAllocator::emptyCache(pool);
} catch (const std::exception&) {  // an earlier failure of the device
}
}  // namespace
#endif

std::function<void()> captured([[maybe_unused]] c10::Device device,
                               const std::function<void()>& work) {
#ifdef ASSAY_CUDA
  if (device.is_cuda()) {
    torch::cuda::synchronize(device.index());
    const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool(false, device.index()));
    const std::shared_ptr<at::cuda::CUDAGraph> graph(new at::cuda::CUDAGraph, wait_and_delete);
    graph->capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
    try {
      work();
    } catch (...) {
      graph->capture_end();
      throw;
    }
    graph->capture_end();
    return [graph] { graph->replay(); };
  }
#endif
  return work;
}

}  // namespace assay::ops
