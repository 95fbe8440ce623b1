// The operands of the products, laid out as the streaming kernels take them.
#include "ops/cuda/attention.cuh"
#include "ops/cuda/reduce.cuh"
#include "ops/cuda/wgmma.cuh"
#include "ops/top1_element/cuda_passes.cuh"

namespace assay::ops::cuda::element {
namespace {

Packed packed(int64_t heads, int64_t rows, int64_t head_dim, WorkspaceArena& arena) {
  Packed out;
  out.rows = ceil_div(rows, Packed::kPadding) * Packed::kPadding;
  out.data = arena.take<bf16>(heads * out.rows * head_dim);
  return out;
}

// 64 rows of a head into their tile, times `factor`, which is 1, −1 or 0. One block per tile.
template <int D>
__global__ void __launch_bounds__(256)
    pack_kernel(View x, int heads, int64_t rows, Packed to, float factor) {
  const int64_t head = blockIdx.y, first = blockIdx.x * int64_t{64};
  const WgmmaTile<D, 64> tile{to.data + (head * to.rows + first) * D};
  const __nv_bfloat162 sign = __float2bfloat162_rn(factor);
#pragma unroll
  for (int i = threadIdx.x; i < 64 * (D / 8); i += 256) {
    const int row = i / (D / 8), vector = i % (D / 8);
    uint4 numbers = make_uint4(0, 0, 0, 0);
    if (first + row < rows)
      numbers = *reinterpret_cast<const uint4*>(
          head_row<D>(x, head / heads, first + row, head % heads) + vector * 8);
    if (factor != 1)
      for (int pair = 0; pair < 4; ++pair)
        reinterpret_cast<__nv_bfloat162*>(&numbers)[pair] =
            __hmul2(reinterpret_cast<__nv_bfloat162*>(&numbers)[pair], sign);
    *reinterpret_cast<uint4*>(tile.at(row, vector)) = numbers;
  }
}

void pack_rows(const Top1ElementForward& p, const View& x, int64_t heads, int64_t rows,
               const Packed& to, Stream stream, double factor = 1) {
  const dim3 tiles(unsigned(to.rows / 64), unsigned(p.batch * heads));
  with_head_dim(p.head_dim, [&](auto d) {
    launch_kernel(pack_kernel<d()>, tiles, 256, 0, stream, x, int(heads), rows, to, float(factor));
  });
}

// logsumexp and delta of each query, rows of a head padded. One quad of lanes per query.
template <int D>
__global__ void __launch_bounds__(256) facts_kernel(Top1ElementBackward bwd, Operands m) {
  const Top1ElementForward& p = bwd.forward;
  const int64_t head = blockIdx.y, t = blockIdx.x * int64_t{64} + threadIdx.x / 4;
  const int lane = threadIdx.x % 4;
  float delta = 0;
  if (t < p.time) {
    const float* soft = static_cast<const float*>(p.soft) + (head * p.time + t) * D;
    const bf16* dout = head_row<D>(bwd.dout, head / p.heads, t, head % p.heads);
#pragma unroll
    for (int i = lane * 4; i < D; i += 16) {
      const float4 x = *reinterpret_cast<const float4*>(soft + i);
      const uint2 y = *reinterpret_cast<const uint2*>(dout + i);
      const float2 low = unpack_bf16x2(y.x), high = unpack_bf16x2(y.y);
      delta += x.x * low.x + x.y * low.y + x.z * high.x + x.w * high.y;
    }
  }
  delta = quad_sum(delta);
  if (lane > 0) return;
  m.delta[head * m.q.rows + t] = delta;
  m.logsumexp[head * m.q.rows + t] =
      t < p.time ? static_cast<const float*>(p.logsumexp)[head * p.time + t] * kLog2e : INFINITY;
}

}  // namespace

Operands::Operands(const Top1ElementForward& p, WorkspaceArena& arena)
    : q(packed(p.batch * p.heads, p.time, p.head_dim, arena)),
      k(packed(p.batch * p.kv_heads, p.past + p.time, p.head_dim, arena)) {
  if (p.soft) v = packed(p.batch * p.kv_heads, p.past + p.time, p.head_dim, arena);
}
Operands::Operands(const Top1ElementBackward& b, WorkspaceArena& arena)
    : Operands(b.forward, arena) {
  const Top1ElementForward& p = b.forward;
  dout = packed(p.batch * p.heads, p.time, p.head_dim, arena);
  logsumexp = arena.take<float>(p.batch * p.heads * q.rows);
  delta = arena.take<float>(p.batch * p.heads * q.rows);
}

void pack_operands(const Top1ElementForward& p, const Operands& m, Stream stream) {
  pack_rows(p, p.q, p.heads, p.time, m.q, stream, (p.scale > 0) - (p.scale < 0));
  pack_rows(p, p.k, p.kv_heads, p.past + p.time, m.k, stream);
  if (m.v.data) pack_rows(p, p.v, p.kv_heads, p.past + p.time, m.v, stream);
}
void pack_operands(const Top1ElementBackward& b, const Operands& m, Stream stream) {
  const Top1ElementForward& p = b.forward;
  pack_operands(p, m, stream);
  pack_rows(p, b.dout, p.heads, p.time, m.dout, stream);
  const dim3 rows(unsigned(m.q.rows / 64), unsigned(p.batch * p.heads));
  with_head_dim(p.head_dim,
                [&](auto d) { launch_kernel(facts_kernel<d()>, rows, 256, 0, stream, b, m); });
}

}  // namespace assay::ops::cuda::element
