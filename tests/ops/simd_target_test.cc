// ASSAY_SIMD_TARGET=EMU128 runs every test of this program with that instruction set of Highway
// alone. The tests are skipped where the CPU lacks it. CTest runs the tests of CPU kernels once per
// target in this way.
#include "ops/simd_target.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>

#include "ops/core/cpu_target.h"

namespace assay::ops {
namespace {

const char* wanted() { return std::getenv("ASSAY_SIMD_TARGET"); }

class WantedTarget : public testing::Environment {
 public:
  void SetUp() override {
    if (!wanted()) return;
    for (const int64_t target : targets())
      if (hwy::TargetName(target) == std::string(wanted())) target_.emplace(target);
    if (!target_) GTEST_SKIP() << "no SIMD target " << wanted() << " on this CPU";
  }
  void TearDown() override { target_.reset(); }

 private:
  std::optional<SimdTarget> target_;
};

[[maybe_unused]] const auto* registered = testing::AddGlobalTestEnvironment(new WantedTarget);

TEST(SimdTarget, KernelsRunWithTheWantedTarget) {
  if (!wanted()) GTEST_SKIP() << "ASSAY_SIMD_TARGET is not set";
  EXPECT_EQ(cpu_target(), wanted());
}

TEST(SimdTarget, TargetIsRestoredAfterATest) {
  const std::string before = cpu_target();
  for (const int64_t target : targets()) {
    const SimdTarget only(target);
    EXPECT_EQ(cpu_target(), hwy::TargetName(target));
  }
  EXPECT_EQ(cpu_target(), before);
}

}  // namespace
}  // namespace assay::ops
