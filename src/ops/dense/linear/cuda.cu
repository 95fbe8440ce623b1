// x Wᵀ for few rows on CUDA. A block has 16 rows of W, the A operand of mma.m16n8k16; the rows of x
// are the columns of its B operand. The warps of a block divide k; their sums are added in the
// order of the warps.
//
//   W, 16 rows:   │ warp 0 │ warp 1 │ … │ warp 0 │ …      32 numbers of k each: two products
//   a row:        │ lane 0 │ lane 1 │ lane 2 │ lane 3 │   8 neighbouring numbers of k per lane
//
// A lane reads the same k of W and of x, so which k a product takes for which of its 16 columns
// does not matter: both operands are read in vectors of 16 bytes. The first weights are requested
// before the kernel waits for the one before it. If the rows are first normalised, each block
// normalises all of them.
#include <algorithm>
#include <bit>

#include "ops/cuda/math.cuh"
#include "ops/cuda/reduce.cuh"
#include "ops/dense/linear/kernel.h"

namespace assay::ops::cuda {
namespace {

constexpr int kStep = 32;      // numbers of k that a warp takes at a time
constexpr int kSteps = 4;      // that a warp takes, if they are not too many warps
constexpr int kMaxWarps = 16;  // warps of a block, at most
// rows that are normalised; their parts of 256
constexpr int kNormedRows = 2;
constexpr int kMaxParts = 8;

// Steps whose operands a lane holds: weights in registers, x in shared memory.
constexpr __host__ __device__ int depth(int tiles) { return tiles < 8 ? kSteps : kSteps / 2; }

// The norm of one or two rows, in the order of sums of the norm's own kernel for few parts
// (norm/cuda.cu): 8 numbers of k in a lane, 32 lanes, then the parts of 256 numbers. Two
// neighbouring warps have a part, and a row each; the last of an odd number of warps has both rows
// of its part. `shared` gets the normalised rows as the product reads them, [steps, lanes], with
// zeros past k.
__device__ __forceinline__ void normalise_rows(const LinearFewRows& args, const float (&weight)[8],
                                               uint4* shared) {
  __shared__ float squares[kNormedRows][kMaxParts];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int warps = blockDim.x / 32;
  const int in = int(args.in);
  const int rows = int(args.rows);
  const int part = warp / 2;
  const int parts = (warps + 1) / 2;
  const int column = (part * 32 + lane) * 8;
  const int apart = min(2, warps - 2 * part);
  const auto vector_of = [&](const void* matrix, int row) {
    return reinterpret_cast<const uint4*>(static_cast<const bf16*>(matrix) + row * in + column);
  };
  const auto place = [&](int row) { return shared + column / kStep * 32 + row * 4 + lane % 4; };
  for (int row = warp % 2; row < rows; row += apart) {
    uint4 x = {};
    uint4 added = {};
    if (column < in) x = *vector_of(args.x, row);
    if (column < in && args.added) added = *vector_of(args.added, row);
    float sum = 0;
    const auto add = [&](uint32_t& to, uint32_t more) {
      const float2 a = unpack_bf16x2(to);
      const float2 b = unpack_bf16x2(more);
      to = pack_bf16x2(a.x + b.x, a.y + b.y);
      const float2 rounded = unpack_bf16x2(to);
      sum += rounded.x * rounded.x;
      sum += rounded.y * rounded.y;
    };
    add(x.x, added.x);
    add(x.y, added.y);
    add(x.z, added.z);
    add(x.w, added.w);
    if (column < warps * kSteps * kStep) *place(row) = x;
    if (column < in && args.sum && blockIdx.x == 0)
      *const_cast<uint4*>(vector_of(args.sum, row)) = x;
    sum = group_reduce<32>(sum, Plus{});
    if (lane == 0) squares[row][part] = sum;
  }
  __syncthreads();
  for (int row = warp % 2; row < rows; row += apart) {
    float sum = squares[row][0];
#pragma unroll
    for (int other = 1; other < kMaxParts; ++other)
      if (other < parts) sum += squares[row][other];
    const float scale = rsqrt(sum / float(in) + float(args.eps));
    const auto scaled = [&](uint32_t pair, int k) {
      const float2 x = unpack_bf16x2(pair);
      return pack_bf16x2(x.x * scale * weight[k], x.y * scale * weight[k + 1]);
    };
    if (column >= in) continue;
    const uint4 x = *place(row);
    *place(row) = {scaled(x.x, 0), scaled(x.y, 2), scaled(x.z, 4), scaled(x.w, 6)};
  }
  __syncthreads();
}

// 8 kTiles ≥ rows; a block has kTall times 16 rows of W. Gated: rows g and out / 2 + g make one
// output. Normed: the rows are normalised, and all of k is in shared memory.
template <int kTiles, bool kGated, int kTall, bool kNormed>
__global__ void __launch_bounds__(32 * kMaxWarps / kTall) linear_kernel(LinearFewRows args) {
  constexpr int kDepth = depth(kTiles);
  static_assert(!kNormed || (kTiles == 1 && kDepth == kSteps), "a warp takes all in one turn");
  extern __shared__ uint4 shared[];  // x, then the sums
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int warps = blockDim.x / 32;
  const int in = int(args.in);
  const int rows = int(args.rows);
  const int64_t width = kGated ? args.out / 2 : args.out;
  constexpr int kOutputs = kGated ? 8 : 16;  // outputs of 16 rows of W
  const int64_t block_row = blockIdx.x * int64_t{kTall * kOutputs};
  const int first = warp * kStep + lane % 4 * 8;
  const int stride = warps * kStep;
  const bf16* const x = static_cast<const bf16*>(args.x) + lane / 4 * args.in;

  const bf16* weight[kTall][2];  // the rows of the lane
#pragma unroll
  for (int i = 0; i < kTall; ++i) {
    const int64_t row = block_row + i * kOutputs + lane / 4;
    const int64_t upper = min(row, width - 1);
    const int64_t lower = kGated ? upper + width : min(row + 8, width - 1);
    weight[i][0] = static_cast<const bf16*>(args.weight) + upper * args.in;
    weight[i][1] = static_cast<const bf16*>(args.weight) + lower * args.in;
  }
  uint4 w[kDepth][kTall][2];
  const auto load_weights = [&](uint4(&to)[kTall][2], int k) {
#pragma unroll
    for (int i = 0; i < 2 * kTall; ++i) {
      uint4& vector = to[i / 2][i % 2];
      vector = {};
      if (k < in) vector = __ldg(reinterpret_cast<const uint4*>(weight[i / 2][i % 2] + k));
    }
  };
  // [warps, kDepth, kTiles, lanes]: a lane reads what it copied itself, so the warps need no
  // barrier. Normalised rows are in the order of k: [kDepth, warps, lanes].
  const auto x_at = [&](int d, int t) {
    if constexpr (kNormed) return shared + (d * warps + warp) * 32 + lane;
    else return shared + ((warp * kDepth + d) * kTiles + t) * 32 + lane;
  };
  const auto copy_x = [&](int d, int k) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const bool wanted = k < in && 8 * t + lane / 4 < rows;
      cp_async_16(x_at(d, t), wanted ? x + (8 * t * in + k) : x, wanted);
    }
    cp_async_commit_group();
  };
#pragma unroll
  for (int d = 0; d < kDepth; ++d) load_weights(w[d], first + d * stride);
  [[maybe_unused]] float norm_weight[8] = {};
  if constexpr (kNormed) {
    const int column = (warp / 2 * 32 + lane) * 8;
    if (column < in) load_vec(norm_weight, args.norm_weight, DType::f32, column);
  }
  griddep_launch_dependents();
  griddep_wait();
  if constexpr (kNormed) {
    normalise_rows(args, norm_weight, shared);
  } else {
#pragma unroll
    for (int d = 0; d < kDepth; ++d) copy_x(d, first + d * stride);
  }

