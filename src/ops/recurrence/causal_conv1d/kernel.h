#pragma once
// Causal depthwise convolution over time, with the activation that follows it in Mamba's block.
//   pre_t[d] = bias[d] + Σ_{j<K} weight[d, j] · x_{t−(K−1)+j}[d]   y = pre or silu(pre)  [B, T, Dm]
// x before the sequence comes from initial_state (its last K − 1 inputs, oldest first), zero when
// absent; final_state is the same for what follows. The backward recomputes pre.
#include "ops/core/kernel.h"

namespace assay::ops {

struct CausalConv1dForward {
  DType dtype;  // dtype of x and y. "real": f64 when dtype is f64, else f32
  // width K: 1 … 32 on CPU, 1 … 8 on CUDA
  int64_t batch;
  int64_t time;
  int64_t channels;
  int64_t width;
  bool silu;
  View x;                     // in  [B, T, Dm]
  const void* weight;         // in  [Dm, K] real
  const void* bias;           // in  [Dm] real or null
  const void* initial_state;  // in  [B, Dm, K−1] real or null
  View y;                     // out [B, T, Dm]
  void* final_state;          // out [B, Dm, K−1] real
};

constexpr int kConvParts = 3;
struct CausalConv1dBackward {
  CausalConv1dForward forward;  // inputs as they were; y and final_state are not touched
  // in [B, T, Dm]; on CUDA it may be in up to kConvParts tensors of some of the channels each, of
  // which tensor i begins with channel first[i]; the last ones may be absent
  View dy[kConvParts];
  int64_t first[kConvParts];
  const void* dfinal_state;  // in  [B, Dm, K−1] real or null
  View dx;                   // out [B, T, Dm]
  // out [Dm, K], [Dm] real, summed over batch and time; dbias may be null
  void* dweight;
  void* dbias;
  void* dinitial_state;  // out [B, Dm, K−1] real or null
};

namespace cpu {
size_t workspace_bytes(const CausalConv1dBackward&);
void causal_conv1d(const CausalConv1dForward&, const ParallelFor&);
void causal_conv1d(const CausalConv1dBackward&, void* workspace, const ParallelFor&);
}  // namespace cpu

// CUDA: enqueues on `stream`, returns at once, the same bits every time.
namespace cuda {
size_t workspace_bytes(const CausalConv1dBackward&);
void causal_conv1d(const CausalConv1dForward&, Stream);
void causal_conv1d(const CausalConv1dBackward&, void* workspace, Stream);
}  // namespace cuda

}  // namespace assay::ops
