#pragma once
// A tile of queries against the keys of a chunk: what the forward pass and the pairs of a query and
// a listed chunk share.
//
// While a warp does float32 arithmetic, the tensor cores of its part of the SM wait
// (docs/lab/README.md). So a score takes few instructions: it becomes 2^score, and no maximum
// is subtracted. A row's sum says whether that was right: between 2^−60 and 2^60, no score was too
// large and what was lost is too small to matter. Rows with another sum are computed again,
// relative to their maximum.
#include "ops/attention/top1_chunk/cuda_passes.cuh"
#include "ops/cuda/attention.cuh"
#include "ops/cuda/reduce.cuh"
#include "ops/cuda/wgmma.cuh"

namespace assay::ops::cuda::top1 {

constexpr int kTile = 64;      // queries of a tile, of a warpgroup
constexpr int kKeys = 64;      // keys of a product
constexpr int kThreads = 128;  // a block is a warpgroup

inline int padded_chunk(const Top1ChunkForward& args) {
  return int(ceil_div(args.chunk_size, kKeys) * kKeys);
}

// Tiles of a chunk's keys, and of its values if kOperands is 2; then two tiles of queries.
template <int D, int kOperands>
struct ChunkSmem {
  using Tile = WgmmaTile<D, kTile>;
  static_assert(kTile == kKeys);
  bf16* memory;
  int padded;  // keys
  static size_t bytes(int padded) { return (kOperands * padded + 2 * kTile) * D * sizeof(bf16); }
  __device__ explicit ChunkSmem(int padded) : padded(padded) {
    extern __shared__ __align__(1024) unsigned char bytes[];
    memory = reinterpret_cast<bf16*>(bytes);
  }
  __device__ Tile keys(int first) const { return {memory + first * D}; }
  __device__ Tile values(int first) const { return keys(padded + first); }
  __device__ Tile queries(int stage) const { return keys(kOperands * padded + stage * kTile); }

  // Starts copies of rows [first, first + count) of a head, keys or values, and of zeros after.
  __device__ void copy(Tile to, const View& x, int b, int first, int head, int count) const {
    for (int row = 0; row < padded; row += kKeys)
      copy_rows(Tile{to.data + row * D}, x, b, first + row, head, max(0, min(kKeys, count - row)),
                kKeys);
  }
};

// A lane's two rows of a tile.
__device__ inline int lane_row(int i) {
  return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + i * 8;
}

// Starts the copy of a row of queries, by the quad that has it.
template <int D>
__device__ void copy_query(WgmmaTile<D, kTile> to, int row, const bf16* from) {
#pragma unroll
  for (int vector = threadIdx.x % 4; vector < D / 8; vector += 4)
    cp_async_16(to.at(row, vector), from + vector * 8, true);
}

// The keys that a tile's queries read: row i of the lane [0, limit[i]) of the chunk, with
// lowest ≤ limit[i] ≤ highest.
struct Limits {
  int limit[2];
  int lowest;
  int highest;
};

// Sets the elements of keys that a row does not read to x.
__device__ inline void hide(float (&s)[kKeys / 8][4], int first_key, const Limits& limits,
                            float x) {
  if (first_key + kKeys <= limits.lowest) return;
  const int column = first_key + threadIdx.x % 4 * 2;
  each_element(
      s, [&](float& y, int n, int e) { y = column + n * 8 + e % 2 < limits.limit[e / 2] ? y : x; });
}

// Calls use(products of queries and keys, first key) for each step of keys that a row may read.
template <int D, int kOperands, class Use>
__device__ void each_product(const ChunkSmem<D, kOperands>& shared, int stage, const Limits& limits,
                             Use&& use) {
  using Tile = WgmmaTile<D, kTile>;
  const WgmmaDescriptor q = warp_uniform(shared.queries(stage).rows());
#pragma unroll 1
  for (int key = 0; key < limits.highest; key += kKeys) {
    const WgmmaDescriptor k = warp_uniform(shared.keys(key).rows());
    float s[kKeys / 8][4];
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < D / 16; ++d)
      wgmma<kKeys, false, false>(s, q + Tile::rows_at(0, d), k + Tile::rows_at(0, d), d > 0);
    wgmma_commit_group();
    wgmma_wait_group<0>(s);
    use(s, key);
  }
}

// Products become 2^(scale · product − offset). `sum` is of the lane's own columns.
__device__ inline void exponentials(float (&s)[kKeys / 8][4], float (&sum)[2], int first_key,
                                    const Limits& limits, float scale, const float (&offset)[2]) {
  each_element(s, [&](float& x, int, int e) { x = ex2_approx(fmaf(x, scale, -offset[e / 2])); });
  hide(s, first_key, limits, 0);
  each_element(s, [&](float& x, int, int e) { sum[e / 2] += x; });
}

// True if a row of the block has a sum that is not to be trusted; the offset of such rows is then
// their largest score in base 2. By all threads. The results of other rows do not change.
template <int D, int kOperands>
__device__ bool find_offsets(float (&offset)[2], const float (&sum)[2],
                             const ChunkSmem<D, kOperands>& shared, int stage, const Limits& limits,
                             float scale) {
  const auto out_of_range = [](float x) { return !(x >= 0x1p-60f && x <= 0x1p60f); };
  if (!__syncthreads_or(out_of_range(sum[0]) || out_of_range(sum[1]))) return false;
  float largest[2] = {-INFINITY, -INFINITY};
  each_product(shared, stage, limits, [&](float(&s)[kKeys / 8][4], int key) {
    each_element(s, [&](float& x, int, int) { x *= scale; });
    hide(s, key, limits, -INFINITY);
    each_element(s, [&](float& x, int, int e) { largest[e / 2] = fmaxf(largest[e / 2], x); });
  });
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    largest[i] = quad_max(largest[i]);
    offset[i] = out_of_range(sum[i]) ? largest[i] : 0;
  }
  return true;
}

}  // namespace assay::ops::cuda::top1
