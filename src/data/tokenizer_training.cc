#include <sentencepiece_trainer.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <unordered_map>

#include "base/error.h"
#include "base/interrupt.h"
#include "base/progress.h"
#include "base/random.h"
#include "data/reader.h"
#include "data/tokenizer.h"

namespace assay::data {
namespace {

constexpr size_t kLongestSentence = 1 << 16;  // bytes; longer lines are cut
constexpr int64_t kFewest = 256 + 3 + 1;      // bytes, controls and one piece

// An even sample of all lines, in bounded memory [Vitter 1985, algorithm R].
class Sample {
 public:
  Sample(int64_t most, int64_t seed)
      : most_(size_t(most)), random_(uint64_t(seed), "tokenizer sample") {}
  void add(std::string_view line) {
    while (line.size() > kLongestSentence) {
      const size_t space = line.rfind(' ', kLongestSentence);
      const bool at_space = space != std::string_view::npos && space > 0;
      const size_t end = at_space ? space : end_of_characters(line);
      add_short(line.substr(0, end));
      line.remove_prefix(at_space ? end + 1 : end);
    }
    add_short(line);
  }
  const std::vector<std::string>& lines() const { return lines_; }

 private:
  // The most bytes of whole UTF-8 characters that a sentence may have.
  static size_t end_of_characters(std::string_view line) {
    size_t end = kLongestSentence;
    while ((static_cast<unsigned char>(line[end]) & 0xC0) == 0x80) --end;
    return end;
  }
  void add_short(std::string_view line) {
    if (line.empty()) return;
    ++seen_;
    if (lines_.size() < most_) return void(lines_.emplace_back(line));
    if (const uint64_t place = random_.below(seen_); place < most_) lines_[place] = line;
  }

  size_t most_;
  Random random_;
  uint64_t seen_ = 0;
  std::vector<std::string> lines_;
};

ReadCounts add_file(const fs::path& file, Sample& sample) {
  BlockReader reader(file);
  DocumentParser parser("text");
  Block block;
  ReadCounts counts;
  while (reader.next(block)) {
    check_interrupt();
    parser.parse(block, counts, [&](const Document& document) {
      ++counts.documents;
      counts.bytes += int64_t(document.text.size());
      for (std::string_view rest = document.text; !rest.empty();) {
        const size_t end = std::min(rest.find('\n'), rest.size());
        sample.add(rest.substr(0, end));
        rest.remove_prefix(std::min(end + 1, rest.size()));
      }
    });
  }
  return counts += reader.counts();
}

// While this object lives, Ctrl-C and SIGTERM end the process directly if they would otherwise be
// noted for later. For work of a library that cannot be stopped and has written nothing.
class EndAtOnce {
 public:
  EndAtOnce() {
    for (Handler& handler : handlers_) {
      handler.before = std::signal(handler.number, end);
      if (handler.before == SIG_DFL || handler.before == SIG_IGN)
        std::signal(handler.number, handler.before);
    }
  }
  ~EndAtOnce() {
    for (const Handler& handler : handlers_) std::signal(handler.number, handler.before);
  }
  EndAtOnce(const EndAtOnce&) = delete;

 private:
  struct Handler {
    int number;
    void (*before)(int) = SIG_DFL;
  };
  static void end(int) {  // calls only functions that a signal handler may call
    constexpr std::string_view message = "\nassay: interrupted; nothing was left behind\n";
    if (::write(STDERR_FILENO, message.data(), message.size()) < 0) ::_exit(kInterrupted);
    ::_exit(kInterrupted);
  }
  std::array<Handler, 2> handlers_{{{SIGINT}, {SIGTERM}}};
};

class Lines final : public sentencepiece::SentenceIterator {
 public:
  explicit Lines(const std::vector<std::string>& lines) : lines_(lines) {}
  bool done() const override { return at_ == lines_.size(); }
  void Next() override { ++at_; }
  const std::string& value() const override { return lines_[at_]; }
  sentencepiece::util::Status status() const override { return {}; }

