// The compact results of tasks.
#include "run/tasks.h"

#include <gtest/gtest.h>

#include "data/folder.h"
#include "run/finished.h"

namespace assay::run {
namespace {

using data::message_of;

TEST(TaskResults, BitsHoldEveryItemInOrder) {
  for (const size_t items : {0u, 1u, 4u, 5u, 131u}) {
    std::vector<double> values;
    for (size_t i = 0; i < items; ++i) values.push_back(double(i * i % 3 == 1));
    const std::string bits = bits_of(values);
    EXPECT_EQ(bits.size(), (items + 3) / 4);
    EXPECT_EQ(values_of(bits, int64_t(items)), values) << items;
  }
  EXPECT_EQ(bits_of({1, 0, 0, 0, 0, 1}), "84");
}

TEST(TaskResults, WrongBitsAreRejected) {
  EXPECT_NE(message_of([] { values_of("ff", 9); }).find("9 items and only 8 bits"),
            std::string::npos);
  EXPECT_NE(message_of([] { values_of("fg", 8); }).find("'g', which is not a hexadecimal digit"),
            std::string::npos);
}

TEST(TaskResults, BlocksAddUpAndKeepShortLists) {
  EXPECT_EQ(block_sums({1, 2.5, 4}), (std::vector<double>{1, 2.5, 4}));
  const std::vector<double> sums = block_sums(std::vector<double>(1234, 1));
  EXPECT_EQ(sums.size(), size_t(TaskMetric::kBlocks));
  double total = 0;
  for (const double sum : sums) {
    EXPECT_NEAR(sum, 24.7, 1);
    total += sum;
  }
  EXPECT_EQ(total, 1234);
}

TEST(TaskResults, MetricsOfLikelihoodsAreScaled) {
  EXPECT_NEAR(likelihood_metric("word_perplexity", -2), std::exp(2.0), 1e-12);
  EXPECT_NEAR(likelihood_metric("bits_per_byte", -2), 2 / std::log(2.0), 1e-12);
  EXPECT_EQ(likelihood_difference("perplexity", 0.25), -0.25);
  EXPECT_FALSE(is_likelihood("acc_norm"));
}

TEST(TaskResults, RecordCarriesThem) {
  FinishedRun run;
  run.tasks = {{.name = "piqa",
                .key = "k",
                .items = 6,
                .truncated = 1,
                .metrics = {{.name = "acc", .bits = "84"}}},
               {.name = "race", .key = "k", .problem = "no memory"}};
  const RunRecord record = from_json<RunRecord>(to_json(record_of(run)), "the record");
  const FinishedRun copy = run_of(record);
  ASSERT_EQ(copy.tasks.size(), 2u);
  EXPECT_EQ(copy.tasks[0].metrics[0].bits, "84");
  EXPECT_EQ(copy.tasks[0].truncated, 1);
  EXPECT_EQ(copy.tasks[1].problem, "no memory");
  EXPECT_FALSE(to_json(record_of(FinishedRun())).contains("tasks"))
      << "records without tasks stay as they were";
}

}  // namespace
}  // namespace assay::run
