// Several processes train one model on CPUs: the same bytes for any number of them, and an end
// without hanging when one is lost or differs.
#include <sys/resource.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cli/program.h"

namespace assay::cli {
namespace {

using nlohmann::json;

const std::string kSettings =
    "--set train.steps=50 --set train.checkpoint_every=5 --set train.eval_every=25 ";
const std::string kSlices = kSettings + "--set train.gradient_slices=4 ";
// Every sequence is cut. RWKV-7's layers hand values on.
const std::string kCuts =
    "--set train.context_slices=4 --set train.micro_batch_size=2 --set train.sequence_length=32 ";
const std::string kLayers =
    R"(--set model.num_layers=3 --set 'model.pattern=["rwkv7","attention","rwkv7"]' )";
const std::string kContext = kSettings + kCuts + kLayers + "--set model.rwkv7.num_heads=2 ";
// Does not end before it is stopped. Each of its 3 ranks has a sequence.
const std::string kLong =
    "--set train.steps=1000000 --set train.checkpoint_every=5 --set train.batch_size=3 ";

// Results that must not depend on the number of ranks: weights, moments, losses by document, states
// and metrics without times and memory.
std::map<std::string, std::string> results(const fs::path& run) {
  std::map<std::string, std::string> out;
  for (const auto& [path, hash] : contents(run))
    if (path.ends_with(".safetensors") || path == "config.toml") out[path] = hash;
  for (const auto& entry : fs::directory_iterator(run / "checkpoints")) {
    json state = json::parse(read_file(entry.path() / "state.json"));
    state.erase("seconds");
    out[entry.path().filename()] = state.dump();
  }
  std::istringstream lines(read_file(run / "metrics.jsonl"));
  for (std::string line; std::getline(lines, line);) {
    json record = json::parse(line);
    for (const char* timed : {"tokens_per_second", "mfu", "seconds", "memory_bytes"})
      record.erase(timed);
    out["metrics"] += record.dump() + "\n";
  }
  return out;
}

bool has_checkpoint(const fs::path& run) {
  if (!fs::exists(run / "checkpoints")) return false;
  for (const auto& entry : fs::directory_iterator(run / "checkpoints"))
    if (entry.path().filename().string().starts_with("step-")) return true;
  return false;
}

// The process that `launcher` started as this rank.
pid_t process_of_rank(const Process& launcher, int rank) {
  const std::string wanted = fmt::format("RANK={}", rank);
  std::ifstream children(fmt::format("/proc/{0}/task/{0}/children", launcher.id()));
  for (pid_t child; children >> child;) {
    std::ifstream environment(fmt::format("/proc/{}/environ", child));
    for (std::string variable; std::getline(environment, variable, '\0');)
      if (variable == wanted) return child;
  }
  return 0;
}

int free_port() { return Port().number; }

// While it lives, processes that are started cannot write past this size of a file.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit{bytes, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    handler_ = ::signal(SIGXFSZ, SIG_IGN);  // write() fails instead
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    ::signal(SIGXFSZ, handler_);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;

 private:
  rlimit before_{};
  void (*handler_)(int);
};

class RanksOfOneModel : public testing::Test {
 protected:
  void SetUp() override { synthesize(folder_); }
  void TearDown() override {
    for (const char* name : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE",
                             "NCCL_P2P_DISABLE", "NCCL_SOCKET_IFNAME", "NCCL_HOSTID"})
      ::unsetenv(name);
  }
  // As torchrun would start it.
  Process start(int rank, int size, int port, const std::string& arguments) {
    ::setenv("RANK", std::to_string(rank).c_str(), 1);
    ::setenv("WORLD_SIZE", std::to_string(size).c_str(), 1);
    ::setenv("MASTER_ADDR", "127.0.0.1", 1);
    ::setenv("MASTER_PORT", std::to_string(port).c_str(), 1);
    return Process(folder_.path(), arguments);
  }
  void expect_same(const std::string& name, const std::string& expected_name) {
    const auto expected = results(folder_ / expected_name);
    const auto got = results(folder_ / name);
    EXPECT_TRUE(expected.contains("checkpoints/step-50/model.safetensors") &&
                expected.contains("checkpoints/step-50/optimizer.safetensors") &&
                expected.contains("evaluations/step-50.safetensors"));
    for (const auto& [path, content] : expected)
      EXPECT_TRUE(got.contains(path) && got.at(path) == content) << name << ": " << path;
    EXPECT_EQ(got.size(), expected.size());
  }
  void expect_error(const Outcome& outcome, int exit_code, const std::vector<std::string>& parts) {
    EXPECT_EQ(outcome.exit_code, exit_code) << outcome.error;
    for (const std::string& part : parts)
      EXPECT_NE(outcome.error.find(part), std::string::npos) << part << "\n" << outcome.error;
  }
  data::Folder folder_;
};

