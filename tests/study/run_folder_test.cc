// What is read from the folder of a run while it trains.
#include "study/run_folder.h"

#include "data/folder.h"

namespace assay::study {
namespace {

TEST(RunFolder, NewestMetricsLineWithTheKeyIsRead) {
  const data::Folder folder;
  EXPECT_TRUE(last_metrics_line(folder.path(), "loss").empty());
  folder.write("metrics.jsonl",
               "{\"step\": 0, \"held_out_loss\": 5.5}\n"
               "{\"step\": 4, \"loss\": 5.1}\n"
               "{\"step\": 4, \"held_out_loss\": 5.2}\n"
               "{\"step\": 8, \"loss\": 4.9}\n"
               "{\"step\": 9, \"held_out_loss\": null}\n"
               "{\"step\": 12, \"lo");  // still being written
  EXPECT_EQ(last_metrics_line(folder.path(), "loss").value("step", 0), 8);
  EXPECT_EQ(last_metrics_line(folder.path(), "held_out_loss").value("step", 0), 4);
}

}  // namespace
}  // namespace assay::study
