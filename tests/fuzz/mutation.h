#pragma once
// Random changes of an input: of its bytes, and of its values if it is JSON.
#include <string>

#include "base/random.h"

namespace assay::fuzz {

std::string mutated_bytes(std::string input, Random& random);
// One value of the JSON text is removed, replaced or repeated. Bytes are changed if it is not JSON.
std::string mutated_json(const std::string& input, Random& random);

}  // namespace assay::fuzz