TEST_F(RanksOfOneModel, OneTwoAndFourRanksGiveTheBytesOfOneProcess) {
  const Outcome alone = run(folder_.path(), train("alone", kSlices));
  ASSERT_EQ(alone.exit_code, 0) << alone.error;
  for (const int ranks : {1, 2, 4}) {
    const std::string name = fmt::format("ranks{}", ranks);
    const Outcome outcome =
        run(folder_.path(), train(name, kSlices + fmt::format("--json --ranks {}", ranks)));
    ASSERT_EQ(outcome.exit_code, 0) << outcome.error;
    EXPECT_EQ(json::parse(outcome.out).at("steps"), 50);
    expect_same(name, "alone");
  }
}

TEST_F(RanksOfOneModel, OneRankGivesTheBytesOfATrainingWithoutRanks) {
  ASSERT_EQ(run(folder_.path(), train("alone", kSettings)).exit_code, 0);
  const Outcome outcome = run(folder_.path(), train("ranks1", kSettings + "--ranks 1"));
  ASSERT_EQ(outcome.exit_code, 0) << outcome.error;
  expect_same("ranks1", "alone");
}

TEST_F(RanksOfOneModel, RanksThatShareSequencesGiveTheBytesOfOneProcess) {
  const Outcome alone = run(folder_.path(), train("alone", kContext));
  ASSERT_EQ(alone.exit_code, 0) << alone.error;
  const Outcome four = run(folder_.path(), train("ranks4", kContext + "--ranks 4"));
  ASSERT_EQ(four.exit_code, 0) << four.error;
  expect_same("ranks4", "alone");
  {
    Process process(folder_.path(), train("stopped", kContext + "--ranks 4"));
    ASSERT_TRUE(wait_until(process, [&] { return has_checkpoint(folder_ / "stopped"); }));
    ASSERT_EQ(::kill(process_of_rank(process, 2), SIGUSR1), 0);
    expect_error(process.wait(), 130, {"saved in stopped. Continue with --resume."});
  }
  std::string resumed = kContext + "--resume --ranks 2";
  resumed.erase(resumed.find("--set train.context_slices=4 "), 29);  // the run keeps its own
  const Outcome two = run(folder_.path(), train("stopped", resumed));
  ASSERT_EQ(two.exit_code, 0) << two.error;
  expect_same("stopped", "alone");
}

TEST_F(RanksOfOneModel, RanksThatShareBatchAndSequencesGiveTheBytesOfOneProcess) {
  const std::string both =
      kSettings + "--set train.gradient_slices=2 --set train.context_slices=2 ";
  ASSERT_EQ(run(folder_.path(), train("alone", both)).exit_code, 0);
  for (const int ranks : {2, 4}) {
    const std::string name = fmt::format("ranks{}", ranks);
    const Outcome outcome =
        run(folder_.path(), train(name, both + fmt::format("--ranks {}", ranks)));
    ASSERT_EQ(outcome.exit_code, 0) << outcome.error;
    expect_same(name, "alone");
  }
}

// In bfloat16, gradients of weights are made where they are sent from.
TEST_F(RanksOfOneModel, RanksInBfloat16GiveTheBytesOfOneProcess) {
  const std::string narrow =
      kSlices +
      "--set train.precision=bf16 --set train.micro_batch_size=1 --set train.batch_size=8 ";
  ASSERT_EQ(run(folder_.path(), train("alone", narrow)).exit_code, 0);
  for (const int ranks : {2, 4}) {
    const std::string name = fmt::format("ranks{}", ranks);
    const Outcome outcome =
        run(folder_.path(), train(name, narrow + fmt::format("--ranks {}", ranks)));
    ASSERT_EQ(outcome.exit_code, 0) << outcome.error;
    expect_same(name, "alone");
  }
}

