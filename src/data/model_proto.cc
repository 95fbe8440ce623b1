#include "data/model_proto.h"

#include <bit>
#include <cstring>

#include "base/error.h"

namespace assay::data {
namespace {

struct Value {
  uint64_t number = 0;     // of a varint
  std::string_view bytes;  // of a length-delimited field, or of a fixed number
};

class Wire {
 public:
  explicit Wire(std::string_view bytes) : bytes_(bytes) {}
  bool done() const { return bytes_.empty(); }
  uint64_t varint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const auto byte = static_cast<unsigned char>(take(1)[0]);
      value |= uint64_t(byte & 127) << shift;
      if (byte < 128) return value;
    }
    fail("a number in the SentencePiece model does not end");
  }
  Value value(uint64_t type) {
    if (type == 0) return {varint(), {}};
    if (type == 1) return {0, take(8)};
    if (type == 2) return {0, take(varint())};
    if (type == 5) return {0, take(4)};
    fail("the SentencePiece model holds an unknown wire type {}", type);
  }

 private:
  std::string_view take(uint64_t count) {
    if (count > bytes_.size()) fail("the SentencePiece model is cut off");
    const auto taken = bytes_.substr(0, count);
    bytes_.remove_prefix(count);
    return taken;
  }
  std::string_view bytes_;
};

float as_float(std::string_view bytes) {
  if (bytes.size() != 4) fail("a score in the SentencePiece model is not a number of 4 bytes");
  uint32_t bits;
  std::memcpy(&bits, bytes.data(), 4);
  return std::bit_cast<float>(bits);
}

void for_each_field(std::string_view message, auto&& use) {
  for (Wire wire(message); !wire.done();) {
    const uint64_t tag = wire.varint();
    use(tag >> 3, wire.value(tag & 7));
  }
}

}  // namespace

ModelProto parse_model_proto(std::string_view contents) {
  ModelProto model;
  auto piece = [&](uint64_t field, Value value) {
    if (field == 1) model.pieces.back().text = value.bytes;
    if (field == 2) model.pieces.back().score = as_float(value.bytes);
    if (field == 3) model.pieces.back().type = Piece::Type(value.number);
  };
  auto trainer = [&](uint64_t field, Value value) {
    if (field == 3) model.bpe = value.number == 2;
    if (field == 24) model.whitespace_as_suffix = value.number;
    if (field == 35) model.byte_fallback = value.number;
  };
  auto normalizer = [&](uint64_t field, Value value) {
    if (field == 2) model.normalises = !value.bytes.empty();
    if (field == 3) model.dummy_prefix = value.number;
    if (field == 4) model.removes_whitespace = value.number;
    if (field == 5) model.escapes = value.number;
  };
  for_each_field(contents, [&](uint64_t field, Value value) {
    if (field == 1) {
      model.pieces.emplace_back();
      for_each_field(value.bytes, piece);
    }
    if (field == 2) for_each_field(value.bytes, trainer);
    if (field == 3) for_each_field(value.bytes, normalizer);
  });
  return model;
}

}  // namespace assay::data
