// Commands that are killed at random moments and given again end in the same bytes as an
// undisturbed run.
#include <algorithm>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "base/random.h"
#include "cli/results.h"

namespace assay::cli {
namespace {

using nlohmann::json;

class KillMatrixSlow : public testing::Test {
 protected:
  KillMatrixSlow()
      : seed_(uint64_t(std::chrono::steady_clock::now().time_since_epoch().count())),
        random_(seed_, "kills") {}
  struct Disturbance {
    int least_kills;
    int most_kills;
    double longest_wait;  // in seconds
  };
  // Gives command(name) until it ends by itself. Up to `most_kills` times in all, disturb(process)
  // kills what it chooses after a random time and returns how many processes that were. Repeats
  // this under new names until `least_kills` processes were killed, because a fast machine may end
  // a command before its random time. check(name, outcome) sees each command that ended.
  void disturb_until_done(const std::string& name, const Disturbance& limits, auto&& command,
                          auto&& disturb, auto&& check) {
    killed_ = 0;
    for (int round = 0; killed_ < limits.least_kills; ++round) {
      ASSERT_LT(round, 50) << "only " << killed_ << " processes could be killed";
      const std::string folder = fmt::format("{}{}", name, round);
      check(folder, give_until_done(command(folder), limits, disturb));
    }
    RecordProperty(name + "_kills", killed_);
  }
  Outcome give_until_done(const std::string& arguments, const Disturbance& limits, auto&& disturb) {
    for (;;) {
      Process process(folder_.path(), arguments);
      const double until = limits.longest_wait * random_.uniform();
      for (double waited = 0; waited < until && process.running(); waited += 0.01)
        sleep_seconds(0.01);
      if (killed_ < limits.most_kills && process.running()) killed_ += disturb(process);
      else return process.wait();
      const Outcome outcome = process.wait();
      if (outcome.exit_code == 0) return outcome;
      EXPECT_EQ(outcome.exit_code, 128 + SIGKILL) << outcome.error;
    }
  }
  static int kill_process(Process& process) {
    process.signal(SIGKILL);
    return 1;
  }

