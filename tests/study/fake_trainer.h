#pragma once
// A study's folder, plan and a shell script in the place of the trainer: it obeys the trainer's
// command line and leaves a run's files, without a model.
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>

#include "base/files.h"
#include "study/runner.h"

namespace assay::study {

// The environment variable FAKE decides what the script does:
//   ""                trains
//   kill              leaves a checkpoint and dies by SIGKILL unless resumed
//   kill-always       does so each time
//   kill-at-exit      trains, writes everything and dies by SIGKILL
//   terminated        saves and ends with 130 unless resumed
//   kill-questions:N  dies by SIGKILL the first N times that it is asked about a model
//   full              finds a full disk
//   fail              ends with 1 for models named window
//   diverge           ends with 1 at the learning rate 0.004
//   slow              saves and ends with 130 on SIGINT
//   other-data        trains, and finds other data than when it was asked
// FAKE_TASKS decides what happens to tasks. The key of a task ends in FAKE_KEY.
//   ""                answers
//   kill              dies by SIGKILL after the first task of a run, once
//   fail-TASK         gives the task a problem
//   slow              ends with 130 on SIGINT
inline constexpr const char* kTrainer = R"(#!/bin/sh
if [ "$1" = eval ]; then
  shift 2; tasks=; limit=0
  while [ $# -gt 0 ]; do case $1 in
    --dry-run) dry=1; shift;;
    --keep|--json) shift;;
    --tasks) tasks="$tasks $2"; shift 2;;
    --limit) limit=$2; shift 2;;
    --*) shift 2;; *) run=$1; shift;; esac; done
  if [ "$dry" ]; then
    case "$tasks" in *pica*)
      echo "{\"error\": \"there is no task 'pica'; did you mean 'piqa'? Nothing was run.\"}"
      exit 2;;
    esac
    for t in $tasks; do
      question="\"name\": \"$t\", \"key\": \"$t $limit $FAKE_KEY\", \"recall\": false"
      question="$question, \"metrics\": [\"acc\"], \"items\": 8, \"longest\": 90"
      all="$all${all:+, }{$question, \"least\": ${FAKE_LEAST:-5}}"
    done
    echo "{\"tasks\": [$all]}"; exit 0
  fi
  for t in $tasks; do
    echo "$(basename $run) $t" >> "$FAKE_LOG.tasks"
    case "$FAKE_TASKS:$t" in
      slow:*) trap 'exit 130' INT; i=0; while [ $i -lt 300 ]; do sleep 0.1; i=$((i + 1)); done;;
      "fail-$t:$t")
        result='"problem": "the text is empty", "items": 0, "truncated": 0, "metrics": []'
        failed=1;;
      *)
        result='"problem": "", "items": 8, "truncated": 0'
        result="$result, \"metrics\": [{\"name\": \"acc\", \"bits\": \"f0\"}]";;
    esac
    echo "{\"name\": \"$t\", \"key\": \"$t $limit $FAKE_KEY\", $result}" > "$run/$t.result"
    cat "$run"/*.result | paste -sd, | sed 's/.*/{"results": [&]}/' > "$run/tasks.json"
    if [ "$FAKE_TASKS" = kill ] && [ ! -e "$run/killed" ]; then touch "$run/killed"; kill -9 $$; fi
  done
  exit ${failed:-0}
fi
config=$2; shift 2
while [ $# -gt 0 ]; do case $1 in
  -o) out=$2; shift 2;;
  --dry-run) dry=1; shift;;
  --resume) resume=1; shift;;
  --set|--data|--device|--threads) shift 2;;
  *) shift;; esac; done
provenance() {
  cat <<END
"parameters": 1000, "flops_per_token": 2000, "state_bytes": {"2048": 10, "102400": 20},
"device": "cpu", "torch": "2", "assay": "0", "commit": "c", "paths": {}, "numerics": {},
"data": "${data:-d}", "started": "now", "key": "k", "identity": "$1"
END
}
identity=$(grep -v -e '^seed' -e '^tokens' -e '^learning_rate' "$config" | cksum)
tokens=$(sed -n 's/^tokens = //p' "$config")
steps=$(((${tokens:-4000} + 399) / 400))
tokens=$((steps * 400))
if [ "$dry" ]; then
  if grep -q '^chunk_sise' "$config"; then
    cat <<END
{"error": "m.toml:9:1: unknown key", "table": "model.attention", "key": "chunk_sise",
"problem": "unknown key 'chunk_sise' in {table}; did you mean 'chunk_size'?"}
END
    exit 2
  fi
  case "$FAKE" in  # the first questions are stopped by a signal
    kill-questions:*) echo question >> "$FAKE_LOG.questions"
      if [ $(wc -l < "$FAKE_LOG.questions") -le "${FAKE#*:}" ]; then kill -9 $$; fi;;
  esac
  rate=$(sed -n 's/^learning_rate = //p' "$config")
  cat <<END
{$(provenance "$identity"), "tokens": $tokens, "steps": $steps,
"learning_rate": ${rate:-0.001}, "estimated_seconds": 1.5, "end_seconds": 0.5,
"longest_input": 128}
END
  exit 0
