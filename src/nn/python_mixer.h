#pragma once
// A mixer that is a PyTorch module: "python:CLASS" in a pattern, and the key `python` of the model,
// a file or a module that can be imported. The Python package registers the functions below with
// torch's dispatcher (python/assay/_mixers.py); C++ finds them there and links no Python.
//   assay_python::create(source, name, class, fields as TOML, d_model, layer, num_layers) → handle
//   assay_python::check(handle, x)                           raises what `assay check` finds with x
//   assay_python::needs_gpu(handle) → bool                   starts kernels of Triton
//   assay_python::where(handle) → "FILE:LINE"                of its forward
//   assay_python::forward(handle, x, tensors, names) → (y, tensors, names)      state by name
#include <memory>
#include <string>

#include "nn/mixer.h"

namespace assay::nn {

constexpr std::string_view kPythonPrefix = "python:";
inline bool is_python(std::string_view part) { return part.starts_with(kPythonPrefix); }
// The class, which is also the name of the table of its fields.
std::string python_class(const std::string& part);

// Where the class is. `source` is the text of the file, so that a run keeps the code that it was
// trained with; of a module that is imported, "sha256 " and that of its file.
struct PythonCode {
  std::string name;
  std::string source;
};
// Reads the file, or asks Python for the hash. With a hash of an earlier time in `known`, BadInput
// unless it is still that of the file. BadInput without Python.
PythonCode read_python(const std::string& name, const std::string& known);

std::shared_ptr<Mixer> make_python_mixer(const PythonCode& code, const std::string& part,
                                         const std::string& fields, const Place& place);

// BadInput, as `assay check` says it, if the mixer is a module that cannot be trained with inputs
// such as x: a wrong dtype, a change of x in place, a parameter without a gradient, and the like.
void check_python_mixer(const Mixer& mixer, const at::Tensor& x);
std::string place_of_python_mixer(const Mixer& mixer);  // "FILE:LINE" of its forward; or empty
// From now on forward(x) of a module that needs a GPU returns x, so that the model runs on the CPU.
void leave_out_if_it_needs_a_gpu(Mixer& mixer);

}  // namespace assay::nn
