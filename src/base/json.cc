#include "base/json.h"

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
  const size_t begin = what.find(kRead), end = what.rfind('\'');
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
    fail("{}: broken JSON: {}", source_, with_short_quotation(what.substr(what.find("] ") + 2)));
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

}  // namespace

nlohmann::json parse_json(std::string_view text, const std::string& source) {
  Builder builder(source);
  json::sax_parse(text, &builder);
  return builder.take();
}

}  // namespace assay
