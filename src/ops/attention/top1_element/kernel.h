#pragma once
// Top-1 Element attention: a query reads the one position that matters most to it.
//   p_tj    = softmax over j ≤ t of s·q_t·k_j          logsumexp_t = log Σ_{j ≤ t} exp(s·q_t·k_j)
//   j*(t)   = argmax_j p_tj, the lowest where several are equal
//   out_t   = v_{j*(t)}                                                      [BC §4, Top-1 Element]
//   soft_t  = Σ_j p_tj v_j
// The backward is the straight-through estimator: the value of onehot(j*), the gradient of p.
//   dv_j = Σ_{t: j*(t) = j} dout_t        dS_tj = s p_tj dout_t·(v_j − soft_t)
//   dq_t = Σ_j dS_tj k_j                  dk_j  = Σ_t dS_tj q_t
// Head h reads the keys and values of head ⌊h / (H/Hk)⌋. Memory is O(T). A row whose scores hold a
// NaN is NaN.
#include "ops/core/kernel.h"

namespace assay::ops {

struct Top1ElementForward {
  DType dtype;  // dtype of q, k, v, out. "real" below: f64 when dtype is f64, else f32
  // time ≥ 1, of the queries
  int64_t batch;
  int64_t time;
  int64_t past;  // positions of k and v before the first query: k, v have past + time
  // H, Hk; Hk divides H
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;  // D ≥ 1
  double scale;      // s
  // in  [B, T, H, D], [B, past + T, Hk, D]
  View q;
  View k;
  View v;
  View out;  // out [B, T, H, D]; every element is written
  // out [B, H, T] real, natural log; both null when no gradient is wanted
  void* logsumexp = nullptr;
  void* soft = nullptr;      // out [B, H, T, D] real
  int64_t* index = nullptr;  // out [B, H, T]
};

struct Top1ElementBackward {
  // as the forward left it: q, k, v, logsumexp, soft and index are read
  Top1ElementForward forward;
  View dout;  // in  [B, T, H, D]
  View dq;    // out [B, T, H, D]
  // out [B, past + T, Hk, D], summed over the heads that read them
  View dk;
  View dv;
};

// One writer a row: the bits do not depend on the number of threads.
namespace cpu {
size_t workspace_bytes(const Top1ElementForward&);
size_t workspace_bytes(const Top1ElementBackward&);
void top1_element(const Top1ElementForward&, void* workspace, const ParallelFor&);
void top1_element(const Top1ElementBackward&, void* workspace, const ParallelFor&);
}  // namespace cpu

// CUDA, sm_90a: enqueues on `stream` and returns, allocates nothing, gives the same
// bits every time.
// `workspace` is 256-byte aligned.
namespace cuda {
// Null: the kernels take it. Else the reason, and they throw Unsupported.
const char* why_unsupported(const Top1ElementForward&);
size_t workspace_bytes(const Top1ElementForward&);
size_t workspace_bytes(const Top1ElementBackward&);
void top1_element(const Top1ElementForward&, void* workspace, Stream);
void top1_element(const Top1ElementBackward&, void* workspace, Stream);
// dv alone, from dout and index, for bf16 and the same head_dims; also compute_80.
size_t value_gradient_bytes(const Top1ElementBackward&);
void value_gradients(const Top1ElementBackward&, void* workspace, Stream);
}  // namespace cuda

}  // namespace assay::ops
