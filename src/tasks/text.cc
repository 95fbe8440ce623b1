#include "tasks/text.h"

#include <locale.h>
#include <wctype.h>

#include <algorithm>
#include <cctype>
#include <map>

#include "base/error.h"

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

// Results of upper() and of the start of capitalize() for the characters whose result has more than
// one character [Unicode, SpecialCasing.txt].
struct Capital {
  std::u32string upper;
  std::u32string title;
};
const std::map<char32_t, Capital> kCapitals = {{U'\u00DF', {U"SS", U"Ss"}},
                                               {U'\u0149', {U"\u02BCN", U"\u02BCN"}},
                                               {U'\u01F0', {U"J\u030C", U"J\u030C"}},
                                               {U'\u0587', {U"\u0535\u0552", U"\u0535\u0582"}},
                                               {U'\u1E96', {U"H\u0331", U"H\u0331"}},
                                               {U'\u1E97', {U"T\u0308", U"T\u0308"}},
                                               {U'\u1E98', {U"W\u030A", U"W\u030A"}},
                                               {U'\u1E99', {U"Y\u030A", U"Y\u030A"}},
                                               {U'\u1E9A', {U"A\u02BE", U"A\u02BE"}},
                                               {U'\uFB00', {U"FF", U"Ff"}},
                                               {U'\uFB01', {U"FI", U"Fi"}},
                                               {U'\uFB02', {U"FL", U"Fl"}},
                                               {U'\uFB03', {U"FFI", U"Ffi"}},
                                               {U'\uFB04', {U"FFL", U"Ffl"}},
                                               {U'\uFB05', {U"ST", U"St"}},
                                               {U'\uFB06', {U"ST", U"St"}},
                                               {U'\uFB13', {U"\u0544\u0546", U"\u0544\u0576"}},
                                               {U'\uFB14', {U"\u0544\u0535", U"\u0544\u0565"}},
                                               {U'\uFB15', {U"\u0544\u053B", U"\u0544\u056B"}},
                                               {U'\uFB16', {U"\u054E\u0546", U"\u054E\u0576"}},
                                               {U'\uFB17', {U"\u0544\u053D", U"\u0544\u056D"}}};

// Greek letters of the same kind. Those with an iota below have one character as the start of a
// word.
bool is_one_of(char32_t c, std::u32string_view characters) {
  return characters.find(c) != characters.npos;
}
bool has_iota_below(char32_t c) {
  return (c >= 0x1F80 && c <= 0x1FAF) || is_one_of(c, U"\u1FB3\u1FBC\u1FC3\u1FCC\u1FF3\u1FFC");
}
bool has_several_marks(char32_t c) {
  return is_one_of(c, U"\u0390\u03B0\u1F50\u1F52\u1F54\u1F56\u1FB2\u1FB4\u1FB6\u1FB7") ||
         is_one_of(c, U"\u1FC2\u1FC4\u1FC6\u1FC7\u1FD2\u1FD3\u1FD6\u1FD7\u1FE2\u1FE3") ||
         is_one_of(c, U"\u1FE4\u1FE6\u1FE7\u1FF2\u1FF4\u1FF6\u1FF7");
}
[[noreturn]] void refuse_capital(char32_t c) {
  fail("the capital form of '{}' is not supported", utf8(std::u32string(1, c)));
}

std::u32string upper_of(char32_t c) {
  if (const auto found = kCapitals.find(c); found != kCapitals.end()) return found->second.upper;
  if (has_iota_below(c) || has_several_marks(c)) refuse_capital(c);
  return {to_upper(c)};
}

// As the first letter of a word.
std::u32string title_of(char32_t c) {
  if (const auto found = kCapitals.find(c); found != kCapitals.end()) return found->second.title;
  if (has_several_marks(c)) refuse_capital(c);
  if (c >= 0x10D0 && c <= 0x10FF) return {c};  // Georgian has capitals for whole words only
  if (c >= 0x1C4 && c <= 0x1CC) return {char32_t(0x1C5 + (c - 0x1C4) / 3 * 3)};  // as in Dž
  if (c >= 0x1F1 && c <= 0x1F3) return {0x1F2};
  return {to_upper(c)};
}

