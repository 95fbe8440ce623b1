#include "base/json.h"

#include <nlohmann/json.hpp>

#include "base/error.h"

namespace assay {

nlohmann::json parse_json(std::string_view text, const std::string& source) {
  constexpr int kDeepest = 64;
  const auto check_depth = [&](int depth, nlohmann::json::parse_event_t, nlohmann::json&) {
    if (depth > kDeepest) fail("{}: JSON with more than {} levels", source, kDeepest);
    return true;
  };
  try {
    return nlohmann::json::parse(text, check_depth);
  } catch (const nlohmann::json::exception& error) {
    // "[json.exception.parse_error.101] parse error at …"
    const std::string_view what = error.what();
    fail("{}: broken JSON: {}", source, what.substr(what.find("] ") + 2));
  }
}

}  // namespace assay
