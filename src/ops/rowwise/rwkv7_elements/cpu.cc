// RWKV-7's element-wise parts on the CPU.
#include "ops/rowwise/rwkv7_elements/kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/rowwise/rwkv7_elements/cpu.cc"
#include "ops/cpu/highway.h"
//
#include "ops/cpu/rowwise-inl.h"

ASSAY_ROWWISE_TARGET(Rwkv7Prepare)
ASSAY_ROWWISE_TARGET(Rwkv7Values)
ASSAY_ROWWISE_TARGET(Rwkv7Output)
#if HWY_ONCE
ASSAY_ROWWISE_EXPORT(Rwkv7Prepare)
ASSAY_ROWWISE_EXPORT(Rwkv7Values)
ASSAY_ROWWISE_EXPORT(Rwkv7Output)
#endif
