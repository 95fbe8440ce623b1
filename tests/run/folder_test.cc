// The files of a run folder, as train writes and study reads them.
#include "run/folder.h"

#include "data/folder.h"
#include "run/finished.h"
#include "run/training_loss.h"

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

TEST(RunFolder, OutputFolderOfAnotherKindIsRefused) {
  const data::Folder temporary;
  check_output_folder(temporary / "missing");
  check_output_folder(temporary / std::string(10'000, 'a'));
  for (const char* file : {"manifest.json", "study.sqlite", "run.json", "plan.json"}) {
    const fs::path folder = temporary / fmt::format("with {}", file);
    make_folder(folder);
    write_file(folder / file, "");
    check_output_folder(folder, folder / file);
    EXPECT_NE(message_of([&] { check_output_folder(folder, "other"); }).find(file),
              std::string::npos);
  }
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
  FinishedRun run{.config = "[model]\nd_model = 8\n[model.rwkv7]\nhead_dim = 4\n",
                  .end = {.step = 2, .tokens = 8}};
  run.provenance.data_folder = "/home/me/store";
  run.metrics.training = {{.step = 1, .loss = 4.56789}, {.step = 2, .loss = 4}};
  const std::map<std::string, Slice> slices = {{slice::kRepeatedBigram, {2, 30, 0.3}},
                                               {slice::kOther, {5, 70, 0.7}},
                                               {slice::kRare, {6, 50, 0.5}}};
  run.metrics.evaluations = {{.step = 1, .tokens = 4},
                             {.step = 2,
                              .tokens = 8,
                              .evaluation = {{"a.test", {.loss = 4.1234567, .slices = slices}}},
                              .attention_entropy = Entropies{{0.25, 0.75}}}};
  Clusters& clusters = run.end.sets["a.test"].clusters;
  clusters.tokens = {7, 999, 1000, 25'000, 130'000, 70};
  clusters.recall_tokens = clusters.tokens;
  for (const int64_t tokens : clusters.tokens) {
    clusters.nll.push_back(double(tokens) * 3.14159265);
    clusters.recall_nll.push_back(double(tokens));
  }
  return run;
}

TEST(RunRecord, KeepsWhatAReportReads) {
  const RunRecord record = record_of(finished_run());
  EXPECT_FALSE(record.provenance.data_folder) << "a path of the machine";
  const FinishedRun back = run_of(from_json<RunRecord>(to_json(record), "record"));
  EXPECT_EQ(back.config, finished_run().config);
  EXPECT_EQ(training_losses(back.metrics), training_losses(finished_run().metrics));
  const std::vector<EvaluationLine>& evaluations = back.metrics.evaluations;
  EXPECT_EQ(evaluations.at(0).tokens, 4);
  EXPECT_TRUE(std::isnan(evaluations[0].evaluation.at("a.test").loss)) << "it has no such set";
  EXPECT_EQ(mean_entropy_of(evaluations.at(1)), 0.5);
  const EvaluatedSet& set = evaluations[1].evaluation.at("a.test");
  EXPECT_EQ(set.loss, 4.1235);
  EXPECT_EQ(set.tokens, 100);
  EXPECT_EQ(set.slices->at(slice::kRare).share, 0.5);
  EXPECT_FALSE(set.slices->contains(slice::kUnseen)) << "it has no tokens";
  EXPECT_EQ(to_json(record_of(back)).dump(), to_json(record).dump());
}

TEST(RunRecord, SumsInWholeNatsKeepTheLossOfTheSet) {
  const std::vector<double> exact = finished_run().end.sets.at("a.test").clusters.nll;
  const std::vector<double> sums = record_of(finished_run()).end.sets.at("a.test").clusters.nll;
  ASSERT_EQ(sums.size(), exact.size());
  double difference = 0;
  for (size_t i = 0; i < sums.size(); ++i) {
    EXPECT_EQ(sums[i], std::round(sums[i]));
    EXPECT_NEAR(sums[i], exact[i], 1) << i;
    difference += sums[i] - exact[i];
  }
  EXPECT_NEAR(difference, 0, 0.5 + 1e-6);
}

TEST(RunRecord, ListsOfOtherLengthAreRejected) {
  const nlohmann::json good = to_json(record_of(finished_run()));
  for (const char* list :
       {"/step", "/training_loss", "/losses/a.test", "/mean_attention_entropy"}) {
    nlohmann::json record = good;
    record["evaluations"][nlohmann::json::json_pointer(list)].push_back(1);
    EXPECT_NE(message_of([&] {
                run_of(from_json<RunRecord>(record, "a.json"));
              }).find("the lists of its evaluations differ in length"),
              std::string::npos)
        << list;
  }
}

TEST(RunRecord, OtherFormatIsRejected) {
  nlohmann::json record = to_json(record_of(finished_run()));
  EXPECT_TRUE(is_record(record, "a.json"));
  record["format"] = "assay-run-2";
  EXPECT_NE(message_of([&] {
              is_record(record, "a.json");
            }).find("has the format assay-run-2, and this version of Assay reads assay-run-4"),
            std::string::npos);
}

}  // namespace
}  // namespace assay::run
