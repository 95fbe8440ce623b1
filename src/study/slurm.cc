#include "study/slurm.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <string_view>
#include <thread>

#include "base/interrupt.h"
#include "base/record.h"
#include "study/run_folder.h"

namespace assay::study {
namespace {

using Clock = std::chrono::steady_clock;

// N.json
struct ArrayTask {
  std::string run;  // name of its folder
  int64_t restarts = 0;
  int64_t steps = 0;
  ASSAY_FIELDS(run, restarts, steps)
};
struct Array {
  std::vector<ArrayTask> tasks;  // by index
  ASSAY_FIELDS(tasks)
};

constexpr size_t kTasksPerArray = 1000;  // Slurm's default limit, MaxArraySize, is 1001
constexpr std::string_view kExitCode = "exit code ";

// In PATH; "" when it is not there.
std::string find_program(const std::string& name) {
  const char* variable = std::getenv("PATH");
  std::string folders = variable ? variable : "";
  for (size_t begin = 0; begin <= folders.size();) {
    const size_t end = std::min(folders.find(':', begin), folders.size());
    const fs::path program = fs::path(folders.substr(begin, end - begin)) / name;
    if (::access(program.c_str(), X_OK) == 0) return program;
    begin = end + 1;
  }
  return "";
}

// As one word of a shell.
std::string quoted(const std::string& word) {
  std::string out = "'";
  for (const char c : word) out += c == '\'' ? "'\\''" : std::string(1, c);
  return out + "'";
}
std::string quoted(const std::vector<std::string>& words) {
  std::string out;
  for (const std::string& word : words) {
    const bool plain = !word.empty() && std::ranges::all_of(word, [](unsigned char c) {
      return std::isalnum(c) || std::string_view("-_=./:,+@%").find(char(c)) != std::string::npos;
    });
    out += (out.empty() ? "" : " ") + (plain ? word : quoted(word));
  }
  return out;
}

// Slurm replaces %a, %j and others in the name of an output file.
std::string without_patterns(const fs::path& path) {
  std::string out;
  for (const char c : path.string()) out += c == '%' ? "%%" : std::string(1, c);
  return out;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

// The first `count` fields, and the rest of the line.
std::vector<std::string> fields_of(const std::string& line, size_t count) {
  std::vector<std::string> fields;
  size_t begin = 0;
  while (fields.size() < count) {
    const size_t end = line.find('|', begin);
    if (end == std::string::npos) break;
    fields.push_back(line.substr(begin, end - begin));
    begin = end + 1;
  }
  fields.push_back(line.substr(begin));
  return fields;
}

std::optional<int64_t> number_of(std::string_view text) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

std::string trimmed(std::string text) {
  text.resize(text.find_last_not_of(" \n\r\t") + 1);
  return text;
}

// The output of one of Slurm's commands. Error with its words when it fails.
std::string ask(std::vector<std::string> command) {
  const std::string name = command[0];
  command[0] = find_program(name);
  if (command[0].empty())
    fail(
        "--launcher slurm: {} is not in PATH. "
        "Give the command on a host from which jobs can be submitted. Nothing was changed.",
        name);
  const Captured result = capture(command);
  if (result.ending.code != 0)
    fail<Error>("{} failed ({}): {}", name, result.ending.text(),
                trimmed(result.errors + result.output));
  return result.output;
}

// The number of the new job. sbatch --parsable answers "120" or "120;cluster".
std::string submit(const std::vector<std::string>& command) {
  const std::string answer = trimmed(ask(command));
  return answer.substr(0, answer.find(';'));
}

// The number of an array by the name of one of its files, such as 12.json.
std::optional<int64_t> array_number(const fs::path& file) {
  if (file.extension() != ".json") return std::nullopt;
  return number_of(file.stem().string());
}

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

// Variables of the job that this process is part of would reach the jobs that it submits.
void forget_own_job() {
  std::vector<std::string> names;
  for (char** entry = environ; *entry; ++entry) {
    const std::string text = *entry;
    const std::string name = text.substr(0, text.find('='));
    if (name.starts_with("SLURM_") && name != "SLURM_CONF") names.push_back(name);
  }
  for (const std::string& name : names) ::unsetenv(name.c_str());
}

void check_options(const std::vector<std::string>& words) {
  for (const std::string& word : words)
    for (const char* own : {"--job-name", "-J", "--array", "-a", "--output", "-o", "--wrap"})
      if (word == own || word.starts_with(std::string(own) + "=") ||
          (own[1] != '-' && word.starts_with(own)))
        fail("the option {} of sbatch is set by `assay run` itself. Nothing was changed.", word);
}

// "full.seed-1" of the folder "full.seed-1.1a2b3c4d"
std::string run_name(const std::string& folder) { return folder.substr(0, folder.rfind('.')); }

}  // namespace

bool SlurmLauncher::Job::is_active() const {
  static const std::set<std::string> over = {"BOOT_FAIL", "CANCELLED", "COMPLETED",     "DEADLINE",
                                             "FAILED",    "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
                                             "REVOKED",   "TIMEOUT"};
  return !over.contains(state);
}
bool SlurmLauncher::Job::is_at_work() const { return is_active() && state != "PENDING"; }

SlurmLauncher::SlurmLauncher(const StudyOptions& options)
    : options_(options),
      study_(fs::weakly_canonical(fs::absolute(options.study))),
      folder_(study_ / "slurm"),
      own_job_(number_of(variable("SLURM_JOB_ID"))) {
  check_options(options.slurm->sbatch);
  check_options(options.slurm->controller);
  if (options.devices.size() > 1)
    fail("--launcher slurm takes one device in --devices: each run has its own job");
  std::string name = study_.filename();
  for (char& c : name)
    if (!std::isalnum(static_cast<unsigned char>(c)) && c != '-' && c != '_') c = '_';
  tag_ = fmt::format("assay.{}.{}", name, sha256(study_.string()).substr(0, 8));
  // The real path of the study may differ between hosts. A controller job keeps the tag
  const std::string job_name = variable("SLURM_JOB_NAME");
  continues_ =
      job_name.size() == tag_.size() && job_name.starts_with(tag_.substr(0, tag_.size() - 8));
  if (continues_) tag_ = job_name;
  forget_own_job();
}

void SlurmLauncher::look_around() {
  tasks_ = tasks(jobs());
  to_submit_.clear();
}

std::optional<int> SlurmLauncher::started_earlier(const PlannedRun& run) {
  const auto task = tasks_.find(run.folder(study_).path.filename());
  if (task == tasks_.end() || !(task->second.is_active || continues_)) return std::nullopt;
  return int(task->second.restarts);
}

void SlurmLauncher::start(const PlannedRun& run, int restarts) {
  tasks_.erase(run.folder(study_).path.filename());
  to_submit_.push_back({run, restarts});
}

std::optional<Ending> SlurmLauncher::ended(const PlannedRun& run) {
  const auto task = tasks_.find(run.folder(study_).path.filename());
  if (task == tasks_.end() || task->second.is_active) return std::nullopt;
  const Ending found = ending(task->second);
  tasks_.erase(task);
  return found;
}

void SlurmLauncher::leave() {
  for (size_t begin = 0; begin < to_submit_.size(); begin += kTasksPerArray) {
    const size_t end = std::min(begin + kTasksPerArray, to_submit_.size());
    submit_array({to_submit_.begin() + int64_t(begin), to_submit_.begin() + int64_t(end)});
  }
  const bool any_active =
      std::ranges::any_of(tasks_, [](const auto& task) { return task.second.is_active; });
  if (any_active || !to_submit_.empty()) submit_controller();
  to_submit_.clear();
}

// All states: a job that has ended is shown for some minutes.
std::vector<SlurmLauncher::Job> SlurmLauncher::jobs() const {
  const std::string text = ask({"squeue", fmt::format("--user={}", ::geteuid()), "--array",
                                "--noheader", "--states=all", "--format=%i|%F|%K|%T|%r|%j"});
  std::vector<Job> found;
  for (const std::string& line : lines_of(text)) {
    const auto fields = fields_of(line, 5);
    if (fields.size() < 6) continue;
    Job job{.id = fields[0],
            .array = fields[1],
            .task = number_of(fields[2]).value_or(-1),
            .state = fields[3],
            .reason = fields[4],
            .name = trimmed(fields[5])};
    if (job.name == tag_ || job.name.starts_with(tag_ + ".")) found.push_back(std::move(job));
  }
  return found;
}

std::map<std::string, SlurmLauncher::Task> SlurmLauncher::tasks(
    const std::vector<Job>& jobs) const {
  std::map<std::pair<std::string, int64_t>, const Job*> by_name;
  for (const Job& job : jobs) by_name[{job.name, job.task}] = &job;
  std::map<std::string, Task> found;
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(folder_, none)) {
    const auto number = array_number(entry.path());
    if (!number) continue;
    const Array array = read_record<Array>(entry.path());
    for (size_t index = 0; index < array.tasks.size(); ++index) {
      const ArrayTask& listed = array.tasks[index];
      Task& task = found[listed.run];
      if (task.array > *number) continue;
      task = {listed.run, *number, int64_t(index), listed.restarts, listed.steps};
      const auto job = by_name.find({fmt::format("{}.{}", tag_, *number), int64_t(index)});
      if (job == by_name.end()) continue;
      task.is_active = job->second->is_active();
      task.id = job->second->id;
      task.state = job->second->state;
    }
  }
  return found;
}

// The script writes the exit code of the run. When Slurm ended the job, its last words say why, or
// else the state of the job.
Ending SlurmLauncher::ending(const Task& task) {
  const fs::path log = folder_ / fmt::format("{}.{}.log", task.array, task.index);
  const std::string last = last_line(log);
  if (last.starts_with(kExitCode))
    if (const auto code = number_of(std::string_view(last).substr(kExitCode.size())))
      return ending_of(int(*code));
  const std::string state = task.state.empty() ? state_in_accounting(task) : task.state;
  std::string reason = "its job left Slurm's queue";
  if (!task.id.empty()) reason += fmt::format(" (job {})", task.id);
  if (!state.empty()) reason += fmt::format(", state {}", state);
  if (fs::exists(log)) reason += fmt::format(", {}", last);
  else if (state.empty() || state == "FAILED")
    reason += fmt::format("; it wrote nothing: is {} visible on the nodes?", study_.string());
  return {.code = kFailed, .killed = true, .reason = reason};
}

// A cluster without accounting has no such state.
std::string SlurmLauncher::state_in_accounting(const Task& task) {
  if (!accounting_) {
    accounting_.emplace();
    std::string names;
    for (const auto& [run, other] : tasks_)
      names += fmt::format("{}{}.{}", names.empty() ? "" : ",", tag_, other.array);
    try {
      const std::string text =
          ask({"sacct", "--noheader", "--parsable2", "--allocations", "--starttime=now-30days",
               "--name=" + names, "--format=JobID,State,JobName"});
      for (const std::string& line : lines_of(text)) {
        const auto fields = fields_of(line, 2);
        if (fields.size() < 3) continue;
        const std::string index = fields[0].substr(fields[0].find('_') + 1);
        (*accounting_)[fields[2] + " " + index] = fields[1];
      }
    } catch (const Error&) {  // no accounting
    }
  }
  return (*accounting_)[fmt::format("{}.{} {}", tag_, task.array, task.index)];
}

std::string SlurmLauncher::array_script(const std::vector<PlannedRun>& runs) const {
  std::string cases;
  StudyOptions here = options_;
  here.study = study_;
  for (size_t i = 0; i < runs.size(); ++i) {
    PlannedRun run = runs[i];
    const run::Folder folder = run.folder(study_);
    run.config = folder_ / (folder.path.filename().string() + ".toml");
    run.data = fs::absolute(run.data);
    std::vector<std::string> command = training(run, here);
    command.push_back("--resume");
    if (!options_.devices.empty())
      command.insert(command.end(), {"--device", options_.devices.front()});
    cases += fmt::format("  {})\n    log={}\n    set -- {} ;;\n", i, quoted(folder.log().string()),
                         quoted(command));
  }
  const std::string threads =
      options_.threads > 0 ? std::to_string(options_.threads) : "${SLURM_CPUS_PER_TASK:-1}";
  return fmt::format(R"(#!/bin/bash
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=USR1@120
# Each task trains one run of {}.
# Two minutes before its time limit a run saves and ends, and the same job continues it.
case $SLURM_ARRAY_TASK_ID in
{}esac
exec 3>&1 >>"$log" 2>&1 || exit
srun --cpus-per-task="${{SLURM_CPUS_PER_TASK:-1}}" "$@" --threads "{}"
code=$?
echo "{}$code" >&3
if [ $code = {} ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $code
)",
                     study_.string(), cases, threads, kExitCode, int(kInterrupted));
}

std::string SlurmLauncher::controller_script() const {
  return fmt::format(R"(#!/bin/bash
#SBATCH --open-mode=append
#SBATCH --requeue
# Continues the study {}.
cd {} || exit
exec {}
)",
                     study_.string(), quoted(fs::current_path().string()),
                     quoted(options_.slurm->command));
}

