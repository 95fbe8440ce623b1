// assay doctor, assay list KIND, assay describe KIND NAME
#include <nlohmann/json.hpp>
#include <thread>

#include "base/build.h"
#include "base/version.h"
#include "cli/command.h"
#include "nn/language_model.h"
#include "nn/mixer.h"
#include "ops/paths.h"
#include "study/plan.h"
#include "train/config.h"
#include "train/device.h"

namespace assay::cli {
namespace {

using Json = nlohmann::json;

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
  report["cuda_kernels"] = "not compiled: build with CUDA=1 make where nvcc is";
#endif
  std::string text =
      fmt::format("assay {} ({}), torch {}\nCPU   {}\nGPU   {}\nCUDA kernels {}\nOperators\n", version(), commit(),
                  train::torch_version(), report["cpu"].get<std::string>(),
                  report["gpus"].empty() ? "none seen; everything runs on the CPU" : report["gpus"].dump(),
                  report["cuda_kernels"].get<std::string>());
  for (const ops::OpPath& path : ops::op_paths()) {
    report["operators"].push_back({{"op", path.op}, {"device", path.device}, {"path", path.path}});
    text += fmt::format("  {:<20} {:<5} {}\n", path.op, path.device, path.path);
  }
  print(report, text);
}

struct Described {
  std::string about;
  Fields fields;
};

// A preset with every default written out.
void describe_model(const std::string& name) {
  const std::string toml = nn::ModelSpec::read(ConfigNode::read_file(study::preset_file(name)).child("model")).toml();
  print({{"kind", "model"}, {"name", name}, {"toml", toml}}, toml);
}

Described described(const std::string& kind, const std::string& name) {
  if (kind == "mixer") return {nn::mixers().at(name).about, nn::mixers().at(name).fields()};
  if (kind == "channel_mixer") return {nn::channel_mixers().at(name).about, nn::channel_mixers().at(name).fields()};
  static nn::ModelConfig model;
  static train::TrainConfig train;
  if (kind == "table" && name == "model") return {"a language model: a pattern of layers", fields_of(model)};
  if (kind == "table" && name == "train") return {"how it is trained", fields_of(train)};
  fail(
      "nothing to describe under {} '{}'; there are mixer NAME, channel_mixer NAME, model NAME, table model, table "
      "train",
      kind, name);
}

std::vector<std::string> listed(const std::string& kind) {
  if (kind == "mixers") return nn::mixers().names();
  if (kind == "channel_mixers") return nn::channel_mixers().names();
  if (kind == "ops") {
    return ops::operator_names();
  }
  if (kind == "models") return study::names_of_plans("models");
  if (kind == "tasks") return study::names_of_plans("tasks");
  if (kind == "plans") {
    std::vector<std::string> names = study::names_of_plans("");
    for (const std::string& name : study::names_of_plans("ablations")) names.push_back("ablations/" + name);
    return names;
  }
  const std::vector<std::string> kinds = {"mixers", "channel_mixers", "ops", "models", "plans", "tasks"};
  fail("unknown kind '{}'{}; there are {}", kind, did_you_mean(kind, kinds), join(kinds));
}

void describe(const std::string& kind, const std::string& name) {
  if (kind == "model") return describe_model(name);
  const Described what = described(kind, name);
  Json fields = Json::array();
  std::string text = fmt::format("{} {}: {}\n", kind, name, what.about);
  for (const Field& field : what.fields) {
    fields.push_back({{"name", field.name}, {"type", field.type()}, {"default", field.toml()}, {"about", field.doc}});
    text += fmt::format("  {:<22} {:<16} {:<10} {}\n", field.name, field.type(), field.toml(), field.doc);
  }
  print({{"kind", kind}, {"name", name}, {"about", what.about}, {"fields", fields}}, text);
}

void add_doctor(CLI::App& app) {
  subcommand(app, "doctor", "what this machine offers, and which path each operator takes")->callback(doctor);
}

void add_list(CLI::App& app) {
  auto kind = std::make_shared<std::string>();
  CLI::App* command = subcommand(app, "list", "names of mixers, channel_mixers, ops, models, plans or tasks");
  command->add_option("kind", *kind, "what to list")->required();
  command->callback([kind] { print(listed(*kind), join(listed(*kind), "\n") + "\n"); });
}

void add_describe(CLI::App& app) {
  auto words = std::make_shared<std::pair<std::string, std::string>>();
  CLI::App* command = subcommand(app, "describe", "fields, types, defaults and the paper's equation");
  command->add_option("kind", words->first, "mixer, channel_mixer, model or table")->required();
  command->add_option("name", words->second, "its name")->required();
  command->callback([words] { describe(words->first, words->second); });
}

const bool doctor_registered = commands().add("doctor", add_doctor);
const bool list_registered = commands().add("list", add_list);
const bool describe_registered = commands().add("describe", add_describe);

}  // namespace
}  // namespace assay::cli
