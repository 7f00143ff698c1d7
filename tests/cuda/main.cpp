#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>

#include "nsa/backend.h"

namespace {

/// Where NSA_CUDA_TRACE names a folder: the kernels that a test launches go to a file of its name there.
class TraceOfEachTest : public testing::EmptyTestEventListener {
 public:
  explicit TraceOfEachTest(std::string folder) : folder_(std::move(folder)) {}

 private:
  void OnTestStart(const testing::TestInfo& test) override {
    std::string name = std::string(test.test_suite_name()) + "." + test.name();
    std::replace(name.begin(), name.end(), '/', '+');
    setenv("NSA_CUDA_TRACE", (folder_ + "/" + name).c_str(), 1);
  }

  std::string folder_;
};

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (nsa::device_count() == 0) {
    std::printf("skipped: %s\n", nsa::describe_devices().c_str());
    return 77;
  }
  if (const char* folder = std::getenv("NSA_CUDA_TRACE"))
    testing::UnitTest::GetInstance()->listeners().Append(new TraceOfEachTest(folder));
  return RUN_ALL_TESTS();
}
