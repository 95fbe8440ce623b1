// Decode attention on CUDA. The keys of a row and head are cut into up to eight parts, one per
// 256 keys. A cluster of eight blocks has one part per block; where there are many rows and
// heads, one block has all parts in turn, with the same result. On GPUs without clusters, eight
// blocks leave their parts in global memory, and join_kernel combines them. A group of lanes has a
// key at a time, each lane eight of its numbers, and an online softmax of its own over every n-th
// key.
//
//            keys →  0 … S/8     S/8 … 2S/8         … S − 1
//   row b, head h  [ part 0 ]   [ part 1 ]    …    [ part 7 ]
//    + new token        └────────────┴────────────────┘  shared memory of block 0 → out
//
// The grid does not depend on the lengths, which are read from the memory of the device, so a
// captured launch serves all of them. Every key and value is read once per query head: 4 D bytes in
// bf16 for 4 D FLOPs, so the memory is the limit. A thread has 256 bytes of keys and values in
// flight, in a ring in shared memory that no other thread uses, also from one part to the next: an
// SM with three blocks has up to 192 KB in flight.
#include <algorithm>
#include <bit>
#include <climits>

#include "ops/attention/decode_attention/kernel.h"
#include "ops/cuda/reduce.cuh"

namespace assay::ops::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kParts = 8;    // parts of the keys of a row, at most: blocks of a cluster
constexpr int kKeys = 256;   // keys for which a row has one more part
constexpr int kColumns = 8;  // numbers of a lane
constexpr int kUnroll = 4;   // keys of a group at a time: a tile
template <class T>
constexpr int kDepth = 4 / sizeof(T);  // tiles that are in flight
constexpr float kUnitLengthEps = 1e-6f;

// A lane's numbers of one head, as they lie in memory.
template <class T>
using Packed = Vec<uint32_t, kColumns * sizeof(T) / 4>;
template <class T>
__device__ Packed<T> load_or_zero(const T* from, bool exists) {
  return exists ? *reinterpret_cast<const Packed<T>*>(from) : Packed<T>{};
}
template <class T>
__device__ void unpack(const Packed<T>& from, float (&x)[kColumns]) {
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    if constexpr (sizeof(T) == 4) x[i] = __uint_as_float(from.at[i]);
    else x[i] = __uint_as_float(i % 2 ? from.at[i / 2] & 0xffff0000u : from.at[i / 2] << 16);
  }
}
template <class T>
__device__ Packed<T> pack(const float (&x)[kColumns]) {
  Packed<T> out;
#pragma unroll
  for (int i = 0; i < int(sizeof(out) / 4); ++i) {
    if constexpr (sizeof(T) == 4) out[i] = __float_as_uint(x[i]);
    else out[i] = pack_bf16x2(x[2 * i], x[2 * i + 1]);
  }
  return out;
}

// Scores are in base 2.
struct Softmax {
  float most = -INFINITY;
  float sum = 0;
  float out[kColumns] = {};

  template <class T, int N>
  __device__ void add(const float (&scores)[N], const Packed<T> (&values)[N]) {
    float top = most;
#pragma unroll
    for (int n = 0; n < N; ++n) top = fmaxf(top, scores[n]);
    rescale(top);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const float weight = exp2f(scores[n] - origin());
      sum += weight;
      float value[kColumns];
      unpack<T>(values[n], value);
#pragma unroll
      for (int i = 0; i < kColumns; ++i) out[i] += weight * value[i];
    }
  }
  __device__ void rescale(float top) {
    const float before = most;
    most = top;
    const float factor = exp2f(before - origin());
    sum *= factor;
#pragma unroll
    for (float& x : out) x *= factor;
  }
  __device__ float origin() const { return most == -INFINITY ? 0 : most; }  // −∞ − −∞ is NaN
};

