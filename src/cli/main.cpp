// The program `nsa`.
#include "cli/program.h"

int main(int argc, char** argv) { return nsa_program(argc, argv, nullptr); }
