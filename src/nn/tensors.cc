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
  std::vector<TensorEntry> entries;
  NamedTensors held;  // keeps the host copies alive until they are written
  for (const auto& [name, tensor] : tensors) {
    held.emplace_back(name, tensor.detach().cpu().contiguous());
    const at::Tensor& host = held.back().second;
    const auto dtype = std::ranges::find(kDtypes, host.scalar_type(), &DtypeName::type);
    if (dtype == std::end(kDtypes))
      fail<Error>("tensor '{}': safetensors has no dtype for {}", name,
                  c10::toString(host.scalar_type()));
    entries.push_back({name,
                       dtype->name,
                       host.sizes().vec(),
                       {static_cast<const std::byte*>(host.data_ptr()),
                        size_t(host.numel() * host.element_size())}});
  }
  write_safetensors(file, entries, metadata);
}

NamedTensors load_tensors(const fs::path& file) {
  const Safetensors in(file);
  NamedTensors out;
  for (const TensorEntry& entry : in.tensors()) out.emplace_back(entry.name, to_tensor(entry));
  return out;
}

void copy_tensors(const NamedTensors& source, NamedTensors target, const std::string& where) {
  std::map<std::string, at::Tensor> found(source.begin(), source.end());
  std::vector<std::string> wanted;
  for (const auto& [name, tensor] : target) wanted.push_back(name);
  for (const auto& [name, tensor] : source)
    if (std::ranges::find(wanted, name) == wanted.end())
      fail("{}: unknown tensor '{}'{}", where, name, did_you_mean(name, wanted));
  for (const auto& [name, tensor] : target) {
    const auto it = found.find(name);
    if (it == found.end()) fail("{}: tensor '{}' is missing", where, name);
    if (it->second.sizes() != tensor.sizes())
      fail("{}: tensor '{}' is {}, expected {}", where, name, shape_text(it->second.sizes()),
           shape_text(tensor.sizes()));
  }
  const at::NoGradGuard no_grad;
  for (auto& [name, tensor] : target) tensor.copy_(found.at(name));
}

}  // namespace assay::nn
