#pragma once
// Work of a device that the host does not wait for.
#include <ATen/core/Tensor.h>

#include <functional>

namespace assay::ops {

// A copy of a tensor of the CPU, which the device makes when it comes to it.
at::Tensor to_device(const at::Tensor& tensor, c10::Device device);

// A CUDA graph: captures what `work` launches, without running it, and returns a function that
// replays it on the current stream, asynchronously. Tensors that `work` allocates keep their memory
// while the function lives, and are overwritten by each replay. `work` must not wait for the
// device; all that it reads must stay where it is. Without CUDA: `work` itself.
std::function<void()> captured(c10::Device device, const std::function<void()>& work);

// While one exists in a thread, decode steps of recurrences on CUDA may write the new state where
// the old one was, which they then return.
class StatesInPlace {
 public:
  StatesInPlace();
  ~StatesInPlace();
  StatesInPlace(const StatesInPlace&) = delete;
};
// Memory for the state that follows `state` (contiguous): its own, or new memory.
at::Tensor next_state(const at::Tensor& state);

}  // namespace assay::ops
