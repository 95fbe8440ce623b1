#include "data/store_writer.h"

#include <fcntl.h>
#include <simdjson.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <limits>
#include <optional>
#include <set>
#include <unordered_map>
#include <vector>

#include "base/error.h"
#include "base/json.h"

namespace assay::data {
namespace {

constexpr int64_t kU16Vocabulary = 65500;
constexpr size_t kMostParts = 192;  // four open files each; 1024 is a usual limit

// A buffered file in the temporary folder.
class Output {
 public:
  explicit Output(fs::path path) : path_(std::move(path)), file_(std::fopen(path_.c_str(), "w+b")) {
    check(file_);
  }
  ~Output() {
    if (file_) std::fclose(file_);
  }
  Output(const Output&) = delete;
  void write(const void* data, size_t bytes) { check(std::fwrite(data, 1, bytes, file_) == bytes); }
  template <class T>
  void value(T value) {
    write(&value, sizeof value);
  }
  std::FILE* rewound() {
    check(std::fflush(file_) == 0);
    std::rewind(file_);
    return file_;
  }
  void close() { check(std::fclose(std::exchange(file_, nullptr)) == 0); }
  const fs::path& path() const { return path_; }

 private:
  void check(bool done) const {
    if (!done)
      fail<Error>("{}: cannot be written: {}; nothing was left behind", path_.string(),
                  std::strerror(errno));
  }
  fs::path path_;
  std::FILE* file_;
};

// The source of every document. There are no files until a document names its source.
class SourceOutput {
 public:
  explicit SourceOutput(fs::path stem) : stem_(std::move(stem)) {}
  void add(std::string_view source) {
    if (!source.empty() && !file_) open();
    if (file_) file_->value(position(source));
    else ++without_;
  }
  bool finish() {  // false when no document named a source
    if (!file_) return false;
    file_->close();
    write_file(stem_.string() + ".sources.json", nlohmann::json(names_).dump(1) + "\n");
    return true;
  }

 private:
  void open() {
    file_.emplace(stem_.string() + ".sources");
    for (int64_t i = 0; i < without_; ++i) file_->value(int32_t{-1});
  }
  int32_t position(std::string_view source) {
    if (source.empty()) return -1;
    const auto [found, added] = positions_.try_emplace(std::string(source), int32_t(names_.size()));
    if (added) names_.emplace_back(source);
    return found->second;
  }
  fs::path stem_;
  std::optional<Output> file_;
  int64_t without_ = 0;
  std::vector<std::string> names_;
  std::unordered_map<std::string, int32_t> positions_;
};

// Calls use(length) for every i32 of the file.
void for_each_length(Output& lengths, auto&& use) {
  std::FILE* file = lengths.rewound();
  for (int32_t length; std::fread(&length, sizeof length, 1, file) == 1;) use(length);
}

// One call for all files of a folder: fsync for each would cost a disk turn a file.
void sync_files(const fs::path& folder) {
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY);
  const bool done = descriptor >= 0 && ::syncfs(descriptor) == 0;
  const int code = errno;
  if (descriptor >= 0) ::close(descriptor);
  if (!done)
    fail<Error>("{}: cannot be written: {}; nothing was left behind", folder.string(),
                std::strerror(code));
}

// The files that a token store with this manifest may hold.
std::set<std::string> files_of(const nlohmann::json& manifest) {
  std::set<std::string> files{"manifest.json", "tokenizer.model"};
  for (const auto& part : manifest.at("parts"))
    for (const char* suffix : {"bin", "idx", "bytes", "sources", "sources.json"})
      files.insert(fmt::format("{}.{}.{}", part.at("domain").get<std::string>(),
                               part.at("split").get<std::string>(), suffix));
  return files;
}

// Why the folder must not be replaced, "" when it is empty or a token store and nothing else.
std::string why_to_keep(const fs::path& folder) try {
  if (!fs::is_directory(folder)) return "is not a folder";
  if (fs::is_empty(folder)) return "";
  if (!fs::exists(folder / "manifest.json")) return "is not a token store";
  const auto manifest = parse_json(read_file(folder / "manifest.json"), "manifest.json");
  if (!manifest.is_object() || manifest.value("format", nlohmann::json()) != "assay token store")
    return "is not a token store";
  const auto own = files_of(manifest);
  for (const auto& entry : fs::directory_iterator(folder))
    if (const std::string name = entry.path().filename().string();
        !own.contains(name) || entry.is_directory())
      return fmt::format("holds '{}', which is not part of a token store", name);
  return "";
} catch (const BadInput&) {
  return "has a manifest.json that is not a token store's";
} catch (const nlohmann::json::exception&) {
  return "has a manifest.json that is not a token store's";
}

// The place behind a symbolic link, also behind one to a place where nothing is yet.
fs::path behind_links(fs::path path) {
  constexpr int kMostLinks = 40;
  std::error_code none;  // no such file is no link
  for (int i = 0; i < kMostLinks && fs::is_symlink(path, none); ++i)
    path = path.parent_path() / fs::read_symlink(path);
  return path;
}

bool may_be_in_a_name(char c) {
  const auto byte = static_cast<unsigned char>(c);
  return byte >= 0x80 || std::isalnum(byte) || c == '_' || c == '-';
}

}  // namespace

