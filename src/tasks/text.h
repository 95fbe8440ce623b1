#pragma once
// Text by code points, with the meaning that Python gives these operations on str.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace assay::tasks {

std::u32string code_points(std::string_view text);  // a byte that is not UTF-8 becomes U+FFFD
std::string utf8(std::u32string_view text);

bool is_space(char32_t c);  // str.isspace() of one character
bool is_word(char32_t c);   // letters, digits and the underscore
std::string strip(std::string_view text, bool left = true, bool right = true);
// str.strip(characters): any of these at both ends.
std::string strip_characters(std::string_view text, std::string_view characters, bool left = true,
                             bool right = true);
std::string lower(std::string_view text);
// BadInput names a Greek letter with accents whose capital form is several characters.
std::string upper(std::string_view text);
std::string capitalize(std::string_view text);
// Every occurrence from left to right, at most `most` of them unless it is negative. An empty
// `from` changes nothing.
std::string replace_all(std::string_view text, std::string_view from, std::string_view to,
                        int64_t most = -1);
// repr(text).
std::string python_quoted(std::string_view text);
// The characters of the escape in a string literal whose character after the backslash is text[at].
// `at` moves to the last character of the escape. BadInput says what is wrong.
std::string unescaped(std::string_view text, size_t& at);
// str.split(separator, most); most = -1: no limit. An empty separator splits at runs
// of white space.
std::vector<std::string> split(std::string_view text, std::string_view separator,
                               int64_t most = -1);
int64_t length(std::string_view text);  // in code points

}  // namespace assay::tasks
