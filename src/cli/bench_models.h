#pragma once
#include <CLI/CLI.hpp>

namespace assay::cli {

void add_bench_models(CLI::App& bench);  // assay bench models

}  // namespace assay::cli
