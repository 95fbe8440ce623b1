// Studies through a real Slurm, whose daemons the test starts on this host.
#include <sys/prctl.h>

#include <fstream>
#include <set>
#include <sstream>

#include "base/random.h"
#include "cli/program.h"
#include "cli/results.h"

namespace assay::cli {
namespace {

using nlohmann::json;

std::string find_program(const std::string& name) {
  for (const char* folder : {"/usr/sbin/", "/usr/bin/", "/usr/local/sbin/", "/usr/local/bin/"})
    if (::access((folder + name).c_str(), X_OK) == 0) return folder + name;
  return "";
}

// Standard output of a shell command.
std::string output_of(const std::string& command) {
  std::string out;
  std::FILE* pipe = ::popen(command.c_str(), "r");
  for (int c; (c = std::fgetc(pipe)) != EOF;) out += char(c);
  ::pclose(pipe);
  return out;
}
std::vector<std::string> lines_of(const std::string& command) {
  std::istringstream text(output_of(command));
  std::vector<std::string> lines;
  for (std::string line; std::getline(text, line);) lines.push_back(line);
  return lines;
}

// A daemon in the foreground. It ends with this object, and with the process of the test.
class Daemon {
 public:
  Daemon(const std::string& program, const std::vector<std::string>& options, const fs::path& log) {
    std::vector<std::string> words = {find_program(program)};
    words.insert(words.end(), options.begin(), options.end());
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    process_ = ::fork();
    if (process_ != 0) return;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    const int output = ::open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0644);
    ::dup2(::open("/dev/null", O_RDONLY), STDIN_FILENO);
    ::dup2(output, STDOUT_FILENO);
    ::dup2(output, STDERR_FILENO);
    ::execv(arguments[0], arguments.data());
    ::_exit(127);
  }
  ~Daemon() {
    ::kill(process_, SIGTERM);
    for (int i = 0; i < 100 && running(); ++i) sleep_seconds(0.05);
    ::kill(process_, SIGKILL);
    ::waitpid(process_, nullptr, 0);
  }
  Daemon(const Daemon&) = delete;
  bool running() const {
    siginfo_t info{};
    return ::waitid(P_PID, id_t(process_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
           info.si_pid == 0;
  }

 private:
  pid_t process_;
};

// One node with two CPUs, without accounting and cgroups.
constexpr const char* kConfiguration = R"(ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={ctld}
SlurmdPort={slurmd}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SchedulerParameters=sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
KillWait=5
ReturnToService=2
MailProg=/bin/true
NodeName=localhost NodeHostname=localhost NodeAddr=127.0.0.1 CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=test Nodes=localhost Default=YES MaxTime=INFINITE State=UP
)";

class Cluster {
 public:
  // Sets SLURM_CONF for commands that are started later.
  explicit Cluster(const fs::path& folder) : folder_(folder) {
    for (const char* name : {"state", "spool"}) make_folder(folder / name);
    Random random(::getpid(), "munge");
    std::string key(128, '\0');
    for (char& c : key) c = char(random.below(256));
    write_file(folder / "munge.key", key);
    fs::permissions(folder / "munge.key", fs::perms::owner_read | fs::perms::owner_write);
    ::setenv("SLURM_CONF", (folder / "slurm.conf").c_str(), 1);
    munge_ = std::make_unique<Daemon>(
        "munged",
        std::vector<std::string>{"--foreground", "--force", option("key-file", "munge.key"),
                                 option("socket", "munge.socket"), option("pid-file", "munge.pid"),
                                 option("log-file", "munged.log"), option("seed-file", "seed")},
        folder / "munge.log");
    // Another program may take a port before the daemons do
    for (int tries = 0; tries < 3 && !ready_; ++tries) start();
  }
  ~Cluster() {
    output_of("scancel --user=$(id -u) 2>&1");
    for (int i = 0; i < 100 && !output_of("squeue --noheader 2>&1").empty(); ++i)
      sleep_seconds(0.1);
    ::unsetenv("SLURM_CONF");
  }
  bool ready() const { return ready_; }
  std::string logs() const {
    return output_of(
        fmt::format("tail -n 5 {0}/munge.log {0}/ctld.log {0}/slurmd.log", folder_.string()));
  }

