// main of every test program: a forced instruction set that this CPU lacks skips the program, with a line that says so.
#include <gtest/gtest.h>

#include <cstdio>

#include "cpu/isa.h"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  nsa::cpu::Isa isa;
  if (const nsa::Status status = nsa::cpu::choose_isa(isa); !status.ok()) {
    std::printf("Skipped: %s\n", status.message().c_str());
    return 77;
  }
  return RUN_ALL_TESTS();
}
