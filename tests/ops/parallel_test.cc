#include "ops/core/parallel.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>

namespace assay::ops {
namespace {

TEST(AtParallelFor, CoversTheRangeOnceWhateverTheThreads) {
  const int before = at::get_num_threads();
  for (const int threads : {1, 2, 5}) {
    at::set_num_threads(threads);
    for (const int64_t size : {0, 1, 3, 100}) {
      std::vector<std::atomic<int>> visits(size);
      at_parallel_for()(size, 7, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) ++visits[i];
      });
      for (const auto& count : visits)
        EXPECT_EQ(count, 1) << "threads " << threads << " size " << size;
    }
  }
  at::set_num_threads(before);
}

TEST(AtParallelFor, IsTorchsPool) {  // and a call inside a region runs inline
  at_parallel_for()(2, 1, [&](int64_t, int64_t) {
    if (at::get_num_threads() > 1) EXPECT_TRUE(at::in_parallel_region());
    int calls = 0;
    at_parallel_for()(100, 1, [&](int64_t begin, int64_t end) {
      ++calls;
      EXPECT_EQ(begin, 0);
      EXPECT_EQ(end, 100);
    });
    EXPECT_EQ(calls, 1);
  });
}

TEST(AtParallelFor, PassesExceptionsOn) {
  EXPECT_THROW(at_parallel_for()(100, 1, [](int64_t, int64_t) { throw Error("on purpose"); }),
               Error);
}

}  // namespace
}  // namespace assay::ops
