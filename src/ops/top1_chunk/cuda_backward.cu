// The gradients: a block holds up to 128 keys and values of a chunk and streams the queries that read them, the list of
// those that chose the chunk or its own. A warp owns 16 keys; with keys as rows, the exponentials come out of the
// tensor cores as the operands of dv and dk. dS goes through shared memory once, for dq.
#include "ops/top1_chunk/cuda_passes.cuh"

namespace assay::ops::cuda::top1 {
namespace {

constexpr int kTile = 64, kPart = 32;  // queries of a step, and of the part of it that is in registers at a time

int block_keys(const Top1ChunkForward& p) { return p.chunk_size <= 64 ? 64 : 128; }

// delta = dout · out. A quad of lanes a row.
template <int D>
__global__ void __launch_bounds__(256) delta_kernel(Top1ChunkBackward q, float* delta) {
  const int heads = int(q.forward.heads), lane = threadIdx.x % 4;
  const int64_t i = (blockIdx.x * int64_t{256} + threadIdx.x) / 4, time = q.forward.time;
  const bool wanted = i < q.forward.batch * time * heads;
  const int64_t b = i / (time * heads), t = i / heads % time, h = i % heads;
  float sum = 0;
  if (wanted) {
    const bf16 *out = row_of<D>(q.forward.out, b, t, h), *dout = row_of<D>(q.dout, b, t, h);
#pragma unroll
    for (int j = 0; j < D / 32; ++j) {
      const uint4 x = reinterpret_cast<const uint4*>(out)[j * 4 + lane],
                  y = reinterpret_cast<const uint4*>(dout)[j * 4 + lane];
      const uint32_t xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 u = unpack(xs[e]), w = unpack(ys[e]);
        sum += u.x * w.x + u.y * w.y;
      }
    }
  }
  sum += __shfl_xor_sync(~0u, sum, 1);
  sum += __shfl_xor_sync(~0u, sum, 2);
  if (wanted && lane == 0) delta[(b * heads + h) * time + t] = sum;
}

// What a query brings beside its rows. `limit`: it reads the block's keys [0, limit).
struct Facts {
  float logsumexp[kTile], delta[kTile];  // logsumexp in base 2; +inf: no such query
  int limit[kTile];
};

template <int D, int kKeys>
struct Shared {
  Tile<D> k, v;
  Tile<kTile> ds;  // [keys, queries]
  bf16* queries;   // rows of q, then of dout, of two stages
  Facts* two_facts;
  static constexpr size_t kBytes =
      (2 * kKeys + 4 * kTile) * D * sizeof(bf16) + kKeys * kTile * sizeof(bf16) + 2 * sizeof(Facts);
  __device__ Shared() {
    extern __shared__ __align__(1024) unsigned char memory[];
    bf16* at = reinterpret_cast<bf16*>(memory);
    auto take = [&](int rows, int width) { return at += rows * width, at - rows * width; };
    k.data = take(kKeys, D), v.data = take(kKeys, D), ds.data = take(kKeys, kTile);
    queries = take(4 * kTile, D), two_facts = reinterpret_cast<Facts*>(at);
  }
  __device__ Tile<D> q(int stage) const { return {queries + 2 * stage * kTile * D}; }
  __device__ Tile<D> dout(int stage) const { return {queries + (2 * stage + 1) * kTile * D}; }
  __device__ Facts& facts(int stage) const { return two_facts[stage]; }
};

// The items that a block goes through, and the keys that it holds.
struct Work {
  int b, kv, group, time;
  int first_key, keys,
      own;           // keys [first_key, first_key + keys) of the sequence; own: of the queries when local, else −1
  int begin, end;    // item numbers: of `order`, or (local) 0 … group · own queries
  const int* order;  // null: local
  int local_begin, local_count;
  int64_t rows;  // of the key head's first item in logsumexp and delta
  __device__ int item(int i) const { return order ? order[i] : i / local_count * time + local_begin + i % local_count; }
  __device__ int limit(int item) const { return order ? keys : min(keys, item % time - first_key + 1); }
  __device__ int head(int item) const { return kv * group + item / time; }
};

template <int D, int kKeys>
__device__ void fetch(const Top1ChunkBackward& q, const Work& work, const Shared<D, kKeys>& shared, const float* delta,
                      int first, int stage) {
  for (int i = threadIdx.x; i < kTile * (D / 8); i += kKeys * 2) {
    const int row = i / (D / 8), vector = i % (D / 8);
    const bool wanted = first + row < work.end;
    const int item = work.item(wanted ? first + row : work.begin), t = item % work.time, h = work.head(item);
    copy_async(shared.q(stage).at(row, vector), row_of<D>(q.forward.q, work.b, t, h) + vector * 8, wanted);
    copy_async(shared.dout(stage).at(row, vector), row_of<D>(q.dout, work.b, t, h) + vector * 8, wanted);
  }
  commit_copies();
  if (threadIdx.x < kTile) {
    const int i = first + threadIdx.x;
    const bool wanted = i < work.end;
    const int item = work.item(wanted ? i : work.begin);
    Facts& facts = shared.facts(stage);
    facts.logsumexp[threadIdx.x] =
        wanted ? static_cast<const float*>(q.forward.logsumexp)[work.rows + item] * kLog2e : INFINITY;
    facts.delta[threadIdx.x] = wanted ? delta[work.rows + item] : 0;
    facts.limit[threadIdx.x] = work.limit(item);
  }
}

// A warp's 16 keys.
template <int D, int kKeys>
struct KeyGradients {
  float dk[D / 32][4][4] = {}, dv[D / 32][4][4] = {};

