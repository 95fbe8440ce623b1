#include "base/files.h"

#include <fcntl.h>
#include <openssl/evp.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <mutex>
#include <utility>

#include "base/error.h"
#include "base/truncated_files.h"

namespace assay {
namespace {

[[noreturn]] void system_error(const char* what, const fs::path& path) {
  const int code = errno;
  fail<Error>("{}: {}: {}", path.string(), what, std::strerror(code));
}

void sync_folder(const fs::path& folder) {
  const int descriptor = ::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY);
  if (descriptor < 0) return;
  ::fsync(descriptor);
  ::close(descriptor);
}

constexpr const char* kTemporary = ".tmp";
constexpr size_t kRandomDigits = 16;
constexpr std::chrono::hours kAbandonedAfter(1);

fs::path random_name(const fs::path& path) {
  uint64_t number;
  if (::getrandom(&number, sizeof number, 0) != sizeof number) system_error("no random name", path);
  return path.string() + kTemporary + fmt::format("{:0{}x}", number, kRandomDigits);
}

bool is_temporary_name(const std::string& name, const std::string& of) {
  const std::string begin = of + kTemporary;
  if (!name.starts_with(begin) || name.size() != begin.size() + kRandomDigits) return false;
  return name.find_first_not_of("0123456789abcdef", begin.size()) == std::string::npos;
}

// Whether `path` still names what the descriptor has open.
bool is_at(const fs::path& path, int descriptor) {
  struct stat opened;
  struct stat named;
  if (::fstat(descriptor, &opened) || ::stat(path.c_str(), &named)) return false;
  return opened.st_dev == named.st_dev && opened.st_ino == named.st_ino;
}

// Whether nothing in the folder was written for a while.
bool is_old(const fs::path& folder) {
  const auto limit = fs::file_time_type::clock::now() - kAbandonedAfter;
  if (fs::last_write_time(folder) > limit) return false;
  for (const auto& entry : fs::directory_iterator(folder))
    if (entry.last_write_time() > limit) return false;
  return true;
}

// Removes temporary folders of `path` that no living process holds. The lock alone does not tell:
// some file systems keep locks to themselves on each host.
void remove_abandoned_folders(const fs::path& path) {
  const fs::path parent = path.has_parent_path() ? path.parent_path() : fs::path(".");
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(parent, ignored)) {
    if (!is_temporary_name(entry.path().filename().string(), path.filename().string())) continue;
    const int descriptor =
        ::open(entry.path().c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (descriptor < 0) continue;
    if (!::flock(descriptor, LOCK_EX | LOCK_NB) && is_old(entry.path()))
      fs::remove_all(entry.path(), ignored);
    ::close(descriptor);
  }
}

// A file without a name, which vanishes with its process. It gets its name in commit(). On a file
// system without such files it has its final name from the start.
int open_new_file(const fs::path& name) {
  const fs::path folder = name.has_parent_path() ? name.parent_path() : fs::path(".");
  const int descriptor = ::open(folder.c_str(), O_WRONLY | O_TMPFILE | O_CLOEXEC, 0666);
  if (descriptor >= 0) return descriptor;
  return ::open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
}

// False if the file has another name already.
bool give_name(int descriptor, const fs::path& name) {
  const std::string nameless = fmt::format("/proc/self/fd/{}", descriptor);
  return !::linkat(AT_FDCWD, nameless.c_str(), AT_FDCWD, name.c_str(), AT_SYMLINK_FOLLOW);
}

// The mapped files of the process, for a signal handler: a list that only grows. A node is free
// for another file while its size is 0.
struct Mapping {
  std::atomic<const std::byte*> begin = nullptr;
  std::atomic<size_t> size = 0;
  std::array<char, 4096> path{};
  Mapping* next = nullptr;
};
std::atomic<Mapping*> mappings = nullptr;
std::mutex mappings_mutex;  // held by those who change the list

void add_mapping(const std::byte* begin, size_t size, const std::string& path) {
  const std::lock_guard lock(mappings_mutex);
  Mapping* node = mappings;
  while (node && node->size > 0) node = node->next;
  if (!node) {
    node = new Mapping;
    node->next = mappings;
    mappings = node;
  }
  node->path[path.copy(node->path.data(), node->path.size() - 1)] = '\0';
  node->begin = begin;
  node->size = size;
}

void remove_mapping(const std::byte* begin) {
  const std::lock_guard lock(mappings_mutex);
  for (Mapping* node = mappings; node; node = node->next)
    if (node->size > 0 && node->begin == begin) node->size = 0;
}

// Calls only functions that a signal handler may call.
void say(const char* text) {
  if (::write(STDERR_FILENO, text, std::strlen(text)) < 0) return;
}

void on_bus_error(int signal, siginfo_t* info, void*) {
  const auto* address = static_cast<const std::byte*>(info->si_addr);
  for (const Mapping* node = mappings; node; node = node->next) {
    if (address < node->begin || address >= node->begin + node->size) continue;
    say("assay: ");
    say(node->path.data());
    say(": the file became shorter while it was read. Restore it and give the command again.\n");
    ::_exit(1);
  }
  ::signal(signal, SIG_DFL);  // not from a mapped file: end as without this handler
}

}  // namespace

