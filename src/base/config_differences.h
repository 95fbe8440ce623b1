#pragma once
#include <string>
#include <vector>

#include "base/config.h"

namespace assay {

// "train.steps is 200 instead of 100" for every value of `now` that differs from `before`.
std::vector<std::string> differences(const ConfigNode& before, const ConfigNode& now);

}  // namespace assay
