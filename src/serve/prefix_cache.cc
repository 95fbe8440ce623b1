#include "serve/prefix_cache.h"

#include <torch/torch.h>

namespace assay::serve {
namespace {

int64_t bytes_of(const Page& page) {
  int64_t bytes = int64_t(page.hidden.nbytes()) + int64_t(page.tokens.size()) * 16;
  for (const nn::State& layer : page.layers) bytes += layer.bytes();
  return bytes;
}

// The part of each growing tensor that follows what the pages before hold, and copies of the rest.
nn::State last_part(const nn::State& state, const std::vector<PagePointer>& before, size_t layer) {
  nn::State part;
  for (const auto& [name, tensor] : state.tensors()) {
    int64_t known = 0;
    if (state.grows(name)) {
      part.set_grows(name);
      for (const PagePointer& page : before)
        if (const auto earlier = page->layers[layer].find(name)) known += earlier->size(1);
    }
    part[name] = (known > 0 ? tensor.slice(1, known) : tensor).clone(at::MemoryFormat::Contiguous);
  }
  return part;
}

std::vector<PagePointer> path_to(PagePointer page) {
  std::vector<PagePointer> path;
  for (; page; page = page->before) path.push_back(page);
  std::ranges::reverse(path);
  return path;
}

}  // namespace

nn::ModelState state_after(const PagePointer& page) {
  nn::ModelState state;
  if (!page) return state;
  const std::vector<PagePointer> path = path_to(page);
  state.position = page->position;
  state.layers.resize(page->layers.size());
  for (size_t i = 0; i < state.layers.size(); ++i) {
    for (const auto& [name, tensor] : page->layers[i].tensors()) {
      if (!page->layers[i].grows(name)) {
        state.layers[i][name] = tensor;
        continue;
      }
      state.layers[i].set_grows(name);
      std::vector<at::Tensor> parts;
      for (const PagePointer& earlier : path)
        if (const auto part = earlier->layers[i].find(name)) parts.push_back(*part);
      state.layers[i][name] = at::cat(parts, 1);
    }
  }
  return state;
}

PagePointer PrefixCache::find(const PagePointer& before, const std::vector<int64_t>& tokens) {
  const auto found = places_.find({before.get(), tokens});
  if (found == places_.end()) return nullptr;
  const PagePointer page = *found->second;
  touch(page);
  return page;
}

// A page moves to the front, and then the pages before it. So the last page of the list is never
// one that another page follows.
void PrefixCache::touch(const PagePointer& page) {
  for (PagePointer next = page; next; next = next->before) {
    const auto place = places_.find(key_of(*next));
    if (place != places_.end()) recent_.splice(recent_.begin(), recent_, place->second);
  }
}

PagePointer PrefixCache::add(const PagePointer& before, const std::vector<int64_t>& tokens,
                             const nn::ModelState& state, const at::Tensor& hidden) {
  if (budget_ == 0 || (before && !places_.contains(key_of(*before)))) return nullptr;
  const std::vector<PagePointer> path = path_to(before);
  auto page = std::make_shared<Page>();
  page->before = before;
  page->tokens = tokens;
  page->position = state.position;
  page->hidden = hidden.clone(at::MemoryFormat::Contiguous);
  for (size_t i = 0; i < state.layers.size(); ++i)
    page->layers.push_back(last_part(state.layers[i], path, i));
  page->bytes = bytes_of(*page);
  touch(before);
  while (bytes_ + page->bytes > budget_) {
    if (recent_.empty() || recent_.back() == before) return nullptr;
    bytes_ -= recent_.back()->bytes;
    places_.erase(key_of(*recent_.back()));
    recent_.pop_back();
  }
  bytes_ += page->bytes;
  recent_.push_front(page);
  places_[key_of(*page)] = recent_.begin();
  touch(page);
  return page;
}

}  // namespace assay::serve
