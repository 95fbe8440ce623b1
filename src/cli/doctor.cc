// assay doctor
#include <map>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/build.h"
#include "base/version.h"
#include "cli/command.h"
#include "ops/paths.h"
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

void doctor() {
  Json report = {{"assay", version()},
                 {"commit", commit()},
                 {"torch", train::torch_version()},
                 {"cpu", train::device_name(c10::kCPU)},
                 {"cores", std::thread::hardware_concurrency()},
                 {"gpus", train::gpu_names()},
                 {"operators", Json::array()}};
#ifdef ASSAY_CUDA
  report["cuda_kernels"] = "compiled (sm_90a)";
#else
  report["cuda_kernels"] = "not compiled: build with `CUDA=1 make` on a machine with nvcc";
#endif
  std::string text = fmt::format(
      "assay {} ({}), torch {}\nCPU   {}\nGPU   {}\nCUDA kernels {}\nOperators\n", version(),
      commit(), train::torch_version(), report["cpu"].get<std::string>(),
      report["gpus"].empty() ? "none found; everything runs on the CPU" : report["gpus"].dump(),
      report["cuda_kernels"].get<std::string>());
  for (const ops::OpPath& path : ops::op_paths())
    report["operators"].push_back({{"op", path.op}, {"device", path.device}, {"path", path.path}});
  print(report, text + implementations());
}

void add(CLI::App& app) {
  subcommand(app, "doctor",
             "show CPU, GPU and versions of this machine, and the implementation of each operator")
      ->callback(doctor);
}
const bool registered = commands().add("doctor", add);

}  // namespace
}  // namespace assay::cli
