#include "data/prepare.h"

#include <fnmatch.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <map>
#include <set>
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

// Bytes of text; their tokens and the parsers take about three times as much
constexpr int64_t kUnderWay = 96 << 20;
constexpr int kMostThreads = 1024;  // each takes tens of MB for the words that it remembers
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
    std::string domain;
    std::string split;
    std::string source;
    int64_t tokens;
    int64_t bytes;
  };
  size_t file = 0;
  std::vector<Entry> documents;
  std::vector<int32_t> tokens;  // of all documents back to back
  ReadCounts counts;
  std::set<std::pair<std::string, std::string>> names;  // domain, what the field said
  // That the first document without a domain has, and the first one without a text
  std::vector<std::string> fields_instead;
  std::vector<std::string> fields_without_text;
};

// The nearest folder that is not named after a split, as the name of a domain.
std::string domain_of_folder(const fs::path& file) {
  for (fs::path folder = fs::absolute(file).lexically_normal().parent_path();
       folder.has_relative_path(); folder = folder.parent_path())
    if (const std::string name = folder.filename().string(); !is_split_name(name))
      return as_part_name(name);
  return "text";
}

// A glob that matches the files of the folder of `file`.
std::string glob_of_folder(const fs::path& file) {
  if (!file.has_parent_path()) return "*" + file.extension().string();
  std::string glob;
  for (const char c : file.parent_path().string()) {
    if (std::string_view("*?[\\").find(c) != std::string_view::npos) glob += '\\';
    glob += c;
  }
  return glob + "/*";
}

class Preparation {
 public:
  explicit Preparation(const PrepareOptions& options)
      : options_(options),
        files_(input_files(options.inputs)),
        counts_(files_.size()),
        tokenizer_(options.tokenizer),
        writer_(
            options.store,
            {"sentencepiece", tokenizer_.sha256(), tokenizer_.vocab_size(), tokenizer_.separator()},
            options.overwrite) {
    for (const auto& [name, glob] : options.domains) check_part_name("domain", name);
    for (const InputFile& file : files_) {
      splits_.push_back(split_of(file));
      given_domain_.push_back(domain_by_name(file.path));
      total_ += fs::file_size(file.path);
    }
  }

  nlohmann::json run() {
    const int threads = options_.threads > 0
                            ? options_.threads
                            : int(std::max(1u, std::thread::hardware_concurrency()));
    Pipeline<Input, Output> pipeline(
        {[this](Input& in) { return read(in); },
         [](const Input& in) { return int64_t(in.block.text.size()); }, [this] { return worker(); },
         [this](Output& out) { write(out); }, [this] { report_progress(); }},
        threads, kUnderWay);
    pipeline.run();
    for (size_t i = 0; i < files_.size(); ++i) counts_[i] += reader_counts_[i];
    return finish();
  }

 private:
  // The domain of the first pattern that matches. Counts what each pattern matches and takes.
  std::string domain_by_name(const fs::path& file) {
    std::string domain;
    bool taken = false;
    for (size_t i = 0; i < options_.domains.size(); ++i) {
      const auto& [name, glob] = options_.domains[i];
      if (::fnmatch(glob.c_str(), file.c_str(), 0) &&
          ::fnmatch(glob.c_str(), file.filename().c_str(), 0))
        continue;
      ++patterns_[i].matched;
      patterns_[i].took = patterns_[i].took || !taken;
      if (!taken) domain = name;
      taken = true;
    }
    return domain;
  }

  // On the reading thread.
  bool read(Input& in) {
    for (; at_ < files_.size(); ++at_, reader_.reset()) {
      if (!reader_) reader_.emplace(files_[at_].path);
      const bool more = reader_->next(in.block);
      consumed_ = finished_files_ + reader_->consumed();
      reader_counts_[at_] = reader_->counts();
      if (more) {
        in.file = at_;
        return true;
      }
      finished_files_ += reader_->consumed();
    }
    return false;
  }

