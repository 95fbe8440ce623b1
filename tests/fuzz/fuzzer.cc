// libFuzzer over one parser, which ASSAY_PARSER names.
//
//   fuzz_parsers --list                                        names of the parsers
//   ASSAY_PARSER=toml fuzz_parsers CORPUS -max_total_time=60   writes the seeds to CORPUS first
#include <cstdlib>
#include <cstring>

#include "fuzz/parsers.h"

namespace {

using namespace assay;

const fuzz::Parser& parser() {
  static const fuzz::Parser& chosen = []() -> const fuzz::Parser& {
    const char* name = std::getenv("ASSAY_PARSER");
    return fuzz::parsers().at(name ? name : "");
  }();
  return chosen;
}

}  // namespace

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t most);

extern "C" int LLVMFuzzerInitialize(int* count, char*** arguments) {
  if (*count > 1 && !std::strcmp((*arguments)[1], "--list")) {
    for (const std::string& name : fuzz::parsers().names()) fmt::print("{}\n", name);
    std::exit(0);
  }
  try {
    const auto seeds = parser().seeds();
    if (*count > 1 && fs::is_directory((*arguments)[1]))
      for (size_t i = 0; i < seeds.size(); ++i)
        fuzz::put(fs::path((*arguments)[1]) / fmt::format("seed-{}", i), seeds[i]);
  } catch (const Error& error) {
    fmt::print(stderr, "{}\n", error.what());
    std::exit(2);
  }
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::try_parser(parser(), {reinterpret_cast<const char*>(data), size});
  return 0;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t most, unsigned seed) {
  Random random(seed, "mutator");
  if (!parser().json || random.below(2)) return LLVMFuzzerMutate(data, size, most);
  const std::string made =
      fuzz::mutated(parser(), {reinterpret_cast<const char*>(data), size}, random);
  const size_t kept = std::min(made.size(), most);
  std::memcpy(data, made.data(), kept);
  return kept;
}
