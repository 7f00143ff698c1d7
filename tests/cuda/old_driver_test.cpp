// Where the driver is older than the CUDA runtime, that is a line in what the backends are, and the CPU serves.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <nsa/backend.h>

#include <string>

TEST(OldDriver, IsALineAndNoCrash) {
  // LD_LIBRARY_PATH leads to old_driver.cpp, not to this machine's driver. The runtime would close it after its
  // question.
  void* driver = dlopen("libcuda.so.1", RTLD_LAZY);
  ASSERT_NE(driver, nullptr) << dlerror();
  const auto* asked = static_cast<const int*>(dlsym(driver, "old_driver_asked"));
  ASSERT_NE(asked, nullptr) << dlerror();

  EXPECT_EQ(nsa::device_count(), 0);
  EXPECT_GT(*asked, 0);
  const std::string backends = nsa::describe_backends();
  EXPECT_NE(backends.find("cannot run: backend cuda: no device: CUDA driver version is insufficient"),
            std::string::npos)
      << backends;
  EXPECT_NE(backends.find("chosen: cpu"), std::string::npos) << backends;
}