// Ranks have parts only of the float32 weights, which must not be named as the first NaN.
TEST_F(RanksOfOneModel, RanksNameTheFirstNonFiniteValueAsOneProcess) {
  const auto place = [&](const std::string& name, const std::string& more) {
    const std::string bad =
        "--set train.precision=bf16 --set train.clip=0 --set train.learning_rate=1e30 ";
    const Outcome outcome = run(folder_.path(), train(name, kSlices + bad + more));
    EXPECT_EQ(outcome.exit_code, 1) << outcome.error;
    const size_t begin = outcome.error.find("first non-finite value");
    EXPECT_NE(begin, std::string::npos) << outcome.error;
    return outcome.error.substr(begin, outcome.error.find(';', begin) - begin);
  };
  EXPECT_EQ(place("ranks2", "--ranks 2"), place("alone", ""));
}

std::string train_on_gpu(const std::string& run, const std::string& more = "") {
  std::string command = train(run, kSlices + more);
  command.replace(command.find("--device cpu"), 12, "--device cuda");
  return command;
}

TEST_F(RanksOfOneModel, CudaGpusThatReadEachOthersMemoryGiveTheBytesOfOne) {
  const Outcome both = run(folder_.path(), train_on_gpu("gpus2", "--gpus 2"));
  if (both.error.find("this host has") != std::string::npos)
    GTEST_SKIP() << "fewer than two CUDA devices";
  ASSERT_EQ(both.exit_code, 0) << both.error;
  ASSERT_EQ(run(folder_.path(), train_on_gpu("gpus1")).exit_code, 0);
  expect_same("gpus2", "gpus1");
}

// Two ranks share a GPU. NCCL allows it only if it takes them for two hosts.
TEST_F(RanksOfOneModel, CudaRanksOnOneGpuGiveTheBytesOfOneProcess) {
  const Outcome alone = run(folder_.path(), train_on_gpu("alone"));
  if (alone.error.find("no CUDA device") != std::string::npos) GTEST_SKIP() << alone.error;
  ASSERT_EQ(alone.exit_code, 0) << alone.error;
  for (const bool by_nccl : {false, true}) {
    const std::string name = by_nccl ? "nccl" : "copies";
    const int port = free_port();
    const auto rank = [&](int number) {
      ::setenv("NCCL_P2P_DISABLE", by_nccl ? "1" : "0", 1);
      ::setenv("NCCL_SOCKET_IFNAME", "lo", 1);
      ::setenv("NCCL_HOSTID", std::to_string(number).c_str(), 1);
      ::setenv("LOCAL_WORLD_SIZE", "2", 1);
      return start(number, 2, port, train_on_gpu(name));
    };
    Process first = rank(0);
    Process second = rank(1);
    for (Process* process : {&first, &second}) {
      const Outcome outcome = process->wait();
      ASSERT_EQ(outcome.exit_code, 0) << outcome.error;
    }
    expect_same(name, "alone");
  }
}

TEST_F(RanksOfOneModel, RanksThatComputeLayersAgainGiveTheBytesOfOneProcess) {
  const std::string again = kSlices + "--set train.recompute_activations=true ";
  ASSERT_EQ(run(folder_.path(), train("alone", again)).exit_code, 0);
  const Outcome outcome = run(folder_.path(), train("ranks2", again + "--ranks 2"));
  ASSERT_EQ(outcome.exit_code, 0) << outcome.error;
  expect_same("ranks2", "alone");
}

TEST_F(RanksOfOneModel, ThreeRanksGiveTheBytesOfSixAndOneSlow) {
  const std::string six = kSettings + "--set train.batch_size=6 --set train.gradient_slices=6 ";
  ASSERT_EQ(run(folder_.path(), train("alone", six)).exit_code, 0);
  for (const int ranks : {3, 6}) {
    const std::string name = fmt::format("ranks{}", ranks);
    const Outcome outcome =
        run(folder_.path(), train(name, six + fmt::format("--ranks {}", ranks)));
    ASSERT_EQ(outcome.exit_code, 0) << outcome.error;
    expect_same(name, "alone");
  }
}

