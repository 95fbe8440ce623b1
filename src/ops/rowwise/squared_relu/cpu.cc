// Squared ReLU on the CPU.
#include "ops/rowwise/squared_relu/squared_relu.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/rowwise/squared_relu/cpu.cc"
#include "ops/cpu/highway.h"
//
#include "ops/cpu/elementwise-inl.h"

ASSAY_ELEMENTWISE_TARGET(SquaredRelu)
#if HWY_ONCE
ASSAY_ELEMENTWISE_EXPORT(SquaredRelu)
#endif
