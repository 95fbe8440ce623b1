// Which calls the kernels take, and their steps.
#include <initializer_list>
#include <string>

#include "ops/top1_element/cuda_passes.cuh"

namespace assay::ops::cuda {
namespace {

using namespace element;

bool aligned(const View& x) {
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.batch_stride % 8 == 0 && x.time_stride % 8 == 0;
}

void check(const Top1ElementForward& p) {
  if (const char* reason = why_unsupported(p)) throw Unsupported(std::string("top1_element on CUDA ") + reason);
}

struct BackwardScratch {
  Operands operands;
  Choices choices;
  BackwardScratch(const Top1ElementBackward& q, Arena& arena) : operands(q, arena), choices(q.forward, arena) {}
};

}  // namespace

const char* why_unsupported(const Top1ElementForward& p) {
  if (p.dtype != DType::bf16) return "takes bfloat16 only";
  if (p.head_dim != 64 && p.head_dim != 96 && p.head_dim != 128) return "takes a head_dim of 64, 96 or 128";
  if (p.batch * p.heads * (p.past + p.time) >= int64_t{1} << 31) return "takes fewer than 2^31 rows of all heads";
  if (p.batch * p.heads >= 1 << 16) return "takes fewer than 2^16 heads of the batch";
  for (const View& x : {p.q, p.k, p.v, p.out})
    if (!aligned(x)) return "takes rows that begin at multiples of 16 bytes";
  return nullptr;
}

size_t workspace_bytes(const Top1ElementForward& p) {
  Arena arena;
  Operands(p, arena);
  return arena.used;
}
size_t workspace_bytes(const Top1ElementBackward& q) {
  Arena arena;
  BackwardScratch(q, arena);
  return arena.used;
}

void top1_element(const Top1ElementForward& p, void* workspace, Stream raw_stream) {
  check(p);
  const auto stream = static_cast<cudaStream_t>(raw_stream);
  Arena arena{static_cast<char*>(workspace)};
  const Operands operands(p, arena);
  pack_operands(p, operands, stream);
  choose(p, operands, stream);
}

void top1_element(const Top1ElementBackward& q, void* workspace, Stream raw_stream) {
  check(q.forward);
  for (const View& x : {q.dout, q.dq, q.dk, q.dv})
    if (!aligned(x)) throw Unsupported("top1_element on CUDA takes rows that begin at multiples of 16 bytes");
  const auto stream = static_cast<cudaStream_t>(raw_stream);
  Arena arena{static_cast<char*>(workspace)};
  const BackwardScratch scratch(q, arena);
  pack_operands(q, scratch.operands, stream);
  query_gradients(q, scratch.operands, stream);
  key_gradients(q, scratch.operands, stream);
  value_gradients(q, scratch.choices, stream);
}

}  // namespace assay::ops::cuda