std::vector<std::string> SlurmLauncher::array_command(int64_t number, size_t tasks) const {
  std::vector<std::string> command = {"sbatch"};
  command.insert(command.end(), options_.slurm->sbatch.begin(), options_.slurm->sbatch.end());
  std::string indices = fmt::format("0-{}", tasks - 1);
  if (options_.slurm->tasks_at_a_time > 0)
    indices += fmt::format("%{}", options_.slurm->tasks_at_a_time);
  const std::string log = fmt::format("{}/{}.%a.log", without_patterns(folder_), number);
  command.insert(command.end(),
                 {"--parsable", fmt::format("--job-name={}.{}", tag_, number), "--array=" + indices,
                  "--output=" + log, folder_ / fmt::format("{}.sh", number)});
  return command;
}

std::vector<std::string> SlurmLauncher::controller_command(
    const std::set<std::string>& arrays) const {
  const SlurmOptions& slurm = *options_.slurm;
  const auto& words = slurm.controller.empty() ? slurm.sbatch : slurm.controller;
  std::vector<std::string> command = {"sbatch"};
  command.insert(command.end(), words.begin(), words.end());
  command.insert(command.end(), {"--parsable", "--job-name=" + tag_,
                                 "--output=" + without_patterns(folder_ / "controller.log")});
  if (!arrays.empty())
    command.push_back("--dependency=afterany:" +
                      join(std::vector<std::string>(arrays.begin(), arrays.end()), ":"));
  command.push_back(folder_ / "controller.sh");
  return command;
}