  __device__ void add(const Shared<D, kKeys>& shared, int stage, float scale) {
    const int lane = threadIdx.x % 32, key = threadIdx.x / 32 * 16;
    const Facts& facts = shared.facts(stage);
#pragma unroll 1
    for (int part = 0; part < kTile; part += kPart) {
      float p[kPart / 8][4] = {}, ds[kPart / 8][4] = {};
      products(p, shared.k, shared.q(stage), key, part);
      products(ds, shared.v, shared.dout(stage), key, part);
#pragma unroll
      for (int n = 0; n < kPart / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int query = part + n * 8 + lane % 4 * 2 + e % 2;
          const bool seen = key + lane / 4 + e / 2 * 8 < facts.limit[query];
          p[n][e] = seen ? exp2_fast(p[n][e] * scale - facts.logsumexp[query]) : 0;
          ds[n][e] = p[n][e] * (ds[n][e] - facts.delta[query]);
        }
      accumulate(dv, p, shared.dout(stage), part);
      accumulate(dk, ds, shared.q(stage), part);
#pragma unroll
      for (int n = 0; n < kPart / 8; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          reinterpret_cast<uint32_t*>(shared.ds.at(key + lane / 4 + half * 8, part / 8 + n))[lane % 4] =
              pack(ds[n][2 * half], ds[n][2 * half + 1]);
    }
  }
  // c [16 keys, queries] += rows of a · rows of b
  static __device__ void products(float (&c)[kPart / 8][4], Tile<D> keys, Tile<D> queries, int key, int part) {
#pragma unroll
    for (int kk = 0; kk < D / 16; ++kk) {
      uint32_t a[4];
      load_a(a, keys, key, kk * 2);
#pragma unroll
      for (int n = 0; n < kPart / 16; ++n) {
        uint32_t b[4];
        load_b(b, queries, part + n * 16, kk * 2);
        multiply_add(c[2 * n], c[2 * n + 1], a, b);
      }
    }
  }
  // sum [16 keys, D] += weights [16 keys, queries] · rows
  static __device__ void accumulate(float (&sum)[D / 32][4][4], const float (&weights)[kPart / 8][4], Tile<D> rows,
                                    int part) {
#pragma unroll
    for (int n = 0; n < kPart / 16; ++n) {
      const float(&left)[4] = weights[2 * n], (&right)[4] = weights[2 * n + 1];
      const uint32_t a[4] = {pack(left[0], left[1]), pack(left[2], left[3]), pack(right[0], right[1]),
                             pack(right[2], right[3])};
#pragma unroll
      for (int d = 0; d < D / 16; ++d) {
        uint32_t b[4];
        load_b_transposed(b, rows, part + n * 16, d * 2);
        multiply_add(sum[d / 2][d % 2 * 2], sum[d / 2][d % 2 * 2 + 1], a, b);
      }
    }
  }
};

// dq of a tile: dSᵀ · K, 16 queries × 32 columns a warp at a time. Adds to what is there, or writes.
template <int D, int kKeys>
__device__ void query_gradients(const Top1ChunkBackward& q, const Work& work, const Shared<D, kKeys>& shared, int first,
                                bool add) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int unit = threadIdx.x / 32; unit < kTile / 16 * (D / 32); unit += kKeys / 16) {
    const int query = unit % (kTile / 16) * 16, column = unit / (kTile / 16) * 32;
    if (first + query >= work.end) continue;
    float dq[4][4] = {};
#pragma unroll
    for (int kk = 0; kk < kKeys / 16; ++kk) {
      uint32_t a[4], b[4];
      load_a_transposed(a, shared.ds, kk * 16, query / 8);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        load_b_transposed(b, shared.k, kk * 16, column / 8 + n * 2);
        multiply_add(dq[2 * n], dq[2 * n + 1], a, b);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = first + query + lane / 4 + half * 8;
      const int item = work.item(min(i, work.end - 1));
      bf16* row = i < work.end ? row_of<D>(q.dq, work.b, item % work.time, work.head(item)) + column : nullptr;
      add_row32(dq, add ? row : nullptr, half, float(q.forward.scale), 1);
      store_row32(row, dq, half, 1);
    }
  }
}

