// assay doctor
#include <cstdlib>
#include <map>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/build.h"
#include "base/files.h"
#include "base/version.h"
#include "cli/command.h"
#include "ops/core/dispatch.h"
#include "ops/core/paths.h"
#include "train/device.h"

namespace assay::cli {
namespace {

using Json = nlohmann::json;

// One paragraph per device and implementation, with the operators that use it.
std::string implementations() {
  std::map<std::pair<std::string, std::string>, std::vector<std::string>> users;
  for (const ops::OpPath& path : ops::op_paths())
    users[{path.device, path.path}].push_back(path.op);
  std::string text;
  for (const auto& [key, names] : users)
    text += fmt::format("  {:<5} {}\n{}", key.first, key.second, wrapped(names, 8));
  return text;
}

// "sm_90a", "compute_80" or "none" of each GPU
std::vector<std::string> kernels_of_gpus() {
  std::vector<std::string> kernels;
  for (size_t i = 0; i < train::gpu_names().size(); ++i) {
    const c10::Device gpu(c10::kCUDA, c10::DeviceIndex(i));
    kernels.push_back(ops::on_hopper(gpu) ? "sm_90a" : ops::on_gpu(gpu) ? "compute_80" : "none");
  }
  return kernels;
}

// And what to do about it
std::string why_no_gpu() {
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (!fs::exists("/dev/nvidiactl"))
    return "there is no /dev/nvidiactl; "
           "install the NVIDIA driver, or give the container access to the GPU";
  if (visible) return fmt::format("CUDA_VISIBLE_DEVICES is '{}'; unset it", visible);
  return "torch finds none, although /dev/nvidiactl exists; "
         "try nvidia-smi, and a torch that was built with CUDA";
}

void doctor() {
  Json report = {{"assay", version()},
                 {"commit", commit()},
                 {"torch", train::torch_version()},
                 {"cpu", train::device_name(c10::kCPU)},
                 {"cores", std::thread::hardware_concurrency()},
                 {"gpus", train::gpu_names()},
                 {"kernels_of_gpus", kernels_of_gpus()},
                 {"operators", Json::array()}};
#ifdef ASSAY_CUDA
  report["cuda_kernels"] =
      "compiled (sm_90a; compute_80 for other GPUs from compute capability 8.0)";
#else
  report["cuda_kernels"] = "not compiled: build with `CUDA=1 make` on a machine with nvcc";
#endif
  std::string text =
      fmt::format("assay {} ({}), torch {}\nCPU   {}\nGPU   {}\nCUDA kernels {}{}\nOperators\n",
                  version(), commit(), train::torch_version(), report["cpu"].get<std::string>(),
                  report["gpus"].empty() ? "none found, everything runs on the CPU: " + why_no_gpu()
                                         : report["gpus"].dump(),
                  report["cuda_kernels"].get<std::string>(),
                  report["gpus"].empty() ? "" : ", used: " + report["kernels_of_gpus"].dump());
  for (const ops::OpPath& path : ops::op_paths())
    report["operators"].push_back({{"op", path.op}, {"device", path.device}, {"path", path.path}});
  if (report["gpus"].empty()) report["why_no_gpu"] = why_no_gpu();
  print(report, text + implementations());
}

void add(CLI::App& app) {
  subcommand(app, "doctor",
             "show CPU, GPU and versions of this machine, and the implementation of each operator",
             {"doctor"})
      ->callback(doctor);
}
const bool registered = commands().add("doctor", add);

}  // namespace
}  // namespace assay::cli
