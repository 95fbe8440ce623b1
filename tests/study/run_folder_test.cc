// Content of a run's folder as the runner finds it and leaves it.
#include "study/run_folder.h"

#include "data/folder.h"

namespace assay::study {
namespace {

// The lock outlives the clearing: a process that waits for it holds the same file.
TEST(RunFolder, RunWithoutCheckpointIsClearedExceptItsLogAndLock) {
  const data::Folder folder;
  const run::Folder run{folder.path()};
  for (const char* name :
       {"log.txt", ".lock", "metrics.jsonl", "checkpoints/writing/model.safetensors"})
    folder.write(name, "x");
  EXPECT_FALSE(begin_or_resume(run));
  EXPECT_TRUE(fs::exists(run.log()));
  EXPECT_TRUE(fs::exists(run.lock()));
  EXPECT_EQ(folder.entries(), 2);
  folder.write("checkpoints/step-4/state.json", "{}");
  EXPECT_TRUE(begin_or_resume(run));
}

}  // namespace
}  // namespace assay::study