template <int D, int kKeys>
__device__ void write_rows(const View& to, const Work& work, float (&sum)[D / 32][4][4], float factor, bool add) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int key = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + half * 8;
    bf16* row = key < work.keys ? row_of<D>(to, work.b, work.first_key + key, work.kv) : nullptr;
#pragma unroll
    for (int d = 0; d < D / 32; ++d) {
      add_row32(sum[d], add && row ? row + d * 32 : nullptr, half, factor, 1);
      store_row32(row ? row + d * 32 : nullptr, sum[d], half, 1);
    }
  }
}

template <int D>
__device__ void write_partial(float* to, const float (&sum)[D / 32][4][4], float factor) {
  const int lane = threadIdx.x % 32, key = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
  for (int d = 0; d < D / 8; ++d)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      *reinterpret_cast<float2*>(to + (key + half * 8) * D + d * 8 + lane % 4 * 2) =
          make_float2(sum[d / 4][d % 4][2 * half] * factor, sum[d / 4][d % 4][2 * half + 1] * factor);
}

template <int D, int kKeys>
__device__ void gradients(const Top1ChunkBackward& q, const Work& work, const float* delta, bool add_dq, bool add_dk,
                          float* partial) {
  const Shared<D, kKeys> shared;
  copy_rows<D>(shared.k, q.forward.k, work.b, work.first_key, work.kv, work.keys, kKeys);
  copy_rows<D>(shared.v, q.forward.v, work.b, work.first_key, work.kv, work.keys, kKeys);
  fetch<D, kKeys>(q, work, shared, delta, work.begin, 0);
  KeyGradients<D, kKeys> sums;
  for (int first = work.begin, stage = 0; first < work.end; first += kTile, stage ^= 1) {
    const bool more = first + kTile < work.end;
    if (more) fetch<D, kKeys>(q, work, shared, delta, first + kTile, stage ^ 1), wait_copies<1>();
    else wait_copies<0>();
    __syncthreads();
    sums.add(shared, stage, float(q.forward.scale) * kLog2e);
    __syncthreads();
    query_gradients<D, kKeys>(q, work, shared, first, add_dq);
  }
  const float scale = float(q.forward.scale);
  if (partial) {
    write_partial<D>(partial, sums.dk, scale), write_partial<D>(partial + kKeys * D, sums.dv, 1);
  } else {
    write_rows<D, kKeys>(q.dk, work, sums.dk, scale, add_dk), write_rows<D, kKeys>(q.dv, work, sums.dv, 1, add_dk);
  }
}

