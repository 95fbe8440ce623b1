#pragma once
// Fields of a SentencePiece model file that the SentencePiece library does not expose. They are
// read from the protobuf.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace assay::data {

struct Piece {
  enum Type : uint64_t { kNormal = 1, kUnknown, kControl, kUserDefined, kUnused, kByte };
  std::string text;
  float score = 0;
  Type type = kNormal;
};

struct ModelProto {
  std::vector<Piece> pieces;
  // trainer_spec
  bool bpe = false;
  bool byte_fallback = false;
  bool whitespace_as_suffix = false;
  // normalizer_spec
  bool normalises = false;
  bool dummy_prefix = true;
  bool removes_whitespace = true;
  bool escapes = true;
};
ModelProto parse_model_proto(std::string_view contents);  // BadInput when it is cut off

}  // namespace assay::data
