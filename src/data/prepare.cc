#include "data/prepare.h"

#include <fnmatch.h>

#include <atomic>
#include <chrono>
#include <map>
#include <thread>

#include "base/config.h"
#include "base/error.h"
#include "base/interrupt.h"
#include "base/progress.h"
#include "base/random.h"
#include "data/pipeline.h"
#include "data/reader.h"
#include "data/store_writer.h"
#include "data/word_encoder.h"

namespace assay::data {
namespace {

constexpr int64_t kUnderWay = 96 << 20;  // bytes of text; their tokens and the parsers take about three times as much
constexpr const char* kSetField = "meta.redpajama_set_name";

const std::map<std::string, std::string, std::less<>> kSetNames = {
    {"RedPajamaCommonCrawl", "cc"},     {"RedPajamaC4", "c4"},       {"RedPajamaWikipedia", "wiki"},
    {"RedPajamaBook", "book"},          {"RedPajamaArXiv", "arxiv"}, {"RedPajamaGithub", "github"},
    {"RedPajamaStackExchange", "stack"}};

struct Input {
  size_t file = 0;
  Block block;
};

// The documents of a block, tokenised.
struct Output {
  struct Entry {
    std::string domain, split, source;
    int64_t tokens, bytes;
  };
  size_t file = 0;
  std::vector<Entry> documents;
  std::vector<int32_t> tokens;  // of all documents back to back
  ReadCounts counts;
};

class Preparation {
 public:
  explicit Preparation(const PrepareOptions& options)
      : options_(options),
        files_(input_files(options.inputs)),
        counts_(files_.size()),
        tokenizer_(options.tokenizer),
        writer_(options.store, {"sentencepiece", tokenizer_.sha256(), tokenizer_.vocab_size(), tokenizer_.separator()},
                options.overwrite) {
    for (const fs::path& file : files_) {
      splits_.push_back(split_of(file));
      given_domain_.push_back(domain_by_name(file));
      total_ += fs::file_size(file);
    }
  }

  nlohmann::json run() {
    const int threads =
        options_.threads > 0 ? options_.threads : int(std::max(1u, std::thread::hardware_concurrency()));
    Pipeline<Input, Output> pipeline(
        {[this](Input& in) { return read(in); }, [](const Input& in) { return int64_t(in.block.text.size()); },
         [this] { return worker(); }, [this](Output& out) { write(out); }, [this] { report_progress(); }},
        threads, kUnderWay);
    pipeline.run();
    for (size_t i = 0; i < files_.size(); ++i) counts_[i].too_long += too_long_[i];
    return finish();
  }

 private:
  std::string domain_by_name(const fs::path& file) const {
    for (const auto& [name, glob] : options_.domains)
      if (!::fnmatch(glob.c_str(), file.c_str(), 0) || !::fnmatch(glob.c_str(), file.filename().c_str(), 0))
        return name;
    return "";
  }

  // On the reading thread.
  bool read(Input& in) {
    for (; at_ < files_.size(); ++at_, reader_.reset()) {
      if (!reader_) reader_.emplace(files_[at_]);
      const bool more = reader_->next(in.block);
      consumed_ = finished_files_ + reader_->consumed();
      too_long_[at_] = reader_->too_long();
      if (more) return in.file = at_, true;
      finished_files_ += reader_->consumed();
    }
    return false;
  }

  // On each tokenising thread.
  std::function<void(Input&, Output&)> worker() {
    struct State {
      State(const std::string& domain_field, const std::string& source_field, const Tokenizer& tokenizer)
          : parser(domain_field, source_field), encoder(tokenizer) {}
      DocumentParser parser;
      WordEncoder encoder;
      std::vector<int32_t> ids;
    };
    auto state =
        std::make_shared<State>(options_.field.empty() ? kSetField : options_.field, options_.source_field, tokenizer_);
    return [this, state](Input& in, Output& out) {
      out.file = in.file;
      state->parser.parse(in.block, out.counts, [&](const Document& document) {
        const std::string domain = domain_of(in.file, document);
        if (domain.empty()) return void(++out.counts.unknown_domain);
        if (!state->encoder.encode(document.text, state->ids)) return void(++out.counts.too_long);
        out.tokens.insert(out.tokens.end(), state->ids.begin(), state->ids.end());
        out.documents.push_back({domain, split(in.file, document.text), std::string(document.source),
                                 int64_t(state->ids.size()), int64_t(document.text.size())});
      });
    };
  }
  std::string domain_of(size_t file, const Document& document) const {
    if (!given_domain_[file].empty()) return given_domain_[file];
    if (const auto found = kSetNames.find(document.domain); found != kSetNames.end()) return found->second;
    if (options_.field.empty()) return "";
    std::string name(document.domain);  // any name will do, but it becomes a file name
    for (char& c : name)
      if (!std::isalnum(static_cast<unsigned char>(c)) && c != '-') c = '_';
    return name;
  }
  std::string split(size_t file, std::string_view text) const {
    const bool held_out =
        splits_[file] == "train" && Random(purpose(text), "held out").uniform() < options_.valid_fraction;
    return held_out ? "valid" : splits_[file];
  }

