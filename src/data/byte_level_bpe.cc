#include "data/byte_level_bpe.h"

#include <utf8proc.h>

#include <array>
#include <map>
#include <nlohmann/json.hpp>
#include <queue>
#include <unordered_map>

#include "base/error.h"
#include "base/json.h"
#include "data/bytes.h"
#include "data/regular_expression.h"

namespace assay::data {
namespace {

using nlohmann::json;

// ---- The alphabet of bytes ----

std::string utf8(char32_t character) {
  std::array<utf8proc_uint8_t, 4> bytes{};
  const auto size = utf8proc_encode_char(utf8proc_int32_t(character), bytes.data());
  return {reinterpret_cast<const char*>(bytes.data()), size_t(size)};
}

// The character that stands for each byte: itself if it can be printed in Latin-1, and otherwise
// the next one from U+0100 on.
std::array<char32_t, 256> alphabet() {
  std::array<char32_t, 256> characters{};
  char32_t next = 256;
  for (char32_t byte = 0; byte < 256; ++byte) {
    const bool prints = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte != 0xAD);
    characters[byte] = prints ? byte : next++;
  }
  return characters;
}

// The bytes that a token stands for; a token with other characters stands for its own text.
std::string bytes_of(const std::string& token) {
  static const std::map<char32_t, char> byte_of = [] {
    std::map<char32_t, char> map;
    const auto characters = alphabet();
    for (size_t byte = 0; byte < 256; ++byte) map[characters[byte]] = char(byte);
    return map;
  }();
  std::string out;
  for (size_t i = 0; i < token.size();) {
    utf8proc_int32_t character = 0;
    const auto size = utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(token.data()) + i,
                                       utf8proc_ssize_t(token.size() - i), &character);
    const auto found = byte_of.find(char32_t(character));
    if (size < 1 || found == byte_of.end()) return token;
    out += found->second;
    i += size_t(size);
  }
  return out;
}

std::string composed(std::string_view text) {
  utf8proc_uint8_t* out = nullptr;
  const auto size = utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                                 utf8proc_ssize_t(text.size()), &out,
                                 utf8proc_option_t(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owner(out, &std::free);
  if (size < 0) fail<Error>("NFC of {} bytes: {}", text.size(), utf8proc_errmsg(size));
  return {reinterpret_cast<const char*>(out), size_t(size)};
}

// Bytes of the character at text[i] that are valid UTF-8, and whether it is whole.
std::pair<size_t, bool> character_at(std::string_view text, size_t i) {
  const auto at = [&](size_t k) { return k < text.size() ? uint8_t(text[k]) : uint8_t(0); };
  const uint8_t lead = at(i);
  const size_t size = lead < 0x80 ? 1 : lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  if (size == 0 || lead > 0xF4) return {1, false};
  for (size_t k = 1; k < size; ++k) {
    const uint8_t first_least = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
    const uint8_t first_most = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
    const uint8_t least = k > 1 ? 0x80 : first_least;
    const uint8_t most = k > 1 ? 0xBF : first_most;
    if (at(i + k) < least || at(i + k) > most) return {k, false};
  }
  return {size, true};
}

std::string with_replacements(const std::string& bytes) {
  if (is_utf8(bytes)) return bytes;
  std::string out;
  for (size_t i = 0; i < bytes.size();) {
    const auto [size, whole] = character_at(bytes, i);
    out += whole ? bytes.substr(i, size) : "\uFFFD";
    i += size;
  }
  return out;
}

// ---- tokenizer.json ----

// Reads parts of the file. Errors name the file and the path.
struct File {
  std::string name;
  [[noreturn]] void refuse(const std::string& path, const json& value) const {
    std::string text = value.dump(-1, ' ', false, json::error_handler_t::replace);
    if (text.size() > 80) text = text.substr(0, 77) + "...";
    fail("{}: {} = {} is not supported. Nothing was written.", name, path, text);
  }
  // `object[key]`, or null without it.
  const json& at(const json& object, const std::string& path, const char* key) const {
    static const json kNull;
    if (!object.is_object()) refuse(path, object);
    const auto found = object.find(key);
    return found == object.end() ? kNull : *found;
  }
  bool flag(const json& object, const std::string& path, const char* key, bool absent) const {
    const json& value = at(object, path, key);
    if (!value.is_null() && !value.is_boolean()) refuse(path + "." + key, value);
    return value.is_null() ? absent : value.get<bool>();
  }
  std::string text(const json& object, const std::string& path, const char* key) const {
    const json& value = at(object, path, key);
    if (!value.is_string()) refuse(path + "." + key, value);
    return value.get<std::string>();
  }
  int32_t id(const json& value, const std::string& path) const {
    constexpr int64_t kMost = 1 << 20;
    if (!value.is_number_integer() || value.get<int64_t>() < 0 || value.get<int64_t>() >= kMost)
      refuse(path, value);
    return value.get<int32_t>();
  }
};

struct AddedToken {
  std::string text;
  int32_t id;
};

constexpr const char* kWordsOfGpt2 =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

uint64_t pair_of(int32_t left, int32_t right) {
  return uint64_t(uint32_t(left)) << 32 | uint32_t(right);
}

}  // namespace

