#pragma once
// The gradient of values; the other passes are those of ops/cuda/attention_passes.cuh.
#include "ops/attention/top1_element/kernel.h"
#include "ops/cuda/types.cuh"

namespace assay::ops::cuda::element {

// dv: queries sorted by the key that they chose, each key the sum of its queries.
struct Choices {
  // [B·H·T] the key chosen, as head · S + position; the query, in [B, H, T]
  uint32_t* key;
  uint32_t* item;
  // by key, then by query
  uint32_t* sorted_key;
  uint32_t* sorted_item;
  // [B·Hk·S] where a key's queries lie in sorted_item; equal where it has none
  uint32_t* begin;
  uint32_t* end;
  void* scratch;
  size_t scratch_bytes;
  Choices(const Top1ElementForward& args, WorkspaceArena& arena);
};
void value_gradients(const Top1ElementBackward& bwd, const Choices& choices, Stream stream);

}  // namespace assay::ops::cuda::element
