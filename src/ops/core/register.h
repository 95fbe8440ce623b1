#pragma once
// The registration of an operator in torch's dispatcher, so that it serves eager calls, fake
// tensors, torch.compile and torch.export. For the files that define operators.
#include <ATen/core/boxing/KernelFunction.h>
#include <torch/library.h>

#include <string>
#include <vector>

namespace assay::ops {

// Defines torch.ops.assay.<name> by its schema "name(arguments) -> results". `about` is one line,
// usually the formula; `assay list ops` shows it. `function` checks its arguments, computes
// gradients by itself, and returns empty results of the right shapes and dtypes where its first
// argument is on the device "meta". Every argument that holds numbers is a Tensor or a Tensor?, and
// every result is a new Tensor.
//   CPU, CUDA  `function`
//   Meta       `function` of stand-ins on the device "meta". A symbolic size becomes a guard on its
//              value.
//   Autograd   `function`, which records its own backward pass. Tensors without data (fake, meta)
//              and tensors that are traced (torch.compile) record
//              torch.ops.assay._<name>_backward in its place. That operator runs the forward pass
//              again: a compiled training step costs one more forward pass than an eager one.
// `constant_results` names the floating-point results that have no gradient.
template <class Function>
void register_operator(torch::Library& library, const std::string& schema, const std::string& about,
                       Function* function, const std::vector<std::string>& constant_results = {});

// The part that does not depend on the function's type.
void define_operator(torch::Library& library, const std::string& schema, const std::string& about,
                     const c10::KernelFunction& kernel,
                     const std::vector<std::string>& constant_results);

template <class Function>
void register_operator(torch::Library& library, const std::string& schema, const std::string& about,
                       Function* function, const std::vector<std::string>& constant_results) {
  define_operator(library, schema, about,
                  c10::KernelFunction::makeFromUnboxedRuntimeFunction(function), constant_results);
  const std::string name = schema.substr(0, schema.find('('));
  for (const c10::DispatchKey key : {c10::DispatchKey::CPU, c10::DispatchKey::CUDA})
    library.impl(name.c_str(), torch::dispatch(key, function));
}

}  // namespace assay::ops