struct ByteLevelBpe::Model {
  struct Merge {
    int32_t rank;
    int32_t id;
  };
  std::vector<std::string> tokens;  // by id
  std::vector<std::string> bytes;   // by id
  std::vector<bool> special;
  std::unordered_map<std::string, int32_t> ids;
  std::unordered_map<std::string, int32_t> ids_of_bytes;
  std::unordered_map<uint64_t, Merge> merges;
  std::array<int32_t, 256> id_of_byte{};
  bool composes = false;
  bool prefix_space = false;
  bool whole_words = false;
  std::vector<RegularExpression> cuts;  // each cuts the parts of the one before
  std::vector<AddedToken> before;       // found before NFC
  std::vector<AddedToken> after;        // found after NFC

  void add(const std::string& token, int32_t id) {
    if (size_t(id) >= tokens.size()) {
      tokens.resize(size_t(id) + 1);
      bytes.resize(tokens.size());
      special.resize(tokens.size());
    }
    tokens[size_t(id)] = token;
    bytes[size_t(id)] = bytes_of(token);
    ids.emplace(token, id);
  }

  void read_vocabulary(const File& file, const json& model) {
    const json& vocabulary = file.at(model, "model", "vocab");
    if (!vocabulary.is_object()) file.refuse("model.vocab", vocabulary);
    for (const auto& [token, id] : vocabulary.items()) {
      add(token, file.id(id, "model.vocab." + token));
      ids_of_bytes.emplace(bytes_of(token), id.get<int32_t>());
    }
    const auto characters = alphabet();
    for (size_t byte = 0; byte < 256; ++byte) {
      const auto found = ids.find(utf8(characters[byte]));
      if (found == ids.end()) fail("{}: model.vocab has no token for byte {}", file.name, byte);
      id_of_byte[byte] = found->second;
    }
  }

