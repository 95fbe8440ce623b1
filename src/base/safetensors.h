#pragma once
// The safetensors format: u64 length, JSON header padded with spaces to 8 bytes, then the data.
// Ranges lie in order, without holes, and end where the file ends; anything else is refused
// with the reason.
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "base/files.h"

namespace assay {

struct TensorEntry {
  // dtype as the format names it: F64 F32 F16 BF16 I64 I32 I16 I8 U8 BOOL
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  // Little-endian, row-major; points into the file or the caller's memory
  std::span<const std::byte> bytes;
};
size_t dtype_bytes(const std::string& dtype,
                   // 8 for F64; BadInput, with `where`, for a name the format lacks
                   const std::string& where = "");

class Safetensors {
 public:
  // Maps it; BadInput when it breaks the format
  explicit Safetensors(const fs::path& file);
  const std::vector<TensorEntry>& tensors() const { return tensors_; }  // in the order of the data
  bool has(const std::string& name) const { return index_.contains(name); }
  const TensorEntry& at(const std::string& name) const;  // BadInput with the nearest name
  template <class T>
  std::span<const T> values(const std::string& name) const {  // the caller knows the dtype
    const auto bytes = at(name).bytes;
    return {reinterpret_cast<const T*>(bytes.data()), bytes.size() / sizeof(T)};
  }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  std::string checksum() const;  // safetensors_checksum of the file

 private:
  std::string path_;
  MappedFile file_;
  std::vector<TensorEntry> tensors_;
  std::map<std::string, size_t> index_;
  std::map<std::string, std::string> metadata_;
};

// Where the parts of a file with these tensors are, in the order given. Their bytes are not read.
struct SafetensorsLayout {
  std::string header;             // all bytes before the data
  std::vector<uint64_t> offsets;  // in the file, of the data of each tensor
  uint64_t file_size = 0;
};
SafetensorsLayout safetensors_layout(const std::vector<TensorEntry>& tensors,
                                     const std::map<std::string, std::string>& metadata = {});

// 64 hexadecimal digits, which every byte of a file decides. Processes that write a file together
// each know the sha256 of their tensors; `tensors` has those of all, joined in the file's order.
std::string safetensors_checksum(std::string_view header, std::string_view tensors);

// Writes atomically, tensors in the order given.
void write_safetensors(const fs::path& file, const std::vector<TensorEntry>& tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace assay