 private:
  const std::vector<std::string>& lines_;
  size_t at_ = 0;
};

std::unordered_map<std::string, std::string> settings(int64_t vocab_size) {
  return {{"model_type", "bpe"},
          {"vocab_size", std::to_string(vocab_size)},
          {"byte_fallback", "true"},
          {"split_digits", "true"},
          {"normalization_rule_name", "identity"},
          {"add_dummy_prefix", "true"},
          {"remove_extra_whitespaces", "false"},
          {"unk_id", "0"},
          {"bos_id", "1"},
          {"eos_id", "2"},
          {"pad_id", "-1"},
          {"max_sentence_length", std::to_string(kLongestSentence)},
          {"num_threads", "1"},
          {"minloglevel", "2"}};
}

// The number that follows `mark` in the text; "" without one.
std::string number_after(const std::string& text, const std::string& mark) {
  const size_t found = text.find(mark);
  if (found == std::string::npos) return "";
  const size_t begin = found + mark.size();
  return text.substr(begin, text.find_first_not_of("0123456789", begin) - begin);
}

// Why SentencePiece refuses the size of the vocabulary. Its own text names options that
// `assay tokenizer train` does not have.
std::string reason_of(const std::string& message) {
  const std::string text = without_source_position(message);
  const std::string least = number_after(text, " vs ");
  const std::string most = number_after(text, "value <= ");
  if (!least.empty()) return fmt::format("its characters need at least {} tokens", least);
  if (!most.empty()) return fmt::format("the text gives at most {} tokens", most);
  return text.substr(0, text.find_last_not_of('.') + 1);
}

}  // namespace

TrainingFiles training_files(const std::vector<fs::path>& inputs) {
  TrainingFiles files;
  for (const InputFile& file : input_files(inputs)) {
    const bool held_out = split_of(file) != "train";
    if (held_out && !file.searched()) files.held_out_used.push_back(file.path);
    (held_out && file.searched() ? files.left_out : files.used).push_back(file.path);
  }
  if (files.used.empty())
    fail(
        "all {} files are of split valid or test, from which a tokenizer should not learn; "
        "name the files themselves to use them anyway",
        files.left_out.size());
  return files;
}

TrainingFiles train_tokenizer(const TokenizerTraining& training, const fs::path& model) {
  if (training.vocab_size < kFewest || training.vocab_size > 1'000'000)
    fail("a vocabulary of {}; {} … 1000000 was expected", training.vocab_size, kFewest);
  check_output(model);
  if (training.max_sentences < 1)
    fail("a sample of {} sentences; at least 1 was expected", training.max_sentences);
  Sample sample(training.max_sentences, training.seed);
  Progress progress;
  TrainingFiles files = training_files(training.inputs);
  for (const fs::path& file : files.used) {
    progress.show("tokenizer train: reading " + file.string());
    files.counts.push_back(add_file(file, sample));
  }
  if (sample.lines().empty()) {
    ReadCounts all;
    for (const ReadCounts& counts : files.counts) all += counts;
    fail("no text was found in {} (left out: {}); nothing was written",
         counted(int64_t(files.used.size()), "file"), all.all_left_out() ? all.left_out() : "none");
  }
  progress.show(fmt::format("tokenizer train: {} sentences", sample.lines().size()));
  Lines lines(sample.lines());
  std::string contents;
  const auto status = [&] {
    const EndAtOnce on_interrupt;
    check_interrupt();
    return sentencepiece::SentencePieceTrainer::Train(settings(training.vocab_size), &lines,
                                                      &contents);
  }();
  if (!status.ok())
    fail("a vocabulary of {} cannot be learned from {}: {}. Nothing was written.",
         training.vocab_size, counted(int64_t(sample.lines().size()), "sentence"),
         reason_of(status.message()));
  check_interrupt();
  write_file(model, contents);
  return files;
}

}  // namespace assay::data
