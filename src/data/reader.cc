#include "data/reader.h"

#include <simdjson.h>
#include <sys/stat.h>

#include <algorithm>
#include <map>

#include "base/config.h"
#include "base/error.h"
#include "base/interrupt.h"
#include "base/json.h"

namespace assay::data {
namespace {

constexpr size_t kBlock = 1 << 20;          // bytes asked of the source at a time
constexpr size_t kLongestLine = 32u << 20;  // bounds memory whatever the input

bool is_blank(std::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return c == ' ' || (c >= '\t' && c <= '\r'); });
}

bool is_hidden(const fs::path& path) { return path.filename().string().starts_with('.'); }

void add_folder(const fs::path& folder, std::vector<InputFile>& files) {
  std::vector<fs::path> found;
  std::error_code code;
  fs::recursive_directory_iterator walk(folder, code);
  fs::recursive_directory_iterator end;
  std::error_code none;  // a link to nothing, or to itself, is not a file
  for (; !code && walk != end; walk.increment(code)) {
    if (is_hidden(walk->path()) && walk->is_directory(none)) walk.disable_recursion_pending();
    if (!is_hidden(walk->path()) && walk->is_regular_file(none)) found.push_back(walk->path());
  }
  if (code) fail("{}: cannot be searched: {}", folder.string(), code.message());
  if (found.empty()) fail("{}: the folder holds no file", folder.string());
  std::sort(found.begin(), found.end());
  for (const fs::path& file : found) files.push_back({file, folder});
}

}  // namespace

std::vector<InputFile> input_files(const std::vector<fs::path>& paths) {
  std::vector<InputFile> files;
  for (const fs::path& path : paths) {
    std::error_code code;
    const fs::file_status status = fs::status(path, code);
    if (status.type() == fs::file_type::not_found)
      fail("{}: no such file or folder", path.string());
    if (status.type() == fs::file_type::none)
      fail("{}: cannot be read: {}", path.string(), code.message());
    if (fs::is_directory(status)) {
      add_folder(path, files);
      continue;
    }
    if (!fs::is_regular_file(status))
      fail("{}: neither a regular file nor a folder", path.string());
    files.push_back({path, path});
  }
  // Links may name a file again. The canonical name is enough where no hard link exists; numbers of
  // files are unique on local file systems only.
  std::map<std::pair<dev_t, ino_t>, fs::path> numbers;
  std::map<fs::path, fs::path> names;
  for (const auto& [file, input] : files) {
    auto [first, is_new] = names.emplace(fs::canonical(file), file);
    struct stat status;
    if (is_new && !::stat(file.c_str(), &status) && status.st_nlink > 1) {
      const auto [same, is_new_number] =
          numbers.emplace(std::pair(status.st_dev, status.st_ino), file);
      if (!is_new_number)
        fail("{}: the same file as {} (a hard link); its text would count twice", file.string(),
             same->second.string());
    }
    if (!is_new)
      fail("{}: the same file as {}; its text would count twice", file.string(),
           first->second.string());
  }
  return files;
}

bool is_split_name(std::string_view word) {
  return word == "train" || word == "valid" || word == "validation" || word == "test";
}

std::vector<std::string> splits_in(const InputFile& file) {
  std::vector<std::string> splits;
  auto add = [&](const std::string& word) {
    if (is_split_name(word)) splits.push_back(word == "validation" ? "valid" : word);
  };
  const std::string name = file.path.filename().string();
  for (size_t begin = name.find('.'), end; begin != std::string::npos; begin = end) {
    end = name.find('.', begin + 1);
    if (begin > 0 && end != std::string::npos) add(name.substr(begin + 1, end - begin - 1));
  }
  const fs::path folder = fs::absolute(file.path).lexically_normal().parent_path();
  fs::path input = folder;
  if (file.searched()) input = fs::absolute(file.input / "").lexically_normal().parent_path();
  add(input.filename().string());
  for (const fs::path& part : folder.lexically_relative(input)) add(part.string());
  return splits;
}

