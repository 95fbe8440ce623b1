#pragma once
// The program that runs, for those who start it again: the runs of a study, ranks and jobs are
// processes of it. It is either build/assay or, when Python is the host, the command `assay` of the
// Python package.
#include <string>
#include <vector>

#include "base/files.h"

namespace assay {

// Says that the program is a script of a host. `script` can be executed with the arguments of the
// command line; `arguments` are those of this process, without the name of the program.
void set_hosted_program(const fs::path& script, std::vector<std::string> arguments);
bool is_hosted();

fs::path own_program();
std::vector<std::string> own_command_line();  // the program, then the arguments of this process
// The folder of the library or program that holds this function: plans/ is in it or next to it.
fs::path own_folder();

}  // namespace assay
