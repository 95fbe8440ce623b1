#include "base/record.h"

namespace assay {

nlohmann::json parse_json(std::string_view text, const std::string& source) {
  try {
    return nlohmann::json::parse(text);
  } catch (const nlohmann::json::exception& error) {
    // "[json.exception.parse_error.101] parse error at …"
    const std::string_view what = error.what();
    fail("{}: broken JSON: {}", source, what.substr(what.find("] ") + 2));
  }
}

}  // namespace assay
