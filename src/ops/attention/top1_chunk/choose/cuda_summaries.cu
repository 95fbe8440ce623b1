// Summaries of the chunks: their means and axes.
#include "ops/attention/top1_chunk/choose/cuda_scores.cuh"
#include "ops/cuda/reduce.cuh"

namespace assay::ops::cuda::top1 {
namespace {

// Numbers as the sum of two bf16: what is packed of each in a word.
struct Split {
  uint32_t high;
  uint32_t low;
};
__device__ Split split(float x, float y) {
  const uint32_t high = pack_bf16x2(x, y);
  const float2 rounded = unpack_bf16x2(high);
  return {high, pack_bf16x2(x - rounded.x, y - rounded.y)};
}

// Eight rows of float32, axes or what they were: rows 0 … 7 of an operand hold their high parts,
// rows 8 … 15 the low ones, so that a product has both, and their sum is in one lane.
constexpr int kAxisRows = 8;

// partial[warp][i][d] = Σ_j (k_j · s_i) k_j[d] over the warp's part of the keys; kMean: Σ_j k_j[d].
template <int D, bool kMean>
__device__ void weighted_sums(float (*partial)[kAxisRows][D], SwizzledTile<D> keys,
                              const float (*s)[D], int padded) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int row = lane / 4;
  const int column = lane % 4 * 2;
  uint32_t axes[D / 16][4];
#pragma unroll
  for (int k = 0; k < D / 16 && !kMean; ++k)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* from = s[row] + k * 16 + half * 8 + column;
      const Split x = split(from[0], from[1]);
      axes[k][2 * half] = x.high;
      axes[k][2 * half + 1] = x.low;
    }
  float sum[D / 8][4] = {};
  for (int key = warp * 16; key < padded; key += 4 * 16) {
    const uint32_t one = pack_bf16x2(1, 1);
    uint32_t weights[4] = {one, 0, one, 0};
    if (!kMean) {
      float y[2][4] = {};
#pragma unroll
      for (int k = 0; k < D / 16; ++k) {
        uint32_t x[4];
        load_b_nk(x, keys, key, k * 2);
        mma_m16n16k16(y[0], y[1], axes[k], x);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Split x = split(y[half][0] + y[half][2], y[half][1] + y[half][3]);
        weights[2 * half] = x.high;
        weights[2 * half + 1] = x.low;
      }
    }
#pragma unroll
    for (int n = 0; n < D / 16; ++n) {
      uint32_t x[4];
      load_b_kn(x, keys, key, n * 2);
      mma_m16n16k16(sum[2 * n], sum[2 * n + 1], weights, x);
    }
  }
#pragma unroll
  for (int n = 0; n < D / 8; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) partial[warp][row][n * 8 + column + e] = sum[n][e] + sum[n][e + 2];
}

template <int D>
__device__ float warp_dot(const float* a, const float* b) {
  float sum = 0;
  for (int d = threadIdx.x % 32; d < D; d += 32) sum += a[d] * b[d];
  return warp_sum(sum);
}

// to_i = A s_i from those sums, or that at unit length: Σ_j ((k_j − μ) · s_i) (k_j − μ) / C. A
// warp an axis.
template <int D, bool kUnit>
__device__ void times_covariance(float (*to)[D], const float (*partial)[kAxisRows][D],
                                 const float (*s)[D], const float* mean, float share) {
  const int lane = threadIdx.x % 32;
  for (int i = threadIdx.x / 32; i < kAxisRows; i += 4) {
    const float middle = warp_dot<D>(mean, s[i]);
    float x[D / 32];
    float square = 0;
#pragma unroll
    for (int n = 0; n < D / 32; ++n) {
      const int d = n * 32 + lane;
      x[n] = (partial[0][i][d] + partial[1][i][d] + partial[2][i][d] + partial[3][i][d]) * share;
      x[n] -= middle * mean[d];
      square += x[n] * x[n];
    }
    const float factor = kUnit ? rsqrtf(fmaxf(warp_sum(square), 1e-30f)) : 1;
#pragma unroll
    for (int n = 0; n < D / 32; ++n) to[i][n * 32 + lane] = x[n] * factor;
  }
}

// Number d of u_i, what is left of w_i when its parts along earlier ones are taken away, with
// m[i][j] = s_i · w_j: the rows of L⁻¹ w, L the Cholesky factor of m. An axis of which nothing is
// left is 0.
template <int D, int kAxes>
__device__ void separate(float (&u)[kAxes], const float (*w)[D], const float (*m)[kAxisRows],
                         int d) {
  constexpr float kTiny = 1e-6f;
  float l[kAxes][kAxes];
  float inverse[kAxes];
#pragma unroll
  for (int i = 0; i < kAxes; ++i) {
    float left = m[i][i];
    u[i] = w[i][d];
#pragma unroll
    for (int j = 0; j < i; ++j) {
      l[i][j] = m[i][j];
#pragma unroll
      for (int k = 0; k < j; ++k) l[i][j] -= l[i][k] * l[j][k];
      l[i][j] *= inverse[j];
      left -= l[i][j] * l[i][j];
      u[i] -= l[i][j] * u[j];
    }
    inverse[i] = left > kTiny * m[i][i] ? rsqrtf(fmaxf(left, 1e-30f)) : 0;
    u[i] = inverse[i] > 0 ? u[i] * inverse[i] : 0;
  }
}

