#pragma once
// The instruction set that the CPU kernels run with on this machine.
#include <string>

namespace assay::ops {

// Highway's name of it: "AVX3" (AVX-512), "AVX2", "EMU128" (no vector instructions asked for)
std::string cpu_target();

}  // namespace assay::ops
