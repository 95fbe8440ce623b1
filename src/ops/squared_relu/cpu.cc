// Squared ReLU on the CPU.
#include "ops/squared_relu/squared_relu.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/squared_relu/cpu.cc"
#include "ops/highway.h"
//
#include "ops/elementwise-inl.h"

ASSAY_ELEMENTWISE_TARGET(SquaredRelu)
#if HWY_ONCE
ASSAY_ELEMENTWISE_EXPORT(SquaredRelu)
#endif
