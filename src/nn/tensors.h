#pragma once
// Named tensors and the safetensors files that hold them.
#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/files.h"
#include "base/safetensors.h"

namespace assay::nn {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

NamedTensors named_parameters_of(const torch::nn::Module& module);

void save_tensors(const fs::path& file, const NamedTensors& tensors,
                  const std::map<std::string, std::string>& metadata = {});
NamedTensors load_tensors(const fs::path& file);  // copies, on the CPU, in the order of the file
at::Tensor to_tensor(const TensorEntry& entry);   // a copy, on the CPU

// Copies `source` into `target` by name. BadInput, with `where` and the nearest name, when a name
// is missing, unknown or of another shape; nothing is copied then.
void copy_tensors(const NamedTensors& source, NamedTensors target, const std::string& where);

}  // namespace assay::nn