TEST_F(RanksOfOneModel, SignalToOneRankSavesAndAnotherNumberOfRanksContinues) {
  ASSERT_EQ(run(folder_.path(), train("alone", kSlices)).exit_code, 0);
  {
    Process process(folder_.path(), train("stopped", kSlices + "--ranks 4"));
    ASSERT_TRUE(wait_until(process, [&] { return has_checkpoint(folder_ / "stopped"); }));
    ASSERT_EQ(::kill(process_of_rank(process, 3), SIGUSR1), 0);
    expect_error(process.wait(), 130, {"saved in stopped. Continue with --resume."});
  }
  EXPECT_FALSE(fs::exists(folder_ / "stopped" / "done.json"));
  // Without gradient_slices: the run keeps its own
  const Outcome outcome = run(folder_.path(), train("stopped", kSettings + "--resume --ranks 2"));
  ASSERT_EQ(outcome.exit_code, 0) << outcome.error;
  expect_same("stopped", "alone");
}

TEST_F(RanksOfOneModel, TerminatedLauncherSavesAndOneProcessContinuesSlow) {
  ASSERT_EQ(run(folder_.path(), train("alone", kSlices)).exit_code, 0);
  {
    Process process(folder_.path(), train("stopped", kSlices + "--ranks 2"));
    ASSERT_TRUE(wait_until(process, [&] { return has_checkpoint(folder_ / "stopped"); }));
    process.signal(SIGTERM);
    expect_error(process.wait(), 130, {"saved in stopped. Continue with --resume."});
  }
  const Outcome outcome = run(folder_.path(), train("stopped", kSlices + "--resume"));
  ASSERT_EQ(outcome.exit_code, 0) << outcome.error;
  expect_same("stopped", "alone");
}

TEST_F(RanksOfOneModel, KilledRankIsNamedAndTwoRanksContinue) {
  ASSERT_EQ(run(folder_.path(), train("alone", kSlices)).exit_code, 0);
  {
    Process process(folder_.path(), train("killed", kSlices + "--ranks 4"));
    ASSERT_TRUE(wait_until(process, [&] { return has_checkpoint(folder_ / "killed"); }));
    ASSERT_EQ(::kill(process_of_rank(process, 2), SIGKILL), 0);
    const auto start = std::chrono::steady_clock::now();
    expect_error(process.wait(), 1, {"rank 2 of 4", "killed by signal 9"});
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
  }
  const Outcome outcome = run(folder_.path(), train("killed", kSlices + "--resume --ranks 2"));
  ASSERT_EQ(outcome.exit_code, 0) << outcome.error;
  expect_same("killed", "alone");
}

TEST_F(RanksOfOneModel, KilledRankThatWritesLeavesTheEarlierCheckpoints) {
  const std::string often = kSlices + "--set train.checkpoint_every=1 ";
  ASSERT_EQ(run(folder_.path(), train("alone", often)).exit_code, 0);
  const fs::path writing = folder_ / "killed" / "checkpoints" / "writing";
  {
    Process process(folder_.path(), train("killed", often + "--ranks 2"));
    ASSERT_TRUE(wait_until(process, [&] { return has_checkpoint(folder_ / "killed"); }));
    const pid_t rank = process_of_rank(process, 1);
    for (bool killed = false; !killed;) {
      ASSERT_TRUE(wait_until(process, [&] { return fs::exists(writing); }));
      ::kill(rank, SIGSTOP);
      sleep_seconds(0.3);
      killed = fs::exists(writing);  // rank 0 waits for the part of this rank
      ::kill(rank, killed ? SIGKILL : SIGCONT);
    }
    expect_error(process.wait(), 1, {"rank 1 of 2", "killed by signal 9"});
  }
  EXPECT_TRUE(has_checkpoint(folder_ / "killed"));
  const Outcome outcome = run(folder_.path(), train("killed", often + "--resume --ranks 4"));
  ASSERT_EQ(outcome.exit_code, 0) << outcome.error;
  EXPECT_FALSE(fs::exists(writing));
  expect_same("killed", "alone");
}