// A lane's numbers of two heads of the new token, rotated by its position. With QK-norm the heads
// are then of these lengths.
template <class T, int kLanes>
__device__ void heads_of_token(const DecodeAttention& args, const T* const (&heads)[2],
                               const float (&lengths)[2], int column, int position,
                               Packed<T> (&out)[2]) {
  const bool inside = column < args.head_dim;
  const bool rotates = args.cos && inside;
  const int half = int(args.head_dim) / 2;
  const int other = column < half ? column + half : column - half;
  const int64_t angle = int64_t(position) * half + min(column, other);
  Packed<T> own[2];
  Packed<T> others[2];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    own[n] = load_or_zero(heads[n] + column, inside);
    others[n] = load_or_zero(heads[n] + other, rotates);
  }
  float cos[kColumns];
  float sin[kColumns];
  unpack<float>(load_or_zero(args.cos + angle, rotates), cos);
  unpack<float>(load_or_zero(args.sin + angle, rotates), sin);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    float x[kColumns];
    float y[kColumns];
    float factor = 1;
    unpack<T>(own[n], x);
    unpack<T>(others[n], y);
    if (args.norm_scale) {
      float squares = 0;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) squares += x[i] * x[i];
      squares = group_reduce<kLanes>(squares, Plus{});
      factor = rsqrtf(squares + kUnitLengthEps) * lengths[n];
    }
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (rotates) x[i] = x[i] * cos[i] + (column < half ? -y[i] : y[i]) * sin[i];
      x[i] *= factor;
    }
    out[n] = pack<T>(x);
  }
}

template <class T, int kLanes>
__device__ float dot(const float (&query)[kColumns], const Packed<T>& key) {
  float x[kColumns];
  float sum = 0;
  unpack<T>(key, x);
#pragma unroll
  for (int i = 0; i < kColumns; ++i) sum += query[i] * x[i];
  return group_reduce<kLanes>(sum, Plus{});
}

// Partial softmax over the keys of a warp or of a part: `out` is the weighted sum of the values.
template <int kWidth>
struct Part {
  float most;
  float sum;
  float out[kWidth];
};
// Number d of the sum of `count` parts and, of all of them, the largest score and the sum of
// weights.
template <int kWidth>
__device__ float combine(const Part<kWidth>* parts, int count, int d, float& most, float& sum) {
  most = -INFINITY;
  for (int n = 0; n < count; ++n) most = fmaxf(most, parts[n].most);
  const float origin = most == -INFINITY ? 0 : most;
  float out = 0;
  sum = 0;
  for (int n = 0; n < count; ++n) {
    const float weight = exp2f(parts[n].most - origin);
    sum += weight * parts[n].sum;
    out += weight * parts[n].out[d];
  }
  return out;
}

// The keys of a row, numbered from the first one that the query sees, and their parts.
struct KeysOfRow {
  int position;  // of the new token
  int skipped;   // keys before the first one
  int last;      // the number of the new one; negative for a row that is not used
  int parts;
  int length;  // of a part
  __device__ KeysOfRow(const DecodeAttention& args, int64_t row)
      : position(int(args.positions ? args.positions[row] : args.position)),
        skipped(args.window > 0 ? max(position + 1 - int(args.window), 0) : 0),
        last(args.positions ? position - skipped : int(args.length) - 1),
        parts(max(min((last + kKeys - 1) / kKeys, kParts), 1)),
        length((last + parts - 1) / parts) {}
};

// kLanes · 8 ≥ D. Grid: blocks that share the keys, heads and rows in one dimension. The blocks are
// a cluster, or `apart` [rows, heads, kParts] takes the parts of the keys.
template <class T, int kLanes>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 ? 3 : 2)
    decode_kernel(const __grid_constant__ DecodeAttention args, unsigned blocks, int ring_mask,
                  Part<kLanes * kColumns>* apart) {
  constexpr int kGroups = kThreads / kLanes;
  constexpr int kWidth = kLanes * kColumns;
  constexpr int kTile = kGroups * kUnroll;  // keys that a block reads at a time
  // `parts` is used in block 0
  __shared__ Part<kWidth> warps[kWarps];
  __shared__ Part<kWidth> parts[kParts];
  griddep_launch_dependents();
  cluster_arrive_relaxed();  // a block sends its results when all blocks have begun
  const int block = blockIdx.x % blocks;
  const int d = threadIdx.x;
  const unsigned heads = unsigned(args.heads);
  const unsigned per_kv = heads / unsigned(args.kv_heads);
  const unsigned head = blockIdx.x / blocks % heads;
  const unsigned kv = head / per_kv;
  const int64_t D = args.head_dim;
  const int64_t row = blockIdx.x / blocks / heads;
  const auto [position, skipped, last, count, length] = KeysOfRow(args, row);
  const int group = threadIdx.x / kLanes;
  const int column = threadIdx.x % kLanes * kColumns;
  const bool inside = column < D;
  T* const keys = (args.positions ? static_cast<T*>(args.row_caches[row][0])
                                  : static_cast<T*>(args.keys) + row * args.keys_stride) +
                  kv * D + column;
  T* const values = (args.positions ? static_cast<T*>(args.row_caches[row][1])
                                    : static_cast<T*>(args.values) + row * args.values_stride) +
                    kv * D + column;
  __builtin_assume(__isGlobal(keys) && __isGlobal(values));
  T* const out = static_cast<T*>(args.out) + (row * args.heads + head) * D;
  if (last < 0) {
    griddep_wait();
    if (block == 0 && d < D) out[d] = from_compute<T>(0.f);
    return;
  }
  const int64_t stride = args.kv_heads * D;
  const auto place_of = [&](int j) { return ((skipped + j) & ring_mask) * stride; };

  extern __shared__ uint4 ring[];  // [kDepth, kUnroll, keys and values, threads] of Packed<T>
  const auto place = [&](int slot, int u, int is_value) {
    const int i = ((slot * kUnroll + u) * 2 + is_value) * kThreads + int(threadIdx.x);
    return reinterpret_cast<Packed<T>*>(ring) + i;
  };
  const auto copy = [](Packed<T>* to, const T* from, bool exists) {
#pragma unroll
    for (int i = 0; i < int(sizeof(Packed<T>) / 16); ++i)
      cp_async_16(reinterpret_cast<uint4*>(to) + i, reinterpret_cast<const uint4*>(from) + i,
                  exists);
  };
  const auto end_of = [&](int part) { return part < count ? min((part + 1) * length, last) : 0; };
  // tile to request
  int next_part = block;
  int next = block * length;
  int next_end = end_of(block);
  const auto request = [&](int slot) {
    if (next < next_end) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int j = next + u * kGroups + group;
        const bool exists = inside && j < next_end;
        const int64_t offset = exists ? place_of(j) : 0;
        copy(place(slot, u, 0), keys + offset, exists);
        copy(place(slot, u, 1), values + offset, exists);
      }
      next += kTile;
    }
    cp_async_commit_group();
    if (next < next_end) return;
    next_part += int(blocks);
    next = next_part * length;
    next_end = end_of(next_part);
  };
