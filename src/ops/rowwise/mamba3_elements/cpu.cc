// Mamba-3's element-wise parts on the CPU. The rotation is composed there.
#include "ops/rowwise/mamba3_elements/kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/rowwise/mamba3_elements/cpu.cc"
#include "ops/cpu/highway.h"
//
#include "ops/cpu/rowwise-inl.h"

ASSAY_ROWWISE_TARGET(Mamba3Write)
ASSAY_ROWWISE_TARGET(Mamba3Output)
#if HWY_ONCE
ASSAY_ROWWISE_EXPORT(Mamba3Write)
ASSAY_ROWWISE_EXPORT(Mamba3Output)
#endif
