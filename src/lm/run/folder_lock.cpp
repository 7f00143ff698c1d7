#include "lm/run/folder_lock.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <ctime>
#include <filesystem>

#include "base/error.h"

namespace nsa::lm {
namespace {

namespace fs = std::filesystem;

/// Who this is, for those who come later.
std::string self() {
  std::array<char, 256> host{}, now{};
  ::gethostname(host.data(), host.size() - 1);
  const std::time_t seconds = std::time(nullptr);
  std::strftime(now.data(), now.size(), "%F %T", std::gmtime(&seconds));
  return fmt::format("process {} on {} since {} UTC", ::getpid(), host.data(), now.data());
}

/// What the holder wrote; nothing yet if it has just begun.
std::string holder(const std::string& path) {
  const std::string text = base::read_prefix(path, base::Links::kRefuse, 1000);
  const bool sound = std::all_of(text.begin(), text.end(), [](char c) { return c >= ' ' && c <= '~'; });
  return sound && !text.empty() ? text : "a process that has just begun";
}

/// Is the open file still the one of that name?
bool is_named(int fd, const std::string& path) {
  struct stat open = {}, named = {};
  return ::fstat(fd, &open) == 0 && ::lstat(path.c_str(), &named) == 0 && open.st_dev == named.st_dev &&
         open.st_ino == named.st_ino;
}

}  // namespace

FolderLock::FolderLock(const std::string& folder) : folder_(folder) {
  std::error_code error;
  made_ = fs::create_directories(folder, error);
  if (error) {
    errno = error.value();
    base::throw_errno(folder, "cannot be made");
  }
  if (made_) base::flush_folder((fs::path(folder) / "..").string());
  const std::string path = (fs::path(folder) / kLockName).string();
  for (;;) {
    auto file = base::open_regular(path, O_RDWR | O_CREAT, base::Links::kRefuse);
    if (::flock(file.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno != EWOULDBLOCK) base::throw_errno(path, "cannot be locked");
      throw base::Error(fmt::format("{}: is being trained in by {}", folder, holder(path)));
    }
    if (!is_named(file.get(), path)) continue;  // its owner removed the name at its end
    if (::ftruncate(file.get(), 0) != 0) base::throw_errno(path, "cannot write");
    base::append_text(path, self());
    file_ = std::move(file);
    return;
  }
}

FolderLock::~FolderLock() {
  if (file_.get() < 0) return;
  ::unlink((fs::path(folder_) / kLockName).c_str());
  if (made_) ::rmdir(folder_.c_str());
}

}  // namespace nsa::lm
