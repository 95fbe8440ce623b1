#include "train/checkpoint.h"

#include <torch/torch.h>

#include <mutex>

#include "nn/tensors.h"

namespace assay::train {
namespace {

[[noreturn]] void refuse(const fs::path& folder, const std::string& why) {
  fail(
      "{}\n  The checkpoint {} is broken; nothing was changed. "
      "Remove it to continue from the previous one.",
      why, folder.string());
}

// A folder inside checkpoints/ that is not a checkpoint. It is removed with this object and, if the
// process was killed, by the next one; the run is locked, so nobody else uses it.
class Scratch {
 public:
  explicit Scratch(fs::path folder) : path(std::move(folder)) { fs::remove_all(path); }
  ~Scratch() {
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }
  Scratch(const Scratch&) = delete;
  const fs::path path;
};

// A new checkpoint before it has its tensors, made by rank 0. It has a name that no host has seen,
// so no host mistakes another folder for it, and none finds an older one in the cache of a network
// file system.
class Unfinished {
 public:
  Unfinished(const run::Folder& run, const nn::NamedTensors& weights,
             const nn::NamedTensors& moments)
      : scratch_(run.unfinished_checkpoints()), folder_(scratch_.path / "step") {
    const run::Checkpoint checkpoint{folder_.path()};
    const nn::SharedTensorFile weights_file(checkpoint.weights(), weights, /*is_new=*/true);
    const nn::SharedTensorFile moments_file(checkpoint.moments(), moments, /*is_new=*/true);
  }
  std::string name() const { return folder_.path().filename(); }
  void publish(const run::Checkpoint& target, const run::TrainingState& state) const {
    run::Checkpoint{folder_.path()}.state().write(state);  // syncs the folder
    publish_folder(folder_.path(), target.path);
  }

 private:
  Scratch scratch_;
  TemporaryFolder folder_;
};

void say_once(const std::string& why) {
  static std::once_flag said;
  std::call_once(said, [&] {
    const std::string line =
        fmt::format("assay: {}. Rank 0 writes the part of this rank in checkpoints.\n", why);
    std::fputs(line.c_str(), stderr);
  });
}

// sha256 of each tensor of a file, joined. Spaces are in the place of those that are not known.
class Digests {
 public:
  explicit Digests(size_t tensors) : text_(tensors * kDigits, ' ') {}
  void set(size_t tensor, const std::string& digest) {
    text_.replace(tensor * kDigits, kDigits, digest);
  }
  void add(const std::string& other) {
    for (size_t i = 0; i < text_.size(); ++i)
      if (text_[i] == ' ') text_[i] = other[i];
  }
  const std::string& text() const { return text_; }

 private:
  static constexpr size_t kDigits = 64;
  std::string text_;
};

// The part of a checkpoint that one rank writes. All ranks call the same functions in the same
// order, also after an error: the others wait for this rank until all know of it.
class Share {
 public:
  explicit Share(Ranks* ranks) : ranks_(ranks), rank_(ranks ? ranks->rank() : 0) {}
  // Writes the share of this rank of a file with these names and shapes. `each` calls its argument
  // with every tensor. On rank 0, returns the checksum of the file, if all is written.
  std::string write(const fs::path& path, const nn::NamedTensors& tensors,
                    const std::function<void(const TensorFunction&)>& each);
  // Errors with the numbers of their ranks; the same text on all ranks. Empty if all is written.
  std::string problems() const;

 private:
  std::vector<std::string> gather(const std::string& text) const {
    return ranks_ ? ranks_->gather_texts(text) : std::vector{text};
  }
  // The reason why `work` failed, or "".
  template <class Work>
  static std::string attempt(Work&& work) try {
    work();
    return "";
  } catch (const std::exception& error) {
    return error.what();
  }

