#include "data/adopt.h"

#include <algorithm>

#include "base/error.h"
#include "base/interrupt.h"
#include "data/reader.h"
#include "data/store_writer.h"
#include "data/tokenizer.h"

namespace assay::data {
namespace {

std::string domain_of(const fs::path& file) {
  std::string name = file.filename().string();
  name.resize(name.find('.'));
  return name;
}

std::vector<int32_t> without_separator(const Tokens& document, int64_t separator) {
  int64_t size = document.size();
  if (size && document[size - 1] == separator) --size;
  std::vector<int32_t> tokens;
  for (int64_t i = 0; i < size; ++i) tokens.push_back(int32_t(document[i]));
  return tokens;
}

}  // namespace

int64_t adopt(const AdoptOptions& options) {
  const Tokenizer tokenizer(options.tokenizer);
  StoreWriter writer(
      options.store,
      {"sentencepiece", tokenizer.sha256(), tokenizer.vocab_size(), tokenizer.separator()},
      options.overwrite);
  int64_t left_out = 0;
  for (const auto& [file, input] : input_files(options.files)) {
    if (file.extension() != ".idx")
      fail("{}: the .idx file of a pair .bin/.idx was expected", file.string());
    const Documents documents(fs::path(file).replace_extension());
    documents.verify(tokenizer.vocab_size());
    for (int64_t i = 0; i < documents.size(); ++i) {
      check_interrupt();
      if (documents.document(i).size() == 0) {
        ++left_out;
        continue;
      }
      const auto tokens = without_separator(documents.document(i), tokenizer.separator());
      const int64_t source = documents.source(i);
      writer.add(domain_of(file), split_of({file, file}), tokens,
                 int64_t(tokenizer.decode(tokens).size()),
                 source < 0 ? "" : documents.source_names()[size_t(source)]);
    }
  }
  writer.set_tokenizer_file(tokenizer.contents());
  writer.commit();
  return left_out;
}

}  // namespace assay::data
