#pragma once
// A SentencePiece model in the files of Hugging Face's libraries.
#include <nlohmann/json_fwd.hpp>

#include "data/tokenizer.h"

namespace assay::data {

// tokenizer.json, from which the library `tokenizers` makes the same ids and the same text as the
// model. BadInput with the reason if the file cannot express the model: expected are BPE with byte
// fallback, no normalisation, white space kept, and no pieces that the user defined.
nlohmann::json tokenizer_json(const Tokenizer& tokenizer);

// tokenizer_config.json, with which transformers reads tokenizer.json for a model of any type. It
// adds no bos or eos, and "<s>" in a text is ordinary text, as in Tokenizer::encode.
nlohmann::json tokenizer_config_json(const Tokenizer& tokenizer);

}  // namespace assay::data
