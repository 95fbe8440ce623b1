#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace assay {

// The value of a JSON text. BadInput that names `source` if the text is not JSON or has more than
// 64 levels: code that copies or writes a value recurses once per level.
nlohmann::json parse_json(std::string_view text, const std::string& source);

// The value of a text that Python's json module may have written. NaN, infinities and numbers that
// float64 cannot hold become null, and half surrogates become U+FFFD.
nlohmann::json parse_python_json(std::string_view text, const std::string& source);
// A text in the JSON of Python as strict JSON, changed as above; integers of more than 18 digits
// become floats. What is wrong in Python, too, stays wrong.
std::string strict_json(std::string_view python_json);

}  // namespace assay
