// The files of a run folder, as train writes and study reads them.
#include "run/folder.h"

#include "data/folder.h"
#include "run/finished.h"

namespace assay::run {
namespace {

using data::message_of;

TEST(RunFolder, CheckpointsAreFoundByStep) {
  const data::Folder temporary;
  const Folder folder{temporary.path()};
  EXPECT_TRUE(folder.checkpoints().empty());
  for (const char* name : {"step-9", "step-20", "step-", "step-3.old", "writing", "step--4"})
    make_folder(temporary / "checkpoints" / name);
  const auto found = folder.checkpoints();
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(found.rbegin()->first, 20);
  EXPECT_EQ(found.at(9).path, folder.checkpoint(9).path);
}

TEST(RunFolder, ARunAndItsCheckpointsBelongToTheRun) {
  const data::Folder temporary;
  const Folder folder{temporary / "run"};
  make_folder(folder.checkpoint(5).path);
  EXPECT_FALSE(enclosing_run(folder.path));
  write_file(folder.config(), "");
  EXPECT_EQ(enclosing_run(folder.path)->config(), folder.config());
  EXPECT_EQ(enclosing_run(folder.checkpoint(5).path)->path, folder.path);
  EXPECT_FALSE(enclosing_run(temporary.path()));
}

TEST(RunFolder, BrokenRecordNamesFileAndKey) {
  const data::Folder temporary;
  const Folder folder{temporary.path()};
  temporary.write("done.json", "{\"steps\": 3, \"tokens\": \"many\"}");
  EXPECT_EQ(message_of([&] { folder.outcome().read(); }),
            folder.outcome().path.string() + ": the key 'tokens' must be an integer");
}

TEST(Metrics, NewestLineOfEachKindIsRead) {
  const data::Folder temporary;
  const Folder folder{temporary.path()};
  EXPECT_FALSE(newest_metrics(folder).training);
  const std::string evaluation = "\"tokens\": 0, \"evaluation\": {}, \"held_out_loss\": ";
  temporary.write("metrics.jsonl", "{\"step\": 0, " + evaluation + "5.5}\n" +
                                       "{\"step\": 4, \"loss\": 5.1}\n" + "{\"step\": 4, " +
                                       evaluation + "5.2}\n" + "{\"step\": 8, \"loss\": 4.9}\n" +
                                       "{\"step\": 9, " + evaluation + "null}\n" +
                                       "{\"step\": 12, \"lo");  // still being written
  EXPECT_EQ(newest_metrics(folder).training->step, 8);
  EXPECT_EQ(newest_metrics(folder).held_out_loss, 5.2);
}

TEST(Metrics, ResumedRunDropsLinesThatItRepeats) {
  const data::Folder temporary;
  const Folder folder{temporary.path()};
  {
    MetricsWriter metrics(folder, 0);
    for (const int64_t step : {5, 10, 15}) metrics.write(TrainingLine{.step = step, .loss = 4});
    metrics.write(EvaluationLine{.step = 15});
  }
  MetricsWriter metrics(folder, 10);
  metrics.write(EvaluationLine{.step = 10, .held_out_loss = NAN});
  const Metrics found = read_metrics(folder);
  ASSERT_EQ(found.training.size(), 2u);
  EXPECT_EQ(found.training[1].step, 10);
  ASSERT_EQ(found.evaluations.size(), 1u);
  EXPECT_TRUE(std::isnan(*found.evaluations[0].held_out_loss)) << "null";
}

TEST(Metrics, BrokenLineIsNamed) {
  const data::Folder temporary;
  const Folder folder{temporary.path()};
  temporary.write("metrics.jsonl", "{\"step\": 1, \"loss\": 4.5}\n{\"step\": 2}\n");
  EXPECT_EQ(message_of([&] { read_metrics(folder); }),
            folder.metrics().string() + ":2: the key 'loss' is missing");
}

FinishedRun finished_run() {
  FinishedRun run{.config = "[model]\n", .end = {.step = 2}};
  run.provenance.data_folder = "/home/me/store";
  run.metrics.training = {{.step = 1, .loss = 4.56789}, {.step = 2, .loss = 4}};
  const std::map<std::string, Slice> slices = {{slice::kRepeatedBigram, {2, 30, 0.3}},
                                               {slice::kOther, {5, 70, 0.7}},
                                               {slice::kRare, {6, 50, 0.5}}};
  run.metrics.evaluations = {
      {.step = 2, .tokens = 8, .evaluation = {{"a.test", {.loss = 4.1234567, .slices = slices}}}}};
  return run;
}

TEST(RunRecord, KeepsWhatAReportReads) {
  const RunRecord record = record_of(finished_run());
  EXPECT_FALSE(record.provenance.data_folder) << "a path of the machine";
  const FinishedRun back = run_of(parse_record<RunRecord>(to_json(record).dump(), "record"));
  EXPECT_EQ(back.metrics.training[0].loss, 4.5679);
  const EvaluatedSet& set = back.metrics.evaluations.at(0).evaluation.at("a.test");
  EXPECT_EQ(set.loss, 4.12346);
  EXPECT_EQ(set.tokens, 100);
  EXPECT_EQ(set.slices->at(slice::kRare).share, 0.5);
  EXPECT_EQ(to_json(record_of(back)).dump(), to_json(record).dump());
}

}  // namespace
}  // namespace assay::run