std::string SlurmLauncher::preview(const std::vector<PlannedRun>& runs) const {
  const size_t tasks = std::min(runs.size(), kTasksPerArray);
  const std::vector<PlannedRun> first(runs.begin(), runs.begin() + int64_t(tasks));
  return fmt::format("{}\n\n{}\n{}\n\n{}", quoted(array_command(1, tasks)), array_script(first),
                     quoted(controller_command({"ARRAY"})), controller_script());
}

void SlurmLauncher::submit_array(const std::vector<std::pair<PlannedRun, int>>& runs) {
  make_folder(folder_);
  int64_t number = 1;
  for (const auto& entry : fs::directory_iterator(folder_))
    number = std::max(number, 1 + array_number(entry.path()).value_or(0));
  Array array;
  std::vector<PlannedRun> planned;
  for (const auto& [run, restarts] : runs) {
    const std::string name = run.folder(study_).path.filename();
    array.tasks.push_back({name, restarts, run.estimate.steps});
    write_file(folder_ / (name + ".toml"), read_file(run.config));
    planned.push_back(run);
  }
  write_file(folder_ / fmt::format("{}.sh", number), array_script(planned));
  const fs::path record = folder_ / fmt::format("{}.json", number);
  write_file(record, to_json(array).dump(1) + "\n");
  try {
    const std::string id = submit(array_command(number, runs.size()));
    progress_.log(fmt::format("submitted {} runs as job array {}", runs.size(), id));
  } catch (...) {
    std::error_code none;
    fs::remove(record, none);  // its runs did not begin
    throw;
  }
}

