// The inputs of a delta rule with a decay per channel on the CPU.
#include "ops/rowwise/delta_inputs/kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/rowwise/delta_inputs/cpu.cc"
#include "ops/cpu/highway.h"
//
#include "ops/cpu/rowwise-inl.h"

ASSAY_ROWWISE_TARGET(KdaInputsUnbounded)
ASSAY_ROWWISE_TARGET(KdaInputsBounded)
ASSAY_ROWWISE_TARGET(Gdn2Inputs)
#if HWY_ONCE
ASSAY_ROWWISE_EXPORT(KdaInputsUnbounded)
ASSAY_ROWWISE_EXPORT(KdaInputsBounded)
ASSAY_ROWWISE_EXPORT(Gdn2Inputs)
#endif