#pragma unroll
  for (int slot = 0; slot < kDepth<T>; ++slot) request(slot);
  if (args.cos && inside) {
    const int64_t half = D / 2;
    const int64_t angle = position * half + column % half;
    prefetch_l2(args.cos + angle);
    prefetch_l2(args.sin + angle);
  }
  griddep_wait();  // only the new tokens come from the kernel before this one
  const auto of_token = [&](const void* x, int64_t row_stride, int64_t h) {
    return static_cast<const T*>(x) + row * row_stride + h * D;
  };
  const float slope = args.alibi_slopes ? args.alibi_slopes[head] * kLog2e : 0.f;
  const Packed<T> value[1] = {load_or_zero(of_token(args.v, args.v_stride, kv) + column, inside)};
  Packed<T> token[2];  // the query and the key
  heads_of_token<T, kLanes>(
      args, {of_token(args.q, args.q_stride, head), of_token(args.k, args.k_stride, kv)},
      {args.norm_scale ? args.norm_scale[head] : 1.f, 1.f}, column, position, token);
  float query[kColumns];  // times scale · log2(e), so that exp2 gives the weights
  unpack<T>(token[0], query);
#pragma unroll
  for (float& x : query) x *= float(args.scale) * kLog2e;

  int slot = 0;
  for (int part = block; part < count; part += int(blocks)) {
    Softmax softmax;
    const int end = end_of(part);
    for (int base = part * length; base < end; base += kTile) {
      cp_async_wait_group<kDepth<T> - 1>();
      Packed<T> k[kUnroll];
      Packed<T> v[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        k[u] = *place(slot, u, 0);
        v[u] = *place(slot, u, 1);
      }
      __syncwarp();  // a place is read before it is written again
      request(slot);
      slot = (slot + 1) % kDepth<T>;
      float scores[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int j = base + u * kGroups + group;
        const float x = dot<T, kLanes>(query, k[u]) - slope * float(last - j);
        scores[u] = j < end ? x : -INFINITY;
      }
      softmax.add<T>(scores, v);
    }
    if (part == 0 && threadIdx.x < 32) {  // the new token is not read from the cache
      const float x = dot<T, kLanes>(query, token[1]);
      const float scores[1] = {group == 0 ? x : -INFINITY};
      softmax.add<T>(scores, value);
      if (group == 0 && inside && head % per_kv == 0) {
        *reinterpret_cast<Packed<T>*>(keys + place_of(last)) = token[1];
        *reinterpret_cast<Packed<T>*>(values + place_of(last)) = value[0];
      }
    }

    softmax.rescale(butterfly<kLanes, 32>(softmax.most, Max{}));
    softmax.sum = butterfly<kLanes, 32>(softmax.sum, Plus{});
    butterfly_sum<kLanes, 32>(softmax.out);
    __syncthreads();  // the part before has been combined
    if (threadIdx.x % 32 < kLanes) {
      Part<kWidth>& warp = warps[threadIdx.x / 32];
#pragma unroll
      for (int i = 0; i < kColumns; ++i) warp.out[column + i] = softmax.out[i];
      warp.most = softmax.most;
      warp.sum = softmax.sum;
    }
    __syncthreads();
    if (part == block) cluster_wait();
    if (d < kWidth) {
      float most;
      float sum;
      const float x = combine(warps, kWarps, d, most, sum);
      Part<kWidth>* const to =
          apart ? apart + (row * heads + head) * kParts + part : in_first_block(&parts[part]);
      to->out[d] = x;
      if (d == 0) {
        to->most = most;
        to->sum = sum;
      }
    }
  }
  if (block >= count) cluster_wait();
  cluster_arrive();
  if (apart || block > 0) return;
  cluster_wait();
  if (d >= D) return;
  float most;
  float sum;
  const float x = combine(parts, count, d, most, sum);
  out[d] = from_compute<T>(x / sum);
}