  // On the caller's thread.
  void write(const Output& out) {
    size_t begin = 0;
    ReadCounts& counts = counts_[out.file] += out.counts;
    for (const auto& document : out.documents) {
      writer_.add(document.domain, document.split, std::span(out.tokens).subspan(begin, size_t(document.tokens)),
                  document.bytes, document.source);
      begin += size_t(document.tokens);
      ++counts.documents, counts.bytes += document.bytes, text_bytes_ += document.bytes;
    }
  }
  void report_progress() {
    check_interrupt();
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    const double share = total_ ? double(consumed_) / double(total_) : 1;
    progress_.show(fmt::format("prepare {:5.1f} %   {} tokens   {:.1f} MB/s of text   {} left", 100 * share,
                               Progress::count(double(writer_.tokens())),
                               double(text_bytes_) / 1e6 / std::max(seconds, 1e-3),
                               share > 0 ? Progress::duration(seconds * (1 - share) / share) : "?"));
  }
  nlohmann::json finish() {
    nlohmann::json sources = nlohmann::json::array();
    ReadCounts all;
    for (size_t i = 0; i < files_.size(); ++i) {
      nlohmann::json source = {
          {"file", files_[i].string()}, {"size", int64_t(fs::file_size(files_[i]))}, {"split", splits_[i]}};
      counts_[i].fields([&](const char* name, int64_t count) { source[name] = count; });
      if (const auto left_out = counts_[i].left_out(); !left_out.empty()) source["left_out"] = left_out;
      sources.push_back(std::move(source));
      all += counts_[i];
    }
    if (all.documents == 0)
      fail("no document was found in {} files ({} lines or files were left out: {}); nothing was written.{}",
           files_.size(), all.broken_lines + all.invalid_utf8 + all.empty + all.too_long + all.unknown_domain,
           all.left_out().empty() ? "none" : all.left_out(),
           all.unknown_domain
               ? fmt::format("\n  The domain is read from {}; --field or --domain NAME=GLOB names another way.",
                             options_.field.empty() ? kSetField : options_.field)
               : "");
    nlohmann::json report = {{"sources", std::move(sources)}, {"valid_fraction", options_.valid_fraction}};
    all.fields([&](const char* name, int64_t count) { report["total"][name] = count; });
    for (const auto& [key, value] : report.items()) writer_.note(key, value);
    writer_.set_tokenizer_file(tokenizer_.contents());
    writer_.commit();
    report["total"]["tokens"] = writer_.tokens();
    report["total"]["seconds"] = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    return report;
  }

  const PrepareOptions& options_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  const std::vector<fs::path> files_;
  std::vector<std::string> splits_, given_domain_;  // of each file
  std::vector<ReadCounts> counts_;
  std::vector<int64_t> too_long_ = std::vector<int64_t>(files_.size());
  const Tokenizer tokenizer_;
  StoreWriter writer_;
  Progress progress_;
  size_t at_ = 0, finished_files_ = 0, total_ = 0;
  std::optional<BlockReader> reader_;
  std::atomic<size_t> consumed_ = 0;
  int64_t text_bytes_ = 0;
};

}  // namespace

std::string split_of(const fs::path& file) {
  auto known = [](const std::string& word) -> std::string {
    if (word == "validation") return "valid";
    return word == "train" || word == "valid" || word == "test" ? word : "";
  };
  std::string name = file.filename().string() + ".";
  for (size_t dot; (dot = name.find('.')) != std::string::npos; name.erase(0, dot + 1))
    if (const auto split = known(name.substr(0, dot)); !split.empty()) return split;
  for (fs::path folder = file.parent_path(); folder.has_relative_path(); folder = folder.parent_path())
    if (const auto split = known(folder.filename().string()); !split.empty()) return split;
  return "train";
}

nlohmann::json prepare(const PrepareOptions& options) {
  if (!(options.valid_fraction >= 0 && options.valid_fraction < 1))
    fail("valid_fraction is {}; 0 … 1 was expected", options.valid_fraction);
  if (options.threads < 0) fail("threads is {}; a positive number, or 0 for one a core, was expected", options.threads);
  return Preparation(options).run();
}

}  // namespace assay::data
