#include "data/pipeline.h"

#include <sys/resource.h>

#include "folder.h"

namespace assay::data {
namespace {

using Numbers = Pipeline<int, int>;

Numbers::Stages doubling(int count, std::vector<int>& seen) {
  return {[count, n = 0](int& in) mutable {
            in = n;
            return n++ < count;
          },
          [](const int&) { return int64_t{1}; },
          [] { return [](int& in, int& out) { out = 2 * in; }; },
          [&seen](int& out) { seen.push_back(out); }, [] {}};
}

TEST(Pipeline, KeepsTheOrderInABoundedQueue) {
  for (const int workers : {1, 4}) {
    std::vector<int> seen;
    Numbers pipeline(doubling(2000, seen), workers, 3);
    pipeline.run();
    ASSERT_EQ(seen.size(), 2000u);
    for (int i = 0; i < 2000; ++i) EXPECT_EQ(seen[size_t(i)], 2 * i);
  }
}

TEST(Pipeline, ThreadsThatCannotBeStartedAreAnError) {
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
  GTEST_SKIP() << "the sanitizer needs the address space that this test takes away";
#endif
  EXPECT_EXIT(
      {
        rlimit memory;
        memory.rlim_cur = memory.rlim_max = uint64_t{3} << 30;  // room for some stacks of 8 MB
        ::setrlimit(RLIMIT_AS, &memory);
        std::vector<int> seen;
        const auto message = message_of<Error>([&] { Numbers(doubling(10, seen), 1000, 3).run(); });
        ::_exit(message.find("1001 threads cannot be started") != std::string::npos ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
}

TEST(Pipeline, PassesOnWhatAnyStageThrows) {
  auto boom = [](int at, int n) {
    if (n == at) throw BadInput("boom");
  };
  for (const int stage : {0, 1, 2}) {
    std::vector<int> seen;
    auto stages = doubling(1000, seen);
    if (stage == 0)
      stages.produce = [&, n = 0](int& in) mutable {
        boom(50, n);
        in = n++;
        return true;
      };
    if (stage == 1) stages.make_work = [&] { return [&](int& in, int&) { boom(50, in); }; };
    if (stage == 2) stages.consume = [&](int& out) { boom(50, out); };
    EXPECT_THROW(Numbers(stages, 2, 5).run(), BadInput) << "stage " << stage;
  }
}

}  // namespace
}  // namespace assay::data
