#pragma once
#include <string>

namespace assay {

std::string version();  // "0.1.0"
std::string commit();   // abbreviated, "+" appended for a changed tree; "unknown" outside git

}  // namespace assay