int padded_chunk(const Top1ChunkForward& p) { return int(ceil_div(p.chunk_size, 16) * 16); }

// Into tiles, means and axes as chunk_summaries of the operator has them, times s and s / √2; or
// (kParts 2) means as the sum of two bf16, to 2^−17. One block per chunk.
template <int D, int kParts>
__global__ void __launch_bounds__(128, D == 64 ? 6 : 1)
    summary_kernel(Top1ChunkForward p, bf16* columns, int tiles, int padded) {
  using L = Layout<kParts>;
  constexpr int kAxes = kParts - 1;
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ float mean[D];
  __shared__ float s[kAxisRows][D];
  __shared__ float w[kAxisRows][D];
  __shared__ float partial[4][kAxisRows][D];
  __shared__ float m[kAxisRows][kAxisRows];
  const int chunk = int(p.chunk_size);
  const int rank = int(p.rank);
  const int c = blockIdx.x;
  const int warp = threadIdx.x / 32;
  const int b = blockIdx.y / int(p.kv_heads);
  const int kv = blockIdx.y % int(p.kv_heads);
  const SwizzledTile<D> keys{reinterpret_cast<bf16*>(memory)};
  if ((c + 1) * int64_t{chunk} > p.time) return;  // a partial chunk is not a candidate
  copy_rows(keys, p.k, b, c * int64_t{chunk}, kv, chunk, padded);
  cp_async_commit_group();
  cp_async_wait_group<0>();
  __syncthreads();
  weighted_sums<D, true>(partial, keys, nullptr, padded);
  __syncthreads();
  const float share = 1 / float(chunk);
  for (int place = threadIdx.x; place < kAxisRows * D; place += 128) {
    const int i = place / D;
    const int d = place % D;
    const float x =
        (partial[0][0][d] + partial[1][0][d] + partial[2][0][d] + partial[3][0][d]) * share;
    if (kParts > 2)
      s[i][d] = i < rank ? to_compute(keys.at(i * chunk / rank, d / 8)[d % 8]) - x : 0;
    if (i == 0) mean[d] = x;
  }
  __syncthreads();
  const int d = threadIdx.x;
  const WgmmaTile<D, kTileRows> tile{columns + (blockIdx.y * int64_t{tiles} + c / L::kChunks) *
                                                   kTileRows * D};
  const auto put = [&](int part, float x) {
    tile.at(L::row(c, part), d / 8)[d % 8] = __float2bfloat16(x);
  };
  if constexpr (kParts == 2) {
    if (d >= D) return;
    put(0, mean[d]);
    put(1, mean[d] - to_compute(__float2bfloat16(mean[d])));
  } else {
    weighted_sums<D, false>(partial, keys, s, padded);
    __syncthreads();
    times_covariance<D, true>(w, partial, s, mean, share);
    __syncthreads();
    weighted_sums<D, false>(partial, keys, w, padded);
    __syncthreads();
    // now the axes are in w, A times them in s
    times_covariance<D, false>(s, partial, w, mean, share);
    __syncthreads();
    for (int i = warp; i < kAxes; i += 4)
      for (int j = 0; j <= i; ++j) {
        const float x = warp_dot<D>(w[i], s[j]);
        if (threadIdx.x % 32 == 0) m[i][j] = x;
      }
    __syncthreads();
    if (d >= D) return;
    const float scale = float(p.scale);
    put(0, scale * mean[d]);
    float u[kAxes];
    separate<D, kAxes>(u, s, m, d);
#pragma unroll
    for (int i = 0; i < kAxes; ++i) put(1 + i, 0.7071067812f * scale * u[i]);
  }
}

}  // namespace

bf16* take_summaries(const Top1ChunkForward& p, WorkspaceArena& arena) {
  return arena.take<bf16>(p.batch * p.kv_heads * summary_tiles(p) * kTileRows * p.head_dim);
}

void summarise(const Top1ChunkForward& p, bf16* columns, Stream stream) {
  const dim3 chunks(unsigned(ceil_div(p.time, p.chunk_size)), unsigned(p.batch * p.kv_heads));
  with_head_dim(p.head_dim, [&](auto d) {
    with_constant<2, 4, 8>(summary_parts(p), [&](auto parts) {
      launch_kernel(summary_kernel<d(), parts()>, chunks, 128, padded_chunk(p) * d() * sizeof(bf16),
                    stream, p, columns, int(summary_tiles(p)), padded_chunk(p));
    });
  });
}

}  // namespace assay::ops::cuda::top1
