#pragma once
// The losses and the gradient norm of one step. They are read one step later, so that the host
// prepares the next step while the device works on this one.
#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <chrono>
#include <optional>

#include "train/step_gradient.h"

namespace assay::train {

class StepResult {
 public:
  // Starts to copy what `made` holds and `norm`, a scalar on the device, to the host.
  StepResult(int64_t step, const StepGradient::Step& made, const at::Tensor& norm);
  struct Values {
    double loss;
    std::optional<double> auxiliary_loss;
    double gradient_norm;
    bool stop;
    bool save;
    std::chrono::steady_clock::time_point ended;  // the step, or a little later on a GPU
  };
  Values read() const;  // waits for the step
  const int64_t step;

 private:
  at::Tensor values_;
  int64_t losses_;
  std::optional<c10::Event> copied_;
  std::chrono::steady_clock::time_point made_ = std::chrono::steady_clock::now();
};

}  // namespace assay::train
