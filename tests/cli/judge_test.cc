// `assay judge`: verdicts from a file of losses.
#include <sys/mount.h>

#include <cstring>

#include "cli/program.h"

namespace assay::cli {
namespace {

// Losses of a reference with three budgets and of one contender that read its text eight times.
// All training losses lie `gap` below the held-out losses.
std::string losses_of(double gap) {
  std::string text;
  const auto run_of = [&](const std::string& model, int seed, int millions, double epochs,
                          double loss) {
    text += fmt::format(R"({{"run": {{"model": "{}", "seed": {}, "tokens": {}, "epochs": {}, )"
                        R"("training_loss": {}}}}})"
                        "\n",
                        model, seed, millions * 1'000'000, epochs, loss - gap);
    const std::pair<const char*, double> sets[] = {{"held_out", loss}, {"out_of_domain", loss + 1}};
    for (const auto& [role, nats_per_token] : sets)
      for (int document = 0; document < 20; ++document)
        text += fmt::format(
            R"({{"role": "{}", "domain": "{}", "document": "{}", "nats": {}, "tokens": 1000}})"
            "\n",
            role, role, document, 1000 * nats_per_token + document + 0.1 * seed);
  };
  for (const int seed : {1, 2}) {
    run_of("ref", seed, 20, 0.1, 3.8);
    run_of("ref", seed, 40, 0.2, 3.6);
    run_of("ref", seed, 80, 0.4, 3.4);
    run_of("mine", seed, 80, 8, 3.5);
  }
  return text;
}

TEST(Judge, TrainingLossSaysWhetherAModelMemorises) {
  const data::Folder folder;
  for (const auto& [gap, memorises] : {std::pair(0.01, false), std::pair(0.5, true)}) {
    folder.write("losses.jsonl", losses_of(gap));
    const std::string name = memorises ? "memorises" : "learns";
    const Outcome outcome = run(folder.path(), "judge losses.jsonl --reference ref -o " + name);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.error;
    EXPECT_EQ(outcome.out.find("memorises its text") != std::string::npos, memorises)
        << outcome.out;
    EXPECT_EQ(outcome.out.find("is unknown, so it is taken"), std::string::npos) << outcome.out;
  }
}

// The report needs more space than its data.
TEST(Judge, FolderOfAReportThatDoesNotFitIsRemoved) {
  const data::Folder folder;
  make_folder(folder / "small");
  const std::string path = folder / "small";
  if (::mount("tmpfs", path.c_str(), "tmpfs", 0, "size=100k"))
    GTEST_SKIP() << "a file system of its own cannot be mounted here: " << std::strerror(errno);
  folder.write("losses.jsonl", losses_of(0.01));
  const Outcome outcome = run(folder.path(), "judge losses.jsonl --reference ref -o small/verdict");
  EXPECT_EQ(outcome.exit_code, 1) << outcome.out;
  EXPECT_FALSE(fs::exists(folder / "small" / "verdict"));
  EXPECT_EQ(::umount(path.c_str()), 0);
}

}  // namespace
}  // namespace assay::cli