template <int D, int kKeys>
__global__ void __launch_bounds__(kKeys * 2, D == 64 ? 256 / kKeys : 1)
    local_gradient_kernel(Top1ChunkBackward q, const float* delta, int key_offset) {
  const Top1ChunkForward& p = q.forward;
  Work work{int(blockIdx.y / p.kv_heads), int(blockIdx.y % p.kv_heads), int(p.heads / p.kv_heads), int(p.time)};
  const int begin = int(blockIdx.x * p.chunk_size), end = min(begin + int(p.chunk_size), work.time);
  work.first_key = begin + key_offset, work.keys = min(kKeys, end - work.first_key);
  if (work.keys <= 0) return;
  work.local_begin = work.first_key, work.local_count = end - work.first_key;
  work.begin = 0, work.end = work.group * work.local_count;
  work.rows = int64_t{blockIdx.y} * work.group * work.time;
  gradients<D, kKeys>(q, work, delta, key_offset > 0, false, nullptr);
}

template <int D, int kKeys>
__global__ void __launch_bounds__(kKeys * 2, D == 64 ? 256 / kKeys : 1)
    remote_gradient_kernel(Top1ChunkBackward q, const float* delta, int key_offset, Lists lists, float* partial) {
  const Top1ChunkForward& p = q.forward;
  const Segment segment = segment_of(lists, int(p.batch * p.kv_heads), blockIdx.x);
  if (segment.chunk < 0 || segment.begin == segment.end) return;
  Work work{int(segment.head / p.kv_heads), int(segment.head % p.kv_heads), int(p.heads / p.kv_heads), int(p.time)};
  work.first_key = int(segment.chunk * p.chunk_size) + key_offset;
  work.keys = min(kKeys, int(p.chunk_size) - key_offset);
  work.order = lists.order + int64_t{segment.head} * lists.items;
  work.begin = segment.begin, work.end = segment.end;
  work.rows = int64_t{segment.head} * lists.items;
  // Segments beyond a chunk's first are counted from 0 over all chunks.
  const int64_t beyond = int64_t{segment.head} * (lists.segments - lists.chunks) +
                         lists.first[int64_t{segment.head} * (lists.chunks + 1) + segment.chunk] - segment.chunk +
                         segment.number - 1;
  gradients<D, kKeys>(q, work, delta, true, true, segment.number > 0 ? partial + beyond * 2 * kKeys * D : nullptr);
}

// Adds the partial sums of a chunk's later segments to its dk and dv, in their order.
template <int D, int kKeys>
__global__ void __launch_bounds__(256)
    join_kernel(Top1ChunkBackward q, int key_offset, Lists lists, const float* partial) {
  const Top1ChunkForward& p = q.forward;
  const int64_t head = blockIdx.y;
  const int* first = lists.first + head * (lists.chunks + 1) + blockIdx.x;
  const int count = first[1] - first[0] - 1, keys = min(kKeys, int(p.chunk_size) - key_offset);
  if (count == 0) return;
  partial += (head * (lists.segments - lists.chunks) + first[0] - blockIdx.x) * 2 * kKeys * D;
  const int64_t t = blockIdx.x * p.chunk_size + key_offset;
  for (int i = threadIdx.x; i < 2 * keys * D; i += 256) {
    const int key = i / D % keys, column = i % D, which = i / (keys * D);
    bf16* to = row_of<D>(which ? q.dv : q.dk, head / p.kv_heads, t + key, head % p.kv_heads) + column;
    float sum = __bfloat162float(*to);
    for (int s = 0; s < count; ++s) sum += partial[((int64_t{s} * 2 + which) * kKeys + key) * D + column];
    *to = __float2bfloat16(sum);
  }
}

