// The two passes of the forward: remote, a block a segment of a chunk's list of queries; local, a block a tile of a
// chunk's own queries. A warp owns 16 queries; the chunk's keys and values lie in shared memory.
#include "ops/top1_chunk/cuda_passes.cuh"

namespace assay::ops::cuda::top1 {
namespace {

constexpr int kWarps = 8, kRows = 16, kKeys = 64;  // of a block, queries of a warp, keys of one step of the softmax

int padded_chunk(const Top1ChunkForward& p) { return int(ceil_div(p.chunk_size, kKeys) * kKeys); }

// Keys and values of a chunk, then two tiles of queries for each warp.
template <int D>
struct Shared {
  Tile<D> k, v, first_q;
  __device__ Shared(int keys, int warp) {
    extern __shared__ __align__(1024) unsigned char memory[];
    k.data = reinterpret_cast<bf16*>(memory);
    v.data = k.data + keys * D, first_q.data = v.data + (keys + warp * 2 * kRows) * D;
  }
  __device__ Tile<D> q(int stage) const { return {first_q.data + stage * kRows * D}; }
};
template <int D>
size_t shared_bytes(const Top1ChunkForward& p, int warps) {
  return 2 * (padded_chunk(p) + warps * kRows) * D * sizeof(bf16);
}

// What 16 queries have read so far: out = o / l, logsumexp = m + log₂ l (base 2). Lane's rows: lane/4 and + 8.
template <int D>
struct Softmax {
  float o[D / 32][4][4] = {};
  float m[2] = {-INFINITY, -INFINITY}, l[2] = {0, 0};  // l: this lane's columns only, until finish()

  // Attends to keys [0, highest) of the tile; row i of the lane to [0, limit[i]), with lowest ≤ limit[i] ≤ highest.
  __device__ void attend(const uint32_t (&q)[D / 16][4], Tile<D> k, Tile<D> v, const int (&limit)[2], int lowest,
                         int highest, float scale) {
    for (int key = 0; key < highest; key += kKeys) {
      float s[kKeys / 8][4] = {};
#pragma unroll
      for (int kk = 0; kk < D / 16; ++kk)
#pragma unroll
        for (int n = 0; n < kKeys / 16; ++n) {
          uint32_t b[4];
          load_b(b, k, key + n * 16, kk * 2);
          multiply_add(s[2 * n], s[2 * n + 1], q[kk], b);
        }
      const int column = key + threadIdx.x % 4 * 2;
      const bool all = key + kKeys <= lowest;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          s[n][e] = all || column + n * 8 + e % 2 < limit[e / 2] ? s[n][e] * scale : -INFINITY;
      softmax(s);
      uint32_t p[kKeys / 16][4];
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n)
        p[n][0] = pack(s[2 * n][0], s[2 * n][1]), p[n][1] = pack(s[2 * n][2], s[2 * n][3]),
        p[n][2] = pack(s[2 * n + 1][0], s[2 * n + 1][1]), p[n][3] = pack(s[2 * n + 1][2], s[2 * n + 1][3]);
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n)
#pragma unroll
        for (int d = 0; d < D / 16; ++d) {
          uint32_t b[4];
          load_b_transposed(b, v, key + n * 16, d * 2);
          multiply_add(o[d / 2][d % 2 * 2], o[d / 2][d % 2 * 2 + 1], p[n], b);
        }
    }
  }

