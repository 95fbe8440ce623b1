#include "data/hugging_face_tokenizer.h"

#include <simdjson.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include "base/error.h"
#include "data/model_proto.h"

namespace assay::data {
namespace {

using nlohmann::json;

constexpr const char* kSpace = "▁";  // U+2581, what SentencePiece makes of a space

bool begins_character(char byte) { return (byte & 0xC0) != 0x80; }

// Pieces that merges make and that merges join, with their ids.
std::unordered_map<std::string, size_t> normal_pieces(const ModelProto& model) {
  std::unordered_map<std::string, size_t> found;
  for (size_t id = 0; id < model.pieces.size(); ++id)
    if (model.pieces[id].type == Piece::kNormal) found.emplace(model.pieces[id].text, id);
  return found;
}

void check_expressible(const ModelProto& model) {
  const auto refuse_if = [](bool condition, const char* reason) {
    if (condition) fail("tokenizer.json cannot express this SentencePiece model: {}", reason);
  };
  refuse_if(!model.bpe, "it is not BPE");
  refuse_if(!model.byte_fallback, "it has no byte fallback");
  refuse_if(model.normalises, "it normalises text");
  refuse_if(model.removes_whitespace, "it removes white space");
  refuse_if(!model.escapes || model.whitespace_as_suffix,
            "it does not write spaces as a leading ▁");
  for (const Piece& piece : model.pieces) {
    refuse_if(piece.type == Piece::kUserDefined || piece.type == Piece::kUnused,
              "it has pieces that are user-defined or unused");
    refuse_if(piece.text.empty() || !simdjson::validate_utf8(piece.text),
              "a piece is not UTF-8 text");
    refuse_if(!std::isfinite(piece.score), "the score of a piece is not a finite number");
  }
  // SentencePiece joins a character without an id to its neighbour; tokenizers splits
  // it into bytes.
  const auto normal = normal_pieces(model);
  for (const auto& [text, id] : normal)
    for (size_t begin = 0, end = 1; begin < text.size(); begin = end++) {
      while (end < text.size() && !begins_character(text[end])) ++end;
      refuse_if(!normal.contains(text.substr(begin, end - begin)),
                "a character of a piece is not a piece itself");
    }
}

// Pairs of pieces in the order in which they are merged: best score of the result first, and of
// equals the longest left piece first, which is the leftmost pair in a run of one character.
json merges_of(const ModelProto& model) {
  const auto normal = normal_pieces(model);
  std::vector<size_t> order;
  for (const auto& [text, id] : normal) order.push_back(id);
  std::ranges::sort(order, [&](size_t a, size_t b) {
    return std::pair(-model.pieces[a].score, a) < std::pair(-model.pieces[b].score, b);
  });
  json merges = json::array();
  for (const size_t id : order) {
    const std::string& text = model.pieces[id].text;
    for (size_t cut = text.size() - 1; cut > 0; --cut) {
      std::string left = text.substr(0, cut);
      std::string right = text.substr(cut);
      if (normal.contains(left) && normal.contains(right))
        merges.push_back({std::move(left), std::move(right)});
    }
  }
  return merges;
}

json added_tokens(const ModelProto& model) {
  json tokens = json::array();
  for (size_t id = 0; id < model.pieces.size(); ++id) {
    const Piece& piece = model.pieces[id];
    if (piece.type != Piece::kUnknown && piece.type != Piece::kControl) continue;
    tokens.push_back({{"id", id},
                      {"content", piece.text},
                      {"single_word", false},
                      {"lstrip", false},
                      {"rstrip", false},
                      {"normalized", false},
                      {"special", true}});
  }
  return tokens;
}

json replace(const char* pattern, const char* content) {
  return {{"type", "Replace"}, {"pattern", {{"String", pattern}}}, {"content", content}};
}

json normalizer(const ModelProto& model) {
  json steps = json::array();
  if (model.dummy_prefix) steps.push_back({{"type", "Prepend"}, {"prepend", kSpace}});
  steps.push_back(replace(" ", kSpace));
  return {{"type", "Sequence"}, {"normalizers", steps}};
}

json decoder(const ModelProto& model) {
  json steps = {replace(kSpace, " "), {{"type", "ByteFallback"}}, {{"type", "Fuse"}}};
  if (model.dummy_prefix)
    steps.push_back({{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}});
  return {{"type", "Sequence"}, {"decoders", steps}};
}

std::string piece_of_type(const ModelProto& model, Piece::Type type) {
  const auto found = std::ranges::find(model.pieces, type, &Piece::type);
  if (found == model.pieces.end()) fail("the SentencePiece model has no piece for unknown text");
  return found->text;
}

}  // namespace

json tokenizer_json(const Tokenizer& tokenizer) {
  if (tokenizer.is_byte_level()) return json::parse(tokenizer.contents());
  const ModelProto model = parse_model_proto(tokenizer.contents());
  check_expressible(model);
  json vocabulary = json::object();
  for (size_t id = 0; id < model.pieces.size(); ++id) vocabulary[model.pieces[id].text] = id;
  return {{"version", "1.0"},
          {"truncation", nullptr},
          {"padding", nullptr},
          {"added_tokens", added_tokens(model)},
          {"normalizer", normalizer(model)},
          {"pre_tokenizer", nullptr},
          {"post_processor", nullptr},
          {"decoder", decoder(model)},
          {"model",
           {{"type", "BPE"},
            {"dropout", nullptr},
            {"unk_token", piece_of_type(model, Piece::kUnknown)},
            {"continuing_subword_prefix", nullptr},
            {"end_of_word_suffix", nullptr},
            {"fuse_unk", true},
            {"byte_fallback", true},
            {"ignore_merges", false},
            {"vocab", std::move(vocabulary)},
            {"merges", merges_of(model)}}}};
}

json tokenizer_config_json(const Tokenizer& tokenizer) {
  json config = {{"tokenizer_class", "PreTrainedTokenizerFast"},
                 {"eos_token", tokenizer.piece(int32_t(tokenizer.separator()))},
                 {"clean_up_tokenization_spaces", false},
                 {"split_special_tokens", true}};
  if (!tokenizer.is_byte_level())
    config["unk_token"] = piece_of_type(parse_model_proto(tokenizer.contents()), Piece::kUnknown);
  if (tokenizer.bos() >= 0) config["bos_token"] = tokenizer.piece(int32_t(tokenizer.bos()));
  return config;
}

}  // namespace assay::data
