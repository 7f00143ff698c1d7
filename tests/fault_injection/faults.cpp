// Preloaded into a program: counts the calls that change files below a folder, and lets one of them fail or be the
// last.
//   NSA_FAULTS_UNDER  the folder, absolute; without it nothing happens
//   NSA_FAULTS_LOG    a line per call is added to this file: number, call, path (of rename: both, the new one first)
//   NSA_FAULTS_AT     number of the call (from 1) that meets
//   NSA_FAULTS_DO     kill-before | kill-behind | short (half of a write is done) | torn (... and the process ends) |
//                     an errno, or -errno for this call and all behind it that could need space
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

template <class F>
F* next(const char* name) {
  return reinterpret_cast<F*>(::dlsym(RTLD_NEXT, name));
}

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

const std::string& under() {
  static const std::string folder = variable("NSA_FAULTS_UNDER");
  return folder;
}

bool is_under(const std::string& path) {
  const auto& folder = under();
  return !folder.empty() && path.compare(0, folder.size(), folder) == 0 &&
         (path.size() == folder.size() || path[folder.size()] == '/');
}

std::string link_target(const std::string& link) {
  char target[PATH_MAX];
  const ssize_t size = ::readlink(link.c_str(), target, sizeof target);
  return size < 0 ? "" : std::string(target, static_cast<std::size_t>(size));
}

std::string path_of(int fd) { return link_target("/proc/self/fd/" + std::to_string(fd)); }

std::string path_at(int folder, const char* path) {
  if (path[0] == '/') return path;
  return (folder == AT_FDCWD ? link_target("/proc/self/cwd") : path_of(folder)) + "/" + path;
}

[[noreturn]] void die() {
  ::kill(::getpid(), SIGKILL);
  ::_exit(1);
}

struct Plan {
  long at = std::atol(variable("NSA_FAULTS_AT").c_str());
  std::string action = variable("NSA_FAULTS_DO");
  int error = std::atoi(action.c_str());
  int log = variable("NSA_FAULTS_LOG").empty()
                ? -1
                : next<int(const char*, int, ...)>("open")(variable("NSA_FAULTS_LOG").c_str(),
                                                           O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
};

/// One call that may meet its fault.
class Call {
 public:
  Call(const char* name, const std::string& path, bool needs_space = false, const std::string& from = "") {
    if (!is_under(path)) return;
    static const Plan plan;
    static std::atomic<long> count{0};
    const long number = ++count;
    if (plan.log >= 0) {
      const std::string line = std::to_string(number) + "\t" + name + "\t" + path + "\t" + from + "\n";
      if (next<ssize_t(int, const void*, std::size_t)>("write")(plan.log, line.data(), line.size()) < 0) die();
    }
    if (plan.at > 0 && plan.error < 0 && number >= plan.at && needs_space) error_ = -plan.error;
    if (number != plan.at) return;
    if (plan.action == "kill-before") die();
    kill_ = plan.action == "kill-behind" || plan.action == "torn";
    half_ = plan.action == "short" || plan.action == "torn";
    if (plan.error > 0) error_ = plan.error;
  }
  std::size_t size(std::size_t whole) const { return half_ ? (whole + 1) / 2 : whole; }

  template <class Do>
  auto operator()(Do&& call) const -> decltype(call()) {
    if (error_ != 0) {
      errno = error_;
      return static_cast<decltype(call())>(-1);
    }
    const auto result = call();
    if (kill_) die();
    return result;
  }
  bool fails() const { return error_ != 0; }
  int error() const { return error_; }

 private:
  bool kill_ = false, half_ = false;
  int error_ = 0;
};

int open_at(const char* name, int folder, const char* path, int flags, mode_t mode) {
  const bool creates = (flags & O_CREAT) != 0;
  const Call call(creates ? "create" : "open", path_at(folder, path), creates);
  return call([&] {
    return std::strstr(name, "at") != nullptr ? next<int(int, const char*, int, ...)>(name)(folder, path, flags, mode)
                                              : next<int(const char*, int, ...)>(name)(path, flags, mode);
  });
}

FILE* open_stream(const char* name, const char* path, const char* mode) {
  const bool creates = mode[0] != 'r';
  const Call call(creates ? "create" : "open", path_at(AT_FDCWD, path), creates);
  FILE* stream = nullptr;
  const int done = call([&] {
    stream = next<FILE*(const char*, const char*)>(name)(path, mode);
    return 0;
  });
  return done == 0 ? stream : nullptr;
}

mode_t mode_of(int flags, va_list list) { return (flags & O_CREAT) != 0 ? va_arg(list, mode_t) : 0; }

}  // namespace

