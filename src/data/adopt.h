#pragma once
// Token files that Megatron-LM wrote (.bin/.idx without a manifest) made a token store.
#include <vector>

#include "base/files.h"

namespace assay::data {

struct AdoptOptions {
  std::vector<fs::path> files;  // <name>.idx, its .bin beside it
  fs::path tokenizer, store;    // the SentencePiece model they were written with; the store to write
  bool overwrite = false;
};
// Copies the documents; the domain is the file's name up to its first dot, the split as split_of (data/prepare.h) finds
// it. A separator at the end of a document is kept once, a missing one added. The bytes of a document are those of its
// decoded text. BadInput when a file is damaged or a token is outside the vocabulary; then nothing is left behind.
void adopt(const AdoptOptions& options);

}  // namespace assay::data