std::string split_of(const InputFile& file) {
  const auto splits = splits_in(file);
  return splits.empty() ? "train" : splits.front();
}

bool is_json_lines(const fs::path& file) {
  fs::path name = file.filename();
  const bool compressed = extension_of(name) == ".zst" || extension_of(name) == ".gz";
  if (compressed) name = name.stem();
  const std::string extension = extension_of(name);
  return extension == ".jsonl" || extension == ".json" || extension == ".ndjson" ||
         (compressed && (extension.empty() || is_split_name(extension.substr(1))));
}

ReadCounts& ReadCounts::operator+=(const ReadCounts& other) {
  documents += other.documents;
  bytes += other.bytes;
  broken_lines += other.broken_lines;
  if (first_broken_line.empty()) first_broken_line = other.first_broken_line;
  without_text += other.without_text;
  invalid_utf8 += other.invalid_utf8;
  empty += other.empty;
  too_long += other.too_long;
  unknown_domain += other.unknown_domain;
  return *this;
}

int64_t ReadCounts::all_left_out() const {
  return broken_lines + without_text + invalid_utf8 + empty + too_long + unknown_domain;
}

std::string ReadCounts::left_out(bool by_word) const {
  std::vector<std::string> parts;
  auto part = [&](int64_t count, const char* what) {
    if (count) parts.push_back(fmt::format("{} {}", count, what));
  };
  part(broken_lines, broken_lines == 1 ? "broken line" : "broken lines");
  if (!first_broken_line.empty() && broken_lines > 0)
    parts.back() += fmt::format(" (the first: {})", first_broken_line);
  part(without_text, "without a string 'text'");
  part(invalid_utf8, "with invalid UTF-8");
  part(empty, "empty");
  part(too_long, by_word ? "too long (32 MiB, or 2 MiB without a space)"
                         : "too long (2 MiB, because the tokenizer does not encode by words)");
  part(unknown_domain, "of no known domain");
  return join(parts);
}

BlockReader::BlockReader(const fs::path& file)
    : file_(file), json_(is_json_lines(file)), source_(open_bytes(file)) {}

// Appends kBlock bytes to rest_, fewer at the end of the file.
void BlockReader::fill() try {
  size_t size = rest_.size();
  const size_t wanted = size + kBlock;
  rest_.resize(wanted);
  while (size < wanted && !ended_) {
    const size_t count = source_->read(rest_.data() + size, wanted - size);
    size += count;
    ended_ = count == 0;
  }
  rest_.resize(size);
} catch (const BadInput& error) {
  fail("{}: line {} or after it: {}; nothing was kept", file_.string(), line_, error.what());
}

namespace {

// Name of a format that this reader cannot read, recognised by the first bytes; "" for any other.
std::string_view foreign_format(std::string_view start) {
  using namespace std::string_view_literals;
  constexpr std::pair<std::string_view, std::string_view> kFormats[] = {
      {"\x1f\x8b"sv, "a gzip stream"},     {"\x28\xb5\x2f\xfd"sv, "a zstd stream"},
      {"\3757zXZ\0"sv, "an xz stream"},    {"\x04\x22\x4d\x18"sv, "an lz4 stream"},
      {"PK\x03\x04"sv, "a zip archive"},   {"7z\xbc\xaf\x27\x1c"sv, "a 7z archive"},
      {"Rar!\x1a\x07"sv, "a rar archive"}, {"PAR1\x15"sv, "a Parquet table"},
      {"ARROW1\0"sv, "an Arrow table"},    {"%PDF-"sv, "a PDF document"}};
  for (const auto& [magic, name] : kFormats)
    if (start.starts_with(magic)) return name;
  const auto at = [&](size_t place) { return start.substr(std::min(start.size(), place)); };
  if (start.starts_with("BZh") && at(4).starts_with("1AY&SY")) return "a bzip2 stream";
  const bool tar = at(257).starts_with("ustar\0"sv) || at(257).starts_with("ustar  \0"sv);
  return tar ? "a tar archive" : "";
}

}  // namespace

