// RWKV-7's element-wise parts on the CPU.
#include "ops/rwkv7/kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/rwkv7/cpu.cc"
#include "ops/highway.h"
//
#include "ops/rowwise-inl.h"

ASSAY_ROWWISE_TARGET(Rwkv7Prepare)
ASSAY_ROWWISE_TARGET(Rwkv7Values)
ASSAY_ROWWISE_TARGET(Rwkv7Output)
#if HWY_ONCE
ASSAY_ROWWISE_EXPORT(Rwkv7Prepare)
ASSAY_ROWWISE_EXPORT(Rwkv7Values)
ASSAY_ROWWISE_EXPORT(Rwkv7Output)
#endif