// The new one first: a study whose runs are in the queue is never without a controller job.
void SlurmLauncher::submit_controller() {
  std::set<std::string> arrays;
  std::set<std::string> old;
  for (const Job& job : jobs()) {
    if (job.task >= 0 && job.is_active()) arrays.insert(job.array);
    if (job.task < 0 && job.state == "PENDING") old.insert(job.id);
  }
  write_file(folder_ / "controller.sh", controller_script());
  const std::string id = submit(controller_command(arrays));
  progress_.log(fmt::format("submitted job {}, which continues the study after them", id));
  if (old.empty()) return;
  std::vector<std::string> cancel = {"scancel"};
  cancel.insert(cancel.end(), old.begin(), old.end());
  try {
    ask(cancel);
  } catch (const Error& error) {  // one controller job too many does no harm
    progress_.log(error.what());
  }
}

void SlurmLauncher::wait_for_controller() {
  for (;;) {
    const auto found = jobs();
    // If there are two controller jobs, the younger one waits.
    const auto other = std::ranges::find_if(found, [&](const Job& job) {
      return job.task < 0 && job.is_at_work() && (!continues_ || number_of(job.id) < own_job_);
    });
    if (other == found.end()) return;
    progress_.show(fmt::format("waiting for job {}, which continues the study", other->id));
    check_interrupt();
    std::this_thread::sleep_for(std::chrono::seconds(1));
  }
}

