#include "ops/core/cpu_target.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/cpu_target.cc"
#include "ops/cpu/highway.h"
//
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace assay::ops::HWY_NAMESPACE {
const char* target_name() { return hwy::TargetName(HWY_TARGET); }
}  // namespace assay::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace assay::ops {
HWY_EXPORT(target_name);
std::string cpu_target() { return HWY_DYNAMIC_DISPATCH(target_name)(); }
}  // namespace assay::ops
#endif