  // On each tokenising thread.
  std::function<void(Input&, Output&)> worker() {
    struct State {
      State(const std::string& domain_field, const std::string& source_field,
            const Tokenizer& tokenizer)
          : parser(domain_field, source_field), encoder(tokenizer) {}
      DocumentParser parser;
      WordEncoder encoder;
      std::vector<int32_t> ids;
    };
    auto state = std::make_shared<State>(options_.field.empty() ? kSetField : options_.field,
                                         options_.source_field, tokenizer_);
    return [this, state](Input& in, Output& out) {
      out.file = in.file;
      state->parser.parse(in.block, out.counts, [&](const Document& document) {
        const std::string domain = domain_of(in.file, document, out);
        if (domain.empty()) {
          if (out.counts.unknown_domain++ == 0) out.fields_instead = state->parser.string_fields();
          return;
        }
        if (!state->encoder.encode(document.text, state->ids)) {
          ++out.counts.too_long;
          return;
        }
        tokens_encoded_ += int64_t(state->ids.size());
        bytes_encoded_ += int64_t(document.text.size());
        out.tokens.insert(out.tokens.end(), state->ids.begin(), state->ids.end());
        out.documents.push_back({domain, split(in.file, document.text),
                                 std::string(document.source), int64_t(state->ids.size()),
                                 int64_t(document.text.size())});
      });
      out.fields_without_text = state->parser.fields_without_text();
    };
  }
  std::string domain_of(size_t file, const Document& document, Output& out) const {
    if (!given_domain_[file].empty()) return given_domain_[file];
    if (const auto found = kSetNames.find(document.domain); found != kSetNames.end()) {
      if (!options_.field.empty()) out.names.emplace(found->second, document.domain);
      return found->second;
    }
    if (options_.field.empty() || int64_t(document.domain.size()) > kLongestPartName) return "";
    std::string given(document.domain);
    std::string name = as_part_name(given);
    out.names.emplace(name, std::move(given));
    return name;
  }
  std::string split(size_t file, std::string_view text) const {
    const bool held_out = splits_[file] == "train" &&
                          Random(purpose(text), "held out").uniform() < options_.valid_fraction;
    return held_out ? "valid" : splits_[file];
  }

  // On the caller's thread.
  void write(const Output& out) {
    size_t begin = 0;
    ReadCounts& counts = counts_[out.file] += out.counts;
    for (const auto& document : out.documents) {
      writer_.add(document.domain, document.split,
                  std::span(out.tokens).subspan(begin, size_t(document.tokens)), document.bytes,
                  document.source);
      begin += size_t(document.tokens);
      ++counts.documents;
      counts.bytes += document.bytes;
      ++documents_[document.domain][document.split];
      if (document.split != splits_[out.file]) ++held_out_[document.domain];
    }
    names_.insert(out.names.begin(), out.names.end());
    if (fields_instead_.empty()) fields_instead_ = out.fields_instead;
    if (fields_without_text_.empty()) fields_without_text_ = out.fields_without_text;
  }
  void report_progress() {
    check_interrupt();
    if (tokens_encoded_ == 0) {
      progress_.show(fmt::format("prepare: reading {}, {:.1f} MB",
                                 counted(int64_t(files_.size()), "file"), double(total_) / 1e6));
      return;
    }
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    const double share = total_ ? double(consumed_) / double(total_) : 1;
    progress_.show(
        fmt::format("prepare {:5.1f} %   {} tokens   {:.1f} MB/s of text   {} left", 100 * share,
                    Progress::count(double(tokens_encoded_)),
                    double(bytes_encoded_) / 1e6 / std::max(seconds, 1e-3),
                    share > 0 ? Progress::duration(seconds * (1 - share) / share) : "?"));
  }

  // Advice on documents without a known domain: another --field, or --domain with their folders.
  std::string other_ways() const {
    const std::string field = options_.field.empty() ? kSetField : options_.field;
    std::string text = fmt::format("The domain is read from '{}'", field);
    if (std::ranges::find(fields_instead_, field) != fields_instead_.end())
      text += fmt::format(
          ", where only SlimPajama's set names count; --field {} accepts every name", field);
    else if (!fields_instead_.empty())
      text += fmt::format(", which is missing (there are: {}{})", join(fields_instead_),
                          did_you_mean(field, fields_instead_));
    // The pattern of a folder matches the files of the folders in it, too, and the first pattern
    // counts: so deeper folders come first.
    std::set<std::pair<std::ptrdiff_t, std::string>> globs;  // minus the depth, option
    for (size_t i = 0; i < files_.size(); ++i) {
      if (!counts_[i].unknown_domain || counts_[i].documents) continue;
      const std::string glob = glob_of_folder(files_[i].path);
      globs.emplace(-std::ranges::count(glob, '/'),
                    fmt::format("--domain '{}={}'", domain_of_folder(files_[i].path), glob));
    }
    constexpr size_t kMost = 8;
    std::vector<std::string> first;
    for (const auto& [depth, option] : globs)
      if (first.size() < kMost) first.push_back(option);
    if (globs.size() > first.size()) first.push_back("…");
    text += ". Use --field with another field, or name domains after folders: " + join(first, " ");
    return text;
  }

