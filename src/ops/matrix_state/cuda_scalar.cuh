#pragma once
// Chunks of 64 steps whose decays are one number a step and head, or none: nothing is prepared but
// sums of log decays, and q and k are read as they are, once for all heads that share them.
// Derivation: README.md, "One decay per step and head".
#include "ops/cuda/launch.cuh"
#include "ops/cuda/types.cuh"
#include "ops/matrix_state/cuda_chunks.cuh"

namespace assay::ops::cuda::scalar {

using namespace chunks;

constexpr int kChunk = kScalarChunkSteps;
constexpr int kColumns = kMaxColumns;  // of the state, that a block holds
// row strides with which ldmatrix meets every bank once
constexpr int kColumnStride = kColumns + 8;
constexpr int kChunkStride = kChunk + 8;
// log₂ of a decay that is 0: two to this power is 0 in fp32, and no difference is NaN
constexpr float kLogDecayFloor = -160;

inline int64_t chunks_of(const ChunkedForward& p) { return ceil_div(p.time, kChunk); }

// Of every chunk (b, n, h), n the chunk of a sequence, [count, 64].
struct Sums {
  // the log₂ decays of its steps up to each, itself included; what scales each k vᵀ
  float *decays, *weights;
};

// Out: out, final_state, and the states before the segments, [B, H, segments, K, V], where
// there are several.
size_t starts_bytes(const ChunkedForward& p);
size_t pass_bytes(const ChunkedForward& p);
void forward(const ChunkedForward& p, const Sums& sums, float* starts, void* workspace,
             Stream stream);
// Out: dv, dinitial_state, and of every chunk [count, V, K] the state before it and the gradient of
// the state after it.
struct States {
  bf16 *before, *dafter;
  Sums sums;
};
void backward(const ChunkedBackward& bwd, const float* starts, const States& states,
              void* workspace, Stream stream);
void gradients(const ChunkedBackward& bwd, const States& states, Stream stream);
int64_t sharers(const ChunkedForward& p);  // heads whose gradients of q and k are one sum

}  // namespace assay::ops::cuda::scalar