std::string as_part_name(std::string text) {
  for (char& c : text)
    if (!may_be_in_a_name(c)) c = '_';
  return text;
}

void check_part_name(const std::string& kind, const std::string& name) {
  if (name.empty()) fail("the name of a {} is empty", kind);
  if (int64_t(name.size()) > kLongestPartName)
    fail("the name of a {} has {} bytes; at most {} are allowed: '{:.40}…'", kind, name.size(),
         kLongestPartName, name);
  if (!std::ranges::all_of(name, may_be_in_a_name) || !simdjson::validate_utf8(name))
    fail("the name of the {} '{}' is not allowed: it may hold letters, digits, '_' and '-'", kind,
         name);
}

class StoreWriter::Part {
 public:
  Part(const fs::path& stem, bool narrow)
      : stem_(stem),
        narrow_(narrow),
        bin_(stem.string() + ".bin"),
        bytes_(stem.string() + ".bytes"),
        lengths_(stem.string() + ".lengths"),
        sources_(stem) {}

  void add(std::span<const int32_t> tokens, int64_t bytes, std::string_view source) {
    narrow_ ? write<uint16_t>(tokens) : write<int32_t>(tokens);
    bytes_.value(bytes);
    lengths_.value(int32_t(tokens.size()));
    sources_.add(source);
    documents += 1;
    this->tokens += int64_t(tokens.size());
    text_bytes += bytes;
  }
  nlohmann::json finish() {
    write_index();
    bin_.close();
    bytes_.close();
    lengths_.close();
    fs::remove(lengths_.path());
    std::vector<std::string> suffixes{"bin", "idx", "bytes"};
    if (sources_.finish()) suffixes.insert(suffixes.end(), {"sources", "sources.json"});
    nlohmann::json files;
    for (const std::string& suffix : suffixes) {
      const fs::path file = stem_.string() + "." + suffix;
      files[suffix] = {{"size", int64_t(fs::file_size(file))}, {"sha256", sha256_of_file(file)}};
    }
    return {{"documents", documents},
            {"tokens", tokens},
            {"bytes", text_bytes},
            {"dtype", narrow_ ? "u16" : "i32"},
            {"files", files}};
  }

