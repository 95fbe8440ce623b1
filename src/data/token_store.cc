#include "data/token_store.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "base/record.h"

namespace assay::data {
namespace {

constexpr int64_t kHeader = 9 + 8 + 1 + 8 + 8;

template <class T>
T load(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

fs::path with_suffix(const fs::path& stem, const char* suffix) { return stem.string() + suffix; }

nlohmann::json read_manifest(const fs::path& folder) {
  const fs::path file = folder / "manifest.json";
  if (!fs::is_directory(folder))
    fail("{}: no such folder; a token store was expected (assay data prepare writes one)",
         folder.string());
  if (!fs::exists(file)) fail("{}: not a token store: it has no manifest.json", folder.string());
  auto manifest = parse_json(read_file(file), file.string());
  if (!manifest.is_object() || manifest.value("format", nlohmann::json()) != "assay token store")
    fail("{}: not the manifest of a token store", file.string());
  if (manifest.value("version", nlohmann::json()) != 1)
    fail("{}: written by another version of the format; this program reads version 1",
         file.string());
  return manifest;
}

}  // namespace

int64_t Tokens::operator[](int64_t i) const {
  return width_ == 2 ? int64_t{load<uint16_t>(data_ + 2 * i)}
                     : int64_t{load<int32_t>(data_ + 4 * i)};
}

void Tokens::copy(int64_t begin, int64_t count, int64_t* out) const {
  for (int64_t i = 0; i < count; ++i) out[i] = (*this)[begin + i];
}

Documents::Documents(const fs::path& stem, int64_t vocabulary)
    : stem_(stem),
      vocabulary_(vocabulary),
      bin_(with_suffix(stem, ".bin")),
      idx_(with_suffix(stem, ".idx")) {
  const auto idx = idx_.bytes();
  const std::string name = with_suffix(stem, ".idx").string();
  if (int64_t(idx.size()) < kHeader || std::memcmp(idx.data(), "MMIDIDX\0\0", 9))
    fail("{}: not an index in Megatron's layout (wrong first bytes)", name);
  if (const auto version = load<uint64_t>(idx.data() + 9); version != 1)
    fail("{}: index version {}, expected 1", name, version);
  const int code = load<uint8_t>(idx.data() + 17);
  if (code != 4 && code != 8) fail("{}: dtype code {}, expected 4 (i32) or 8 (u16)", name, code);
  width_ = code == 8 ? 2 : 4;
  sequences_ = load<int64_t>(idx.data() + 18);
  const auto indices = load<int64_t>(idx.data() + 26);
  const int64_t room = int64_t(idx.size()) - kHeader;
  if (sequences_ < 0 || indices < 1 || sequences_ > room / 12 || indices > room / 8 ||
      12 * sequences_ + 8 * indices != room)
    fail(
        "{}: {} bytes do not hold the {} sequences and {} document indices it announces; "
        "the file is cut off or damaged",
        name, idx.size(), sequences_, indices);
  documents_ = indices - 1;
  int64_t end = 0;
  if (sequences_ > 0)  // offset() bounds the first term, so the sum does not overflow
    end = offset(sequences_ - 1) +
          int64_t{width_} * load<int32_t>(idx.data() + kHeader + 4 * (sequences_ - 1));
  if (end != int64_t(bin_.bytes().size()) || index(0) != 0 || index(documents_) != sequences_)
    fail(
        "{}: the index describes {} bytes of tokens, the .bin file has {}; "
        "one of them is cut off or damaged",
        name, end, bin_.bytes().size());
  open_bytes();
  open_sources();
}

void Documents::open_bytes() {
  const fs::path file = with_suffix(stem_, ".bytes");
  if (!fs::exists(file)) return;
  bytes_.emplace(file);
  if (int64_t(bytes_->bytes().size()) != 8 * documents_)
    fail("{}: {} bytes, expected 8 for each of {} documents", file.string(), bytes_->bytes().size(),
         documents_);
}

void Documents::open_sources() {
  const fs::path file = with_suffix(stem_, ".sources");
  const fs::path names = with_suffix(stem_, ".sources.json");
  if (!fs::exists(file)) return;
  sources_.emplace(file);
  if (int64_t(sources_->bytes().size()) != 4 * documents_)
    fail("{}: {} bytes, expected 4 for each of {} documents", file.string(),
         sources_->bytes().size(), documents_);
  const auto list = parse_json(read_file(names), names.string());
  const bool strings = list.is_array() &&
                       std::ranges::all_of(list, [](const auto& name) { return name.is_string(); });
  if (!strings) fail("{}: a JSON list of the names of the sources was expected", names.string());
  source_names_ = list.get<std::vector<std::string>>();
}

int64_t Documents::offset(int64_t sequence) const {
  const int64_t size = int64_t(bin_.bytes().size());
  if (sequence == sequences_) return size;
  const auto at = load<int64_t>(idx_.bytes().data() + kHeader + 4 * sequences_ + 8 * sequence);
  if (at < 0 || at > size || at % width_)
    fail("{0}.idx: sequence {1} begins at byte {2} of {3}; {0}.bin is cut off or damaged",
         stem_.string(), sequence, at, size);
  return at;
}

int64_t Documents::index(int64_t document) const {
  const auto first = load<int64_t>(idx_.bytes().data() + kHeader + 12 * sequences_ + 8 * document);
  if (first < 0 || first > sequences_)
    fail("{}.idx: document {} begins at sequence {} of {}", stem_.string(), document, first,
         sequences_);
  return first;
}

int64_t Documents::begin(int64_t i) const { return offset(index(i)) / width_; }

Tokens Documents::document(int64_t i) const {
  if (i < 0 || i >= documents_) fail<Error>("{}: document {} of {}", stem_.string(), i, documents_);
  const int64_t from = begin(i);
  const int64_t to = begin(i + 1);
  if (to < from) fail("{}.idx: document {} ends before it begins", stem_.string(), i);
  return {bin_.bytes().data() + from * width_, to - from, width_};
}

Tokens Documents::stream() const {
  return {bin_.bytes().data(), int64_t(bin_.bytes().size()) / width_, width_};
}

int64_t Documents::bytes(int64_t i) const {
  if (!bytes_) fail("{}.bytes: missing, so bits per byte are unknown", stem_.string());
  return load<int64_t>(bytes_->bytes().data() + 8 * i);
}

int64_t Documents::bytes() const {
  int64_t sum = 0;
  for (int64_t i = 0; i < documents_; ++i) sum += bytes(i);
  return sum;
}

int64_t Documents::source(int64_t i) const {
  if (i < 0 || i >= documents_) fail<Error>("{}: document {} of {}", stem_.string(), i, documents_);
  if (!sources_) return -1;
  const int64_t source = load<int32_t>(sources_->bytes().data() + 4 * i);
  if (source < -1 || source >= int64_t(source_names_.size()))
    fail("{}.sources: document {} has source {}, but {} sources have a name", stem_.string(), i,
         source, source_names_.size());
  return source;
}

void Documents::read(int64_t offset, int64_t count, int64_t* out) const {
  const Tokens all = stream();
  if (offset < 0 || count < 0 || offset + count > all.size())
    fail<Error>("{}: tokens {} … {} were requested from {}", stem_.string(), offset,
                offset + count - 1, all.size());
  all.copy(offset, count, out);
  for (int64_t i = 0; i < count; ++i)
    if (out[i] < 0 || out[i] >= vocabulary_) fail_id(offset + i, out[i], vocabulary_);
}

void Documents::fail_id(int64_t token, int64_t id, int64_t vocabulary) const {
  fail(
      "{}.bin: token {} has id {}, but the vocabulary has {} ids; the file is damaged, "
      "or the manifest is not its own",
      stem_.string(), token, id, vocabulary);
}

void Documents::verify_sources() const {
  for (int64_t i = 0; i < documents_; ++i) source(i);
  auto names = source_names_;
  std::ranges::sort(names);
  if (const auto twice = std::ranges::adjacent_find(names); twice != names.end())
    fail("{}.sources.json: the name '{}' occurs twice", stem_.string(), *twice);
}

void Documents::verify(int64_t vocabulary) const {
  const std::byte* lengths = idx_.bytes().data() + kHeader;
  for (int64_t i = 0; i < sequences_; ++i)
    if (offset(i + 1) - offset(i) != width_ * int64_t{load<int32_t>(lengths + 4 * i)})
      fail("{}.idx: length and offsets of sequence {} disagree", stem_.string(), i);
  for (int64_t i = 0; i < documents_; ++i) document(i);  // throws if its end is before its begin
  verify_sources();
  const Tokens all = stream();
  for (int64_t i = 0; i < all.size(); ++i)
    if (all[i] < 0 || all[i] >= vocabulary) fail_id(i, all[i], vocabulary);
}

TokenStore::TokenStore(const fs::path& folder) : folder_(folder), manifest_(read_manifest(folder)) {
  const std::string file = (folder / "manifest.json").string();
  auto manifest = from_json<Manifest>(manifest_, file);
  tokenizer_ = std::move(manifest.tokenizer);
  parts_ = std::move(manifest.parts);
  if (vocab_size() < 1 || vocab_size() > kAnyVocabulary)
    fail("{}: vocab_size is {}; 1 … 2^31 was expected", file, vocab_size());
  if (separator() < 0 || separator() >= vocab_size())
    fail("{}: separator is {}; an id of the vocabulary of {} was expected", file, separator(),
         vocab_size());
  for (const Part& part : parts_) open(part);
}

void TokenStore::open(const Part& part) {
  const fs::path stem = folder_ / part.stem();
  const auto is_path = [](const auto& file) { return file.first.find('/') != std::string::npos; };
  if (part.stem().find('/') != std::string::npos || std::ranges::any_of(part.files, is_path))
    fail("{}/manifest.json: '{}' or the name of one of its files is not a file name",
         folder_.string(), part.stem());
  if (has(part.domain, part.split))
    fail("{}/manifest.json: '{}' occurs twice", folder_.string(), part.stem());
  auto documents = std::make_unique<Documents>(stem, vocab_size());
  if (documents->tokens() != part.tokens || documents->size() != part.documents)
    fail("{}: {} tokens in {} documents, but the manifest says {} in {}", stem.string(),
         documents->tokens(), documents->size(), part.tokens, part.documents);
  const auto check_listed = [&](const char* suffix, bool is_there) {
    if (is_there != part.files.contains(suffix))
      fail("{}.{}: {}", stem.string(), suffix,
           is_there ? "it is not in the manifest" : "the manifest has it, but it is missing");
  };
  check_listed("bytes", documents->has_bytes());
  check_listed("sources", documents->has_sources());
  documents_[part.domain][part.split] = std::move(documents);
}

std::vector<std::string> TokenStore::domains() const {
  std::vector<std::string> names;
  for (const auto& [name, splits] : documents_) names.push_back(name);
  return names;
}

std::vector<std::string> TokenStore::splits(const std::string& domain) const {
  std::vector<std::string> names;
  if (const auto found = documents_.find(domain); found != documents_.end())
    for (const auto& [name, documents] : found->second) names.push_back(name);
  return names;
}

bool TokenStore::has(const std::string& domain, const std::string& split) const {
  const auto found = documents_.find(domain);
  return found != documents_.end() && found->second.contains(split);
}

const Documents& TokenStore::documents(const std::string& domain, const std::string& split) const {
  if (has(domain, split)) return *documents_.at(domain).at(split);
  const auto known = documents_.contains(domain) ? splits(domain) : domains();
  fail("{}: no {} '{}'{}{}\n  There are: {}.", folder_.string(),
       documents_.contains(domain) ? "split" : "domain",
       documents_.contains(domain) ? split : domain,
       documents_.contains(domain) ? " of domain " + domain : "",
       did_you_mean(documents_.contains(domain) ? split : domain, known), join(known));
}

std::string TokenStore::fingerprint(const std::set<std::string>& parts) const {
  std::string content = fmt::format("{} {} {} {}\n", tokenizer_.kind, tokenizer_.sha256,
                                    tokenizer_.vocab_size, tokenizer_.separator);
  for (const Part& part : parts_) {
    if (!parts.empty() && !parts.contains(part.stem())) continue;
    for (const auto& [suffix, file] : part.files)
      content += fmt::format("{}.{} {} {}\n", part.stem(), suffix, file.size, file.sha256);
  }
  return sha256(content);
}

void TokenStore::verify() const {
  auto check = [&](const std::string& name, const std::string& expected) {
    if (sha256_of_file(folder_ / name) != expected)
      fail("{}: its contents changed since it was written (sha256 differs from the manifest's)",
           (folder_ / name).string());
  };
  if (tokenizer_.kind != "none") check("tokenizer.model", tokenizer_.sha256);
  for (const Part& part : parts_) {
    for (const auto& [suffix, file] : part.files) check(part.stem() + "." + suffix, file.sha256);
    const Documents& its = documents(part.domain, part.split);
    its.verify(vocab_size());
    for (int64_t i = 0; i < its.size(); ++i)
      if (its.document(i).size() < 1)
        fail("{}.idx: document {} is empty", (folder_ / part.stem()).string(), i);
  }
}

}  // namespace assay::data
