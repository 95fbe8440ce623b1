#include "bench/models.h"

#include <torch/torch.h>

#include <chrono>
#include <map>
#include <nlohmann/json.hpp>

#include "base/interrupt.h"
#include "base/progress.h"
#include "bench/profile.h"
#include "bench/timing.h"
#include "nn/generate.h"
#include "nn/language_model.h"
#include "ops/attention/window_attention/window_attention.h"
#include "ops/core/asynchronous.h"
#include "ops/core/called.h"
#include "ops/core/paths.h"
#include "train/device.h"
#include "train/optimizer.h"

namespace assay::bench {
namespace {

using Json = nlohmann::json;
using Clock = std::chrono::steady_clock;

nn::ModelSpec complete(const ConfigNode& model, const ModelBench& o) {
  nn::ModelSpec spec = nn::ModelSpec::read(model);
  if (spec.config.vocab_size == 0) spec.config.vocab_size = o.vocabulary;
  if (spec.config.positions == "learned" && spec.config.max_positions == 0)
    spec.config.max_positions =
        o.prompt > 0 ? o.prompt + o.generate : o.time + (o.decode > 0 ? 64 : 0);
  return spec;
}

Json paths_of(const std::set<std::string>& operators, c10::Device device) {
  Json paths = Json::object();
  for (const ops::OpPath& path : ops::op_paths())
    if (path.device == (device.is_cuda() ? "cuda" : "cpu") && operators.contains(path.op))
      paths[path.op] = path.path;
  return paths;
}

std::string memory_ran_out(const std::string& why) {
  const std::string what = why.substr(0, why.find('\n'));
  for (const char* sign : {"not enough memory", "can't allocate memory", "out of memory"})
    if (what.find(sign) != std::string::npos) {
      constexpr std::string_view kAllocator = "DefaultCPUAllocator: ";  // after a place in torch
      const size_t found = what.find(kAllocator);
      return "out of memory: " +
             (found == std::string::npos ? what : what.substr(found + kAllocator.size()));
    }
  return what;
}

// "" when the work was done, else why not.
std::string failure_of(auto&& work) {
  try {
    work();
    return "";
  } catch (const Interrupted&) {
    throw;
  } catch (const c10::Error& error) {
    return memory_ran_out(error.what_without_backtrace());
  } catch (const std::bad_alloc&) {
    return "out of memory";
  } catch (const std::exception& error) {
    return error.what();
  }
}

Json profile_of(c10::Device device, const std::function<void()>& work) {
  Json parts = Json::array();
  for (const TimeSpent& part : profile(device, work))
    parts.push_back({{"op", part.op},
                     {"kernel", part.kernel},
                     {"calls", part.calls},
                     {"seconds", part.seconds}});
  return parts;
}

void time_steps(nn::LanguageModel& model, const ModelBench& o, c10::Device device, Json& row) {
  train::AdamW optimizer(model, {});
  const at::Tensor tokens =
      at::randint(model.spec.config.vocab_size, {o.batch, o.time + 1}, at::kLong).to(device);
  Progress progress;
  std::vector<double> seconds;
  const auto work = [&](int64_t step) {
    model.training_losses(tokens).sum().backward();
    optimizer.step(1e-4, step).item<float>();  // waits for the device
  };
  for (int64_t step = 0; step <= o.steps; ++step) {
    check_interrupt();
    progress.show(fmt::format("step {}/{}", step, o.steps));
    const Clock::time_point start = Clock::now();
    work(step);
    if (step > 0) seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
  }
  std::ranges::sort(seconds);
  const double median = seconds[seconds.size() / 2];
  row["seconds_per_step"] = median;
  row["tokens_per_second"] = double(o.batch * o.time) / median;
  row["peak_memory_bytes"] = train::peak_memory_bytes(device);
  if (o.profile) row["profile"] = profile_of(device, [&] { work(o.steps + 1); });
}

std::map<std::pair<size_t, std::string>, at::Tensor> tensors_of(const nn::ModelState& state) {
  std::map<std::pair<size_t, std::string>, at::Tensor> out;
  for (size_t i = 0; i < state.layers.size(); ++i)
    for (const auto& [name, tensor] : state.layers[i].tensors()) out[{i, name}] = tensor;
  return out;
}

// Bytes that one step reads of the state, which is all of it, and bytes of the tensors that it
// allocates and writes. Nothing else holds the state during the step; a cache would be copied.
double bytes_moved(nn::ModelState& state, auto&& step) {
  std::map<std::pair<size_t, std::string>, const void*> places;
  for (const auto& [name, tensor] : tensors_of(state)) places[name] = tensor.data_ptr();
  int64_t bytes = state.bytes();
  step();
  for (const auto& [name, tensor] : tensors_of(state))
    if (places[name] != tensor.data_ptr()) bytes += int64_t(tensor.nbytes());
  return double(bytes);
}

// Seconds per token of generate() with sampling, without the first tokens: they capture the step.
double seconds_per_token(nn::LanguageModel& model, const at::Tensor& prompts) {
  constexpr int64_t kTokens = 48;
  constexpr int64_t kUntimed = 16;
  Clock::time_point start;
  const auto progress = [&](int64_t made) {
    if (made == kUntimed) start = Clock::now();
  };
  const std::vector<uint64_t> seeds(size_t(prompts.size(0)), 0);
  nn::generate(model, prompts, kTokens, {}, seeds, /*stop=*/-1, progress);
  return std::chrono::duration<double>(Clock::now() - start).count() / (kTokens - kUntimed);
}

// A captured step is repeated with the state that it had when it was captured; nothing else uses
// that memory. Without capture, every call decodes the next token.
void time_decoding(nn::LanguageModel& model, const ModelBench& o, c10::Device device, Json& row) {
  const at::NoGradGuard no_grad;
  model.prepare_inference();
  const at::Tensor tokens =
      at::randint(model.spec.config.vocab_size, {o.decode, o.time + 1}, at::kLong).to(device);
  nn::ModelState state;
  model.hidden(tokens.slice(1, 0, o.time), state);
  const at::Tensor last = tokens.slice(1, o.time);
  const auto step = [&] { model.logits(last, state); };
  step();  // caches get room for more tokens
  const double weights =
      double(model.parameter_count()) * double(c10::elementSize(model.compute_dtype));
  const double bytes = weights + bytes_moved(state, step);
  row["decode"] = {{"sequences", o.decode},
                   {"seconds", seconds_a_call(device, ops::captured(device, step))},
                   {"bytes", bytes},
                   {"bytes_per_second", copy_rate(device)}};
  if (o.profile && o.steps == 0) row["profile"] = profile_of(device, step);
  state = {};
  row["decode"]["seconds_per_token"] = seconds_per_token(model, tokens.slice(1, 0, o.time));
}

// The first call reads one of the prompts: it makes tables of positions and loads kernels.
void time_generation(nn::LanguageModel& model, const ModelBench& o, c10::Device device, Json& row) {
  model.prepare_inference();
  const at::Tensor prompts =
      at::randint(model.spec.config.vocab_size, {o.decode, o.prompt}, at::kLong).to(device);
  const std::vector<uint64_t> seeds(size_t(o.decode), 0);
  nn::generate(model, prompts.slice(0, 0, 1), 2, {}, std::span(seeds).first(1));
  Progress shown;
  Clock::time_point start = Clock::now();
  const auto seconds = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
  double prompt_seconds = 0;
  const auto progress = [&](int64_t made) {
    check_interrupt();
    if (made == 1) prompt_seconds = seconds();
    shown.show(fmt::format("token {}/{}", made, o.generate));
  };
  nn::generate(model, prompts, o.generate, {}, seeds, /*stop=*/-1, progress);
  const double total = seconds();
  const double rest = total - prompt_seconds;
  row["generation"] = {{"sequences", o.decode},
                       {"prompt", o.prompt},
                       {"tokens", o.generate},
                       {"prompt_seconds", prompt_seconds},
                       {"prompt_tokens_per_second", double(o.decode * o.prompt) / prompt_seconds},
                       {"seconds", rest},
                       {"tokens_per_second", double(o.decode * (o.generate - 1)) / rest},
                       {"total_seconds", total}};
  row["peak_memory_bytes"] = train::peak_memory_bytes(device);
}

void count(nn::LanguageModel& model, const ModelBench& o, c10::Device device, Json& row) {
  const ops::CalledOps called;
  row["parameters"] = model.parameter_count();
  row["flops_per_token"] = model.forward_flops(o.time);
  for (const int64_t length : o.state_lengths)
    row["state_bytes"][std::to_string(length)] = model.state_bytes(length);
  row["operators"] = paths_of(called.names, device);
}

std::string why_not_timed(int64_t parameters, const ModelBench& o) {
  if (o.steps == 0 && o.decode == 0) return "not timed";
  if (parameters <= o.largest) return "";
  return fmt::format("not timed: more than {} parameters", Progress::count(double(o.largest)));
}

}  // namespace

Json bench_model(const ConfigNode& table, const ModelBench& o, c10::Device device) {
  Json row = {{"parameters", nullptr},         {"flops_per_token", nullptr},
              {"state_bytes", Json::object()}, {"operators", Json::object()},
              {"seconds_per_step", nullptr},   {"tokens_per_second", nullptr},
              {"peak_memory_bytes", nullptr}};
  const nn::ModelSpec spec = complete(table, o);
  row["d_model"] = spec.config.d_model;
  row["num_layers"] = spec.config.num_layers;
  row["failure"] = failure_of([&] {
    ops::choose_full_attention(o.full_attention);
    nn::LanguageModel model(spec);
    model.compute_dtype = train::compute_dtype(o.precision, device);
    model.recompute_activations = o.recompute_activations;
    const std::string untimed = why_not_timed(model.parameter_count(), o);
    if (untimed.empty()) model.initialise(0);  // on the CPU, where its random numbers are made
    model.to(device, model.compute_dtype == at::kDouble ? at::kDouble : at::kFloat);
    count(model, o, device, row);
    if (!untimed.empty()) fail<Error>("{}", untimed);
    if (o.steps > 0) time_steps(model, o, device, row);
    if (o.prompt > 0) time_generation(model, o, device, row);
    else if (o.decode > 0) time_decoding(model, o, device, row);
  });
  return row;
}

}  // namespace assay::bench