  // s becomes exp2(s − m) for the new m.
  __device__ void softmax(float (&s)[kKeys / 8][4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float top = m[i];
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) top = fmaxf(top, fmaxf(s[n][2 * i], s[n][2 * i + 1]));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      const float factor = exp2_fast(m[i] - top);
      m[i] = top, l[i] *= factor;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int e = 2 * i; e < 2 * i + 2; ++e) s[n][e] = exp2_fast(s[n][e] - top), l[i] += s[n][e];
#pragma unroll
      for (int d = 0; d < D / 32; ++d)
#pragma unroll
        for (int n = 0; n < 4; ++n) o[d][n][2 * i] *= factor, o[d][n][2 * i + 1] *= factor;
    }
  }

  // Row i joined with what `out` and `logsumexp` hold of it, if `begun`, and written there; null: no such query.
  __device__ void finish(int i, bf16* out, float* logsumexp, bool begun) {
    float sum = l[i] + __shfl_xor_sync(~0u, l[i], 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const float before = begun ? *logsumexp * kLog2e : -INFINITY;
    const float top = fmaxf(m[i], before), share = exp2_fast(before - top), mine = exp2_fast(m[i] - top);
    const float total = sum * mine + share;
#pragma unroll
    for (int d = 0; d < D / 32; ++d) {
      add_row32(o[d], begun ? out + d * 32 : nullptr, i, mine, share);
      store_row32(out ? out + d * 32 : nullptr, o[d], i, 1 / total);
    }
    if (out && threadIdx.x % 4 == 0) *logsumexp = (top + log2f(total)) * kLn2;
  }
};

template <int D>
__device__ void load_queries(uint32_t (&q)[D / 16][4], Tile<D> tile) {
#pragma unroll
  for (int kk = 0; kk < D / 16; ++kk) load_a(q[kk], tile, 0, kk * 2);
}

// Whether a rank before `rank` chose a chunk for this row of `selected`.
__device__ bool has_earlier(const int64_t* selected, int rank, int own) {
  for (int r = 0; r < rank; ++r)
    if (valid_choice(selected[r], own) >= 0) return true;
  return false;
}

template <int D>
__global__ void __launch_bounds__(kWarps * 32, D == 64 ? 2 : 1)
    remote_kernel(Top1ChunkForward p, Lists lists, int rank, int padded) {
  const int kv_heads = int(p.kv_heads), time = int(p.time), chunk = int(p.chunk_size);
  const Segment work = segment_of(lists, int(p.batch) * kv_heads, blockIdx.x);
  if (work.chunk < 0 || work.begin == work.end) return;
  const int b = work.head / kv_heads, kv = work.head % kv_heads, group = int(p.heads) / kv_heads;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Shared<D> shared(padded, warp);
  const int* order = lists.order + int64_t{work.head} * lists.items;
  const int64_t rows = int64_t{work.head} * lists.items;  // of this key head's first item in logsumexp
  auto fetch = [&](Tile<D> to, int first) {
    for (int i = lane; i < kRows * (D / 8) && first < work.end; i += 32) {
      const int row = i / (D / 8), vector = i % (D / 8), item = order[min(first + row, work.end - 1)];
      copy_async(to.at(row, vector), row_of<D>(p.q, b, item % time, kv * group + item / time) + vector * 8, true);
    }
    commit_copies();
  };
  int first = work.begin + warp * kRows;
  copy_rows<D>(shared.k, p.k, b, int64_t{work.chunk} * chunk, kv, chunk, padded);
  copy_rows<D>(shared.v, p.v, b, int64_t{work.chunk} * chunk, kv, chunk, padded);
  fetch(shared.q(0), first);
  wait_copies<0>();
  __syncthreads();
  for (int stage = 0; first < work.end; first += kWarps * kRows, stage ^= 1) {
    fetch(shared.q(stage ^ 1), first + kWarps * kRows);
    wait_copies<1>();
    __syncwarp();
    uint32_t q[D / 16][4];
    load_queries<D>(q, shared.q(stage));
    Softmax<D> softmax;
    softmax.attend(q, shared.k, shared.v, {chunk, chunk}, chunk, chunk, float(p.scale) * kLog2e);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = first + lane / 4 + i * 8;
      const bool wanted = at < work.end;
      const int item = order[min(at, work.end - 1)], t = item % time;
      const bool begun = wanted && has_earlier(p.selected + (rows + item) * p.top_k, rank, t / chunk);
      softmax.finish(i, wanted ? row_of<D>(p.out, b, t, kv * group + item / time) : nullptr,
                     static_cast<float*>(p.logsumexp) + rows + item, begun);
    }
    __syncwarp();
  }
}

