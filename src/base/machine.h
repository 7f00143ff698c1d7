// What the program runs on, for reports.
#pragma once

#include <c10/core/Device.h>

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace nsa::base {

/// "AMD EPYC 9654", as the operating system tells; "unknown" where it does not.
std::string cpu_name();

/// Of the NVIDIA driver, by its management library; "unknown" where that is not.
std::string driver_version();

/// {"cpu", "threads", "isa", "backend", "torch"} and on CUDA "gpu", "driver", "cuda" and "cudnn" (versions): the
/// backend that a call on the device would take, and its variant.
nlohmann::json machine_json(int threads, at::Device device);

}  // namespace nsa::base
