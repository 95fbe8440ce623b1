#include "base/shared_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.h"

namespace assay {
namespace {

[[noreturn]] void system_error(const char* what, const fs::path& path, int code = errno) {
  fail<Error>("{}: {}: {}", path.string(), what, std::strerror(code));
}

}  // namespace

// Only for writing: a network file system then sends the bytes that were written, and not whole
// pages with old bytes of other processes.
SharedFile::SharedFile(fs::path path, std::optional<uint64_t> size_of_new)
    : path_(std::move(path)),
      descriptor_(::open(path_.c_str(), O_WRONLY | O_CLOEXEC | (size_of_new ? O_CREAT | O_EXCL : 0),
                         0666)) {
  if (descriptor_ < 0) system_error("cannot be opened for writing", path_);
  if (!size_of_new || *size_of_new == 0) return;
  const off_t size = off_t(*size_of_new);
  // Not posix_fallocate, which writes to every block if the file system cannot reserve
  int error = EINTR;
  while (error == EINTR) error = ::fallocate(descriptor_, 0, 0, size) ? errno : 0;
  if (error == EOPNOTSUPP) error = ::ftruncate(descriptor_, size) ? errno : 0;
  if (error == 0) return;
  ::close(descriptor_);
  system_error("disk space cannot be reserved", path_, error);
}

SharedFile::~SharedFile() { ::close(descriptor_); }

void SharedFile::write(uint64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::pwrite(descriptor_, bytes.data(), bytes.size(), off_t(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) system_error("cannot be written", path_);
    offset += uint64_t(written);
    bytes = bytes.subspan(size_t(written));
  }
}

void SharedFile::sync() {
  if (::fsync(descriptor_)) system_error("cannot be written", path_);
}

}  // namespace assay