  // A wrong split moves test text into the training text, so a doubtful one is named.
  void warn_of_splits(std::vector<std::string>& out) const {
    std::vector<size_t> several;
    std::vector<size_t> above;
    for (size_t i = 0; i < files_.size(); ++i) {
      const auto splits = splits_in(files_[i]);
      if (std::set(splits.begin(), splits.end()).size() > 1) several.push_back(i);
      if (splits.empty() && is_below_a_split(files_[i].input)) above.push_back(i);
    }
    if (!several.empty())
      out.push_back(fmt::format(
          "the paths of {} files name several splits (the first: {}, taken as {}); "
          "the name of the file counts first, then the outermost folder",
          several.size(), files_[several.front()].path.string(), splits_[several.front()]));
    if (!above.empty())
      out.push_back(
          fmt::format("{} files are of split train (the first: {}). "
                      "A folder above the given path is called valid or test. "
                      "Only the given folder and the folders in it name splits.",
                      above.size(), files_[above.front()].path.string()));
  }
  static bool is_below_a_split(const fs::path& input) {
    return std::ranges::any_of(input.lexically_normal().parent_path(), [](const fs::path& folder) {
      return is_split_name(folder.string()) && folder != "train";
    });
  }

  void warn_of_unused_patterns(std::vector<std::string>& out) const {
    for (size_t i = 0; i < patterns_.size(); ++i) {
      const auto& [name, glob] = options_.domains[i];
      if (patterns_[i].matched == 0)
        out.push_back(fmt::format("--domain '{}={}' matches none of the {} files", name, glob,
                                  files_.size()));
      else if (!patterns_[i].took)
        out.push_back(fmt::format(
            "--domain '{}={}' took no file: patterns before it took all {} files that it matches. "
            "The first pattern that matches a file counts, so give this one earlier.",
            name, glob, patterns_[i].matched));
    }
  }

  std::string missing_text() const {
    std::string text = "A JSON document needs a field 'text' that holds a string";
    if (!fields_without_text_.empty())
      text += fmt::format(" (strings are in: {})", join(fields_without_text_));
    return text;
  }
  void warn_of_files_without_text(std::vector<std::string>& out) const {
    std::vector<size_t> files;
    for (size_t i = 0; i < files_.size(); ++i)
      if (counts_[i].without_text && counts_[i].documents == 0) files.push_back(i);
    if (!files.empty())
      out.push_back(fmt::format("{} of {} files have no document with a text (the first: {}). {}",
                                files.size(), files_.size(), files_[files.front()].path.string(),
                                missing_text()));
  }

  void warn_of_broken_lines(std::vector<std::string>& out) const {
    int64_t files = 0;
    int64_t lines = 0;
    size_t first = 0;
    for (size_t i = counts_.size(); i-- > 0;) {
      if (counts_[i].broken_lines == 0) continue;
      first = i;
      ++files;
      lines += counts_[i].broken_lines;
    }
    if (files > 0)
      out.push_back(
          fmt::format("{} of {} files have broken lines, {} in all (the first: {}, {}). "
                      "Each line must hold one JSON object. "
                      "A compressed text is read as one if its name is as TEXT.txt.gz.",
                      files, files_.size(), lines, files_[first].path.string(),
                      counts_[first].first_broken_line));
  }

  std::vector<std::string> warnings() const {
    std::vector<std::string> out;
    warn_of_splits(out);
    warn_of_unused_patterns(out);
    warn_of_files_without_text(out);
    warn_of_broken_lines(out);
    std::vector<std::string> unused;
    for (size_t i = 0; i < files_.size(); ++i)
      if (counts_[i].unknown_domain && counts_[i].documents == 0)
        unused.push_back(files_[i].path.string());
    if (!unused.empty())
      out.push_back(fmt::format(
          "{} of {} files were left out because no domain is known for them (the first: {}). {}",
          unused.size(), files_.size(), unused.front(), other_ways()));
    std::map<std::string, std::vector<std::string>> names;
    for (const auto& [domain, given] : names_) names[domain].push_back("'" + given + "'");
    for (const auto& [domain, given] : names)
      if (given.size() > 1)
        out.push_back(fmt::format("domain {} holds the documents of {} different names: {}", domain,
                                  given.size(), join(given)));
    for (const auto& [domain, splits] : documents_)
      if (splits.contains("train") && !splits.contains("valid") && options_.valid_fraction > 0)
        out.push_back(
            fmt::format("domain {} has no split valid, from which a study reads its held-out loss: "
                        "by chance none of its {} training documents was chosen; "
                        "--valid-fraction {:.2g} chooses about {}",
                        domain, splits.at("train"), enough(splits.at("train")),
                        std::llround(enough(splits.at("train")) * double(splits.at("train")))));
    for (const auto& [domain, chosen] : held_out_) {
      const auto& splits = documents_.at(domain);
      if (!splits.contains("train") || !splits.contains("valid")) continue;
      if (splits.at("valid") >= kFewHeldOut) continue;
      const int64_t all = splits.at("train") + chosen;
      if (all < 2 * kFewHeldOut) continue;  // no share gives more and leaves text for training
      out.push_back(fmt::format(
          "domain {} has {} documents in split valid, from which a study reads its held-out loss; "
          "--valid-fraction {:.2g} chooses about {}",
          domain, splits.at("valid"), enough(all), std::llround(enough(all) * double(all))));
    }
    for (const auto& [domain, count] : held_out_)
      if (!documents_.at(domain).contains("train"))
        out.push_back(fmt::format(
            "domain {} has no split train: by chance all of its {} documents became split valid; "
            "give more documents or a smaller --valid-fraction",
            domain, count));
    return out;
  }
  // The share that gives about ten documents, at most a half.
  static double enough(int64_t documents) { return std::min(0.5, kFewHeldOut / double(documents)); }
  static constexpr int64_t kFewHeldOut = 10;

