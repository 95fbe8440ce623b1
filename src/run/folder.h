#pragma once
// The folder of a run: the only place that knows the names of its files.
#include <cstdint>
#include <map>
#include <optional>

#include "base/files.h"
#include "run/records.h"
#include "run/tasks.h"

namespace assay::run {

// A JSON file and the record that it holds.
template <Record T>
struct RecordFile {
  fs::path path;
  int indent = 1;  // of the text; -1: one line

  bool exists() const { return fs::exists(path); }
  T read() const { return read_record<T>(path); }  // BadInput names file and key
  void write(const T& record) const { write_file(path, to_json(record).dump(indent) + "\n"); }
};

// RUN/checkpoints/step-N, whole or absent.
struct Checkpoint {
  fs::path path;

  fs::path weights() const { return path / "model.safetensors"; }
  fs::path moments() const { return path / "optimizer.safetensors"; }
  RecordFile<TrainingState> state() const { return {path / "state.json"}; }
  // BadInput if the file is not as it was written, as far as state.json knows its checksum.
  void check_weights() const;
  void check_moments() const;
};

struct Folder {
  fs::path path;

  fs::path config() const { return path / "config.toml"; }
  RecordFile<Provenance> provenance() const { return {path / "run.json"}; }
  fs::path metrics() const { return path / "metrics.jsonl"; }
  // Losses of single documents at a step, as safetensors.
  fs::path document_losses(int64_t step) const;
  RecordFile<End> end() const { return {.path = path / "end.json", .indent = -1}; }
  RecordFile<Probes> probes() const { return {path / "probes.json"}; }
  RecordFile<Outcome> outcome() const { return {path / "done.json"}; }
  RecordFile<TaskResults> tasks() const { return {.path = path / "tasks.json", .indent = -1}; }
  fs::path task_items() const { return path / "tasks.sqlite"; }  // answers item by item
  fs::path log() const { return path / "log.txt"; }
  fs::path lock() const { return path / ".lock"; }  // of FolderLock

  std::map<int64_t, Checkpoint> checkpoints() const;  // by step
  Checkpoint checkpoint(int64_t step) const;
  fs::path unfinished_checkpoints() const;  // where one is written before it is renamed
  fs::path removed_checkpoint() const;      // where an old one is moved before it is removed
};

// BadInput if the folder holds a token store, a study, a run or records of runs, and the file
// `own` does not exist.
void check_output_folder(const fs::path& folder, const fs::path& own = {});

// The run that `path` is, or that it is a checkpoint of. None where neither is the case.
std::optional<Folder> enclosing_run(const fs::path& path);

}  // namespace assay::run
