#pragma once
// Texts and a vocabulary that the tests of tokenizers share.
#include <cstdlib>
#include <string>
#include <vector>

#include "base/files.h"
#include "base/random.h"

namespace assay::data {

// $ASSAY_MIXTRAL_MODEL, or where the wheel mistral-common puts it in the project's environment.
inline fs::path mixtral() {
  if (const char* file = std::getenv("ASSAY_MIXTRAL_MODEL")) return file;
  const fs::path libraries = fs::path(ASSAY_SOURCE_DIR) / ".venv" / "lib";
  std::error_code none;
  for (const auto& python : fs::directory_iterator(libraries, none)) {
    const fs::path file = python.path() / "site-packages/mistral_common/data/tokenizer.model.v1";
    if (fs::exists(file)) return file;
  }
  return libraries / "site-packages/mistral_common/data/tokenizer.model.v1";
}

// Texts that press on the cuts: spaces, newlines, ▁ itself, digits, bytes, words of every length.
inline std::string awkward_text(uint64_t seed) {
  static const std::vector<std::string> parts = {" ",
                                                 " ",
                                                 "  ",
                                                 "\n",
                                                 "\n\n",
                                                 "\t",
                                                 "▁",
                                                 "the",
                                                 "The",
                                                 "ing",
                                                 "1",
                                                 "2024",
                                                 ".",
                                                 ",",
                                                 "(",
                                                 "é",
                                                 "汉",
                                                 "😀",
                                                 "<s>",
                                                 "<0x0A>",
                                                 std::string("\0", 1),
                                                 "\r",
                                                 "a",
                                                 "e",
                                                 "t",
                                                 "supercalifragilistic",
                                                 "\u00a0",
                                                 "->"};
  Random random(seed, "awkward text");
  std::string text;
  for (uint64_t i = random.below(60); i > 0; --i) text += parts[random.below(parts.size())];
  return text;
}

}  // namespace assay::data
