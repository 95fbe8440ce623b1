#pragma once
// The ids of Tokenizer::encode, several times faster: SentencePiece encodes a word once, then
// it is remembered.
//
// Why the ids are the same. BPE merges two neighbours only into a piece of the vocabulary, best
// score first, leftmost first among equals. Where no piece of a model holds a character other than
// ▁ followed by ▁, and none of two or more characters holds a newline, nothing is ever merged
// across a cut before the ▁ (space) that ends such a run or before a newline; the order of merges
// on one side of a cut does not depend on the other side, so each part may be encoded alone. A part
// that begins with ▁ is what the library makes of the rest by its dummy prefix; before a newline
// the dummy prefix stays a piece of its own and is dropped. This needs: BPE, byte fallback (unknown
// characters never join), no normalisation, a dummy prefix, white space kept, ▁ in the vocabulary.
// Where one fails, the library encodes whole texts.
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "data/tokenizer.h"

namespace assay::data {

class WordEncoder {
 public:
  explicit WordEncoder(const Tokenizer& tokenizer);  // which must outlive it; one encoder a thread
  // Text in valid UTF-8; replaces what ids held. False, and no ids, when 2 MiB follow each other
  // without a place to cut: the library takes 130 bytes of memory for each of them.
  bool encode(std::string_view text, std::vector<int32_t>& ids);
  bool by_word() const { return by_word_; }

 private:
  // Words and their ids: a hash table with open addressing over two arenas.
  class Memory {
   public:
    std::optional<std::span<const int32_t>> find(std::string_view word) const;
    void add(std::string_view word, std::span<const int32_t> ids);  // forgets all when it is full

   private:
    struct Entry {
      size_t hash;
      // positions in the arenas; word_size 0: free
      uint32_t word;
      uint32_t word_size;
      uint32_t ids;
      uint32_t ids_size;
    };
    size_t slot(std::string_view word, size_t hash) const;
    std::vector<Entry> entries_;
    std::string words_;
    std::vector<int32_t> ids_;
    size_t used_ = 0;
  };
  bool append_word(std::string_view word, std::vector<int32_t>& ids);
  std::vector<int32_t> encode_word(std::string_view word) const;

  const Tokenizer& tokenizer_;
  bool by_word_;
  int32_t space_id_;
  Memory memory_;
};

}  // namespace assay::data
