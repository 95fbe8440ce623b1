// The program build/assay.
#include "cli/main.h"

int main(int argc, char** argv) { return assay_main(argc, argv); }
