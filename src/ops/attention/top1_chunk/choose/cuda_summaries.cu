// Summaries of the chunks: the means of their keys, each as the sum of two bf16, to 2^−17.
#include "ops/attention/top1_chunk/choose/cuda_scores.cuh"

namespace assay::ops::cuda::top1 {
namespace {

// partial[warp][d] = Σ_j k_j[d] over the warp's part of the keys.
template <int D>
__device__ void sum_keys(float (*partial)[D], SwizzledTile<D> keys, int padded) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const uint32_t one = pack_bf16x2(1, 1);
  const uint32_t ones[4] = {one, one, one, one};
  float sum[D / 8][4] = {};  // all rows are equal
  for (int key = warp * 16; key < padded; key += 4 * 16)
#pragma unroll
    for (int n = 0; n < D / 16; ++n) {
      uint32_t x[4];
      load_b_kn(x, keys, key, n * 2);
      mma_m16n16k16(sum[2 * n], sum[2 * n + 1], ones, x);
    }
  if (lane >= 4) return;
#pragma unroll
  for (int n = 0; n < D / 8; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) partial[warp][n * 8 + lane * 2 + e] = sum[n][e];
}

int padded_chunk(const Top1ChunkForward& args) { return int(ceil_div(args.chunk_size, 16) * 16); }

// One block per chunk.
template <int D>
__global__ void __launch_bounds__(128, D == 64 ? 6 : 1)
    summary_kernel(Top1ChunkForward args, bf16* columns, int tiles, int padded) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ float partial[4][D];
  const int chunk = int(args.chunk_size);
  const int c = blockIdx.x;
  const int b = blockIdx.y / int(args.kv_heads);
  const int kv = blockIdx.y % int(args.kv_heads);
  const SwizzledTile<D> keys{reinterpret_cast<bf16*>(memory)};
  if ((c + 1) * int64_t{chunk} > args.time) return;  // a partial chunk is not a candidate
  copy_rows(keys, args.k, b, c * int64_t{chunk}, kv, chunk, padded);
  cp_async_commit_group();
  cp_async_wait_group<0>();
  __syncthreads();
  sum_keys(partial, keys, padded);
  __syncthreads();
  const int d = threadIdx.x;
  if (d >= D) return;
  const float mean =
      (partial[0][d] + partial[1][d] + partial[2][d] + partial[3][d]) * (1 / float(chunk));
  const bf16 high = __float2bfloat16(mean);
  const WgmmaTile<D, kTileRows> tile{columns + (blockIdx.y * int64_t{tiles} + c / kTileChunks) *
                                                   kTileRows * D};
  const int row = c % kTileChunks;
  tile.at(row, d / 8)[d % 8] = high;
  tile.at(kTileChunks + row, d / 8)[d % 8] = __float2bfloat16(mean - to_compute(high));
}

}  // namespace

bf16* take_summaries(const Top1ChunkForward& args, WorkspaceArena& arena) {
  return arena.take<bf16>(args.batch * args.kv_heads * summary_tiles(args) * kTileRows *
                          args.head_dim);
}

void summarise(const Top1ChunkForward& args, bf16* columns, Stream stream) {
  const dim3 chunks(unsigned(all_chunks(args)), unsigned(args.batch * args.kv_heads));
  with_head_dim(args.head_dim, [&](auto d) {
    launch_kernel(summary_kernel<d()>, chunks, 128, padded_chunk(args) * d() * sizeof(bf16), stream,
                  args, columns, int(summary_tiles(args)), padded_chunk(args));
  });
}

}  // namespace assay::ops::cuda::top1
