#include "train/step_result.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/torch.h>

namespace assay::train {

StepResult::StepResult(int64_t step, const StepGradient::Step& made, const at::Tensor& norm)
    : step(step) {
  std::vector<at::Tensor> scalars = {made.loss, norm};
  if (made.stop.defined()) scalars.insert(scalars.end(), {made.stop, made.save});
  for (at::Tensor& scalar : scalars) scalar = scalar.to(at::kDouble);
  const at::Tensor all = at::stack(scalars);
  values_ = at::empty_like(all, at::TensorOptions(at::kCPU).pinned_memory(all.is_cuda()));
  values_.copy_(all, /*non_blocking=*/true);
  if (!all.is_cuda()) return;
  copied_.emplace(c10::DeviceType::CUDA);
  copied_->record(c10::impl::getDeviceGuardImpl(c10::DeviceType::CUDA)->getStream(all.device()));
}

StepResult::Values StepResult::read() const {
  if (copied_) copied_->synchronize();
  const double* value = values_.data_ptr<double>();
  const bool flags = values_.numel() > 2;
  return {value[0], value[1], flags && value[2] > 0, flags && value[3] > 0};
}

}  // namespace assay::train
