#include "base/json.h"

#include <cmath>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/error.h"

namespace assay {
namespace {

using nlohmann::json;

// The library quotes all that it read of a string, which may be most of the file. Keeps the end.
std::string with_short_quotation(std::string_view what) {
  constexpr std::string_view kRead = "last read: '";
  constexpr size_t kLongest = 80;
  const size_t begin = what.find(kRead);
  const size_t end = what.rfind('\'');
  if (begin == std::string_view::npos || end < begin + kRead.size() + kLongest)
    return std::string(what);
  size_t kept = end - kLongest;
  while (kept < end && (what[kept] & 0xC0) == 0x80) ++kept;  // a part of a character
  return fmt::format("{}…{}", what.substr(0, begin + kRead.size()), what.substr(kept));
}

// Builds the value while the text is read. The library's own callback for this costs time quadratic
// in the length of a list of objects.
class Builder final : public nlohmann::json_sax<json> {
 public:
  explicit Builder(const std::string& source) : source_(source) {}
  json take() { return std::move(root_); }

  bool null() override { return add(nullptr); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(number_integer_t value) override { return add(value); }
  bool number_unsigned(number_unsigned_t value) override { return add(value); }
  bool number_float(number_float_t value, const string_t&) override { return add(value); }
  bool string(string_t& value) override { return add(std::move(value)); }
  bool binary(binary_t& value) override { return add(std::move(value)); }
  bool start_object(std::size_t) override { return open(json::object()); }
  bool start_array(std::size_t) override { return open(json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(string_t& name) override {
    member_ = &(*open_.back())[name];
    return true;
  }
  bool parse_error(std::size_t, const std::string&, const json::exception& error) override {
    // "[json.exception.parse_error.101] parse error at …"
    const std::string_view what = error.what();
    const bool is_number = what.find("invalid string") == std::string_view::npos &&
                           (what.ends_with("N'") || what.ends_with("I'"));
    fail("{}: broken JSON: {}{}", source_, with_short_quotation(what.substr(what.find("] ") + 2)),
         is_number ? "; JSON has no NaN and no Infinity" : "");
  }

 private:
  json& place(json&& value) {
    if (open_.empty()) return root_ = std::move(value);
    if (open_.back()->is_array()) return open_.back()->emplace_back(std::move(value));
    return *member_ = std::move(value);
  }
  bool add(json value) {
    place(std::move(value));
    return true;
  }
  bool open(json&& empty) {
    constexpr size_t kDeepest = 64;
    if (open_.size() == kDeepest) fail("{}: JSON with more than {} levels", source_, kDeepest);
    open_.push_back(&place(std::move(empty)));
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }

  const std::string& source_;
  json root_;
  // The lists and objects around the next value. A list grows only while it is the innermost one,
  // so the pointers stay valid.
  std::vector<json*> open_;
  json* member_ = nullptr;  // of the innermost object, for the value of its last key
};

// Reads Python's JSON and writes strict JSON.
class StrictCopy {
 public:
  explicit StrictCopy(std::string_view text) : text_(text) { out_.reserve(text.size() + 16); }
  std::string take() {
    while (at_ < text_.size()) {
      if (text_[at_] == '"') string();
      else if (const size_t end = end_of_word(); end > at_) word(end);
      else out_ += text_[at_++];
    }
    return std::move(out_);
  }

 private:
  // The end of a number or of a name such as NaN.
  size_t end_of_word() const {
    size_t end = at_;
    const auto belongs = [](char c) {
      return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
             c == '-' || c == '+' || c == '.';
    };
    while (end < text_.size() && belongs(text_[end])) ++end;
    return end;
  }
  void word(size_t end) {
    constexpr size_t kMostDigits = 18;  // of integers that always fit 64 bits
    const std::string word(text_.substr(at_, end - at_));
    at_ = end;
    const bool is_number = word.find_first_not_of("0123456789-+.eE") == std::string::npos;
    const bool is_integer = word.find_first_not_of("0123456789-") == std::string::npos;
    if (word == "NaN" || word == "Infinity" || word == "-Infinity" ||
        (is_number && std::isinf(std::strtod(word.c_str(), nullptr))))
      out_ += "null";
    else out_ += is_integer && word.size() > kMostDigits ? word + "e0" : word;
  }
  void string() {
    out_ += text_[at_++];
    while (at_ < text_.size() && text_[at_] != '"') {
      const bool escape = text_[at_] == '\\' && at_ + 1 < text_.size();
      if (const int64_t half = surrogate(at_); half != 0) {
        const int64_t next = surrogate(at_ + 6);
        const bool pair = half < 0xDC00 && next >= 0xDC00;
        out_ += pair ? text_.substr(at_, 12) : std::string_view("\\ufffd");
        at_ += pair ? 12 : 6;
      } else {
        out_ += text_.substr(at_, escape ? 2 : 1);
        at_ += escape ? 2 : 1;
      }
    }
    if (at_ < text_.size()) out_ += text_[at_++];
  }
  // The code of the escape \uD800 … \uDFFF at a position, 0 where there is none.
  int64_t surrogate(size_t at) const {
    if (at + 6 > text_.size() || text_[at] != '\\' || text_[at + 1] != 'u') return 0;
    const std::string escape(text_.substr(at, 6));
    if (escape.find_first_not_of("0123456789abcdefABCDEF", 2) != std::string::npos) return 0;
    const int64_t code = std::strtol(escape.c_str() + 2, nullptr, 16);
    return code >= 0xD800 && code < 0xE000 ? code : 0;
  }

  std::string_view text_;
  size_t at_ = 0;
  std::string out_;
};

}  // namespace

std::string strict_json(std::string_view python_json) { return StrictCopy(python_json).take(); }

nlohmann::json parse_python_json(std::string_view text, const std::string& source) {
  try {
    return parse_json(text, source);
  } catch (const BadInput&) {
    return parse_json(strict_json(text), source);
  }
}

nlohmann::json parse_json(std::string_view text, const std::string& source) {
  Builder builder(source);
  json::sax_parse(text, &builder);
  return builder.take();
}

}  // namespace assay
