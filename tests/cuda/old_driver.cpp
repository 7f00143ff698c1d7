// A libcuda.so.1 as of CUDA 12.4, older than any runtime that libnsa is built with: it knows its version and no more.
#include <cstdint>
#include <cstring>

extern "C" {

int old_driver_asked = 0;  // read by the test

int cuInit(unsigned) { return 0; }

int cuDriverGetVersion(int* version) {
  ++old_driver_asked;
  *version = 12040;
  return 0;
}

int cuGetProcAddress_v2(const char* name, void** function, int, std::uint64_t, int* status) {
  ++old_driver_asked;
  *function = nullptr;
  if (std::strcmp(name, "cuInit") == 0) *function = reinterpret_cast<void*>(&cuInit);
  if (std::strcmp(name, "cuDriverGetVersion") == 0) *function = reinterpret_cast<void*>(&cuDriverGetVersion);
  if (status) *status = *function ? 0 : 1;  // CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND
  return *function ? 0 : 500;               // CUDA_ERROR_NOT_FOUND
}
}
