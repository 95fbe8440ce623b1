#include "data/tokenizer.h"

#include <sentencepiece_processor.h>

#include <optional>

#include "base/error.h"
#include "data/byte_level_bpe.h"
#include "data/bytes.h"

namespace assay::data {

std::string without_source_position(const std::string& message) {
  const size_t place = message.find(".cc(");
  if (place == std::string::npos) return message;
  // The position is "file.cc(7) ", and the condition that failed may follow as "[a == b] ".
  size_t end = message.find("] ", place);
  if (end == std::string::npos) end = message.find(") ", place);
  const std::string reason = end == std::string::npos ? "" : message.substr(end + 2);
  return reason.empty() || reason.starts_with('[') ? "the library gives no reason" : reason;
}

struct Tokenizer::Model {
  std::string contents;
  std::string sha256;
  sentencepiece::SentencePieceProcessor processor;
  std::optional<ByteLevelBpe> byte_level;  // instead of the processor
};

namespace {

// tokenizer.json does not say which tokens begin and end a text.
constexpr const char* kEnds[] = {"<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>"};
constexpr const char* kBegins[] = {"<|begin_of_text|>", "<|startoftext|>", "<s>", "<bos>"};

template <size_t size>
int64_t first_of(const ByteLevelBpe& bpe, const char* const (&names)[size]) {
  for (const char* name : names)
    if (const int32_t id = bpe.id_of(name); id >= 0) return id;
  return -1;
}

}  // namespace

Tokenizer::Tokenizer(std::unique_ptr<Model> model) : model_(std::move(model)) {}
Tokenizer::Tokenizer(const fs::path& model)
    : Tokenizer(from_contents(read_file(model), model.string())) {}
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

Tokenizer Tokenizer::from_contents(std::string contents, const std::string& name) {
  auto model = std::make_unique<Model>();
  if (contents.starts_with('{')) {
    model->byte_level.emplace(contents, name);
    model->sha256 = assay::sha256(contents);
    model->contents = std::move(contents);
    return Tokenizer(std::move(model));
  }
  bool is_model = false;
  try {
    is_model = model->processor.LoadFromSerializedProto(contents).ok() && !contents.empty();
  } catch (const std::exception&) {  // of its index of pieces, which cannot hold a piece of NULs
  }
  if (!is_model) fail("{}: not a SentencePiece model", name);
  model->sha256 = assay::sha256(contents);
  model->contents = std::move(contents);
  return Tokenizer(std::move(model));
}

std::vector<int32_t> Tokenizer::encode(std::string_view text) const {
  if (!is_utf8(text)) fail("the text is not valid UTF-8");
  if (model_->byte_level) return model_->byte_level->encode(text);
  std::vector<int> ids;
  const auto status = model_->processor.Encode(text, &ids);
  if (!status.ok())
    fail<Error>("text of {} bytes cannot be encoded: {}", text.size(),
                without_source_position(status.message()));
  return ids;
}

std::string Tokenizer::decode(std::span<const int32_t> ids) const {
  for (const int32_t id : ids)
    if (id < 0 || id >= vocab_size())
      fail("token {} is outside the vocabulary of {}", id, vocab_size());
  if (model_->byte_level) return model_->byte_level->decode(ids);
  std::string text;
  const auto status = model_->processor.Decode(std::vector<int>(ids.begin(), ids.end()), &text);
  if (!status.ok())
    fail<Error>("{} tokens cannot be decoded: {}", ids.size(),
                without_source_position(status.message()));
  return text;
}

int64_t Tokenizer::vocab_size() const {
  return model_->byte_level ? model_->byte_level->vocab_size() : model_->processor.GetPieceSize();
}
int64_t Tokenizer::bos() const {
  return model_->byte_level ? first_of(*model_->byte_level, kBegins) : model_->processor.bos_id();
}
std::string Tokenizer::piece(int32_t id) const {
  return model_->byte_level ? model_->byte_level->token(id) : model_->processor.IdToPiece(id);
}
bool Tokenizer::is_byte_level() const { return model_->byte_level.has_value(); }

std::string Tokenizer::bytes(int32_t id) const {
  if (model_->byte_level) return model_->byte_level->bytes(id);
  const auto& processor = model_->processor;
  constexpr std::string_view kSpace = "\u2581";
  const std::string piece = processor.IdToPiece(id);
  if (processor.IsControl(id)) return "";
  if (processor.IsUnknown(id)) return " \u2047 ";  // as decode() writes it
  if (processor.IsByte(id)) return std::string(1, char(std::stoi(piece.substr(3, 2), nullptr, 16)));
  std::string text;
  for (size_t i = 0; i < piece.size();) {
    const bool space = piece.compare(i, kSpace.size(), kSpace) == 0;
    text += space ? ' ' : piece[i];
    i += space ? kSpace.size() : 1;
  }
  return text;
}

int32_t Tokenizer::id_of(std::string_view piece) const {
  return model_->byte_level ? model_->byte_level->id_of(piece) : model_->processor.PieceToId(piece);
}
const std::string& Tokenizer::sha256() const { return model_->sha256; }
const std::string& Tokenizer::contents() const { return model_->contents; }

int64_t Tokenizer::separator() const {
  const int64_t id =
      model_->byte_level ? first_of(*model_->byte_level, kEnds) : model_->processor.eos_id();
  if (id < 0) fail("the tokenizer has no end-of-sentence token, which separates documents");
  return id;
}

}  // namespace assay::data
