#pragma once
// A small tokenizer, trained once per process on text that the tests use.
#include "base/files.h"
#include "data/folder.h"
#include "data/tokenizer.h"

namespace assay::tasks {

inline const data::Tokenizer& small_tokenizer() {
  static const data::Folder folder;
  static const data::Tokenizer tokenizer = [] {
    std::string text;
    for (int i = 0; i < 400; ++i)
      text += fmt::format(
          "The answer to question {} is number {}. Where is the blue house? It is in the garden.\n",
          i, i * 37 % 101);
    folder.write("text.txt", text);
    data::train_tokenizer({.inputs = {folder / "text.txt"}, .vocab_size = 340},
                          folder / "small.model");
    return data::Tokenizer(folder / "small.model");
  }();
  return tokenizer;
}

}  // namespace assay::tasks