fi
echo "$out ${resume:-0}" >> "$FAKE_LOG"
if [ "$FAKE" = other-data ]; then data=e; fi
mkdir -p "$out/evaluations"
metric() {
  values="\"step\": $1, \"tokens\": $(($1 * 400)), \"loss\": 4.0, \"tokens_per_second\": 100.0"
  echo "{$values}" >> "$out/metrics.jsonl"
}
case "$FAKE:$out:$resume" in
  kill:*:|kill-always:*) mkdir -p "$out/checkpoints/step-5"; metric 5; kill -9 $$;;
  terminated:*:) mkdir -p "$out/checkpoints/step-5"; metric 5; exit 130;;
  full:*) echo "assay: $out: cannot be written: No space left on device" >&2; exit 1;;
  fail:*window*) echo "assay: the loss is NaN at step 3" >&2; exit 1;;
  slow:*) trap 'mkdir -p "$out/checkpoints/step-5"; exit 130' INT; metric 5; i=0
    while [ $i -lt 300 ]; do sleep 0.1; i=$((i + 1)); done;;
esac
metric $steps
# The held-out loss is lowest at a learning rate of 0.002.
rate=$(sed -n 's/^learning_rate = //p' "$config")
case "$FAKE:$rate" in
  diverge:0.004) echo "assay: the loss is NaN at step 3" >&2; exit 1;;
esac
case "$rate" in 0.002) loss=3.9;; *) loss=4.0;; esac
end_set() {
  cat <<END
{"loss": $1, "recall_loss": 1.0, "bits_per_byte": 2.0, "tokens": 100, "documents": 1,
"clustered_by": "document", "clusters": {"documents": [1], "tokens": [100], "nll": [$1],
"recall_tokens": [10], "recall_nll": [1.0]}}
END
}
cat > "$out/end.json" <<END
{"step": $steps, "tokens": $tokens,
"sets": {"known_a.valid": $(end_set $loss), "fresh_a.test": $(end_set 4.1)}}
END
evaluation='{"a.test": {"loss": 4.1, "bits_per_byte": 2.0}}'
reached="\"step\": $steps, \"tokens\": $tokens, \"train_loss\": 4.0"
echo "{$reached, \"evaluation\": $evaluation}" >> "$out/metrics.jsonl"
cp "$config" "$out/config.toml"
echo "{$(provenance "$identity")}" > "$out/run.json"
mkdir -p "$out/checkpoints/step-$steps"; touch "$out/checkpoints/step-$steps/model.safetensors"
cat > "$out/done.json" <<END
{"steps": $steps, "tokens": $tokens, "seconds": 2.0, "tokens_per_second": 100.0,
"peak_memory_bytes": 1, "final_loss": 4.0, "evaluation_and_saving_seconds": 0.5}
END
if [ "$FAKE" = kill-at-exit ]; then kill -9 $$; fi
)";

class FakeStudy : public testing::Test {
 protected:
  void SetUp() override {
    folder = fs::temp_directory_path() / fmt::format("assay-study-{}", ::getpid());
    fs::remove_all(folder);
    make_folder(folder / "models");
    write_file(folder / "trainer", kTrainer);
    fs::permissions(folder / "trainer", fs::perms::owner_all);
    write_file(
        folder / "models/full.toml",
        "[model]\nd_model = 8\npattern = [\"attention\"]\n[model.attention]\nnum_heads = 2\n");
    write_file(folder / "models/window.toml",
               "[model]\nd_model = 8\n[model.attention]\nwindow = 4\n");
    ::setenv("FAKE_LOG", (folder / "starts").c_str(), 1);
    ::setenv("FAKE", "", 1);
    for (const char* name : {"FAKE_TASKS", "FAKE_KEY"}) ::setenv(name, "", 1);
    ::unsetenv("FAKE_LEAST");
  }
  void TearDown() override { fs::remove_all(folder); }

  static constexpr const char* kPlan =
      "reference = \"full\"\nmodels = [\"full\", \"window\"]\nseeds = [1, 2]\n"
      "data = { synthetic = { documents = 4, held_out = 2, document_length = 64 }, "
      "train = [\"known_a\"], out_of_domain = [\"fresh_a\"], sequence_length = 16 }\n"
      "train = { tokens = 4000, batch = 4 }\n";
  // Two models are the same, which only the answers of the trainer show.
  static std::string with_equal_models() {
    std::string plan = kPlan;
    plan.replace(plan.find("\"window\""), 8, "\"twin\"");
    return plan + "[model.twin]\nbase = \"full\"\n";
  }
  static std::string without_tokens() {
    std::string plan = kPlan;
    return plan.erase(plan.find("tokens = 4000, "), 15);
  }
  StudyOptions options(const std::string& plan = kPlan) {
    write_file(folder / "plan.toml", plan);
    StudyOptions out;
    out.plan = folder / "plan.toml";
    out.study = folder / "study";
    out.program = folder / "trainer";
    out.jobs = 2;
    return out;
  }
  std::string starts() { return fs::exists(folder / "starts") ? read_file(folder / "starts") : ""; }
  int64_t count(const std::string& text, char c) { return std::count(text.begin(), text.end(), c); }

  fs::path folder;
};

template <class Call>
std::string message(Call&& call) {
  try {
    call();
    return "no error";
  } catch (const Error& error) {
    return error.what();
  }
}

}  // namespace assay::study
