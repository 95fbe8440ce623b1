#pragma once
// The origin of a file that Assay writes.
#include <string>

namespace assay {

std::string version();  // "0.1.0"
std::string commit();   // abbreviated, "+" appended for a changed tree; "unknown" outside git
std::string now_utc();  // "2026-01-31T12:00:00Z"

}  // namespace assay