template <int D>
__global__ void __launch_bounds__(kWarps * 32, D == 64 ? 2 : 1) local_kernel(Top1ChunkForward p, int padded) {
  const int chunk = int(p.chunk_size), time = int(p.time), tile = blockDim.x / 2;  // 16 queries a warp
  const int tiles = (chunk + tile - 1) / tile, b = blockIdx.y / int(p.heads), h = blockIdx.y % int(p.heads);
  const int own = blockIdx.x / tiles, begin = own * chunk, end = min(begin + chunk, time);
  const int first = begin + blockIdx.x % tiles * tile, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (first >= end) return;
  const Shared<D> shared(padded, warp);
  const int kv = h / int(p.heads / p.kv_heads), keys = min(first + tile, end) - begin;
  const int key_rows = (keys + kKeys - 1) / kKeys * kKeys, mine = first + warp * kRows;
  for (int i = lane; i < kRows * (D / 8); i += 32) {
    const int row = i / (D / 8), vector = i % (D / 8);
    copy_async(shared.q(0).at(row, vector), row_of<D>(p.q, b, min(mine + row, end - 1), h) + vector * 8, true);
  }
  copy_rows<D>(shared.k, p.k, b, begin, kv, keys, key_rows);
  copy_rows<D>(shared.v, p.v, b, begin, kv, keys, key_rows);
  commit_copies(), wait_copies<0>();
  __syncthreads();
  if (mine >= end) return;
  uint32_t q[D / 16][4];
  load_queries<D>(q, shared.q(0));
  Softmax<D> softmax;
  const int position = mine - begin, limit[2] = {position + lane / 4 + 1, position + lane / 4 + 9};
  softmax.attend(q, shared.k, shared.v, limit, position + 1, min(position + kRows, keys), float(p.scale) * kLog2e);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int t = mine + lane / 4 + i * 8;
    const bool wanted = t < end;
    const int64_t row = int64_t{blockIdx.y} * time + min(t, end - 1);
    const bool begun = wanted && has_earlier(p.selected + row * p.top_k, int(p.top_k), own);
    softmax.finish(i, wanted ? row_of<D>(p.out, b, t, h) : nullptr, static_cast<float*>(p.logsumexp) + row, begun);
  }
}

template <int D>
void remote_blocks(const Top1ChunkForward& p, const Lists& lists, int rank, cudaStream_t stream) {
  const unsigned blocks = unsigned(p.batch * p.kv_heads * lists.segments);
  launch_shared(remote_kernel<D>, blocks, kWarps * 32, shared_bytes<D>(p, kWarps), stream, p, lists, rank,
                padded_chunk(p));
}

template <int D>
void local_blocks(const Top1ChunkForward& p, cudaStream_t stream) {
  const int warps = std::min<int>(kWarps, int(ceil_div(p.chunk_size, kRows)));
  const size_t bytes = shared_bytes<D>(p, warps);
  const int64_t tiles = ceil_div(p.time, p.chunk_size) * ceil_div(p.chunk_size, warps * kRows);
  cudaFuncSetAttribute(local_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes));
  local_kernel<D>
      <<<dim3(unsigned(tiles), unsigned(p.batch * p.heads)), warps * 32, bytes, stream>>>(p, padded_chunk(p));
}

}  // namespace

void remote_pass(const Top1ChunkForward& p, const Lists& lists, int rank, cudaStream_t stream) {
  with_head_dim(p.head_dim, [&](auto d) { remote_blocks<d()>(p, lists, rank, stream); });
  check_launch("top1_chunk: remote pass");
}
void local_pass(const Top1ChunkForward& p, cudaStream_t stream) {
  with_head_dim(p.head_dim, [&](auto d) { local_blocks<d()>(p, stream); });
  check_launch("top1_chunk: local pass");
}

}  // namespace assay::ops::cuda::top1