void BlockReader::check_first_bytes() const {
  if (const std::string_view format = foreign_format(rest_); !format.empty())
    fail(
        "{}: holds {}. Text and JSON Lines are read, "
        "plain or compressed in a file whose name ends in .zst or .gz. "
        "Unpack or convert it first; nothing was kept.",
        file_.string(), format);
  if (!json_) return;
  std::string_view start = rest_;
  if (start.starts_with("\xEF\xBB\xBF")) start.remove_prefix(3);
  start.remove_prefix(std::min(start.find_first_not_of(" \t\r\n"), start.size()));
  const std::string_view line = start.substr(0, start.find('\n'));
  const bool list = start.starts_with('[');
  const bool several = start.size() > line.size();
  if (list || (several && line.find_first_not_of("{ \t\r") == std::string_view::npos))
    fail(
        "{}: holds a JSON {}, but one object per line is expected: "
        "{{\"text\": …}}. `jq -c {} FILE > FILE.jsonl` writes it so; nothing was kept.",
        file_.string(), list ? "list" : "object over several lines", list ? "'.[]'" : ".");
}

// Reads on until rest_ holds a whole line or document. Returns where the last one ends; 0 at the
// end of the file or when the next one is too long.
size_t BlockReader::whole() {
  size_t end = json_ ? rest_.rfind('\n') + 1 : 0;
  while (end == 0 && !ended_ && rest_.size() <= kLongestLine) {
    fill();
    end = json_ ? rest_.rfind('\n') + 1 : 0;
  }
  return end == 0 && ended_ && rest_.size() <= kLongestLine ? rest_.size() : end;
}

// Drops the line or document that begins in rest_.
void BlockReader::skip() {
  ++counts_.too_long;
  size_t newline;
  while ((newline = json_ ? rest_.find('\n') : std::string::npos) == std::string::npos) {
    check_interrupt();
    rest_.clear();
    if (ended_) return;
    fill();
  }
  rest_.erase(0, newline + 1);
  ++line_;
}

bool BlockReader::next(Block& block) {
  size_t end;
  if (!any_) {
    fill();
    check_first_bytes();
  }
  while ((end = whole()) == 0) {
    if (rest_.empty() && !json_ && !any_) ++counts_.empty;
    any_ = true;
    if (rest_.empty()) return false;
    skip();
  }
  any_ = true;
  block.json = json_;
  block.first_line = line_;
  block.text.clear();
  block.text.reserve(end + simdjson::SIMDJSON_PADDING);
  block.text.assign(rest_, 0, end);
  rest_.erase(0, end);
  line_ += std::count(block.text.begin(), block.text.end(), '\n');
  return true;
}

namespace {

// The levels of a field; none for "".
std::vector<std::string> levels_of(std::string field) {
  std::vector<std::string> levels;
  if (field.empty()) return levels;
  for (size_t dot; (dot = field.find('.')) != std::string::npos; field.erase(0, dot + 1))
    levels.push_back(field.substr(0, dot));
  levels.push_back(field);
  return levels;
}

// Appends the fields of `at` that hold a short string; `path` names `at` and ends with a dot.
void add_string_fields(simdjson::dom::element at, const std::string& path,
                       std::vector<std::string>& fields) {
  // kDeepest: bytes of a path
  constexpr size_t kMost = 20;
  constexpr size_t kDeepest = 200;
  constexpr size_t kLongestValue = 200;
  simdjson::dom::object object;
  if (at.get_object().get(object) || path.size() > kDeepest) return;
  for (const auto& [key, value] : object) {
    const std::string name = path + std::string(key);
    std::string_view text;
    const bool is_string = !value.get_string().get(text);
    if (is_string && text.size() <= kLongestValue && name != "text" && fields.size() < kMost)
      fields.push_back(name);
    if (!is_string) add_string_fields(value, name + ".", fields);
  }
}

// The value of a key; false without one. Of equal keys the last one counts, as in Python.
bool find(simdjson::dom::element at, std::string_view name, simdjson::dom::element& value) {
  simdjson::dom::object object;
  if (at.get_object().get(object)) return false;
  bool found = false;
  for (const auto& [key, of_key] : object) {
    if (key != name) continue;
    value = of_key;
    found = true;
  }
  return found;
}

// The string that a document holds at a field, "" when there is none.
std::string_view string_at(simdjson::dom::element at, const std::vector<std::string>& levels) {
  const bool found =
      std::ranges::all_of(levels, [&](const std::string& level) { return find(at, level, at); });
  std::string_view text;
  if (!found || levels.empty() || at.get_string().get(text)) return "";
  return text;
}

}  // namespace