  Ranks* ranks_;
  int64_t rank_;
  std::string problem_;
};

std::string Share::write(const fs::path& path, const nn::NamedTensors& tensors,
                         const std::function<void(const TensorFunction&)>& each) {
  std::optional<nn::SharedTensorFile> file;
  const std::string closed = attempt([&] { file.emplace(path, tensors); });
  const std::vector<std::string> reasons = gather(closed);
  if (rank_ != 0 && !closed.empty()) say_once(closed);
  if (rank_ == 0 && problem_.empty()) problem_ = closed;
  std::map<std::string, size_t> mine;  // tensors that this rank writes
  std::vector<int64_t> elements(reasons.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto least = std::ranges::min_element(elements);
    *least += tensors[i].second.numel();
    const int64_t rank = least - elements.begin();
    if ((reasons[size_t(rank)].empty() ? rank : 0) == rank_) mine[tensors[i].first] = i;
  }
  Digests digests(tensors.size());
  each([&](const std::string& name, const at::Tensor& tensor) {
    const auto found = mine.find(name);
    if (found == mine.end() || !problem_.empty()) return;
    const size_t i = found->second;
    problem_ = attempt([&] { digests.set(i, file->write(i, tensor)); });
  });
  if (file && problem_.empty()) problem_ = attempt([&] { file->sync(); });
  for (const std::string& text : gather(digests.text())) digests.add(text);
  return file ? file->checksum(digests.text()) : "";
}

std::string Share::problems() const {
  const std::vector<std::string> all = gather(problem_);
  if (!ranks_) return problem_;
  std::vector<std::string> out;
  for (size_t rank = 0; rank < all.size(); ++rank)
    if (!all[rank].empty()) out.push_back(fmt::format("rank {}: {}", rank, all[rank]));
  return join(out, "; ");
}

}  // namespace

void save_checkpoint(const run::Folder& run, const nn::LanguageModel& model, const AdamW& optimizer,
                     const run::TrainingState& state, Ranks* ranks) {
  const bool first = !ranks || ranks->first();
  const run::Checkpoint target = run.checkpoint(state.step);
  const nn::NamedTensors weights = nn::named_parameters_of(model);
  const nn::NamedTensors moments = optimizer.moments();
  // Rank 0 alone looks: other hosts can see an earlier state of the folder
  std::optional<Unfinished> unfinished;
  if (first && !fs::exists(target.path)) unfinished.emplace(run, weights, moments);
  std::string name = unfinished ? unfinished->name() : "";
  if (ranks) name = ranks->gather_texts(name).front();
  if (name.empty()) return;  // the same step of the same run: the same bytes
  const run::Checkpoint checkpoint{run.unfinished_checkpoints() / name};
  Share share(ranks);
  run::TrainingState written = state;
  written.weights_checksum =
      share.write(checkpoint.weights(), weights, [&](const TensorFunction& write) {
        for (const auto& [name, tensor] : weights) write(name, tensor);
      });
  written.moments_checksum =
      share.write(checkpoint.moments(), moments,
                  [&](const TensorFunction& write) { optimizer.read_moments(write); });
  if (const std::string problems = share.problems(); !problems.empty()) {
    const std::string message =
        fmt::format("the checkpoint of step {} was not written: {}. Earlier checkpoints are whole.",
                    state.step, problems);
    if (ranks) ranks->fail_together(message);
    fail<Error>("{}", message);
  }
  if (first) unfinished->publish(target, written);
}

run::TrainingState load_checkpoint(const run::Checkpoint& checkpoint, nn::LanguageModel& model,
                                   AdamW& optimizer) {
  try {
    const run::TrainingState state = checkpoint.state().read();
    const run::Folder run{checkpoint.path.parent_path().parent_path()};
    if (run.checkpoint(state.step).path != checkpoint.path)
      fail("state.json is that of step {}", state.step);
    checkpoint.check_weights();
    checkpoint.check_moments();
    nn::copy_file(checkpoint.moments(), optimizer.moments());  // on the meta device: checks only
    nn::copy_file(checkpoint.weights(), nn::named_parameters_of(model));
    const Safetensors moments(checkpoint.moments());
    optimizer.write_moments([&](const std::string& name, const at::Tensor& moment) {
      moment.copy_(nn::to_tensor(moments.at(name)));
    });
    return state;
  } catch (const BadInput& error) {
    refuse(checkpoint.path, error.what());
  }
}

std::optional<run::Checkpoint> newest_checkpoint(const run::Folder& run, int64_t last_step) {
  auto found = run.checkpoints();
  found.erase(found.upper_bound(last_step), found.end());
  return found.empty() ? std::nullopt : std::optional(found.rbegin()->second);
}

void prune_checkpoints(const run::Folder& run, const std::vector<int64_t>& keep_steps) {
  const auto found = run.checkpoints();
  size_t left = found.size();
  for (const auto& [step, checkpoint] : found) {
    const bool is_newest = left <= 2;
    --left;
    if (is_newest || std::ranges::find(keep_steps, step) != keep_steps.end()) continue;
    // A process that is killed here leaves no part of a checkpoint under its name.
    const Scratch old(run.removed_checkpoint());
    publish_folder(checkpoint.path, old.path);
  }
}

void remove_scratch(const run::Folder& run) {
  const Scratch writing(run.unfinished_checkpoints());
  const Scratch removing(run.removed_checkpoint());
}

}  // namespace assay::train
