#pragma once
// Golden files as tensors, and the error that tests of operators bound.
#include <torch/torch.h>

#include <map>

#include "base/safetensors.h"
#include "golden_files.h"

namespace assay::ops {

inline std::filesystem::path golden_file(const std::string& name) {
  return golden_folder() / (name + ".safetensors");
}

// A contiguous copy of x that begins three numbers into its memory, not at a multiple of 16 bytes.
inline at::Tensor misaligned(const at::Tensor& x) {
  return at::cat({at::zeros({3}, x.options()), x.flatten()}).slice(0, 3).view(x.sizes());
}

// Every tensor of the file, float64.
inline std::map<std::string, at::Tensor> read_golden(const std::filesystem::path& file) {
  std::map<std::string, at::Tensor> tensors;
  for (const Safetensors stored(file); const TensorEntry& entry : stored.tensors()) {
    const auto dtype = entry.dtype == "F64"   ? at::kDouble
                       : entry.dtype == "F32" ? at::kFloat
                                              : at::kLong;
    void* bytes = const_cast<std::byte*>(entry.bytes.data());
    tensors[entry.name] = at::from_blob(bytes, entry.shape, dtype).clone().to(at::kDouble);
  }
  return tensors;
}

// max over rows (the last dimension) of ‖actual − expected‖ / ‖expected‖; infinite when anything is
// not finite. A row's norm counts at least `least` of the largest row's.
inline double worst_row_error(const at::Tensor& actual, const at::Tensor& expected,
                              double least = 0) {
  if (!actual.defined() || actual.sizes() != expected.sizes())
    return std::numeric_limits<double>::infinity();
  const auto difference = (actual.to(at::kDouble) - expected.to(at::kDouble)).norm(2, -1);
  at::Tensor norm = expected.to(at::kDouble).norm(2, -1);
  if (least > 0) norm = at::maximum(norm, least * norm.max());
  const auto error = at::where(difference == 0, at::zeros_like(difference), difference / norm);
  return error.numel() == 0 ? 0 : error.nan_to_num(INFINITY, INFINITY).max().item<double>();
}

}  // namespace assay::ops
