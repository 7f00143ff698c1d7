// What the program runs on, for reports.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace nsa::lm {

/// "AMD EPYC 9654", as the operating system tells; "unknown" where it does not.
std::string cpu_name();

/// {"cpu", "threads", "isa", "backend"}: the backend that a call on host memory would take, and its variant.
nlohmann::json machine_json(int threads);

}  // namespace nsa::lm
