// One process at a time works in a folder.
#pragma once

#include <string>

#include "base/files.h"

namespace nsa::lm {

/// The name of the lock's file, which is there while a process holds it and means nothing when none does.
inline constexpr const char* kLockName = ".nsa-lock";

/// A lock on a folder, which ends with the process however that ends.
class FolderLock {
 public:
  /// Makes the folder where it is not. Throws Error naming the process that holds it, or when the folder cannot be had.
  explicit FolderLock(const std::string& folder);
  /// Takes the folder away again if it was made here and nothing was put into it.
  ~FolderLock();
  FolderLock(FolderLock&& other) noexcept = default;

 private:
  std::string folder_;
  bool made_ = false;
  base::Descriptor file_{-1};
};

}  // namespace nsa::lm
