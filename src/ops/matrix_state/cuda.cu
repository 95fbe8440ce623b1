// The passes over chunks, one after the other.
#include "ops/matrix_state/cuda_chunks.cuh"

namespace assay::ops::cuda {
namespace {

cudaStream_t on(Stream stream) { return static_cast<cudaStream_t>(stream); }

struct Scratch {
  bf16 *dstates, *dW;  // [chunks, V, K], [chunks, 16, V]
  char* pass;
  size_t bytes;
};
Scratch scratch(const ChunkedForward& p, void* memory) {
  const int64_t count = p.batch * ceil_div(p.time, kChunkSteps) * p.heads;
  Arena arena{static_cast<char*>(memory)};
  Scratch s{};
  s.dstates = arena.take<bf16>(count * p.value_dim * p.key_dim);
  if (p.rule != Rule::linear) s.dW = arena.take<bf16>(count * kChunkSteps * p.value_dim);
  s.pass = arena.take<char>(chunks::pass_bytes(p));
  s.bytes = arena.used;
  return s;
}

}  // namespace

bool serves(int64_t key_dim, int64_t value_dim) {
  return (key_dim == 64 || key_dim == 96 || key_dim == 128 || key_dim == 256) && value_dim % 16 == 0;
}
size_t chunk_bytes(const ChunkedForward& p) { return chunks::Layout(p, nullptr).bytes; }
size_t workspace_bytes(const ChunkedBackward& q) { return scratch(q.forward, nullptr).bytes; }

size_t workspace_bytes(const ChunkedForward& p) { return chunks::pass_bytes(p); }

void matrix_state(const ChunkedForward& p, void* workspace, Stream stream) {
  const chunks::Prepared tiles = chunks::Layout(p, p.chunks).base;
  chunks::prepare(p, tiles, on(stream));
  chunks::pass(p, {false, tiles, p.v, p.initial_state, static_cast<bf16*>(p.out), p.final_state, tiles.before, tiles.W},
               workspace, on(stream));
}

void matrix_state(const ChunkedBackward& q, void* workspace, Stream stream) {
  const ChunkedForward& p = q.forward;
  const chunks::Prepared tiles = chunks::Layout(p, p.chunks).base;
  const Scratch s = scratch(p, workspace);
  chunks::pass(p, {true, tiles, q.dout, q.dfinal_state, static_cast<bf16*>(q.dv), q.dinitial_state, s.dstates, s.dW},
               s.pass, on(stream));
  chunks::gradients(q, tiles, s.dstates, s.dW, on(stream));
}

}  // namespace assay::ops::cuda