bool is_cased(char32_t c) { return to_lower(c) != c || to_upper(c) != c || kCapitals.contains(c); }
// Passed over when the letters around a sigma are looked for.
bool is_case_ignorable(char32_t c) {
  return (c >= 0x300 && c <= 0x36F) ||
         is_one_of(c, U"'.:^`\u00A8\u00AD\u00AF\u00B4\u00B7\u00B8\u2018\u2019\u2024\u2027");
}
// A sigma after a letter and not before one.
bool is_final(const std::u32string& points, size_t at) {
  size_t before = at;
  size_t after = at + 1;
  while (before > 0 && is_case_ignorable(points[before - 1])) --before;
  while (after < points.size() && is_case_ignorable(points[after])) ++after;
  return before > 0 && is_cased(points[before - 1]) &&
         (after == points.size() || !is_cased(points[after]));
}

std::u32string lower_of(const std::u32string& points, size_t at) {
  const char32_t c = points[at];
  if (c == U'\u03A3') return {is_final(points, at) ? U'\u03C2' : U'\u03C3'};
  if (c == U'\u0130') return U"i\u0307";
  return {to_lower(c)};
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
  size_t begin = 0;
  size_t end = points.size();
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
  return strip_if(text, [&](char32_t c) { return any.find(c) != any.npos; }, left, right);
}

std::string lower(std::string_view text) {
  const std::u32string points = code_points(text);
  std::u32string out;
  for (size_t i = 0; i < points.size(); ++i) out += lower_of(points, i);
  return utf8(out);
}

std::string upper(std::string_view text) {
  std::u32string out;
  for (const char32_t c : code_points(text)) out += upper_of(c);
  return utf8(out);
}

std::string capitalize(std::string_view text) {
  const std::u32string points = code_points(text);
  std::u32string out;
  for (size_t i = 0; i < points.size(); ++i)
    out += i == 0 ? title_of(points[i]) : lower_of(points, i);
  return utf8(out);
}

namespace {

// Controls, formats, private characters and spaces other than ' '.
bool is_printable(char32_t c) {
  if (c < 128) return c >= 32 && c < 127;
  return !is_space(c) && c != 0xAD && c != 0xFEFF && (c < 0x200B || c > 0x200F) &&
         (c < 0x202A || c > 0x202E) && (c < 0x2060 || c > 0x206F) && (c < 0xE000 || c > 0xF8FF) &&
         unicode() && ::iswprint_l(wint_t(c), unicode());
}

}  // namespace

std::string python_quoted(std::string_view text) {
  const char quote = text.find('\'') != text.npos && text.find('"') == text.npos ? '"' : '\'';
  std::string out(1, quote);
  for (const char32_t c : code_points(text)) {
    if (c == '\n') out += "\\n";
    else if (c == '\r') out += "\\r";
    else if (c == '\t') out += "\\t";
    else if (c == '\\' || c == char32_t(quote)) out += {'\\', char(c)};
    else if (is_printable(c)) out += utf8(std::u32string_view(&c, 1));
    else
      out += c < 0x100     ? fmt::format("\\x{:02x}", uint32_t(c))
             : c < 0x10000 ? fmt::format("\\u{:04x}", uint32_t(c))
                           : fmt::format("\\U{:08x}", uint32_t(c));
  }
  return out + quote;
}

std::string unescaped(std::string_view text, size_t& at) {
  constexpr std::string_view kNames = "abfnrtv\\'\"";
  constexpr std::string_view kValues = "\a\b\f\n\r\t\v\\'\"";
  const char c = text[at];
  if (const size_t known = kNames.find(c); known != kNames.npos) return {kValues[known]};
  if (c == '\n') return "";  // a line goes on
  const bool octal = c >= '0' && c <= '7';
  const size_t digits = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
  if (c == 'N') fail("names of characters (\\N) are not supported");
  if (digits == 0 && !octal) return {'\\', c};  // Python keeps both
  const size_t begin = octal ? at : at + 1;
  size_t end = begin;
  while (end < text.size() && end < begin + (octal ? 3 : digits) &&
         (octal ? text[end] >= '0' && text[end] <= '7' : std::isxdigit(uint8_t(text[end]))))
    ++end;
  const std::string code(text.substr(begin, end - begin));
  const char32_t point = code.empty() ? U'\0' : char32_t(std::stoul(code, nullptr, octal ? 8 : 16));
  if ((!octal && code.size() != digits) || point > 0x10FFFF || (point >= 0xD800 && point < 0xE000))
    fail("'\\{}' is not a character", text.substr(at, end - at));
  at = end - 1;
  return utf8(std::u32string_view(&point, 1));
}

std::string replace_all(std::string_view text, std::string_view from, std::string_view to,
                        int64_t most) {
  if (from.empty()) return std::string(text);
  std::string out;
  size_t begin = 0;
  for (size_t found; most != 0 && (found = text.find(from, begin)) != std::string_view::npos;
       begin = found + from.size(), --most) {
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
