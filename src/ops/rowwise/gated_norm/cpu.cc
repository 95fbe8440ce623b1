// Gated root-mean-square norms on the CPU.
#include "ops/rowwise/gated_norm/gated_norm.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/rowwise/gated_norm/cpu.cc"
#include "ops/cpu/highway.h"
//
#include "ops/cpu/rowwise-inl.h"

ASSAY_ROWWISE_TARGET(GateThenNorm)
ASSAY_ROWWISE_TARGET(NormThenGate)
ASSAY_ROWWISE_TARGET(NormThenSigmoid)
#if HWY_ONCE
ASSAY_ROWWISE_EXPORT(GateThenNorm)
ASSAY_ROWWISE_EXPORT(NormThenGate)
ASSAY_ROWWISE_EXPORT(NormThenSigmoid)
#endif
