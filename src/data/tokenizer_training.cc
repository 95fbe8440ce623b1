#include <sentencepiece_trainer.h>

#include <unordered_map>

#include "base/error.h"
#include "base/interrupt.h"
#include "base/progress.h"
#include "base/random.h"
#include "data/reader.h"
#include "data/tokenizer.h"

namespace assay::data {
namespace {

constexpr size_t kLongestSentence = 1 << 16;  // bytes; longer lines say little about words
constexpr int64_t kFewest = 256 + 3 + 1;      // bytes, controls and one piece

// An even sample of all lines, in bounded memory [Vitter 1985, algorithm R].
class Sample {
 public:
  Sample(int64_t most, int64_t seed)
      : most_(size_t(most)), random_(uint64_t(seed), "tokenizer sample") {}
  void add(std::string_view line) {
    if (line.empty() || line.size() > kLongestSentence) return;
    ++seen_;
    if (lines_.size() < most_) return void(lines_.emplace_back(line));
    if (const uint64_t place = random_.below(seen_); place < most_) lines_[place] = line;
  }
  const std::vector<std::string>& lines() const { return lines_; }

 private:
  size_t most_;
  Random random_;
  uint64_t seen_ = 0;
  std::vector<std::string> lines_;
};

void add_file(const fs::path& file, Sample& sample) {
  BlockReader reader(file);
  DocumentParser parser("text");
  Block block;
  ReadCounts counts;
  while (reader.next(block)) {
    check_interrupt();
    parser.parse(block, counts, [&](const Document& document) {
      for (std::string_view rest = document.text; !rest.empty();) {
        const size_t end = std::min(rest.find('\n'), rest.size());
        sample.add(rest.substr(0, end));
        rest.remove_prefix(std::min(end + 1, rest.size()));
      }
    });
  }
}

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
  if (training.max_sentences < 1)
    fail("a sample of {} sentences; at least 1 was expected", training.max_sentences);
  Sample sample(training.max_sentences, training.seed);
  Progress progress;
  TrainingFiles files = training_files(training.inputs);
  for (const fs::path& file : files.used) {
    progress.show("tokenizer train: reading " + file.string());
    add_file(file, sample);
  }
  if (sample.lines().empty()) fail("no text was found; nothing was written");
  progress.show(fmt::format("tokenizer train: {} sentences", sample.lines().size()));
  Lines lines(sample.lines());
  std::string contents;
  const auto status =
      sentencepiece::SentencePieceTrainer::Train(settings(training.vocab_size), &lines, &contents);
  if (!status.ok())
    fail("a vocabulary of {} cannot be learned from {} sentences: {}; nothing was written",
         training.vocab_size, sample.lines().size(), without_source_position(status.message()));
  write_file(model, contents);
  return files;
}

}  // namespace assay::data
