#pragma once
// Top-1 Chunk attention: a query reads its own chunk and the top_k earlier chunks that matter
// most to it.
//   candidates of t: the chunks c < ⌊t/C⌋, all of them full
//   score(t, c)   = log Σ_{j in chunk c} exp(s·q_t·k_j)              (Selection::exact)
//                   q_t · μ_c, the mean of the chunk's keys          (Selection::approx)
//   r(t)          = the top_k best candidates by falling score, −1 where there are fewer; ties: the
//                   lower chunk
//   N(t)          = {j ≤ t in the chunk of t} ∪ {j in a chunk of r(t)}
//   logsumexp_t   = log Σ_{j in N(t)} exp(s·q_t·k_j)
//   out_t         = Σ_{j in N(t)} exp(s·q_t·k_j − logsumexp_t) v_j             [BC App. D, Alg. 1]
// The backward, with P_tj = exp(s·q_t·k_j − logsumexp_t) on N(t) and δ_t = dout_t · out_t
// [BC App. D, Alg. 2]:
//   dv_j = Σ_t P_tj dout_t                   dq_t = Σ_j dS_tj k_j
//   dS_tj = s P_tj (dout_t · v_j − δ_t)      dk_j = Σ_t dS_tj q_t
// One softmax over all chunks read, not blended ones. No gradient flows through r or from
// logsumexp. Head h reads the keys and values of head ⌊h / (H/Hk)⌋. Memory is O(T). Derivation,
// FLOPs, bytes, times: README.md.
#include "ops/core/kernel.h"

namespace assay::ops {

enum class Selection { exact, approx };

struct Top1ChunkForward {
  // dtype of q, k, v, out. "real" below: f64 when dtype is f64, else f32
  DType dtype;
  // time ≥ 1; a last, partial chunk is read by its own queries only
  int64_t batch;
  int64_t time;
  // H, Hk; Hk divides H
  int64_t heads;
  int64_t kv_heads;
  // D, C, each ≥ 1
  int64_t head_dim;
  int64_t chunk_size;
  int64_t top_k;
  double scale;  // s
  Selection selection;
  // selected is given, not chosen; whatever is no candidate of its query counts as −1
  bool forced;
  View q;  // in  [B, T, H, D]
  // in  [B, past + T, Hk, D]
  View k;
  View v;
  View out;         // out [B, T, H, D]; every element is written
  void* logsumexp;  // out [B, H, T] real, natural log
  // out [B, H, T, top_k] r(t); in when forced (a chunk twice in one row is counted twice)
  int64_t* selected;
  // positions of k, v before the first query: they have past + T, and query t is at past + t
  int64_t past = 0;
  // Read where a function says so: in [B, full chunks, Hk, 1, D] real: μ_c. bf16: in bf16,
  // [B, full chunks, Hk, 2, D], what rounding leaves of μ_c before the rounded one.
  View summaries;
  // Inputs of cuda::top1_chunk_step for sequences at positions of their own, with caches of their
  // own. time is 1, all positions are `past` at most, and the data of k, v and summaries are
  // null; their strides are those of the caches.
  const int64_t* positions = nullptr;  // in [B] of the new tokens; −1: the row is not used
  // in [B, 2], for approx [B, 3]: the addresses of the keys, values and summaries of each row
  void* const* caches = nullptr;
  // in [B, 1, Hk, D]: of the new tokens
  View new_k;
  View new_v;
};

struct Top1ChunkBackward {
  // as the forward left it: q, k, v, out, logsumexp and selected are read
  Top1ChunkForward forward;
  View dout;  // in  [B, T, H, D]
  View dq;    // out [B, T, H, D]
  // out [B, past + T, Hk, D], summed over the heads that read them
  View dk;
  View dv;
};

// One writer per row: the bits do not depend on the number of threads.
namespace cpu {
size_t workspace_bytes(const Top1ChunkForward&);
size_t workspace_bytes(const Top1ChunkBackward&);
void top1_chunk(const Top1ChunkForward&, void* workspace, const ParallelFor&);
void top1_chunk(const Top1ChunkBackward&, void* workspace, const ParallelFor&);

// The forward for few queries with a long past (decoding), one query at a time. A query reads
// `summaries` (exact: the keys before it) and the chunks chosen, and nothing else.
size_t step_workspace_bytes(const Top1ChunkForward&);
void top1_chunk_step(const Top1ChunkForward&, void* workspace, const ParallelFor&);
}  // namespace cpu

// CUDA, sm_90a: enqueues on `stream` and returns, allocates nothing, gives the same
// bits every time.
// `workspace` is 256-byte aligned.
namespace cuda {
// Null: the kernels take it. Else the reason, and they throw Unsupported.
const char* why_unsupported(const Top1ChunkForward&);
size_t workspace_bytes(const Top1ChunkForward&);
size_t workspace_bytes(const Top1ChunkBackward&);
void top1_chunk(const Top1ChunkForward&, void* workspace, Stream);
void top1_chunk(const Top1ChunkBackward&, void* workspace, Stream);

// As cpu::top1_chunk_step; any dtype. One launch, one block per query and head, which keeps the
// scores of all chunks in shared memory: of 49,152 at most, in f64 of 24,576. Approx in bf16 ranks
// chunks by the sum of both parts of μ, though it reads the small one only where that may decide.
// With `caches` it writes the keys and values of the new tokens there, and the summaries of chunks
// that these complete. Then logsumexp and selected are not written.
const char* why_no_step(const Top1ChunkForward&);
void top1_chunk_step(const Top1ChunkForward&, Stream);

// to [rows, row_bytes] = rows `index` of `from`; row_bytes is a multiple of 16, as the addresses.
void gather_rows(const void* from, const int64_t* index, int64_t rows, int64_t row_bytes, void* to,
                 Stream);
}  // namespace cuda

}  // namespace assay::ops