TEST_F(RanksOfOneModel, RankThatCannotWriteIsNamedAndLeavesTheEarlierCheckpoints) {
  if (!data::kLimitsOfFilesHold) GTEST_SKIP() << "ThreadSanitizer writes a larger file";
  ASSERT_EQ(run(folder_.path(), train("alone", kSlices)).exit_code, 0);
  {
    Process process(folder_.path(), train("limited", kSlices + "--ranks 2"));
    ASSERT_TRUE(wait_until(process, [&] { return has_checkpoint(folder_ / "limited"); }));
    process.signal(SIGTERM);
    expect_error(process.wait(), 130, {"saved in limited"});
  }
  const auto before = contents(folder_ / "limited" / "checkpoints");
  {
    const int port = free_port();
    const std::string resumed = train("limited", kSlices + "--resume");
    Process first = start(0, 2, port, resumed);
    std::optional<FileSizeLimit> limit(4096);
    Process second = start(1, 2, port, resumed);
    limit.reset();
    const std::vector<std::string> parts = {"the checkpoint of step ", "was not written: rank 1: ",
                                            "model.safetensors: cannot be written: File too large",
                                            "Earlier checkpoints are whole."};
    expect_error(first.wait(), 1, parts);
    expect_error(second.wait(), 1, parts);
  }
  EXPECT_EQ(contents(folder_ / "limited" / "checkpoints"), before);
  EXPECT_FALSE(fs::exists(folder_ / "limited" / "checkpoints" / "writing"));
  TearDown();  // one process, without the variables of ranks
  const Outcome outcome = run(folder_.path(), train("limited", kSlices + "--resume"));
  ASSERT_EQ(outcome.exit_code, 0) << outcome.error;
  expect_same("limited", "alone");
}

TEST_F(RanksOfOneModel, FullDiskOfRankZeroIsReportedBeforeRanksWrite) {
  if (!data::kLimitsOfFilesHold) GTEST_SKIP() << "ThreadSanitizer writes a larger file";
  const int port = free_port();
  std::optional<FileSizeLimit> limit(16 << 10);
  Process first = start(0, 2, port, train("run", kSlices));
  limit.reset();
  Process second = start(1, 2, port, train("run", kSlices));
  const std::string problem = "model.safetensors: disk space cannot be reserved: File too large";
  expect_error(first.wait(), 1, {problem});
  expect_error(second.wait(), 1, {"rank 0 failed", problem});
  EXPECT_TRUE(fs::is_empty(folder_ / "run" / "checkpoints"));
}

TEST_F(RanksOfOneModel, RanksOfAnotherLauncherNameTheOneThatIsLostSlow) {
  const int port = free_port();
  Process first = start(0, 3, port, train("run", kLong));
  Process second = start(1, 3, port, train("run", kLong));
  Process third = start(2, 3, port, train("run", kLong));
  ASSERT_TRUE(wait_until(first, [&] { return has_checkpoint(folder_ / "run"); }));
  const auto start_time = std::chrono::steady_clock::now();
  third.signal(SIGSTOP);  // it keeps its connections
  expect_error(first.wait(), 1, {"rank 2 is lost", "Continue with --resume"});
  expect_error(second.wait(), 1, {"rank 2 is lost"});
  EXPECT_LT(std::chrono::steady_clock::now() - start_time, std::chrono::seconds(60));
}

TEST_F(RanksOfOneModel, LossOfRankZeroEndsTheOthers) {
  const int port = free_port();
  Process first = start(0, 3, port, train("run", kLong));
  Process second = start(1, 3, port, train("run", kLong));
  Process third = start(2, 3, port, train("run", kLong));
  ASSERT_TRUE(wait_until(first, [&] { return has_checkpoint(folder_ / "run"); }));
  const auto start_time = std::chrono::steady_clock::now();
  first.signal(SIGKILL);
  expect_error(second.wait(), 1, {"rank 0", "is lost"});
  expect_error(third.wait(), 1, {"rank 0", "is lost"});
  EXPECT_LT(std::chrono::steady_clock::now() - start_time, std::chrono::seconds(60));
}

TEST_F(RanksOfOneModel, DifferentConfigurationIsRejectedByRankZero) {
  const int port = free_port();
  Process first = start(0, 2, port, train("run", kSlices));
  Process second = start(1, 2, port, train("run", kSlices + "--set train.seed=1"));
  expect_error(
      first.wait(), 2,
      {"rank 1 has another configuration: seed = 1 instead of seed = 0", "Nothing was changed"});
  EXPECT_EQ(second.wait().exit_code, 2);
  EXPECT_FALSE(fs::exists(folder_ / "run"));
}

