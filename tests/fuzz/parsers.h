#pragma once
// Every parser of a file or a request that a user gives, as a function of its bytes. It must return
// or throw Error for any bytes. The fuzzer (fuzzer.cc) and the tests (parsers_test.cc) call it.
#include <string>
#include <string_view>
#include <vector>

#include "base/files.h"
#include "base/random.h"
#include "base/registry.h"

namespace assay::fuzz {

struct Parser {
  std::vector<std::string> (*seeds)();                            // valid inputs, small
  void (*parse)(const fs::path& folder, std::string_view input);  // may write to `folder`
  bool json = false;                                              // inputs are JSON,
  size_t prefix = 0;                                              // after so many bytes
};
Registry<Parser>& parsers();

// A folder of the process in memory, if there is /dev/shm; removed at the end.
const fs::path& scratch();
// Writes a file without syncing it.
fs::path put(const fs::path& path, std::string_view contents);

// Calls the parser; returns the message of the Error, "" without one.
std::string try_parser(const Parser& parser, std::string_view input);

// A random change of the input.
std::string mutated(const Parser& parser, std::string_view input, Random& random);

}  // namespace assay::fuzz
