#pragma once
// Golden data: what the implementations of other authors compute. All of it is in the folder
// golden of $ASSAY_SHARED (default: ../shared); without that folder, tests read the
// selection in tests/golden.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace assay {

inline std::filesystem::path golden_folder() {
  const char* shared = std::getenv("ASSAY_SHARED");
  const auto all =
      std::filesystem::path(shared ? shared : ASSAY_SOURCE_DIR "/../shared") / "golden";
  return std::filesystem::exists(all) ? all
                                      : std::filesystem::path(ASSAY_SOURCE_DIR "/tests/golden");
}

inline bool golden_data_is_complete() {
  return golden_folder() != std::filesystem::path(ASSAY_SOURCE_DIR "/tests/golden");
}

// The cases (a name without .safetensors, and anything) that the golden data has: at least one, and
// all of them if the golden data is complete.
template <class Case>
std::vector<std::pair<std::string, Case>> golden_cases(
    std::vector<std::pair<std::string, Case>> cases) {
  const auto is_absent = [](const auto& c) {
    return !std::filesystem::exists(golden_folder() / (c.first + ".safetensors"));
  };
  const size_t absent = std::erase_if(cases, is_absent);
  if (golden_data_is_complete()) EXPECT_EQ(absent, 0) << "files are missing in " << golden_folder();
  EXPECT_FALSE(cases.empty()) << "no file of this test is in " << golden_folder();
  return cases;
}

}  // namespace assay
