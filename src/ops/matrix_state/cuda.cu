// The passes over chunks, one after the other.
#include "ops/cuda/launch.cuh"
#include "ops/cuda/types.cuh"
#include "ops/matrix_state/cuda_chunks.cuh"
#include "ops/matrix_state/cuda_scalar.cuh"

namespace assay::ops::cuda {
namespace {

// Of a backward; of a forward with scalar decays only `sums` and `pass`.
struct Scratch {
  scalar::States states;  // the states' gradients in `dafter`
  bf16* dW;               // [chunks, 16, V]
  char* pass;
  Scratch(const ChunkedForward& p, bool backwards, WorkspaceArena& arena) {
    const int64_t count = chunk_count(p) * p.heads,
                  state = backwards ? count * p.value_dim * p.key_dim : 0;
    const bool by_scalars = is_scalar(p), low = p.rule != Rule::gla;
    states.sums.decays = arena.take<float>(by_scalars ? count * kScalarChunkSteps : 0);
    states.sums.weights = arena.take<float>(by_scalars ? count * kScalarChunkSteps : 0);
    states.before = arena.take<bf16>(by_scalars ? state : 0);
    states.dafter = arena.take<bf16>(state);
    dW = arena.take<bf16>(backwards && low ? count * kChunkSteps * p.value_dim : 0);
    pass = arena.take<char>(by_scalars ? scalar::pass_bytes(p) : chunks::pass_bytes(p));
  }
};

}  // namespace

int64_t key_size(Rule rule, bool bonus, int64_t key_dim) {
  for (const int64_t size : {int64_t{64}, int64_t{96}, int64_t{128}, kLargestKey})
    if (key_dim <= size) return size == 64 || !(bonus || rule == Rule::dplr) ? size : 0;
  return 0;
}
int64_t value_size(int64_t value_dim, bool decode) {
  const int64_t step = decode || value_dim <= 64 || value_dim % 48 == 0 ? 16 : 64;
  return ceil_div(value_dim, step) * step;
}
bool is_scalar(const ChunkedForward& p) { return p.rule == Rule::gla && p.decay_dim <= 1 && !p.u; }
int64_t chunk_count(const ChunkedForward& p) {
  return p.batch * ceil_div(p.time, is_scalar(p) ? kScalarChunkSteps : kChunkSteps);
}
int64_t key_gradients(const ChunkedForward& p) {
  return is_scalar(p) ? p.heads / scalar::sharers(p) : p.heads;
}

size_t chunk_bytes(const ChunkedForward& p) {
  return is_scalar(p) ? scalar::starts_bytes(p) : workspace_size<chunks::Prepared>(p);
}
size_t workspace_bytes(const ChunkedForward& p) { return workspace_size<Scratch>(p, false); }
size_t workspace_bytes(const ChunkedBackward& bwd) {
  return workspace_size<Scratch>(bwd.forward, true);
}

void matrix_state(const ChunkedForward& p, void* workspace, Stream stream) {
  const auto s = workspace_at<Scratch>(workspace, p, false);
  if (is_scalar(p))
    return scalar::forward(p, s.states.sums, static_cast<float*>(p.chunks), s.pass, stream);
  const auto tiles = workspace_at<chunks::Prepared>(p.chunks, p);
  chunks::prepare(p, tiles, stream);
  chunks::pass(p,
               {false, tiles, p.v, p.initial_state, static_cast<bf16*>(p.out), p.final_state,
                tiles.before, tiles.W},
               s.pass, stream);
}

void matrix_state(const ChunkedBackward& bwd, void* workspace, Stream stream) {
  const ChunkedForward& p = bwd.forward;
  const auto s = workspace_at<Scratch>(workspace, p, true);
  if (is_scalar(p)) {
    scalar::backward(bwd, static_cast<const float*>(p.chunks), s.states, s.pass, stream);
    return scalar::gradients(bwd, s.states, stream);
  }
  const auto tiles = workspace_at<chunks::Prepared>(p.chunks, p);
  chunks::pass(p,
               {true, tiles, bwd.dout, bwd.dfinal_state, static_cast<bf16*>(bwd.dv),
                bwd.dinitial_state, s.states.dafter, s.dW},
               s.pass, stream);
  chunks::gradients(bwd, tiles, s.states.dafter, s.dW, stream);
}

}  // namespace assay::ops::cuda