void catch_truncated_files() {
  struct sigaction action{};
  action.sa_sigaction = on_bus_error;
  action.sa_flags = SA_SIGINFO;
  ::sigaction(SIGBUS, &action, nullptr);
}

namespace {

// The file behind a link. A device or a pipe would be replaced by a file.
fs::path replaceable(const fs::path& path) {
  std::error_code ignored;
  const fs::file_status status = fs::status(path, ignored);
  if (fs::exists(status) && !fs::is_regular_file(status))
    fail("{}: not a regular file, so no file can be written in its place", path.string());
  return fs::is_symlink(path, ignored) ? fs::weakly_canonical(path) : path;
}

}  // namespace

void check_output(const fs::path& file) {
  const fs::path path = replaceable(file);
  const fs::path folder = path.has_parent_path() ? path.parent_path() : fs::path(".");
  if (!fs::is_directory(folder)) fail("{}: there is no folder {}", file.string(), folder.string());
  if (::access(folder.c_str(), W_OK | X_OK))
    fail("{}: cannot be written: {}", file.string(), std::strerror(errno));
}

AtomicFile::AtomicFile(fs::path path)
    : path_(replaceable(path)), temporary_(random_name(path_)), file_(nullptr) {
  const int descriptor = open_new_file(temporary_);
  if (descriptor >= 0) file_ = ::fdopen(descriptor, "wb");
  if (!file_) system_error("cannot be written", path_);
}

AtomicFile::~AtomicFile() {
  if (!file_) return;
  std::fclose(file_);
  ::unlink(temporary_.c_str());
}

void AtomicFile::write(const void* data, size_t bytes) {
  if (std::fwrite(data, 1, bytes, file_) != bytes)
    system_error("cannot be written (the old file is untouched)", path_);
}

void AtomicFile::commit() {
  if (std::fflush(file_) || ::fsync(::fileno(file_)))
    system_error("cannot be written (the old file is untouched)", path_);
  if (!give_name(::fileno(file_), temporary_) && errno != EEXIST)
    system_error("cannot be written (the old file is untouched)", path_);
  std::fclose(std::exchange(file_, nullptr));
  if (::rename(temporary_.c_str(), path_.c_str())) {
    const int code = errno;
    ::unlink(temporary_.c_str());
    errno = code;
    system_error("cannot be replaced", path_);
  }
  sync_folder(path_.parent_path());
}

void write_file(const fs::path& path, std::string_view text) {
  AtomicFile file(path);
  file.write(text);
  file.commit();
}

