#pragma once
// States of prompts that begin alike, read once.
//
// Prompts are read in pieces of a fixed length from their first token on. A page is what one piece
// leaves: what it appended to caches along time, the other states as they are after it, and its
// hidden vectors, from which the log-probabilities of its tokens follow. Pages form a tree, and a
// page is found by its predecessor and its tokens. The pieces of a prompt are the same with and
// without the cache, so cached answers are bitwise equal to uncached ones.
#include <list>
#include <map>
#include <memory>
#include <vector>

#include "nn/language_model.h"

namespace assay::serve {

struct Page {
  std::shared_ptr<const Page> before;  // null for the first piece of a prompt
  std::vector<int64_t> tokens;
  int64_t position = 0;           // tokens up to the end of this page
  std::vector<nn::State> layers;  // of the tensors that grow only this page's part
  at::Tensor hidden;              // [1, T, d_model]
  int64_t bytes = 0;
};
using PagePointer = std::shared_ptr<const Page>;

// The state of one sequence after the tokens of the page and those before it.
nn::ModelState state_after(const PagePointer& page);

// Cache of pages, for one thread. The pages that were used longest ago are dropped first.
class PrefixCache {
 public:
  explicit PrefixCache(int64_t budget) : budget_(budget) {}
  // The page of these tokens after `before`, or null.
  PagePointer find(const PagePointer& before, const std::vector<int64_t>& tokens);
  // Keeps what a piece left: `state` is that after it. Null if it does not fit into the budget, or
  // if `before` is no longer in the cache; both are normal.
  PagePointer add(const PagePointer& before, const std::vector<int64_t>& tokens,
                  const nn::ModelState& state, const at::Tensor& hidden);
  int64_t bytes() const { return bytes_; }
  int64_t pages() const { return int64_t(recent_.size()); }

 private:
  using Key = std::pair<const Page*, std::vector<int64_t>>;
  using Places = std::map<Key, std::list<PagePointer>::iterator>;
  static Key key_of(const Page& page) { return {page.before.get(), page.tokens}; }
  void touch(const PagePointer& page);

  int64_t budget_;
  int64_t bytes_ = 0;
  std::list<PagePointer> recent_;  // the last used first; a page comes before its successors
  Places places_;
};

}  // namespace assay::serve
