#include "data/regular_expression.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <array>

#include "base/error.h"

namespace assay::data {
namespace {

// White space of Unicode, which \s is in Oniguruma; in PCRE2, \s also has U+180E.
constexpr const char* kSpaces = R"(\t-\r\x{85}\p{Z})";

// The pattern for PCRE2.
std::string translated(const std::string& pattern, const std::string& source) {
  const auto refuse = [&](std::string_view what) {
    fail("{}: the regular expression '{}' has {}, which is not supported. Nothing was written.",
         source, pattern, what);
  };
  std::string out;
  bool in_class = false;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    const char next = i + 1 < pattern.size() ? pattern[i + 1] : '\0';
    if (c == '\\') {
      ++i;
      if (next == 's') out += in_class ? kSpaces : fmt::format("[{}]", kSpaces);
      else if (next == 'S' && !in_class) out += fmt::format("[^{}]", kSpaces);
      else if (std::isalnum(uint8_t(next)) &&
               std::string_view("pPdDrntfvx").find(next) == std::string_view::npos)
        refuse(std::string("\\") + next);
      else out += {c, next};
      // The braces of \p{L} are not those of a quantifier
      const size_t end = pattern.find('}', i);
      const bool braces = pattern.substr(i + 1, 1) == "{" && end != std::string::npos;
      if (braces && std::string_view("pPx").find(next) != std::string_view::npos) {
        out += pattern.substr(i + 1, end - i);
        i = end;
      }
      continue;
    }
    if (in_class && (c == '[' || (c == '&' && next == '&'))) refuse("a class within a class");
    if (!in_class && (c == '^' || c == '$' || c == '.')) refuse(std::string(1, c));
    if (!in_class && c == '}' && next == '+') refuse("}+");
    if (c == '[') {
      in_class = true;
      if (next == '^') {
        out += c;
        out += next;
        ++i;
        continue;
      }
    }
    if (c == ']') in_class = false;
    out += c;
  }
  return out;
}

std::string message_of(int error) {
  std::array<PCRE2_UCHAR, 256> buffer{};
  pcre2_get_error_message(error, buffer.data(), buffer.size());
  return reinterpret_cast<const char*>(buffer.data());
}

}  // namespace

RegularExpression::RegularExpression(const std::string& pattern, const std::string& source) {
  const std::string text = translated(pattern, source);
  int error = 0;
  PCRE2_SIZE place = 0;
  pcre2_code* code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(),
                                   PCRE2_UTF | PCRE2_UCP, &error, &place, nullptr);
  if (!code) fail("{}: the regular expression '{}': {}", source, pattern, message_of(error));
  pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);  // without it, matching is slower
  code_ = std::shared_ptr<const void>(code, [code](const void*) { pcre2_code_free(code); });
}

void RegularExpression::for_each_part(std::string_view text,
                                      const std::function<void(std::string_view)>& part) const {
  const auto* code = static_cast<const pcre2_code*>(code_.get());
  const std::unique_ptr<pcre2_match_data, decltype(&pcre2_match_data_free)> match(
      pcre2_match_data_create_from_pattern(code, nullptr), &pcre2_match_data_free);
  const auto* subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  size_t begin = 0;
  while (begin < text.size()) {
    const int found = pcre2_match(code, subject, text.size(), begin,
                                  PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY, match.get(), nullptr);
    if (found == PCRE2_ERROR_NOMATCH) break;
    if (found < 0)
      fail<Error>("text of {} bytes cannot be cut into words: {}", text.size(), message_of(found));
    const PCRE2_SIZE* ends = pcre2_get_ovector_pointer(match.get());
    if (ends[0] > begin) part(text.substr(begin, ends[0] - begin));
    part(text.substr(ends[0], ends[1] - ends[0]));
    begin = ends[1];
  }
  if (begin < text.size()) part(text.substr(begin));
}

}  // namespace assay::data