extern "C" {

#define NSA_OPEN(name)                                  \
  int name(const char* path, int flags, ...) {          \
    va_list list;                                       \
    va_start(list, flags);                              \
    const mode_t mode = mode_of(flags, list);           \
    va_end(list);                                       \
    return open_at(#name, AT_FDCWD, path, flags, mode); \
  }
#define NSA_OPENAT(name)                                   \
  int name(int folder, const char* path, int flags, ...) { \
    va_list list;                                          \
    va_start(list, flags);                                 \
    const mode_t mode = mode_of(flags, list);              \
    va_end(list);                                          \
    return open_at(#name, folder, path, flags, mode);      \
  }
NSA_OPEN(open)
NSA_OPEN(open64)
NSA_OPENAT(openat)
NSA_OPENAT(openat64)

FILE* fopen(const char* path, const char* mode) { return open_stream("fopen", path, mode); }
FILE* fopen64(const char* path, const char* mode) { return open_stream("fopen64", path, mode); }

ssize_t write(int fd, const void* data, size_t size) {
  const Call call("write", path_of(fd), true);
  return call([&] { return next<ssize_t(int, const void*, size_t)>("write")(fd, data, call.size(size)); });
}

ssize_t writev(int fd, const iovec* parts, int count) {
  const Call call("write", path_of(fd), true);
  return call([&] { return next<ssize_t(int, const iovec*, int)>("writev")(fd, parts, count); });
}

ssize_t pwrite(int fd, const void* data, size_t size, off_t offset) {
  const Call call("write", path_of(fd), true);
  return call(
      [&] { return next<ssize_t(int, const void*, size_t, off_t)>("pwrite")(fd, data, call.size(size), offset); });
}

ssize_t read(int fd, void* data, size_t size) {
  const Call call("read", path_of(fd));
  return call([&] { return next<ssize_t(int, void*, size_t)>("read")(fd, data, call.size(size)); });
}

DIR* opendir(const char* path) {
  const Call call("opendir", path_at(AT_FDCWD, path));
  DIR* folder = nullptr;
  return call([&] { return (folder = next<DIR*(const char*)>("opendir")(path)) == nullptr ? -1 : 0; }) == 0 ? folder
                                                                                                            : nullptr;
}

int fsync(int fd) {
  const Call call("fsync", path_of(fd), true);
  return call([&] { return next<int(int)>("fsync")(fd); });
}

int fdatasync(int fd) {
  const Call call("fsync", path_of(fd), true);
  return call([&] { return next<int(int)>("fdatasync")(fd); });
}

int flock(int fd, int operation) {
  const Call call("flock", path_of(fd));
  return call([&] { return next<int(int, int)>("flock")(fd, operation); });
}

int ftruncate(int fd, off_t size) {
  const Call call("truncate", path_of(fd));
  return call([&] { return next<int(int, off_t)>("ftruncate")(fd, size); });
}

int close(int fd) {
  const Call call("close", path_of(fd));
  const auto actual = next<int(int)>("close");
  if (call.fails()) {  // Linux closes the file in any case
    actual(fd);
    errno = call.error();
    return -1;
  }
  return call([&] { return actual(fd); });
}

int rename(const char* from, const char* to) {
  const Call call("rename", path_at(AT_FDCWD, to), true, path_at(AT_FDCWD, from));
  return call([&] { return next<int(const char*, const char*)>("rename")(from, to); });
}

int unlink(const char* path) {
  const Call call("unlink", path_at(AT_FDCWD, path));
  return call([&] { return next<int(const char*)>("unlink")(path); });
}

int remove(const char* path) noexcept {
  const Call call("unlink", path_at(AT_FDCWD, path));
  return call([&] { return next<int(const char*)>("remove")(path); });
}

int rmdir(const char* path) {
  const Call call("rmdir", path_at(AT_FDCWD, path));
  return call([&] { return next<int(const char*)>("rmdir")(path); });
}

int mkdir(const char* path, mode_t mode) {
  const Call call("mkdir", path_at(AT_FDCWD, path), true);
  return call([&] { return next<int(const char*, mode_t)>("mkdir")(path, mode); });
}

}  // extern "C"
