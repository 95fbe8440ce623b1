#pragma once
// A file that several processes write together.
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "base/files.h"

namespace assay {

// Each process writes bytes of its own. The file is in a folder that is published when all of them
// are done. Functions throw Error with the path and the system's reason.
class SharedFile {
 public:
  // With `size_of_new`, makes the file with this size and reserves the disk for it, if the file
  // system can. Without, opens the file of another process.
  explicit SharedFile(fs::path path, std::optional<uint64_t> size_of_new = std::nullopt);
  ~SharedFile();
  SharedFile(const SharedFile&) = delete;
  void write(uint64_t offset, std::span<const std::byte> bytes);
  void sync();

 private:
  fs::path path_;
  int descriptor_;
};

}  // namespace assay
