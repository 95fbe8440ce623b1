#pragma once
#include <string_view>

namespace assay::report {

std::string_view plotly_js();  // the whole library, linked into the program

}  // namespace assay::report
