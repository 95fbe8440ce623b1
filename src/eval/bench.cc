#include "eval/bench.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>

#include "base/interrupt.h"
#include "ops/paths.h"
#include "ops/top1_chunk/top1_chunk.h"
#include "ops/top1_element/top1_element.h"
#include "ops/window_attention/window_attention.h"

namespace assay::eval {
namespace {

using Json = nlohmann::json;
using Clock = std::chrono::steady_clock;

struct Form {
  const char* name;
  std::function<at::Tensor(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v)> run;
  std::vector<double> forward = {}, backward = {};
};

std::vector<Form> forms(const AttentionBench& o) {
  const double scale = std::sqrt(double(o.head_dim));
  const auto window = [=](int64_t size) {
    return [=](auto& q, auto& k, auto& v) { return ops::window_attention(q, k, v, size, scale); };
  };
  const auto top1 = [=, chunk = o.chunk_size](const char* selection) {
    return [=](auto& q, auto& k, auto& v) { return std::get<0>(ops::top1_chunk(q, k, v, chunk, scale, selection)); };
  };
  return {{"full", window(-1)},
          {"window", window(o.window)},
          {"top1_chunk approx", top1("approx")},
          {"top1_chunk exact", top1("exact")},
          {"top1_chunk shortlist", top1("shortlist")},
          {"top1_element", [=](auto& q, auto& k, auto& v) { return std::get<0>(ops::top1_element(q, k, v, scale)); }}};
}

double seconds_of(c10::Device device, auto&& work) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  const auto wait = [&] {
    if (device.is_cuda()) guard.synchronizeDevice(guard.getDevice().index());
  };
  wait();
  const Clock::time_point start = Clock::now();
  work();
  wait();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void round(Form& form, const std::vector<at::Tensor>& qkv, const at::Tensor& dout) {
  at::Tensor out;
  const c10::Device device = dout.device();
  form.forward.push_back(seconds_of(device, [&] { out = form.run(qkv[0], qkv[1], qkv[2]); }));
  form.backward.push_back(seconds_of(device, [&] { torch::autograd::grad({out}, qkv, {dout}); }));
}

double median_after_first(std::vector<double> values) {
  values.erase(values.begin());
  std::ranges::sort(values);
  return values[values.size() / 2];
}

}  // namespace

Json bench_attention(const AttentionBench& o, c10::Device device) {
  const auto options = at::TensorOptions().device(device).dtype(device.is_cuda() ? at::kBFloat16 : at::kFloat);
  Json paths = Json::object(), rows = Json::array();
  for (const ops::OpPath& path : ops::op_paths())
    if (path.device == (device.is_cuda() ? "cuda" : "cpu") &&
        (path.op == "window_attention" || path.op == "top1_chunk" || path.op == "top1_element"))
      paths[path.op] = path.path;
  for (const int64_t time : o.lengths) {
    std::vector<at::Tensor> qkv;
    const auto random = [&] { return at::randn({o.batch, time, o.heads, o.head_dim}, options); };
    for (int i = 0; i < 3; ++i) {
      const at::Tensor x = random();
      qkv.push_back((i < 2 ? x / x.norm(2, -1, true) : x).requires_grad_());
    }
    const at::Tensor dout = random();
    std::vector<Form> all = forms(o);
    const Clock::time_point start = Clock::now();
    while (all[0].forward.size() < 4 || std::chrono::duration<double>(Clock::now() - start).count() < o.seconds) {
      for (Form& form : all) round(form, qkv, dout);
      check_interrupt();
    }
    for (const Form& form : all)
      rows.push_back({{"time", time},
                      {"form", form.name},
                      {"forward", median_after_first(form.forward)},
                      {"backward", median_after_first(form.backward)}});
  }
  return {{"dtype", device.is_cuda() ? "bf16" : "fp32"}, {"paths", paths}, {"rows", rows}};
}

}  // namespace assay::eval
