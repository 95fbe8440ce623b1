#pragma once
#include <istream>
#include <string>

namespace assay::cli {

// std::getline for a stream that may be standard input, a terminal or a pipe that stays open.
// Ctrl-C and SIGTERM end a read that waits, as the end of the input does. The caller then calls
// check_interrupt().
bool read_line(std::istream& in, std::string& line);

}  // namespace assay::cli
