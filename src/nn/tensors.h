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
#include "base/shared_file.h"

namespace assay::nn {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

NamedTensors named_parameters_of(const torch::nn::Module& module);

void save_tensors(const fs::path& file, const NamedTensors& tensors,
                  const std::map<std::string, std::string>& metadata = {});
// A file like that of save_tensors, which several processes write together (SharedFile). All give
// the same names, shapes and dtypes; `tensors` can be on the meta device.
class SharedTensorFile {
 public:
  // `is_new`: makes the file with its header. The others open it after that.
  SharedTensorFile(const fs::path& file, const NamedTensors& tensors, bool is_new = false);
  // Writes those of tensors[index]; returns the sha256 of their bytes.
  std::string write(size_t index, const at::Tensor& values);
  // safetensors_checksum with the sha256 of all tensors
  std::string checksum(std::string_view tensors) const {
    return safetensors_checksum(layout_.header, tensors);
  }
  void sync() { file_.sync(); }

 private:
  SafetensorsLayout layout_;
  SharedFile file_;
};
NamedTensors load_tensors(const fs::path& file);  // copies, on the CPU, in the order of the file
at::Tensor to_tensor(const TensorEntry& entry);   // a copy, on the CPU

// Copies `source` into `target` by name. BadInput, with `where` and the nearest name, when a name
// is missing, unknown or of another shape; nothing is copied then.
void copy_tensors(const NamedTensors& source, NamedTensors target, const std::string& where);
// copy_tensors() with the tensors of a file, one after the other. Those of `target` that are on the
// meta device are checked, and their values are not read.
void copy_file(const fs::path& file, NamedTensors target);

}  // namespace assay::nn
