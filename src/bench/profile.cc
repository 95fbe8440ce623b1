#include "bench/profile.h"

#include <ATen/record_function.h>
#include <torch/csrc/autograd/profiler_kineto.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>

#include "train/device.h"

namespace assay::bench {
namespace {

using torch::autograd::profiler::KinetoEvent;

std::unique_ptr<torch::autograd::profiler::ProfilerResult> recorded(
    c10::Device device, const std::function<void()>& work) {
  using namespace torch::profiler::impl;
  ::setenv("KINETO_LOG_LEVEL", "5", 0);  // else it complains where there is no GPU
  const ProfilerConfig config(ProfilerState::KINETO);
  std::set<ActivityType> activities = {ActivityType::CPU};
  if (device.is_cuda()) activities.insert(ActivityType::CUDA);
  torch::autograd::profiler::prepareProfiler(config, activities);
  torch::autograd::profiler::enableProfiler(config, activities);
  try {
    work();
    train::synchronize(device);
  } catch (...) {
    torch::autograd::profiler::disableProfiler();
    throw;
  }
  return torch::autograd::profiler::disableProfiler();
}

class Sums {
 public:
  void add(const std::string& op, const std::string& kernel, double seconds, int64_t calls = 1) {
    TimeSpent& row = rows_[{op, kernel}];
    row.op = op;
    row.kernel = kernel;
    row.calls += calls;
    row.seconds += seconds;
  }
  std::vector<TimeSpent> sorted() const {
    std::vector<TimeSpent> out;
    for (const auto& [key, row] : rows_) out.push_back(row);
    std::ranges::sort(out, std::greater(), &TimeSpent::seconds);
    return out;
  }

 private:
  std::map<std::pair<std::string, std::string>, TimeSpent> rows_;
};

// Without what every kernel's name has.
std::string shortened(std::string name) {
  for (const char* part : {"void ", "(anonymous namespace)::", "at::native::", "assay::ops::"})
    for (size_t at; (at = name.find(part)) != std::string::npos;) name.erase(at, std::strlen(part));
  return name;
}

double seconds_of(const KinetoEvent& event) { return 1e-9 * double(event.durationNs()); }

// Gaps between kernels, in which none runs, and their seconds.
std::pair<int64_t, double> idle(const std::vector<KinetoEvent>& events) {
  std::vector<std::pair<int64_t, int64_t>> spans;  // nanoseconds
  for (const KinetoEvent& event : events)
    if (event.deviceType() == c10::DeviceType::CUDA)
      spans.emplace_back(event.startNs(), event.endNs());
  std::ranges::sort(spans);
  int64_t gaps = 0;
  int64_t nanoseconds = 0;
  for (int64_t end = spans.empty() ? 0 : spans[0].first; const auto& [from, to] : spans) {
    gaps += from > end;
    nanoseconds += std::max<int64_t>(from - end, 0);
    end = std::max(end, to);
  }
  return {gaps, 1e-9 * double(nanoseconds)};
}

std::vector<TimeSpent> kernels(const std::vector<KinetoEvent>& events) {
  std::map<uint64_t, std::string> operators;  // by correlation
  for (const KinetoEvent& event : events)
    if (event.deviceType() == c10::DeviceType::CPU && event.correlationId() != 0)
      operators.emplace(event.correlationId(), event.name());
  Sums sums;
  for (const KinetoEvent& event : events) {
    if (event.deviceType() != c10::DeviceType::CUDA) continue;
    const auto op = operators.find(event.linkedCorrelationId());
    sums.add(op == operators.end() ? "" : shortened(op->second), shortened(event.name()),
             seconds_of(event));
  }
  if (const auto [gaps, seconds] = idle(events); gaps > 0) sums.add("", kIdle, seconds, gaps);
  return sums.sorted();
}

// Events of a thread nest: what one took is taken from the one around it.
std::vector<TimeSpent> operators(std::vector<KinetoEvent> events) {
  std::ranges::stable_sort(events, {}, [](const KinetoEvent& e) {
    return std::tuple(e.startThreadId(), e.startNs(), ~e.endNs());
  });
  Sums sums;
  std::vector<std::pair<const KinetoEvent*, double>> around;  // and the seconds of those inside
  const auto leave = [&] {
    const auto [event, inside] = around.back();
    sums.add(shortened(event->name()), "", seconds_of(*event) - inside);
    around.pop_back();
    if (!around.empty()) around.back().second += seconds_of(*event);
  };
  for (const KinetoEvent& event : events) {
    while (!around.empty() && (around.back().first->startThreadId() != event.startThreadId() ||
                               around.back().first->endNs() <= event.startNs()))
      leave();
    around.emplace_back(&event, 0);
  }
  while (!around.empty()) leave();
  return sums.sorted();
}

}  // namespace

std::vector<TimeSpent> profile(c10::Device device, const std::function<void()>& work) {
  const auto result = recorded(device, [&] {
    if (device.is_cuda()) return work();
    // The self time of this record is the time that no operator of torch takes
    RECORD_FUNCTION(kOutside, std::vector<c10::IValue>());
    work();
  });
  return device.is_cuda() ? kernels(result->events()) : operators(result->events());
}

}  // namespace assay::bench
