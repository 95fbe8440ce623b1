#pragma once
// The bytes of a file, decompressed as they are read.
#include <cstddef>
#include <memory>
#include <string_view>

#include "base/files.h"

namespace assay::data {

class ByteSource {
 public:
  virtual ~ByteSource() = default;
  // Fills at most `capacity` bytes and returns how many; 0 at the end. Throws BadInput with what is
  // wrong with the stream (cut off, corrupt); the caller knows the place.
  virtual size_t read(char* out, size_t capacity) = 0;
  virtual size_t consumed() const = 0;  // bytes of the file so far, as stored
};

// The extension in small letters: ".gz" of "A.JSONL.GZ".
std::string extension_of(const fs::path& file);
// By the end of the name in any case: .zst (any number of frames, windows up to 2^31), .gz (any
// number of members, zero bytes after the last), else as it is. BadInput when the file cannot be
// opened.
std::unique_ptr<ByteSource> open_bytes(const fs::path& file);

bool is_utf8(std::string_view text);

}  // namespace assay::data
