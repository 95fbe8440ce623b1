#pragma once

namespace assay {

// A mapped file that another process makes shorter is read with a SIGBUS. From now on, the process
// then writes the path of the file to standard error and ends with exit code 1.
void catch_truncated_files();

}  // namespace assay