  float c[kTall][kTiles][4] = {};
  for (int start = 0; start < (kNormed ? 1 : in); start += kDepth * stride) {
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      const int next = start + first + (d + kDepth) * stride;
      if (!kNormed) cp_async_wait_group<kDepth - 1>();
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const uint4 b = *x_at(d, t);
#pragma unroll
        for (int i = 0; i < kTall; ++i) {
          const auto& [upper, lower] = w[d][i];
          mma_m16n8k16(c[i][t], {upper.x, lower.x, upper.y, lower.y}, b.x, b.y);
          mma_m16n8k16(c[i][t], {upper.z, lower.z, upper.w, lower.w}, b.z, b.w);
        }
      }
      if (kNormed) continue;
      __syncwarp();  // a place of x is read before it is written again
      load_weights(w[d], next);
      copy_x(d, next);
    }
  }
  cp_async_wait_all();
  __syncthreads();
  constexpr int kFragments = kTall * kTiles;  // fragments of a warp
  static_assert(kTall <= kDepth, "the sums take no more shared memory than x");
  auto* const sums = reinterpret_cast<float4*>(shared);
#pragma unroll
  for (int i = 0; i < kFragments; ++i) {
    const auto& sum = c[i / kTiles][i % kTiles];
    sums[(warp * kFragments + i) * 32 + lane] = make_float4(sum[0], sum[1], sum[2], sum[3]);
  }
  __syncthreads();

  // A thread finishes the same element of a fragment that a lane held.
  for (int i = threadIdx.x; i < kFragments * 32; i += blockDim.x) {
    float4 sum = sums[i];
    for (int other = 1; other < warps; ++other) {
      const float4 more = sums[other * kFragments * 32 + i];
      sum = make_float4(sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w);
    }
    const int64_t n = block_row + i / 32 / kTiles * kOutputs + i % 32 / 4;
    const int64_t m = i / 32 % kTiles * 8 + i % 4 * 2;
    const auto* bias = static_cast<const bf16*>(args.bias);
    const auto store = [&](int64_t row, int64_t column, float y) {
      if (row < args.rows && column < width)
        static_cast<bf16*>(args.y)[row * width + column] = __float2bfloat16(y);
    };
    const auto biased = [&](float y, int64_t column) {
      return bias && column < args.out ? y + __bfloat162float(bias[column]) : y;
    };
    if constexpr (kGated) {
      const auto rounded = [&](float y, int64_t column) {
        return __bfloat162float(__float2bfloat16(biased(y, column)));
      };
      const float a = float(args.a);
      const float c = float(args.c);
      const auto gated = [&](float gate, float up) {
        const float g = rounded(gate, n);
        return g * sigmoid(c * g * (1 + a * g * g)) * rounded(up, width + n);
      };
      store(m, n, gated(sum.x, sum.z));
      store(m + 1, n, gated(sum.y, sum.w));
    } else {
      store(m, n, biased(sum.x, n));
      store(m + 1, n, biased(sum.y, n));
      store(m, n + 8, biased(sum.z, n + 8));
      store(m + 1, n + 8, biased(sum.w, n + 8));
    }
  }
}

}  // namespace