std::string read_file(const fs::path& path) {
  const MappedFile file(path);
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

namespace {
// A wrong place for a folder is bad input; a full disk, for example, is not.
[[noreturn]] void refuse_folder(const fs::path& path, int reason) {
  constexpr std::array kWrongPlace = {ENOTDIR, EEXIST, ENOENT, EACCES,      EPERM,
                                      EROFS,   ELOOP,  EINVAL, ENAMETOOLONG};
  const bool wrong_place = std::ranges::count(kWrongPlace, reason) > 0;
  throw Error(
      fmt::format("{}: the folder cannot be made: {}. Nothing was written.{}", path.string(),
                  std::strerror(reason), wrong_place ? " Give another folder." : ""),
      wrong_place ? kBadInput : kFailed);
}
}  // namespace

void make_folder(const fs::path& path) {
  std::error_code code;
  fs::create_directories(path, code);
  if (!code && !fs::is_directory(path)) code = std::make_error_code(std::errc::not_a_directory);
  if (code) refuse_folder(path, code.value());
}

void publish_folder(const fs::path& temporary, const fs::path& path) {
  if (::rename(temporary.c_str(), path.c_str()))
    system_error("finished folder cannot be moved into place", path);
  sync_folder(path.parent_path());
}

void exchange_folders(const fs::path& temporary, const fs::path& path) {
  if (::renameat2(AT_FDCWD, temporary.c_str(), AT_FDCWD, path.c_str(), RENAME_EXCHANGE)) {
    if (errno != EINVAL && errno != ENOSYS)
      system_error("finished folder cannot be moved into place", path);
    const fs::path old = random_name(path);
    publish_folder(path, old);
    publish_folder(temporary, path);
    publish_folder(old, temporary);
  }
  sync_folder(path.parent_path());
}

// A folder that was made but is not locked yet looks abandoned to another process. So the lock
// comes first, and then a look whether the folder is still there.
TemporaryFolder::TemporaryFolder(const fs::path& path) {
  if (path.has_parent_path()) make_folder(path.parent_path());
  remove_abandoned_folders(path);
  for (;;) {
    path_ = random_name(path);
    if (::mkdir(path_.c_str(), 0777)) refuse_folder(path, errno);
    descriptor_ = ::open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (descriptor_ >= 0) ::flock(descriptor_, LOCK_EX);
    if (descriptor_ >= 0 && is_at(path_, descriptor_)) return;
    if (descriptor_ >= 0) ::close(descriptor_);
    else if (errno != ENOENT) system_error("folder cannot be opened", path_);
  }
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
  ::close(descriptor_);
}

// O_NONBLOCK: opening a FIFO must not wait for a writer. It has no effect on regular files.
MappedFile::MappedFile(const fs::path& path) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  struct stat status;
  if (descriptor < 0 || ::fstat(descriptor, &status) || !S_ISREG(status.st_mode)) {
    const int code = descriptor < 0 ? errno : EISDIR;
    if (descriptor >= 0) ::close(descriptor);
    fail("{}: cannot be read: {}", path.string(),
         code == EISDIR ? "not a regular file" : std::strerror(code));
  }
  size_ = size_t(status.st_size);
  void* data = size_ ? ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, descriptor, 0) : nullptr;
  ::close(descriptor);
  if (data == MAP_FAILED) system_error("cannot be mapped", path);
  data_ = static_cast<const std::byte*>(data);
  if (data_) add_mapping(data_, size_, path.string());
}

MappedFile::~MappedFile() {
  if (!data_) return;
  remove_mapping(data_);
  ::munmap(const_cast<std::byte*>(data_), size_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

FolderLock::FolderLock(const fs::path& folder) {
  const fs::path path = folder / ".lock";
  descriptor_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (descriptor_ < 0) system_error("cannot be written", path);
  if (::flock(descriptor_, LOCK_EX | LOCK_NB)) {
    char holder[32] = {};
    if (::pread(descriptor_, holder, sizeof holder - 1, 0) <= 0) std::strcpy(holder, "unknown");
    ::close(descriptor_);
    fail("{}: in use by process {}; nothing was changed. Wait for it, or choose another folder.",
         folder.string(), holder);
  }
  const std::string self = std::to_string(::getpid());
  if (::ftruncate(descriptor_, 0) || ::pwrite(descriptor_, self.data(), self.size(), 0) < 0)
    system_error("cannot be written", path);
}

FolderLock::~FolderLock() { ::close(descriptor_); }

namespace {
class Digest {
 public:
  Digest() : context_(EVP_MD_CTX_new()) { EVP_DigestInit_ex(context_, EVP_sha256(), nullptr); }
  ~Digest() { EVP_MD_CTX_free(context_); }
  Digest(const Digest&) = delete;
  void update(std::span<const std::byte> bytes) {
    EVP_DigestUpdate(context_, bytes.data(), bytes.size());
  }
  std::string hex() {
    unsigned char digest[32];
    EVP_DigestFinal_ex(context_, digest, nullptr);
    std::string out;
    for (const unsigned char byte : digest) out += fmt::format("{:02x}", byte);
    return out;
  }

 private:
  EVP_MD_CTX* context_;
};
}  // namespace

std::string sha256(std::span<const std::byte> bytes) {
  Digest digest;
  digest.update(bytes);
  return digest.hex();
}
std::string sha256(std::string_view text) { return sha256(std::as_bytes(std::span(text))); }
std::string sha256_of_file(const fs::path& path) { return sha256(MappedFile(path).bytes()); }

}  // namespace assay