  void read_merges(const File& file, const json& model) {
    const json& list = file.at(model, "model", "merges");
    if (!list.is_array()) file.refuse("model.merges", list);
    const auto id_of = [&](const std::string& token, const json& merge) {
      const auto found = ids.find(token);
      if (found == ids.end()) file.refuse("model.merges", merge);
      return found->second;
    };
    for (const json& merge : list) {
      std::string left;
      std::string right;
      if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
        left = merge[0];
        right = merge[1];
      } else if (const size_t cut =
                     merge.is_string() ? merge.get<std::string>().find(' ') : std::string::npos;
                 cut != std::string::npos) {
        left = merge.get<std::string>().substr(0, cut);
        right = merge.get<std::string>().substr(cut + 1);
      } else {
        file.refuse("model.merges", merge);
      }
      const Merge made{int32_t(merges.size()), id_of(left + right, merge)};
      merges.emplace(pair_of(id_of(left, merge), id_of(right, merge)), made);
    }
  }

  void read_model(const File& file, const json& model) {
    if (const json& type = file.at(model, "model", "type"); type != "BPE" && !type.is_null())
      file.refuse("model.type", type);
    for (const char* key :
         {"dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"})
      if (const json& value = file.at(model, "model", key); !value.is_null() && value != "")
        file.refuse(std::string("model.") + key, value);
    if (file.flag(model, "model", "byte_fallback", false)) file.refuse("model.byte_fallback", true);
    whole_words = file.flag(model, "model", "ignore_merges", false);
    read_vocabulary(file, model);
    read_merges(file, model);
  }

  void read_added_tokens(const File& file, const json& list) {
    if (list.is_null()) return;
    if (!list.is_array()) file.refuse("added_tokens", list);
    for (const json& entry : list) {
      const std::string path = "added_tokens";
      const std::string content = file.text(entry, path, "content");
      const int32_t id = file.id(file.at(entry, path, "id"), path + ".id");
      add(content, id);
      special[size_t(id)] = file.flag(entry, path, "special", false);
      if (special[size_t(id)]) continue;
      if (content.empty()) file.refuse(path, entry);
      for (const char* key : {"single_word", "lstrip", "rstrip"})
        if (file.flag(entry, path, key, false)) file.refuse(path, entry);
      (file.flag(entry, path, "normalized", true) ? after : before).push_back({content, id});
    }
  }

  void read_byte_level(const File& file, const json& step, const std::string& path, bool first) {
    prefix_space = file.flag(step, path, "add_prefix_space", true);
    if (prefix_space && !first) file.refuse(path + ".add_prefix_space", true);
    if (file.flag(step, path, "use_regex", true)) cuts.emplace_back(kWordsOfGpt2, file.name);
  }

  void read_split(const File& file, const json& step, const std::string& path) {
    if (file.text(step, path, "behavior") != "Isolated" || file.flag(step, path, "invert", false))
      file.refuse(path, step);
    cuts.emplace_back(file.text(file.at(step, path, "pattern"), path + ".pattern", "Regex"),
                      file.name);
  }

  void read_pre_tokenizer(const File& file, const json& pre_tokenizer) {
    const std::string path = "pre_tokenizer";
    const bool sequence = file.at(pre_tokenizer, path, "type") == "Sequence";
    const json steps =
        sequence ? file.at(pre_tokenizer, path, "pretokenizers") : json::array({pre_tokenizer});
    if (!steps.is_array() || steps.empty()) file.refuse(path, steps);
    for (size_t i = 0; i < steps.size(); ++i) {
      const std::string type = file.text(steps[i], path, "type");
      const bool last = i + 1 == steps.size();
      if (type == "ByteLevel" && last) read_byte_level(file, steps[i], path, i == 0);
      else if (type == "Split" && !last) read_split(file, steps[i], path);
      else if (type == "Digits" && !last)
        cuts.emplace_back(
            file.flag(steps[i], path, "individual_digits", false) ? R"(\p{N})" : R"(\p{N}+)",
            file.name);
      else file.refuse(path, steps[i]);
    }
  }

  void read_normalizer(const File& file, json normalizer) {
    if (normalizer.is_null()) return;
    if (normalizer == json{{"type", "Sequence"}, {"normalizers", json::array()}}) return;
    if (normalizer != json{{"type", "NFC"}}) file.refuse("normalizer", normalizer);
    composes = true;
  }

  // ---- Encoding ----

  // Calls `between` and `found` for the text between tokens, and for each token: at each place the
  // longest one.
  template <class Between, class Found>
  static void split(std::string_view text, const std::vector<AddedToken>& tokens,
                    const Between& between, const Found& found) {
    size_t begin = 0;
    for (size_t i = 0; i < text.size() && !tokens.empty();) {
      const AddedToken* longest = nullptr;
      for (const AddedToken& token : tokens)
        if (text.substr(i).starts_with(token.text) &&
            (!longest || token.text.size() > longest->text.size()))
          longest = &token;
      if (!longest) {
        ++i;
        continue;
      }
      if (i > begin) between(text.substr(begin, i - begin));
      found(longest->id);
      begin = i += longest->text.size();
    }
    if (begin < text.size()) between(text.substr(begin));
  }

  void append_text(std::string_view text, std::vector<int32_t>& out) const {
    std::string prefixed;
    if (prefix_space && !text.starts_with(' ')) prefixed = " " + std::string(text);
    append_words(prefixed.empty() ? text : prefixed, 0, out);
  }
  void append_words(std::string_view text, size_t cut, std::vector<int32_t>& out) const {
    if (cut == cuts.size()) append_word(text, out);
    else
      cuts[cut].for_each_part(text,
                              [&](std::string_view part) { append_words(part, cut + 1, out); });
  }

  void append_word(std::string_view word, std::vector<int32_t>& out) const {
    if (whole_words)
      if (const auto found = ids_of_bytes.find(std::string(word)); found != ids_of_bytes.end()) {
        out.push_back(found->second);
        return;
      }
    struct Symbol {
      int32_t id;
      size_t next;
      size_t previous;
    };
    constexpr size_t kNone = SIZE_MAX;
    std::vector<Symbol> symbols;
    for (size_t i = 0; i < word.size(); ++i)
      symbols.push_back({id_of_byte[uint8_t(word[i])], i + 1 < word.size() ? i + 1 : kNone,
                         i > 0 ? i - 1 : kNone});
    struct Candidate {
      int32_t rank;
      size_t place;
      uint64_t pair;
      bool operator>(const Candidate& other) const {
        return std::pair(rank, place) > std::pair(other.rank, other.place);
      }
    };
    std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> queue;
    const auto offer = [&](size_t place) {
      if (place == kNone || symbols[place].next == kNone) return;
      const uint64_t pair = pair_of(symbols[place].id, symbols[symbols[place].next].id);
      if (const auto merge = merges.find(pair); merge != merges.end())
        queue.push({merge->second.rank, place, pair});
    };
    for (size_t i = 0; i < symbols.size(); ++i) offer(i);
    constexpr int32_t kGone = -1;  // it became a part of the symbol before
    while (!queue.empty()) {
      const Candidate best = queue.top();
      queue.pop();
      Symbol& left = symbols[best.place];
      if (left.id == kGone || left.next == kNone ||
          pair_of(left.id, symbols[left.next].id) != best.pair)
        continue;
      Symbol& right = symbols[left.next];
      left.id = merges.at(best.pair).id;
      left.next = right.next;
      right.id = kGone;
      if (left.next != kNone) symbols[left.next].previous = best.place;
      offer(left.previous);
      offer(best.place);
    }
    for (const Symbol& symbol : symbols)
      if (symbol.id != kGone) out.push_back(symbol.id);
  }
};

