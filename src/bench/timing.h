#pragma once
// Time of calls on a device.
#include <c10/core/Device.h>

#include <functional>

namespace assay::bench {

// `work` without the time of its launches: on CUDA a captured graph, replayed on the current stream
// and so asynchronous; elsewhere `work` itself. It must not wait for the device. Runs it twice.
std::function<void()> captured(c10::Device device, const std::function<void()>& work);
// Median seconds of a call.
double seconds_a_call(c10::Device device, const std::function<void()>& call);
// Bytes read plus bytes written in a second, of a large copy timed here.
double copy_rate(c10::Device device);

}  // namespace assay::bench
