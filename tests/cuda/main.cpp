#include <gtest/gtest.h>

#include <cstdio>

#include "nsa/backend.h"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (nsa::device_count() == 0) {
    std::printf("skipped: %s\n", nsa::describe_devices().c_str());
    return 77;
  }
  return RUN_ALL_TESTS();
}