 private:
  std::string option(const std::string& name, const std::string& file) const {
    return fmt::format("--{}={}", name, (folder_ / file).string());
  }
  void start() {
    node_.reset();
    controller_.reset();
    {
      const Port controller;
      const Port node;
      write_file(folder_ / "slurm.conf",
                 fmt::format(kConfiguration, fmt::arg("ctld", controller.number),
                             fmt::arg("slurmd", node.number), fmt::arg("folder", folder_.string()),
                             fmt::arg("user", lines_of("id -un").at(0))));
    }
    controller_ = std::make_unique<Daemon>("slurmctld", std::vector<std::string>{"-D", "-c"},
                                           folder_ / "ctld.log");
    node_ = std::make_unique<Daemon>("slurmd", std::vector<std::string>{"-D", "-N", "localhost"},
                                     folder_ / "slurmd.log");
    for (int i = 0; i < 300 && controller_->running() && node_->running() && !ready_; ++i) {
      sleep_seconds(0.1);
      ready_ = output_of("sinfo --noheader --format=%T 2>&1") == "idle\n";
    }
  }

  fs::path folder_;
  bool ready_ = false;
  std::unique_ptr<Daemon> munge_;
  std::unique_ptr<Daemon> controller_;
  std::unique_ptr<Daemon> node_;
};

// Three runs choose the rate of window, and one of them is its run; four runs make the ladder.
constexpr const char* kPlan = R"(reference = "full"
models = ["full", "window"]
tokens = [6400]
ladder = { tokens = [6400, 12800], seeds = [1, 2] }
tune = { learning_rate = [1e-3, 2e-3, 4e-3], tokens = 6400 }
data = { store = "store", train = ["known_a"], out_of_domain = ["fresh_a"], sequence_length = 64 }

[train]
batch = 4
warmup_steps = 4
eval_every = 25
checkpoint_every = 5
eval_tokens = 512

[model.full]
base = "smoke"
train = { learning_rate = 3e-3 }
[model.window]
base = "smoke"
attention = { window = 8 }
)";

class StudyThroughRealSlurmSlow : public testing::Test {
 protected:
  void SetUp() override {
    for (const char* name : {"munged", "slurmctld", "slurmd", "sbatch"})
      if (find_program(name).empty()) GTEST_SKIP() << name << " is not installed";
    make_folder(folder_ / "cluster");
    cluster_ = std::make_unique<Cluster>(folder_ / "cluster");
    if (!cluster_->ready())
      GTEST_SKIP() << "Slurm's daemons cannot work on this host:\n" << cluster_->logs();
    synthesize(folder_);
    folder_.write("plan.toml", kPlan);
  }
  static std::string command(const std::string& study, const std::string& launcher) {
    return fmt::format("run plan.toml -o {} --threads 1 --devices cpu --json {}", study, launcher);
  }
  // The jobs of a state: ids of tasks ("12_0"), or of controller jobs ("13").
  static std::vector<std::string> jobs(const std::string& state, bool tasks) {
    std::vector<std::string> found;
    for (const std::string& id :
         lines_of(fmt::format("squeue --array --noheader --states={} --format=%i", state)))
      if ((id.find('_') != std::string::npos) == tasks) found.push_back(id);
    return found;
  }
  bool has_checkpoint(const std::string& study) const {
    const std::string all = (folder_ / study).string() + "/runs/*/checkpoints/step-*";
    return !output_of("ls -d " + all + " 2>/dev/null").empty();
  }
  static bool queue_is_empty() { return lines_of("squeue --noheader").empty(); }
  // A process whose command line ends with --no-wait works in the folder: a controller job.
  pid_t controller_process() const {
    for (const auto& entry : fs::directory_iterator("/proc")) {
      std::error_code none;
      std::ifstream file(entry.path() / "cmdline");
      std::string line((std::istreambuf_iterator<char>(file)), {});
      if (line.ends_with(std::string("\0--no-wait\0", 11)) &&
          fs::read_symlink(entry.path() / "cwd", none) == fs::canonical(folder_.path()))
        return std::stoi(entry.path().filename());
    }
    return 0;
  }
  // How many arrays list the run of each task.
  std::map<std::string, int> submissions(const std::string& study) const {
    std::map<std::string, int> counts;
    for (const auto& entry : fs::directory_iterator(folder_ / study / "slurm"))
      if (entry.path().extension() == ".json") {
        const json array = json::parse(read_file(entry.path()));
        for (const json& task : array.at("tasks")) ++counts[task.at("run")];
      }
    return counts;
  }