void SlurmLauncher::log_finished(const std::map<std::string, Task>& tasks) {
  for (const auto& [name, task] : tasks) {
    const run::Folder folder{study_ / "runs" / name};
    if (!folder.outcome().exists() || !told_.insert(name).second) continue;
    progress_.log(fmt::format("done: {}, {}", run_name(name), summary(folder)));
  }
}

std::string SlurmLauncher::status(const std::map<std::string, Task>& tasks,
                                  const std::vector<Job>& jobs) const {
  size_t at_work = 0;
  size_t queued = 0;
  std::string reason;  // why Slurm has not started a job
  std::vector<std::string> parts;
  for (const Job& job : jobs) {
    if (job.task < 0 && job.is_at_work())
      parts.push_back(fmt::format("job {} continues the study", job.id));
    if (job.task < 0 || job.state != "PENDING") continue;
    ++queued;
    reason = fmt::format(" ({})", job.reason);
  }
  for (const auto& [name, task] : tasks) {
    if (!task.is_active || task.state == "PENDING") continue;
    ++at_work;
    if (at_work > 3) continue;
    const run::Newest newest = run::newest_metrics({study_ / "runs" / name});
    parts.push_back(progress_text(run_name(name), newest, task.steps));
  }
  return fmt::format("{} runs done, {} running, {} queued{}  {}", told_.size(), at_work, queued,
                     reason, join(parts, "  "));
}

// The controller job is cancelled first. It would start the runs again.
std::string SlurmLauncher::text_about_jobs(const std::vector<Job>& jobs) {
  std::vector<std::string> controllers;
  std::vector<std::string> arrays;
  for (const Job& job : jobs) {
    auto& ids = job.task < 0 ? controllers : arrays;
    if (!std::ranges::count(ids, job.array)) ids.push_back(job.array);
  }
  controllers.insert(controllers.end(), arrays.begin(), arrays.end());
  return fmt::format(
      "the jobs of the study stay in Slurm's queue, and the study goes on without this command. "
      "The same command shows its progress. To stop the study: scancel {}",
      join(controllers, " "));
}

void SlurmLauncher::watch() {
  continues_ = true;
  const Clock::time_point begin = Clock::now();
  for (;;) {
    std::vector<Job> found;
    try {
      found = jobs();
      std::erase_if(found, [](const Job& job) { return !job.is_active(); });
      if (found.empty()) return;
      const auto listed = tasks(found);
      log_finished(listed);
      progress_.show(status(listed, found));
    } catch (const Error& error) {  // Slurm's controller may be restarting
      progress_.show(error.what());
    }
    // Often at first, for short studies, and rarely later: all users share Slurm's controller
    const auto pause = std::clamp<Clock::duration>(
        (Clock::now() - begin) / 20, std::chrono::seconds(1), std::chrono::seconds(15));
    for (const auto until = Clock::now() + pause; Clock::now() < until;) {
      if (interrupted()) fail<Interrupted>("{}", text_about_jobs(found));
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
  }
}

}  // namespace assay::study
