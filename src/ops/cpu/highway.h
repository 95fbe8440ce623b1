#pragma once
// The preamble of a CPU kernel. After
//   #undef HWY_TARGET_INCLUDE
//   #define HWY_TARGET_INCLUDE "ops/NAME/cpu.cc"
// including this header compiles the file once per SIMD target. The macros below export its
// functions, under #if HWY_ONCE and in namespace assay::ops::cpu.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#include <hwy/foreach_target.h>

// void kernel(const Call&, const ParallelFor&) calls `function` of the best target.
#define ASSAY_CPU_KERNEL(kernel, function, Call)               \
  HWY_EXPORT(function);                                        \
  void kernel(const Call& call, const ParallelFor& parallel) { \
    HWY_DYNAMIC_DISPATCH(function)(call, parallel);            \
  }
// As ASSAY_CPU_KERNEL, with a workspace.
#define ASSAY_CPU_WORKSPACE_KERNEL(kernel, function, Call)                      \
  HWY_EXPORT(function);                                                         \
  void kernel(const Call& call, void* workspace, const ParallelFor& parallel) { \
    HWY_DYNAMIC_DISPATCH(function)(call, workspace, parallel);                  \
  }
