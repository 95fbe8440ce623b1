#include "bench/attention.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>
#include <set>

#include "base/interrupt.h"
#include "ops/attention/top1_chunk/top1_chunk.h"
#include "ops/attention/top1_element/top1_element.h"
#include "ops/attention/window_attention/window_attention.h"
#include "ops/core/paths.h"

namespace assay::bench {
namespace {

using Json = nlohmann::json;
using Clock = std::chrono::steady_clock;

struct Form {
  const char* name;
  std::function<at::Tensor(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v)> run;
  const char* full_attention = "deterministic";
  int calls = 1;  // timed in a row
  std::vector<double> forward = {};
  std::vector<double> backward = {};
  std::string failure = {};
};

std::vector<Form> forms(const AttentionBench& o, bool cuda) {
  const double scale = std::sqrt(double(o.head_dim));
  const auto window = [=](int64_t size) {
    return [=](auto& q, auto& k, auto& v) { return ops::window_attention(q, k, v, size, scale); };
  };
  const auto top1 = [=, chunk = o.chunk_size](const char* selection) {
    return [=](auto& q, auto& k, auto& v) {
      return std::get<0>(ops::top1_chunk(q, k, v, chunk, scale, selection));
    };
  };
  std::vector<Form> out = {{"full", window(-1)},
                           {"window", window(o.window)},
                           {"top1_chunk approx", top1("approx")},
                           {"top1_chunk exact", top1("exact")},
                           {"top1_element", [=](auto& q, auto& k, auto& v) {
                              return std::get<0>(ops::top1_element(q, k, v, scale));
                            }}};
  if (cuda) {
    out.push_back({"full cudnn", window(-1), "cudnn"});
    out.push_back({"full flash-2", window(-1), "flash-2"});
    out.push_back({"window flash-2", window(o.window), "flash-2"});
  }
  return out;
}

// Seconds per call of `work`: the mean over `calls` calls in a row.
double seconds_of(c10::Device device, int calls, auto&& work) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  const auto wait = [&] {
    if (device.is_cuda()) guard.synchronizeDevice(guard.getDevice().index());
  };
  wait();
  const Clock::time_point start = Clock::now();
  for (int i = 0; i < calls; ++i) work();
  wait();
  return std::chrono::duration<double>(Clock::now() - start).count() / calls;
}

double last(const Form& form) { return form.forward.back() + form.backward.back(); }

void round(Form& form, const std::vector<at::Tensor>& qkv, const at::Tensor& dout, double limit) {
  if (!form.failure.empty() || (form.forward.size() > 1 && last(form) > limit)) return;
  at::Tensor out;
  const auto forward = [&] { out = form.run(qkv[0], qkv[1], qkv[2]); };
  const auto backward = [&] { torch::autograd::grad({out}, qkv, {dout}, /*retain_graph=*/true); };
  ops::choose_full_attention(form.full_attention);
  try {
    form.forward.push_back(seconds_of(dout.device(), form.calls, forward));
    form.backward.push_back(seconds_of(dout.device(), form.calls, backward));
    form.calls = std::clamp(int(0.02 / last(form)), 1, 20);
  } catch (const c10::Error& error) {
    const std::string why = error.what_without_backtrace();
    form.failure = why.substr(0, why.find('\n'));
  }
  ops::choose_full_attention("deterministic");
}

double median_after_first(std::vector<double> values) {
  values.erase(values.begin());
  std::ranges::sort(values);
  return values[values.size() / 2];
}

Json row_of(const Form& form, int64_t time) {
  Json row = {{"time", time}, {"form", form.name}};
  if (form.failure.empty()) {
    row["forward"] = median_after_first(form.forward);
    row["backward"] = median_after_first(form.backward);
  } else row["failure"] = form.failure;
  return row;
}

// Every form that is not left out, at one length; leaves out those that took too long for the
// lengths that follow.
Json rows_of(int64_t time, const AttentionBench& o, const at::TensorOptions& options,
             std::set<std::string>& left_out) {
  std::vector<at::Tensor> qkv;
  const auto random = [&] { return at::randn({o.batch, time, o.heads, o.head_dim}, options); };
  for (int i = 0; i < 3; ++i) {
    const at::Tensor x = random();
    qkv.push_back((i < 2 ? x / x.norm(2, -1, true) : x).requires_grad_());
  }
  const at::Tensor dout = random();
  std::vector<Form> all = forms(o, options.device().is_cuda());
  std::erase_if(all, [&](const Form& form) { return left_out.contains(form.name); });
  const Clock::time_point start = Clock::now();
  for (int rounds = 0;
       rounds < 4 || std::chrono::duration<double>(Clock::now() - start).count() < o.seconds;
       ++rounds) {
    for (Form& form : all) round(form, qkv, dout, o.limit);
    check_interrupt();
  }
  Json rows = Json::array();
  for (const Form& form : all) {
    rows.push_back(row_of(form, time));
    if (!form.failure.empty() || last(form) > o.limit) left_out.insert(form.name);
  }
  return rows;
}

}  // namespace

Json bench_attention(const AttentionBench& o, c10::Device device) {
  const auto options =
      at::TensorOptions().device(device).dtype(device.is_cuda() ? at::kBFloat16 : at::kFloat);
  Json paths = Json::object();
  Json rows = Json::array();
  for (const ops::OpPath& path : ops::op_paths())
    if (path.device == (device.is_cuda() ? "cuda" : "cpu") &&
        (path.op == "window_attention" || path.op == "top1_chunk" || path.op == "top1_element"))
      paths[path.op] = path.path;
  std::set<std::string> left_out;
  for (const int64_t time : o.lengths)
    for (Json& row : rows_of(time, o, options, left_out)) rows.push_back(std::move(row));
  return {{"dtype", device.is_cuda() ? "bf16" : "fp32"}, {"paths", paths}, {"rows", rows}};
}

}  // namespace assay::bench
