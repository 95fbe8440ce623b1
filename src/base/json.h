#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace assay {

// The value of a JSON text. BadInput that names `source` if the text is not JSON or has more than
// 64 levels: code that copies or writes a value recurses once per level.
nlohmann::json parse_json(std::string_view text, const std::string& source);

}  // namespace assay
