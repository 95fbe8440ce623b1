#include "tasks/text.h"

#include <locale.h>
#include <wctype.h>

#include <algorithm>
#include <cctype>

namespace assay::tasks {
namespace {

locale_t unicode() {
  static const locale_t locale = ::newlocale(LC_CTYPE_MASK, "C.UTF-8", nullptr);
  return locale;
}

char32_t to_lower(char32_t c) {
  if (c < 128 || !unicode()) return c >= 'A' && c <= 'Z' ? c + 32 : c;
  return char32_t(::towlower_l(wint_t(c), unicode()));
}

char32_t to_upper(char32_t c) {
  if (c < 128 || !unicode()) return c >= 'a' && c <= 'z' ? c - 32 : c;
  return char32_t(::towupper_l(wint_t(c), unicode()));
}

std::string mapped(std::string_view text, char32_t (*map)(char32_t)) {
  std::u32string points = code_points(text);
  for (char32_t& c : points) c = map(c);
  return utf8(points);
}

// Bytes of the character that begins with `lead`, and its payload bits; 0 for a byte
// that cannot lead.
int sequence_length(unsigned char lead) {
  if (lead < 0x80) return 1;
  if (lead >= 0xC2 && lead < 0xE0) return 2;
  if (lead >= 0xE0 && lead < 0xF0) return 3;
  return lead >= 0xF0 && lead < 0xF5 ? 4 : 0;
}

}  // namespace

std::u32string code_points(std::string_view text) {
  std::u32string points;
  points.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    const auto lead = static_cast<unsigned char>(text[i]);
    const auto count = size_t(sequence_length(lead));
    char32_t point = count == 1 ? lead : lead & (0x7F >> count);
    bool good = count > 0 && i + count <= text.size();
    for (size_t j = 1; good && j < count; ++j) {
      const auto byte = static_cast<unsigned char>(text[i + j]);
      good = (byte & 0xC0) == 0x80;
      point = point << 6 | (byte & 0x3F);
    }
    points.push_back(good ? point : U'\uFFFD');
    i += good ? count : 1;
  }
  return points;
}

std::string utf8(std::u32string_view text) {
  std::string out;
  out.reserve(text.size());
  for (const char32_t c : text) {
    if (c < 0x80) {
      out += char(c);
    } else if (c < 0x800) {
      out += {char(0xC0 | c >> 6), char(0x80 | (c & 0x3F))};
    } else if (c < 0x10000) {
      out += {char(0xE0 | c >> 12), char(0x80 | (c >> 6 & 0x3F)), char(0x80 | (c & 0x3F))};
    } else {
      out += {char(0xF0 | c >> 18), char(0x80 | (c >> 12 & 0x3F)), char(0x80 | (c >> 6 & 0x3F)),
              char(0x80 | (c & 0x3F))};
    }
  }
  return out;
}

bool is_space(char32_t c) {
  return (c >= 9 && c <= 13) || (c >= 28 && c <= 32) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

bool is_word(char32_t c) {
  if (c < 128) return std::isalnum(int(c)) || c == U'_';
  return unicode() && ::iswalnum_l(wint_t(c), unicode());
}

namespace {

std::string strip_if(std::string_view text, auto&& drop, bool left, bool right) {
  const std::u32string points = code_points(text);
  size_t begin = 0, end = points.size();
  while (left && begin < end && drop(points[begin])) ++begin;
  while (right && end > begin && drop(points[end - 1])) --end;
  return utf8(std::u32string_view(points).substr(begin, end - begin));
}

}  // namespace

std::string strip(std::string_view text, bool left, bool right) {
  return strip_if(text, is_space, left, right);
}

std::string strip_characters(std::string_view text, std::string_view characters, bool left,
                             bool right) {
  const std::u32string any = code_points(characters);
  return strip_if(
      text, [&](char32_t c) { return any.find(c) != any.npos; }, left, right);
}

std::string lower(std::string_view text) { return mapped(text, to_lower); }
std::string upper(std::string_view text) { return mapped(text, to_upper); }

std::string capitalize(std::string_view text) {
  std::u32string points = code_points(text);
  for (size_t i = 0; i < points.size(); ++i)
    points[i] = i == 0 ? to_upper(points[i]) : to_lower(points[i]);
  return utf8(points);
}

std::string replace_all(std::string_view text, std::string_view from, std::string_view to) {
  if (from.empty()) return std::string(text);
  std::string out;
  size_t begin = 0;
  for (size_t found; (found = text.find(from, begin)) != std::string_view::npos;
       begin = found + from.size()) {
    out += text.substr(begin, found - begin);
    out += to;
  }
  return out += text.substr(begin);
}

namespace {

std::vector<std::string> words(std::string_view text, int64_t most) {
  const std::u32string points = code_points(text);
  std::vector<std::string> out;
  for (size_t i = 0; i < points.size();) {
    while (i < points.size() && is_space(points[i])) ++i;
    if (i == points.size()) break;
    size_t end = i;
    if (most >= 0 && int64_t(out.size()) == most) {
      end = points.size();
      while (is_space(points[end - 1])) --end;
    } else {
      while (end < points.size() && !is_space(points[end])) ++end;
    }
    out.push_back(utf8(std::u32string_view(points).substr(i, end - i)));
    i = end == points.size() || (most >= 0 && int64_t(out.size()) > most) ? points.size() : end;
  }
  return out;
}

}  // namespace

std::vector<std::string> split(std::string_view text, std::string_view separator, int64_t most) {
  if (separator.empty()) return words(text, most);
  std::vector<std::string> out;
  size_t begin = 0;
  for (size_t found; (most < 0 || int64_t(out.size()) < most) &&
                     (found = text.find(separator, begin)) != std::string_view::npos;
       begin = found + separator.size())
    out.emplace_back(text.substr(begin, found - begin));
  out.emplace_back(text.substr(begin));
  return out;
}

int64_t length(std::string_view text) {
  return std::ranges::count_if(
      text, [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; });
}

}  // namespace assay::tasks