  const uint64_t seed_;
  Random random_;
  int killed_ = 0;
  data::Folder folder_;
};

constexpr const char* kPlan = R"(reference = "full"
models = ["full", "window"]
seeds = [1]
tokens = [12800]
ladder = { tokens = [12800, 25600], seeds = [1, 2] }
data = { store = "store", train = ["known_a"], out_of_domain = ["fresh_a"], sequence_length = 64 }

[train]
batch = 4
learning_rate = 3e-3
warmup_steps = 4
eval_every = 25
checkpoint_every = 5
eval_tokens = 512

[model.full]
base = "smoke"
[model.window]
base = "smoke"
attention = { window = 8 }
)";

// A run whose runner is killed saves where it is. So the checkpoint before the last one can be that
// of another step, and is not compared.
void keep_last_checkpoints(const fs::path& runs) {
  for (const auto& run : fs::directory_iterator(runs)) {
    std::map<int, fs::path> by_step;
    for (const auto& entry : fs::directory_iterator(run.path() / "checkpoints"))
      by_step[std::stoi(entry.path().filename().string().substr(5))] = entry.path();
    by_step.erase(std::prev(by_step.end()));
    for (const auto& [step, path] : by_step) fs::remove_all(path);
  }
}

struct StudyKillMatrixSlow : KillMatrixSlow {
  void SetUp() override {
    synthesize(folder_);
    folder_.write("plan.toml", kPlan);
    const Outcome whole = run(folder_.path(), command("whole"));
    ASSERT_EQ(whole.exit_code, 0) << whole.error;
    verdicts_ = json::parse(whole.out);
    keep_last_checkpoints(folder_ / "whole" / "runs");
  }
  static std::string command(const std::string& study) {
    return "run plan.toml -o " + study + " --threads 1 --jobs 2 --devices cpu --json";
  }
  void expect_same_study(const std::string& name, const Outcome& last) {
    EXPECT_EQ(last.exit_code, 0) << last.error;
    EXPECT_EQ(json::parse(last.out).at("verdicts"), verdicts_.at("verdicts"));
    keep_last_checkpoints(folder_ / name / "runs");
    expect_same(folder_ / name / "runs", folder_ / "whole" / "runs");
    expect_same(folder_ / name / "configs", folder_ / "whole" / "configs");
  }
  json verdicts_;
};

// Kills the first child of the process at random times, twice at most: a run is restarted twice.
int kill_children(Process& process, Random& random) {
  int kills = 0;
  while (kills < 2 && process.running()) {
    sleep_seconds(0.8 * random.uniform());
    std::ifstream list(fmt::format("/proc/{0}/task/{0}/children", process.id()));
    pid_t child = 0;
    if (list >> child) kills += ::kill(child, SIGKILL) == 0;
  }
  return kills;
}

TEST_F(StudyKillMatrixSlow, KilledRunnerOrChildrenEndInTheSameBytes) {
  SCOPED_TRACE(fmt::format("seed {}", seed_));
  const auto check = [&](const std::string& name, const Outcome& last) {
    expect_same_study(name, last);
  };
  disturb_until_done("runner", {.least_kills = 2, .most_kills = 6, .longest_wait = 3}, command,
                     kill_process, check);
  const auto kill = [&](Process& process) { return kill_children(process, random_); };
  disturb_until_done("children", {.least_kills = 1, .most_kills = 1, .longest_wait = 0.1}, command,
                     kill, check);
}

struct PrepareKillMatrixSlow : KillMatrixSlow {
  void SetUp() override {
    Random random(1, "text");
    std::string lines;
    for (int document = 0; document < 6000; ++document) {
      std::string text;
      for (int word = 0; word < 120; ++word) {
        for (uint64_t letter = 2 + random.below(5); letter > 0; --letter)
          text += char('a' + random.below(26));
        text += ' ';
      }
      lines +=
          json({{"text", text}, {"meta", {{"redpajama_set_name", "RedPajamaC4"}}}}).dump() + "\n";
    }
    folder_.write("a.train.jsonl", lines);
    ASSERT_EQ(run(folder_.path(),
                  "tokenizer train a.train.jsonl --vocab 400 --max-sentences 200 -o t.model")
                  .exit_code,
              0);
    const Outcome whole = run(folder_.path(), command("whole"));
    ASSERT_EQ(whole.exit_code, 0) << whole.error;
  }
  static std::string command(const std::string& store) {
    return "data prepare a.train.jsonl --tokenizer t.model --threads 1 -o " + store;
  }
  // Kills the command while its temporary folder holds tokens.
  void kill_while_writing(const std::string& arguments, const std::string& store) {
    Process process(folder_.path(), arguments);
    const auto is_writing = [&] {
      for (const auto& entry : fs::directory_iterator(folder_.path())) {
        const fs::path tokens = entry.path() / "c4.train.bin";
        std::error_code none;
        const bool temporary = entry.path().filename().string().starts_with(store + ".tmp");
        if (temporary && !old_.contains(entry.path()) && fs::file_size(tokens, none) > 0 && !none) {
          old_.insert(entry.path());
          return true;
        }
      }
      return false;
    };
    if (!wait_until(process, is_writing)) return;
    sleep_seconds(0.2 * random_.uniform());
    process.signal(SIGKILL);
    killed_ += process.wait().exit_code == 128 + SIGKILL;
  }
  std::set<fs::path> old_;
};

TEST_F(PrepareKillMatrixSlow, StoreIsAbsentOrWhole) {
  SCOPED_TRACE(fmt::format("seed {}", seed_));
  for (int i = 0; killed_ < 4; ++i) {
    ASSERT_LT(i, 50);
    kill_while_writing(command("new"), "new");
    if (fs::exists(folder_ / "new")) expect_same(folder_ / "new", folder_ / "whole");
    fs::remove_all(folder_ / "new");
  }
  ASSERT_EQ(run(folder_.path(), command("new")).exit_code, 0);
  expect_same(folder_ / "new", folder_ / "whole");
}

TEST_F(PrepareKillMatrixSlow, OldStoreStaysWholeUntilItIsReplaced) {
  SCOPED_TRACE(fmt::format("seed {}", seed_));
  ASSERT_EQ(run(folder_.path(), "data synth -o old --documents 20 --held-out 4").exit_code, 0);
  for (int i = 0; killed_ < 4; ++i) {
    ASSERT_LT(i, 50);
    kill_while_writing(command("old") + " --overwrite", "old");
    const Outcome verified = run(folder_.path(), "data verify old");
    EXPECT_EQ(verified.exit_code, 0) << verified.error;
  }
  ASSERT_EQ(run(folder_.path(), command("old") + " --overwrite").exit_code, 0);
  expect_same(folder_ / "old", folder_ / "whole");
}

// The process is killed after it saved the last checkpoint, and before it removes an older one.
TEST_F(KillMatrixSlow, CheckpointThatWasNotPrunedIsRemovedByTheNextProcess) {
  synthesize(folder_);
  const auto command = [](const std::string& name) {
    return train(name, "--set train.steps=12 --set train.checkpoint_every=2 --resume");
  };
  ASSERT_EQ(run(folder_.path(), command("whole")).exit_code, 0);
  fs::copy(folder_ / "whole", folder_ / "killed", fs::copy_options::recursive);
  fs::remove(folder_ / "killed" / "done.json");
  const fs::path checkpoints = folder_ / "killed" / "checkpoints";
  fs::copy(checkpoints / "step-10", checkpoints / "step-8", fs::copy_options::recursive);
  const Outcome resumed = run(folder_.path(), command("killed"));
  EXPECT_EQ(resumed.exit_code, 0) << resumed.error;
  expect_same(folder_ / "killed", folder_ / "whole");
}

TEST_F(KillMatrixSlow, KilledTrainingContinuesToTheSameBytes) {
  SCOPED_TRACE(fmt::format("seed {}", seed_));
  synthesize(folder_);
  const auto command = [](const std::string& name) {
    const std::string steps = "--set train.steps=60 ";
    const std::string every = "--set train.checkpoint_every=2 --set train.eval_every=6 ";
    return train(name, steps + every + "--resume");
  };
  ASSERT_EQ(run(folder_.path(), command("whole")).exit_code, 0);
  disturb_until_done("killed", {.least_kills = 4, .most_kills = 25, .longest_wait = 2.5}, command,
                     kill_process, [&](const std::string& name, const Outcome& last) {
                       EXPECT_EQ(last.exit_code, 0) << last.error;
                       expect_same(folder_ / name, folder_ / "whole");
                     });
}

}  // namespace
}  // namespace assay::cli
