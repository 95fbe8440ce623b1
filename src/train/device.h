#pragma once
// The processor a run uses, and what it can do.
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <string>
#include <vector>

namespace assay::train {

// Makes torch's own algorithms deterministic, and keeps the memory of CPU tensors in the process.
// Call it before a model is built.
void set_up_torch();
// "auto" (CUDA when seen, else the CPU), "cpu", "cuda", "cuda:1". BadInput when it is not there,
// with what is.
c10::Device choose_device(const std::string& name);
std::vector<std::string> gpu_names();  // empty where none is seen
std::string torch_version();
void use_threads(int threads);                // of the CPU; 0: all
std::string device_name(c10::Device device);  // "NVIDIA H200", or the CPU's model and threads
// Dtype of computation for "bf16", "fp32", "fp64" and "auto" (bf16 on CUDA, else fp32).
at::ScalarType compute_dtype(const std::string& precision, c10::Device device);
// Peak FLOP/s that utilisation is measured against: the data sheet's dense bf16 figure for GPUs
// that are known, else the rate of a matrix product timed here.
double peak_flops(c10::Device device);
// Most memory in use so far: allocated on the GPU, resident on the CPU
int64_t peak_memory_bytes(c10::Device device);
void synchronize(c10::Device device);  // waits for all work on it

}  // namespace assay::train