void linear_few_rows(const LinearFewRows& args, Stream stream) {
  const auto warps = unsigned(std::clamp<int64_t>(ceil_div(args.in, kSteps * kStep), 1, kMaxWarps));
  const auto tiles = std::bit_ceil(unsigned(ceil_div(args.rows, 8)));
  // All blocks read x from the L2 cache, half as often if they are tall.
  const bool tall = tiles == 8 && args.out >= 2048 && warps <= kMaxWarps / 2;
  const bool takes_norm = args.rows <= kNormedRows && args.in <= kMaxParts * 256;
  check("linear",
        args.norm_weight && !takes_norm ? "normalises 1 or 2 rows of up to 2048 numbers" : nullptr);
  const auto run = [&](auto tiles, auto gated, auto tall, auto normed) {
    const auto kernel = linear_kernel<tiles(), gated(), tall(), normed()>;
    const auto blocks = unsigned(ceil_div(args.out, tall() * 16));
    const size_t shared = warps * depth(tiles()) * tiles() * 32 * sizeof(uint4);
    if (args.weight_at_rest) launch_pdl(kernel, blocks, 32 * warps, shared, stream, args);
    else launch_kernel(kernel, blocks, 32 * warps, shared, stream, args);
  };
  constexpr std::integral_constant<int, 1> one;
  with_constant<false, true>(args.gated, [&](auto gated) {
    if (args.norm_weight) return run(one, gated, one, std::true_type{});
    if (tall)
      return run(std::integral_constant<int, 8>{}, gated, std::integral_constant<int, 2>{},
                 std::false_type{});
    with_constant<1, 2, 4, 8>(int(tiles),
                              [&](auto tiles) { run(tiles, gated, one, std::false_type{}); });
  });
}

}  // namespace assay::ops::cuda
