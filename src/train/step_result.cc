#include "train/step_result.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/torch.h>

namespace assay::train {

StepResult::StepResult(int64_t step, const StepGradient::Step& made, const at::Tensor& norm)
    : step(step), losses_(made.losses.numel()) {
  std::vector<at::Tensor> parts = {made.losses, norm};
  if (made.stop.defined()) parts.insert(parts.end(), {made.stop, made.save});
  for (at::Tensor& part : parts) part = part.to(at::kDouble).reshape({-1});
  const at::Tensor all = at::cat(parts);
  values_ = at::empty_like(all, at::TensorOptions(at::kCPU).pinned_memory(all.is_cuda()));
  values_.copy_(all, /*non_blocking=*/true);
  if (!all.is_cuda()) return;
  copied_.emplace(c10::DeviceType::CUDA);
  copied_->record(c10::impl::getDeviceGuardImpl(c10::DeviceType::CUDA)->getStream(all.device()));
}

StepResult::Values StepResult::read() const {
  if (copied_) copied_->synchronize();
  const double* value = values_.data_ptr<double>();
  const double* after = value + losses_;
  const bool flags = values_.numel() > losses_ + 1;
  return {value[0],
          losses_ > 1 ? std::optional(value[1]) : std::nullopt,
          after[0],
          flags && after[1] > 0,
          flags && after[2] > 0,
          copied_ ? std::chrono::steady_clock::now() : made_};
}

}  // namespace assay::train
