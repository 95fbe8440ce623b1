#pragma once
// Time of calls on a device.
#include <c10/core/Device.h>

#include <functional>

namespace assay::bench {

// Median seconds of a call.
double seconds_a_call(c10::Device device, const std::function<void()>& call);
// Bytes read plus bytes written in a second, of a large copy timed here.
double copy_rate(c10::Device device);

}  // namespace assay::bench
