#pragma once
// Which of Highway's instruction sets the CPU kernels run with in a test.
#include <hwy/targets.h>

#include <vector>

namespace assay::ops {

// The instruction sets that kernels are compiled for and that this process may use, as masks
// of one bit.
inline std::vector<int64_t> targets() {
  std::vector<int64_t> found;
  for (const int64_t target : {HWY_AVX3, HWY_AVX2, HWY_EMU128})
    if (hwy::SupportedTargets() & target) found.push_back(target);
  return found;
}

// While it lives, kernels run with `target` alone. The targets of before are restored, which
// ASSAY_SIMD_TARGET may have restricted.
class SimdTarget {
 public:
  explicit SimdTarget(int64_t target) : before_(hwy::SupportedTargets()) { use(target); }
  ~SimdTarget() { use(before_); }
  SimdTarget(const SimdTarget&) = delete;
  SimdTarget& operator=(const SimdTarget&) = delete;

 private:
  static void use(int64_t targets) {
    hwy::SetSupportedTargetsForTest(targets);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
  int64_t before_;
};

}  // namespace assay::ops
