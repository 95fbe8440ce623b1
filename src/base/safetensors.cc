#include "base/safetensors.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <nlohmann/json.hpp>
#include <ranges>

#include "base/error.h"

namespace assay {
namespace {

using Json = nlohmann::json;
constexpr uint64_t kLargestHeader = 100'000'000;  // the reference implementation's own limit

uint64_t product(const std::vector<int64_t>& shape, const std::string& where) {
  unsigned __int128 size = 1;
  for (const int64_t extent : shape) {
    if (extent < 0) fail("{}: negative extent in its shape", where);
    size *= uint64_t(extent);
    if (size >> 62) fail("{}: its shape overflows", where);
  }
  return uint64_t(size);
}

TensorEntry read_entry(const std::string& where, const std::string& name, const Json& json,
                       uint64_t& end, std::span<const std::byte> data) {
  TensorEntry entry{
      name, json.at("dtype").get<std::string>(), json.at("shape").get<std::vector<int64_t>>(), {}};
  const auto offsets = json.at("data_offsets").get<std::vector<uint64_t>>();
  const std::string place = where + ": tensor '" + name + "'";
  if (offsets.size() != 2 || offsets[0] != end)
    fail("{}: its data does not start where the one before it ends", place);
  if (offsets[1] < offsets[0] || offsets[1] > data.size())
    fail("{}: its data lies outside the file", place);
  if ((unsigned __int128)product(entry.shape, place) * dtype_bytes(entry.dtype, place) !=
      offsets[1] - offsets[0])
    fail("{}: shape and dtype need another number of bytes than it has", place);
  entry.bytes = data.subspan(offsets[0], offsets[1] - offsets[0]);
  end = offsets[1];
  return entry;
}

}  // namespace

size_t dtype_bytes(const std::string& dtype, const std::string& where) {
  static const std::map<std::string, size_t> sizes = {
      {"F64", 8},  {"I64", 8}, {"U64", 8}, {"F32", 4}, {"I32", 4}, {"U32", 4}, {"F16", 2},
      {"BF16", 2}, {"I16", 2}, {"U16", 2}, {"I8", 1},  {"U8", 1},  {"BOOL", 1}};
  const auto found = sizes.find(dtype);
  if (found == sizes.end()) {
    std::vector<std::string> known;
    for (const auto& [name, bytes] : sizes) known.push_back(name);
    fail("{}the dtype {} is not supported; expected {}", where.empty() ? "" : where + ": ", dtype,
         join(known, " or "));
  }
  return found->second;
}

Safetensors::Safetensors(const fs::path& file) : path_(file.string()), file_(file) {
  const auto bytes = file_.bytes();
  uint64_t length = 0;
  if (bytes.size() < 8)
    fail("{}: not a safetensors file: {} bytes, a header needs 8", path_, bytes.size());
  std::memcpy(&length, bytes.data(), 8);
  if (length > kLargestHeader || length > bytes.size() - 8)
    fail("{}: not a safetensors file, or cut short: it announces a header of {} bytes and has {}",
         path_, length, bytes.size() - 8);
  const auto data = bytes.subspan(8 + length);
  try {
    const char* text = reinterpret_cast<const char*>(bytes.data()) + 8;
    const Json header = Json::parse(text, text + length);
    if (!header.is_object()) fail("{}: the safetensors header is not a JSON object", path_);
    using Range = std::array<uint64_t, 2>;
    std::vector<std::pair<Range, std::string>> order;
    for (const auto& [name, json] : header.items())
      if (name == "__metadata__") metadata_ = json.get<std::map<std::string, std::string>>();
      else order.emplace_back(json.at("data_offsets").get<Range>(), name);
    // By begin, then end: an empty tensor comes before the one that starts where it lies
    std::ranges::sort(order);
    uint64_t end = 0;
    for (const auto& name : order | std::views::values) {
      tensors_.push_back(read_entry(path_, name, header[name], end, data));
      index_[name] = tensors_.size() - 1;
    }
    if (end != data.size())
      fail("{}: {} bytes of data belong to no tensor, or the file is cut short", path_,
           data.size() - end);
  } catch (const Json::parse_error& error) {
    fail("{}: broken safetensors header: not JSON from byte {} on", path_, error.byte);
  } catch (const Json::exception& error) {
    const std::string what = error.what();  // begins with "[json.exception.…] "
    fail("{}: broken safetensors header: {}", path_, what.substr(what.find(' ') + 1));
  }
}

const TensorEntry& Safetensors::at(const std::string& name) const {
  const auto found = index_.find(name);
  if (found != index_.end()) return tensors_[found->second];
  std::vector<std::string> names;
  for (const auto& tensor : tensors_) names.push_back(tensor.name);
  fail("{}: no tensor '{}'{}", path_, name, did_you_mean(name, names));
}

std::string safetensors_checksum(std::string_view header, std::string_view tensors) {
  return sha256(sha256(header) + std::string(tensors));
}

std::string Safetensors::checksum() const {
  size_t data_bytes = 0;
  std::string digests;
  for (const TensorEntry& tensor : tensors_) {
    data_bytes += tensor.bytes.size();
    digests += sha256(tensor.bytes);
  }
  const auto bytes = file_.bytes();
  return safetensors_checksum(
      {reinterpret_cast<const char*>(bytes.data()), bytes.size() - data_bytes}, digests);
}

SafetensorsLayout safetensors_layout(const std::vector<TensorEntry>& tensors,
                                     const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  SafetensorsLayout layout;
  uint64_t end = 0;
  for (const TensorEntry& tensor : tensors) {
    const uint64_t bytes = product(tensor.shape, tensor.name) * dtype_bytes(tensor.dtype);
    const uint64_t begin = std::exchange(end, end + bytes);
    layout.offsets.push_back(begin);
    header[tensor.name] = {
        {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {begin, end}}};
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');
  const uint64_t length = text.size();
  layout.header.assign(reinterpret_cast<const char*>(&length), 8);
  layout.header += text;
  for (uint64_t& offset : layout.offsets) offset += layout.header.size();
  layout.file_size = layout.header.size() + end;
  return layout;
}

void write_safetensors(const fs::path& file, const std::vector<TensorEntry>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  AtomicFile out(file);
  out.write(safetensors_layout(tensors, metadata).header);
  for (const TensorEntry& tensor : tensors) out.write(tensor.bytes.data(), tensor.bytes.size());
  out.commit();
}

}  // namespace assay
