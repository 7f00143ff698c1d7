#include "base/error.h"

namespace nsa::base {

void check(const Status& status) {
  if (status.code() == StatusCode::kUnsupported) throw Error(status.message());
  if (status.code() == StatusCode::kInternal) throw Failure(status.message());
  if (!status.ok()) throw std::runtime_error(status.message());
}

}  // namespace nsa::base
