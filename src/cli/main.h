#pragma once
// The command line as functions of libassay.so, for programs that load it. They set the handlers of
// signals, so a process calls one of them once. They return the exit code.
extern "C" {

// argv[0] is the name of the program.
int assay_main(int argc, char** argv);

// For a host such as Python. `script` is an executable file that runs this function again, with the
// arguments that it is given: the runs of a study and ranks are processes of it.
int assay_hosted_main(const char* script, int argc, char** argv);
}