ByteLevelBpe::ByteLevelBpe(std::string_view contents, const std::string& name) {
  const json root = parse_json(contents, name);
  if (!root.contains("model"))
    fail(
        "{}: not a SentencePiece model, and not a tokenizer.json, which has the key 'model'. "
        "Nothing was written.",
        name);
  const File file{name};
  auto model = std::make_unique<Model>();
  model->read_model(file, file.at(root, "the file", "model"));
  model->read_added_tokens(file, file.at(root, "the file", "added_tokens"));
  model->read_normalizer(file, file.at(root, "the file", "normalizer"));
  model->read_pre_tokenizer(file, file.at(root, "the file", "pre_tokenizer"));
  if (const json& decoder = file.at(root, "the file", "decoder");
      file.at(decoder, "decoder", "type") != "ByteLevel")
    file.refuse("decoder", decoder);
  model_ = std::move(model);
}
ByteLevelBpe::~ByteLevelBpe() = default;

std::vector<int32_t> ByteLevelBpe::encode(std::string_view text) const {
  std::vector<int32_t> out;
  const auto found = [&](int32_t id) { out.push_back(id); };
  const auto append = [&](std::string_view part) { model_->append_text(part, out); };
  const auto normalised = [&](std::string_view part) {
    const std::string changed = model_->composes ? composed(part) : std::string();
    Model::split(model_->composes ? changed : part, model_->after, append, found);
  };
  Model::split(text, model_->before, normalised, found);
  return out;
}

std::string ByteLevelBpe::decode(std::span<const int32_t> ids) const {
  std::string out;
  for (const int32_t id : ids) out += bytes(id);
  return with_replacements(out);
}

int64_t ByteLevelBpe::vocab_size() const { return std::ssize(model_->tokens); }
const std::string& ByteLevelBpe::token(int32_t id) const { return model_->tokens.at(size_t(id)); }
std::string ByteLevelBpe::bytes(int32_t id) const {
  return model_->special.at(size_t(id)) ? "" : model_->bytes.at(size_t(id));
}
int32_t ByteLevelBpe::id_of(std::string_view token) const {
  const auto found = model_->ids.find(std::string(token));
  return found == model_->ids.end() ? -1 : found->second;
}

}  // namespace assay::data