TEST_F(RanksOfOneModel, DifferentDataAreRejectedByRankZero) {
  ASSERT_EQ(
      run(folder_.path(), "data synth -o other --documents 61 --held-out 4 --document-length 128")
          .exit_code,
      0);
  std::string other = train("run", kSlices);
  other.replace(other.find("--data store"), 12, "--data other");
  const int port = free_port();
  Process first = start(0, 2, port, train("run", kSlices));
  Process second = start(1, 2, port, other);
  expect_error(first.wait(), 2, {"rank 1 has another token store"});
  EXPECT_EQ(second.wait().exit_code, 2);
}

TEST_F(RanksOfOneModel, FailureOfOneRankEndsTheOthersWithItsMessage) {
  const int port = free_port();
  Process first = start(0, 2, port, train("run", kSlices));
  Process second = start(1, 2, port, train("run", kSlices + "--set train.nothing=1"));
  expect_error(first.wait(), 2, {"rank 1 failed", "unknown key 'nothing'"});
  EXPECT_EQ(second.wait().exit_code, 2);
}

TEST_F(RanksOfOneModel, SecondProcessOfTheSameRankIsRejected) {
  const int port = free_port();
  Process first = start(0, 3, port, train("run", kSlices));
  Process second = start(1, 3, port, train("run", kSlices));
  Process again = start(1, 3, port, train("run", kSlices));
  // One of the two comes first
  while (second.running() && again.running()) sleep_seconds(0.01);
  expect_error((second.running() ? again : second).wait(), 2,
               {"rank 1 at 127.0.0.1", "is taken already"});
}

TEST_F(RanksOfOneModel, PortOfAnotherProgramIsReported) {
  const Port used;
  Process first = start(0, 2, used.number, train("run", kSlices));
  expect_error(first.wait(), 2,
               {fmt::format("port {} is used by another program", used.number), "MASTER_PORT"});
}

TEST_F(RanksOfOneModel, MissingRankIsNamedSlow) {
  Process first = start(0, 2, free_port(), train("run", kSlices));
  expect_error(first.wait(), 1, {"of 2 ranks, rank 1 did not come"});
}

TEST_F(RanksOfOneModel, RanksThatCannotShareTheBatchAreRejectedOnce) {
  const auto before = contents(folder_.path());
  const auto refused = [&](const std::string& options, const std::vector<std::string>& parts) {
    const Outcome outcome = run(folder_.path(), train("run", options));
    expect_error(outcome, 2, parts);
    EXPECT_EQ(outcome.error.find("assay:"), outcome.error.rfind("assay:")) << outcome.error;
  };
  refused("--ranks 3", {"train.batch_size = 4 cannot be cut into train.gradient_slices = 3"});
  refused("--ranks 2 --set train.gradient_slices=1",
          {"2 ranks cannot share train.gradient_slices = 1", "are 1."});
  refused("--ranks 3 --set train.gradient_slices=4",
          {"3 ranks cannot share train.gradient_slices = 4", "1, 2, 4"});
  refused("--ranks 3 --set train.context_slices=4",
          {"train.gradient_slices = 1 with train.context_slices = 4", "1, 2, 4"});
  refused("--ranks 2 --set train.context_slices=5",
          {"train.context_slices must be a divisor of train.sequence_length = 64"});
  refused("--gpus 1000", {"--gpus 1000: this host has"});
  refused("--gpus 1 --ranks 1", {"--ranks or --gpus, and not both"});
  EXPECT_EQ(contents(folder_.path()), before);
}

TEST_F(RanksOfOneModel, WrongVariablesOfTheEnvironmentAreNamed) {
  ::setenv("MASTER_PORT", "many", 1);
  ::setenv("RANK", "0", 1);
  ::setenv("WORLD_SIZE", "2", 1);
  expect_error(run(folder_.path(), train("run", kSlices)), 2, {"MASTER_PORT = 'many'"});
  ::setenv("MASTER_PORT", "29500", 1);
  ::setenv("MASTER_ADDR", "nohost.invalid", 1);
  expect_error(run(folder_.path(), train("run", kSlices)), 2,
               {"MASTER_ADDR = 'nohost.invalid': the host is unknown"});
  ::unsetenv("MASTER_ADDR");
  ::setenv("RANK", "2", 1);
  expect_error(run(folder_.path(), train("run", kSlices)), 2, {"rank 2", "among 2 ranks"});
}

}  // namespace
}  // namespace assay::cli