struct DocumentParser::Parser {
  // the levels of the fields
  std::vector<std::string> domain;
  std::vector<std::string> source;
  simdjson::dom::parser json;
  std::string strict;  // the last line that is not strict JSON, made strict
  bool last_is_json = false;
  std::vector<std::string> fields_without_text;
};

DocumentParser::DocumentParser(const std::string& domain_field, const std::string& source_field)
    : parser_(std::make_unique<Parser>()) {
  parser_->domain = levels_of(domain_field);
  parser_->source = levels_of(source_field);
}
DocumentParser::~DocumentParser() = default;

std::vector<std::string> DocumentParser::string_fields() const {
  std::vector<std::string> fields;
  if (parser_->last_is_json) add_string_fields(parser_->json.doc.root(), "", fields);
  return fields;
}

const std::vector<std::string>& DocumentParser::fields_without_text() const {
  return parser_->fields_without_text;
}

std::optional<Document> DocumentParser::next(const Block& block, Lines& lines, ReadCounts& counts) {
  while (!lines.rest.empty()) {
    const size_t end =
        block.json ? std::min(lines.rest.find('\n'), lines.rest.size()) : lines.rest.size();
    std::string_view line = lines.rest.substr(0, end);
    const int64_t number = lines.line++;
    lines.rest.remove_prefix(std::min(end + 1, lines.rest.size()));
    if (number == 1 && line.starts_with("\xEF\xBB\xBF")) line.remove_prefix(3);  // byte order mark
    if (block.json && is_blank(line)) continue;
    parser_->last_is_json = false;
    const size_t room = size_t(block.text.data() + block.text.capacity() - line.data());
    if (block.json) {
      if (auto document = parse_line(line, room, number, counts)) return document;
    } else if (!simdjson::validate_utf8(line.data(), line.size())) {
      ++counts.invalid_utf8;
    } else if (is_blank(line)) {
      ++counts.empty;
    } else {
      return Document{line, "", "", number};
    }
  }
  return std::nullopt;
}

std::optional<Document> DocumentParser::parse_line(std::string_view line, size_t room,
                                                   int64_t number, ReadCounts& counts) {
  simdjson::dom::element root;
  simdjson::dom::element value;
  const bool padded = room >= line.size() + simdjson::SIMDJSON_PADDING;
  auto error = parser_->json.parse(line.data(), line.size(), !padded).get(root);
  std::string_view text;
  if (error == simdjson::UTF8_ERROR) {
    ++counts.invalid_utf8;
    return std::nullopt;
  }
  if (error) {
    parser_->strict = strict_json(line);
    if (parser_->strict != line) error = parser_->json.parse(parser_->strict).get(root);
  }
  if (error || !root.is_object()) {
    if (counts.broken_lines++ == 0)
      counts.first_broken_line = fmt::format(
          "line {}: {}", number, error ? simdjson::error_message(error) : "not a JSON object");
    return std::nullopt;
  }
  if (!find(root, "text", value) || value.get_string().get(text)) {
    ++counts.without_text;
    if (parser_->fields_without_text.empty())
      add_string_fields(root, "", parser_->fields_without_text);
    return std::nullopt;
  }
  if (is_blank(text)) {
    ++counts.empty;
    return std::nullopt;
  }
  parser_->last_is_json = true;
  return Document{text, string_at(root, parser_->domain), string_at(root, parser_->source), number};
}

}  // namespace assay::data