template <int D, int kKeys>
void local_blocks(const Top1ChunkBackward& q, const float* delta, cudaStream_t stream) {
  const Top1ChunkForward& p = q.forward;
  constexpr size_t kBytes = Shared<D, kKeys>::kBytes;
  cudaFuncSetAttribute(local_gradient_kernel<D, kKeys>, cudaFuncAttributeMaxDynamicSharedMemorySize, int(kBytes));
  const dim3 blocks(unsigned(ceil_div(p.time, p.chunk_size)), unsigned(p.batch * p.kv_heads));
  for (int offset = 0; offset < p.chunk_size; offset += kKeys)
    local_gradient_kernel<D, kKeys><<<blocks, kKeys * 2, kBytes, stream>>>(q, delta, offset);
}

template <int D, int kKeys>
void remote_blocks(const Top1ChunkBackward& q, const GradientScratch& scratch, const Lists& lists,
                   cudaStream_t stream) {
  const Top1ChunkForward& p = q.forward;
  const unsigned heads = unsigned(p.batch * p.kv_heads);
  for (int offset = 0; offset < p.chunk_size; offset += kKeys) {
    launch_shared(remote_gradient_kernel<D, kKeys>, heads * lists.segments, kKeys * 2, Shared<D, kKeys>::kBytes, stream,
                  q, scratch.delta, offset, lists, scratch.partial);
    join_kernel<D, kKeys><<<dim3(lists.chunks, heads), 256, 0, stream>>>(q, offset, lists, scratch.partial);
  }
}

// f(head_dim, keys of a block) as constants.
template <class F>
void with_shape(const Top1ChunkForward& p, F&& f) {
  with_head_dim(p.head_dim, [&](auto d) {
    if (block_keys(p) == 64) f(d, std::integral_constant<int, 64>{});
    else f(d, std::integral_constant<int, 128>{});
  });
}

}  // namespace

GradientScratch::GradientScratch(const Top1ChunkBackward& q, const Lists& lists, Arena& arena) {
  const Top1ChunkForward& p = q.forward;
  delta = arena.take<float>(p.batch * p.heads * p.time);
  const int64_t segments = p.batch * p.kv_heads * (lists.segments - lists.chunks);
  partial = arena.take<float>(segments * 2 * block_keys(p) * p.head_dim);
}

void delta_pass(const Top1ChunkBackward& q, const GradientScratch& scratch, cudaStream_t stream) {
  const unsigned blocks = unsigned(ceil_div(q.forward.batch * q.forward.time * q.forward.heads, 64));
  with_head_dim(q.forward.head_dim, [&](auto d) { delta_kernel<d()><<<blocks, 256, 0, stream>>>(q, scratch.delta); });
  check_launch("top1_chunk: delta");
}
void local_gradients(const Top1ChunkBackward& q, const GradientScratch& scratch, cudaStream_t stream) {
  with_shape(q.forward, [&](auto d, auto keys) { local_blocks<d(), keys()>(q, scratch.delta, stream); });
  check_launch("top1_chunk: local gradients");
}
void remote_gradients(const Top1ChunkBackward& q, const GradientScratch& scratch, const Lists& lists, int rank,
                      cudaStream_t stream) {
  with_shape(q.forward, [&](auto d, auto keys) { remote_blocks<d(), keys()>(q, scratch, lists, stream); });
  check_launch("top1_chunk: remote gradients");
}

}  // namespace assay::ops::cuda::top1