  data::Folder folder_;
  std::unique_ptr<Cluster> cluster_;  // ends before its folder is removed
};

TEST_F(StudyThroughRealSlurmSlow, DisturbedStudyEqualsTheLocalOne) {
  const Outcome local = run(folder_.path(), command("local", "--jobs 2"));
  ASSERT_EQ(local.exit_code, 0) << local.error;
  const std::string slurm = command("slurm", "--launcher slurm --sbatch --time=10");
  {
    // The submitting shell ends when the controller job is in the queue
    Process shell(folder_.path(), slurm);
    while (shell.running() && (jobs("PENDING", false).empty() || jobs("RUNNING", true).empty()))
      sleep_seconds(0.1);
    ASSERT_TRUE(shell.running()) << shell.wait().error;
    shell.signal(SIGKILL);
  }
  // One task is cancelled before it starts. One saves, as it does before its time limit, and is
  // requeued; earlier than at its first checkpoint the signal could kill it
  const auto waiting = jobs("PENDING", true);
  if (!waiting.empty()) output_of("scancel " + waiting.back());
  while (!has_checkpoint("slurm") && !queue_is_empty()) sleep_seconds(0.1);
  for (const std::string& task : jobs("RUNNING", true)) output_of("scancel --signal=USR1 " + task);
  // The controller job follows the array. It is killed
  pid_t controller = 0;
  for (; controller == 0 && !queue_is_empty(); sleep_seconds(0.1))
    controller = controller_process();
  ASSERT_NE(controller, 0) << "no controller job came";
  ::kill(controller, SIGKILL);

  const Outcome last = run(folder_.path(), slurm);
  ASSERT_EQ(last.exit_code, 0) << last.error;
  EXPECT_EQ(json::parse(last.out).at("verdicts"), json::parse(local.out).at("verdicts"));
  expect_same(folder_ / "slurm" / "runs", folder_ / "local" / "runs", Checkpoints::kNewest);
  expect_same(folder_ / "slurm" / "configs", folder_ / "local" / "configs");
  EXPECT_TRUE(queue_is_empty());
  const auto submitted = submissions("slurm");
  EXPECT_EQ(submitted.size(), 7u);
  if (!waiting.empty())
    EXPECT_GE(std::ranges::count_if(submitted, [](const auto& run) { return run.second > 1; }), 1)
        << "the cancelled run was submitted again";

  const auto before = contents(folder_ / "slurm" / "runs");
  const Outcome again = run(folder_.path(), slurm);
  EXPECT_EQ(again.exit_code, 0) << again.error;
  EXPECT_EQ(json::parse(again.out).at("done_before"), json::parse(last.out).at("runs"));
  EXPECT_EQ(contents(folder_ / "slurm" / "runs"), before);
  EXPECT_EQ(submissions("slurm"), submitted);
}

}  // namespace
}  // namespace assay::cli
