// Rows of unit length on the CPU.
#include "ops/rowwise/unit_length/unit_length.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/rowwise/unit_length/cpu.cc"
#include "ops/cpu/highway.h"
//
#include "ops/cpu/rowwise-inl.h"

ASSAY_ROWWISE_TARGET(UnitLength)
#if HWY_ONCE
ASSAY_ROWWISE_EXPORT(UnitLength)
#endif