 private:
  template <class T>
  void write(std::span<const int32_t> tokens) {
    std::vector<T> narrow(tokens.begin(), tokens.end());
    bin_.write(narrow.data(), narrow.size() * sizeof(T));
  }
  void write_index() {
    Output idx(stem_.string() + ".idx");
    idx.write("MMIDIDX\0\0", 9);
    idx.value(uint64_t{1});
    idx.value(uint8_t(narrow_ ? 8 : 4));
    idx.value(uint64_t(documents));
    idx.value(uint64_t(documents + 1));
    for_each_length(lengths_, [&](int32_t length) { idx.value(length); });
    int64_t offset = 0;
    for_each_length(lengths_, [&](int32_t length) {
      idx.value(offset);
      offset += int64_t{length} * (narrow_ ? 2 : 4);
    });
    for (int64_t i = 0; i <= documents; ++i) idx.value(i);
    idx.close();
  }
  fs::path stem_;
  bool narrow_;
  Output bin_;
  Output bytes_;
  Output lengths_;
  SourceOutput sources_;
  int64_t documents = 0;
  int64_t tokens = 0;
  int64_t text_bytes = 0;
};

StoreWriter::StoreWriter(fs::path folder, TokenizerInfo tokenizer, bool overwrite)
    : folder_(std::move(folder)), overwrite_(overwrite), tokenizer_(std::move(tokenizer)) {
  if (!folder_.has_filename()) folder_ = folder_.parent_path();
  folder_ = behind_links(folder_);
  check_place();
  temporary_.emplace(folder_);
}

StoreWriter::~StoreWriter() = default;

void StoreWriter::check_place() const {
  if (!fs::exists(folder_)) return;
  if (!overwrite_)
    fail("{}: exists; nothing was changed. Choose another place or give --overwrite.",
         folder_.string());
  if (const auto reason = why_to_keep(folder_); !reason.empty())
    fail("{}: exists and {}; it was left as it is", folder_.string(), reason);
}

StoreWriter::Part& StoreWriter::part(const std::string& domain, const std::string& split) {
  if (const auto found = parts_.find({domain, split}); found != parts_.end()) return *found->second;
  check_part_name("domain", domain);
  check_part_name("split", split);
  if (parts_.size() >= kMostParts)
    fail("more than {} domains and splits: is the field that names the domain the right one?",
         kMostParts);
  auto& part = parts_[{domain, split}];
  part = std::make_unique<Part>(temporary_->path() / (domain + "." + split),
                                tokenizer_.vocab_size < kU16Vocabulary);
  return *part;
}

void StoreWriter::add(const std::string& domain, const std::string& split,
                      std::span<const int32_t> tokens, int64_t bytes, std::string_view source) {
  if (tokens.size() >= size_t(std::numeric_limits<int32_t>::max()))
    fail("a document of {} tokens; the layout ends at 2^31", tokens.size());
  std::vector<int32_t> ended(tokens.begin(), tokens.end());
  ended.push_back(int32_t(tokenizer_.separator));
  part(domain, split).add(ended, bytes, source);
  tokens_ += int64_t(ended.size());
}

void StoreWriter::set_tokenizer_file(std::string_view contents) {
  write_file(temporary_->path() / "tokenizer.model", contents);
}

nlohmann::json StoreWriter::manifest() {
  nlohmann::json parts = nlohmann::json::array();
  for (auto& [name, part] : parts_) {
    nlohmann::json entry = part->finish();
    entry["domain"] = name.first;
    entry["split"] = name.second;
    parts.push_back(std::move(entry));
  }
  nlohmann::json out = {{"format", "assay token store"}, {"version", 1}, {"parts", parts}};
  out["tokenizer"] = {{"kind", tokenizer_.kind},
                      {"sha256", tokenizer_.sha256},
                      {"vocab_size", tokenizer_.vocab_size},
                      {"separator", tokenizer_.separator}};
  out.update(notes_);
  return out;
}

void StoreWriter::commit() {
  // The name of an input file need not be UTF-8. It has U+FFFD for each wrong byte then.
  const std::string text =
      manifest().dump(1, ' ', /*ensure_ascii=*/false, nlohmann::json::error_handler_t::replace);
  write_file(temporary_->path() / "manifest.json", text + "\n");
  sync_files(temporary_->path());
  check_place();  // again: writing took time
  if (fs::exists(folder_)) exchange_folders(temporary_->path(), folder_);
  else publish_folder(temporary_->path(), folder_);
  temporary_.reset();
}

}  // namespace assay::data
