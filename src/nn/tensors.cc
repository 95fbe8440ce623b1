#include "nn/tensors.h"

#include <torch/torch.h>

#include <cstring>

#include "base/error.h"

namespace assay::nn {
namespace {

struct DtypeName {
  at::ScalarType type;
  const char* name;
};
constexpr DtypeName kDtypes[] = {{at::kDouble, "F64"},    {at::kFloat, "F32"}, {at::kHalf, "F16"},
                                 {at::kBFloat16, "BF16"}, {at::kLong, "I64"},  {at::kInt, "I32"},
                                 {at::kShort, "I16"},     {at::kChar, "I8"},   {at::kByte, "U8"},
                                 {at::kBool, "BOOL"}};

std::string shape_text(at::IntArrayRef shape) {
  return fmt::format("[{}]", fmt::join(shape.begin(), shape.end(), ", "));
}

// Without their bytes.
std::vector<TensorEntry> entries_of(const NamedTensors& tensors) {
  std::vector<TensorEntry> entries;
  for (const auto& [name, tensor] : tensors) {
    const auto dtype = std::ranges::find(kDtypes, tensor.scalar_type(), &DtypeName::type);
    if (dtype == std::end(kDtypes))
      fail<Error>("tensor '{}': safetensors has no dtype for {}", name,
                  c10::toString(tensor.scalar_type()));
    entries.push_back({name, dtype->name, tensor.sizes().vec(), {}});
  }
  return entries;
}

using Shapes = std::map<std::string, std::vector<int64_t>>;

void check_names(const Shapes& source, const NamedTensors& target, const std::string& where) {
  std::vector<std::string> wanted;
  for (const auto& [name, tensor] : target) wanted.push_back(name);
  for (const auto& [name, shape] : source)
    if (std::ranges::find(wanted, name) == wanted.end())
      fail("{}: unknown tensor '{}'{}", where, name, did_you_mean(name, wanted));
  for (const auto& [name, tensor] : target) {
    const auto found = source.find(name);
    if (found == source.end()) fail("{}: tensor '{}' is missing", where, name);
    if (found->second != tensor.sizes())
      fail("{}: tensor '{}' is {}, expected {}", where, name, shape_text(found->second),
           shape_text(tensor.sizes()));
  }
}

at::Tensor on_host(const at::Tensor& tensor) { return tensor.detach().cpu().contiguous(); }

std::span<const std::byte> bytes_of(const at::Tensor& host) {
  return {static_cast<const std::byte*>(host.data_ptr()), host.nbytes()};
}

}  // namespace

NamedTensors named_parameters_of(const torch::nn::Module& module) {
  NamedTensors out;
  for (const auto& item : module.named_parameters()) out.emplace_back(item.key(), item.value());
  return out;
}

at::Tensor to_tensor(const TensorEntry& entry) {
  for (const auto& [type, name] : kDtypes)
    if (entry.dtype == name) {
      at::Tensor tensor = at::empty(entry.shape, type);
      if (!entry.bytes.empty())
        std::memcpy(tensor.data_ptr(), entry.bytes.data(), entry.bytes.size());
      return tensor;
    }
  fail("tensor '{}' has dtype {}, which is not supported here", entry.name, entry.dtype);
}

void save_tensors(const fs::path& file, const NamedTensors& tensors,
                  const std::map<std::string, std::string>& metadata) {
  std::vector<TensorEntry> entries = entries_of(tensors);
  std::vector<at::Tensor> held;  // keeps the host copies alive until they are written
  for (size_t i = 0; i < tensors.size(); ++i) {
    held.push_back(on_host(tensors[i].second));
    entries[i].bytes = bytes_of(held.back());
  }
  write_safetensors(file, entries, metadata);
}

SharedTensorFile::SharedTensorFile(const fs::path& file, const NamedTensors& tensors, bool is_new)
    : layout_(safetensors_layout(entries_of(tensors))),
      file_(file, is_new ? std::optional(layout_.file_size) : std::nullopt) {
  if (is_new) file_.write(0, std::as_bytes(std::span(layout_.header)));
}

std::string SharedTensorFile::write(size_t index, const at::Tensor& values) {
  const at::Tensor host = on_host(values);
  file_.write(layout_.offsets.at(index), bytes_of(host));
  return sha256(bytes_of(host));
}

NamedTensors load_tensors(const fs::path& file) {
  const Safetensors in(file);
  NamedTensors out;
  for (const TensorEntry& entry : in.tensors()) out.emplace_back(entry.name, to_tensor(entry));
  return out;
}

void copy_tensors(const NamedTensors& source, NamedTensors target, const std::string& where) {
  const std::map<std::string, at::Tensor> found(source.begin(), source.end());
  Shapes shapes;
  for (const auto& [name, tensor] : source) shapes[name] = tensor.sizes().vec();
  check_names(shapes, target, where);
  const at::NoGradGuard no_grad;
  for (auto& [name, tensor] : target) tensor.copy_(found.at(name));
}

void copy_file(const fs::path& file, NamedTensors target) {
  const Safetensors in(file);
  Shapes shapes;
  for (const TensorEntry& entry : in.tensors()) shapes[entry.name] = entry.shape;
  check_names(shapes, target, file.string());
  const at::NoGradGuard no_grad;
  for (auto& [name, tensor] : target)
    if (!tensor.is_meta()) tensor.copy_(to_tensor(in.at(name)));
}

}  // namespace assay::nn