// A block per head and row.
template <class T, int kWidth>
__global__ void __launch_bounds__(kWidth)
    join_kernel(const __grid_constant__ DecodeAttention args, const Part<kWidth>* apart) {
  const KeysOfRow keys(args, blockIdx.x / args.heads);
  const int d = threadIdx.x;
  if (keys.last < 0 || d >= args.head_dim) return;
  float most;
  float sum;
  const float x = combine(apart + blockIdx.x * int64_t{kParts}, keys.parts, d, most, sum);
  static_cast<T*>(args.out)[blockIdx.x * args.head_dim + d] = from_compute<T>(x / sum);
}

int lanes_of(const DecodeAttention& args) {
  return std::max(int(std::bit_ceil(unsigned(args.head_dim / kColumns))), 4);
}
// One block per row and head where they fill the device. A part of the keys has the same result in
// any block.
unsigned blocks_of_row(const DecodeAttention& args) {
  return args.heads * args.rows >= 2 * sm_count() ? 1 : kParts;
}
bool has_clusters() { return cuda_target() == CudaTarget::sm_90a; }

template <class T>
void launch(const DecodeAttention& args, void* workspace, Stream stream) {
  constexpr size_t kRing = kDepth<T> * kUnroll * 2 * kThreads * sizeof(Packed<T>);
  const int ring_mask = args.window > 0 ? int(std::bit_ceil(unsigned(args.window))) - 1 : INT_MAX;
  const unsigned blocks = blocks_of_row(args);
  const auto rows = unsigned(args.heads * args.rows);
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {blocks, 1, 1};
  const unsigned attribute_count = !has_clusters() ? 0 : blocks > 1 ? 2 : 1;
  const cudaLaunchConfig_t config{.gridDim = blocks * rows,
                                  .blockDim = kThreads,
                                  .dynamicSmemBytes = kRing,
                                  .stream = cuda_stream(stream),
                                  .attrs = attributes,
                                  .numAttrs = attribute_count};
  with_constant<4, 8, 16, 32>(lanes_of(args), [&](auto lanes) {
    constexpr int kWidth = lanes() * kColumns;
    static_assert(kRing + (kWarps + kParts) * sizeof(Part<kWidth>) <= kPortableSharedBytes);
    const auto kernel = decode_kernel<T, lanes()>;
    auto* const apart = static_cast<Part<kWidth>*>(workspace_bytes(args) ? workspace : nullptr);
    allow_shared_memory(kernel, kRing);
    static_cast<void>(cudaLaunchKernelEx(&config, kernel, args, blocks, ring_mask, apart));
    check_launch(reinterpret_cast<const void*>(kernel));
    if (apart) launch_kernel(join_kernel<T, kWidth>, rows, kWidth, 0, stream, args, apart);
  });
}

}  // namespace

size_t workspace_bytes(const DecodeAttention& args) {
  if (has_clusters() || blocks_of_row(args) == 1) return 0;
  const int64_t floats = 2 + lanes_of(args) * kColumns;  // a Part
  return size_t(args.rows * args.heads * kParts * floats) * sizeof(float);
}

void decode_attention(const DecodeAttention& args, void* workspace, Stream stream) {
  if (args.rows == 0) return;
  if (args.dtype == DType::bf16) launch<bf16>(args, workspace, stream);
  else launch<float>(args, workspace, stream);
}

}  // namespace assay::ops::cuda