  nlohmann::json finish() {
    nlohmann::json sources = nlohmann::json::array();
    ReadCounts all;
    for (size_t i = 0; i < files_.size(); ++i) {
      nlohmann::json source = {{"file", files_[i].path.string()},
                               {"size", int64_t(fs::file_size(files_[i].path))},
                               {"split", splits_[i]}};
      counts_[i].fields([&](const char* name, int64_t count) { source[name] = count; });
      if (const auto left_out = counts_[i].left_out(by_word_); !left_out.empty())
        source["left_out"] = left_out;
      sources.push_back(std::move(source));
      if (all.first_broken_line.empty() && counts_[i].broken_lines > 0)
        all.first_broken_line =
            fmt::format("{}, {}", files_[i].path.string(), counts_[i].first_broken_line);
      all += counts_[i];
    }
    if (all.documents == 0)
      fail("no document was found in {} (left out: {}); nothing was written.{}{}",
           counted(int64_t(files_.size()), "file"),
           all.all_left_out() ? all.left_out(by_word_) : "none",
           all.unknown_domain ? "\n  " + other_ways() : "",
           all.without_text ? "\n  " + missing_text() : "");
    nlohmann::json report = {{"sources", std::move(sources)},
                             {"valid_fraction", options_.valid_fraction}};
    if (auto sentences = warnings(); !sentences.empty()) report["warnings"] = std::move(sentences);
    all.fields([&](const char* name, int64_t count) { report["total"][name] = count; });
    for (const auto& [key, value] : report.items()) writer_.note(key, value);
    writer_.set_tokenizer_file(tokenizer_.contents());
    writer_.commit();
    report["total"]["tokens"] = writer_.tokens();
    report["total"]["seconds"] =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    return report;
  }

  const PrepareOptions& options_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  const std::vector<InputFile> files_;
  struct Pattern {
    int64_t matched = 0;  // files
    bool took = false;    // the domain of a file
  };
  std::vector<Pattern> patterns_ = std::vector<Pattern>(options_.domains.size());
  // of each file
  std::vector<std::string> splits_;
  std::vector<std::string> given_domain_;
  std::vector<ReadCounts> counts_;
  std::vector<ReadCounts> reader_counts_ = std::vector<ReadCounts>(files_.size());
  const Tokenizer tokenizer_;
  const bool by_word_ = WordEncoder(tokenizer_).by_word();
  StoreWriter writer_;
  Progress progress_;
  size_t at_ = 0;
  size_t finished_files_ = 0;
  size_t total_ = 0;
  std::optional<BlockReader> reader_;
  std::atomic<size_t> consumed_ = 0;
  std::atomic<int64_t> tokens_encoded_ = 0;
  std::atomic<int64_t> bytes_encoded_ = 0;
  std::map<std::string, std::map<std::string, int64_t>> documents_;  // written, by domain and split
  std::set<std::pair<std::string, std::string>> names_;              // domain, what the field said
  std::map<std::string, int64_t> held_out_;  // training documents moved to valid, by domain
  std::vector<std::string> fields_instead_;
  std::vector<std::string> fields_without_text_;
};

}  // namespace

nlohmann::json prepare(const PrepareOptions& options) {
  if (!(options.valid_fraction >= 0 && options.valid_fraction < 1))
    fail("valid_fraction is {}; 0 … 1 was expected", options.valid_fraction);
  if (options.threads < 0 || options.threads > kMostThreads)
    fail("threads is {}; 1 … {}, or 0 for one per core, was expected", options.threads,
         kMostThreads);
  return Preparation(options).run();
}

}  // namespace assay::data
