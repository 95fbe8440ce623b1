#pragma once
// Files that are whole or absent: written beside their place, synced, then renamed into it.
#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

namespace assay {

namespace fs = std::filesystem;

// Buffered writing to a temporary file next to `path`; commit() syncs and renames it into place.
// Without commit() the temporary file is removed and `path` keeps what it held. The temporary
// file is new and has a random name (path + ".tmp" + 16 hexadecimal digits), so two writers on
// one volume never share it, not even from two containers. It gets this name in commit(), so a
// process that is killed leaves nothing behind, except on file systems without unnamed files; there
// the file can be deleted. The file behind a symbolic link is replaced, not the link. Throws Error
// with the path and the system's reason, BadInput if `path` is a folder, a device or a pipe.
class AtomicFile {
 public:
  explicit AtomicFile(fs::path path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  void write(const void* data, size_t bytes);
  void write(std::string_view text) { write(text.data(), text.size()); }
  void commit();

 private:
  fs::path path_;
  fs::path temporary_;
  std::FILE* file_;
};

void write_file(const fs::path& path, std::string_view text);  // atomically
// For options that name a file: BadInput if AtomicFile could not write it, before any work is done.
void check_output(const fs::path& file);
// Whole; BadInput when it cannot be read
std::string read_file(const fs::path& path);
// Makes a folder and its parents; Error with the system's reason.
void make_folder(const fs::path& path);
// Renames a finished folder into place and syncs the parent, so that it is there whole or
// not at all.
void publish_folder(const fs::path& temporary, const fs::path& path);

// Exchanges two folders in one step, so that `path` is there at every moment, and syncs the parent.
// Without support by the file system the folder at `path` is moved away first.
void exchange_folders(const fs::path& temporary, const fs::path& path);

// A new folder next to `path` with a random name like that of AtomicFile. It is removed with this
// object, unless it was published under another name. It is locked while this object lives. The
// constructor also removes what killed processes left: temporary folders of `path` that are not
// locked and in which nothing was written for an hour.
class TemporaryFolder {
 public:
  explicit TemporaryFolder(const fs::path& path);
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
  int descriptor_ = -1;
};

// A read-only memory map of a whole file. BadInput when it cannot be opened or is not a regular
// file.
class MappedFile {
 public:
  explicit MappedFile(const fs::path& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  std::span<const std::byte> bytes() const { return {data_, size_}; }

 private:
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// Holds a folder for one process; a second taker gets BadInput that names the holder's process id.
// Released by the kernel when the process ends, however it ends.
class FolderLock {
 public:
  explicit FolderLock(const fs::path& folder);
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;

 private:
  int descriptor_;
};

std::string sha256(std::span<const std::byte> bytes);  // 64 hexadecimal digits
std::string sha256(std::string_view text);
std::string sha256_of_file(const fs::path& path);

}  // namespace assay
