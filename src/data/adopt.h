#pragma once
// Token files that Megatron-LM wrote (.bin/.idx without a manifest) made a token store.
#include <vector>

#include "base/files.h"

namespace assay::data {

struct AdoptOptions {
  std::vector<fs::path> files;  // <name>.idx, its .bin beside it
  // The SentencePiece model they were written with; the store to write
  fs::path tokenizer;
  fs::path store;
  bool overwrite = false;
};
// Copies the documents; those without a token are left out, and their number is returned. The
// domain is the file's name up to its first dot, the split is what split_of (data/reader.h) finds.
// A separator at the end of a document is kept once, a missing one is added. The bytes of a
// document are those of its decoded text. Sources are kept where a .sources file is next to the
// .idx file. BadInput when a file is damaged or a token is outside the vocabulary; then nothing is
// left behind.
int64_t adopt(const AdoptOptions& options);

}  // namespace assay::data
