#pragma once
// Products of a warpgroup (wgmma, bf16 operands, fp32 sums), whose operands lie in shared memory as panels.
//   A panel is [rows, W] bf16, a row 2·W bytes (W = 64 or 32), its 16-byte vectors permuted as wgmma's swizzle has
//   them. A tile [rows, D] is D / W panels, one after the other.
// Sums of a 64 × N product lie as n-tiles of 8 columns, c[n][0..3], in the order of mma.m16n8k16 with a warp's 16 rows.
#include "ops/cuda_async.cuh"
#include "ops/top1_chunk/cuda_tiles.cuh"

namespace assay::ops::cuda::top1 {

template <int D>
constexpr int kPanel = D % 64 == 0 ? 64 : 32;  // W

// What wgmma is told of an operand in shared memory: where it begins (in 16 bytes, which + moves), and how it lies.
struct Descriptor {
  uint32_t low, high;
  __device__ Descriptor operator+(int step) const { return {low + step, high}; }
  __device__ operator uint64_t() const { return uint64_t(high) << 32 | low; }
};

// [rows, D] in panels.
template <int D, int kRows>
struct Panels {
  static constexpr int W = kPanel<D>, kWidth = D;
  bf16* data;
  __device__ static int offset(int row, int vector) {
    const int inner = vector % (W / 8), turn = W == 64 ? row & 7 : (row >> 1) & 3;
    return vector / (W / 8) * kRows * W + row * W + ((inner ^ turn) << 3);
  }
  __device__ bf16* at(int row, int vector) const { return data + offset(row, vector); }
  __device__ uint32_t address(int row, int vector) const { return __cvta_generic_to_shared(at(row, vector)); }

  static __device__ Descriptor descriptor(const bf16* from, int leading, int stride) {
    const uint32_t address = __cvta_generic_to_shared(from);
    return {(address & 0x3ffff) >> 4 | uint32_t(leading >> 4) << 16, uint32_t(stride >> 4) | (W == 64 ? 1u : 2u) << 30};
  }
  // As an operand whose rows (A) or columns (B) are the tile's rows, summed over columns; and the transpose of that.
  // From row and column 0: add rows_at(row, k) or columns_at(column, k), k the step of 16 in the summed dimension.
  __device__ Descriptor rows() const { return descriptor(data, 16, 16 * W); }
  __device__ Descriptor columns() const { return descriptor(data, kRows * W * 2, 16 * W); }
  static constexpr __device__ int rows_at(int row, int k) {
    return (k * 16 / W * kRows * W + row * W + k * 16 % W) * 2 >> 4;
  }
  static constexpr __device__ int columns_at(int column, int k) {
    return (column / W * kRows * W + k * 16 * W + column % W) * 2 >> 4;
  }
};

// The same, of which the compiler knows that the warp agrees on it.
__device__ inline Descriptor uniform(Descriptor x) { return {__shfl_sync(~0u, x.low, 0), x.high}; }

__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending = 0>
__device__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving uses of sums across a wait.
template <int N>
__device__ void pin(float (&c)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(c[n][e])::"memory");
}
// What threads wrote to shared memory becomes visible to wgmma and the copy engine; before the barrier.
__device__ inline void publish_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// A barrier of one warpgroup; id 1 … 15.
__device__ inline void sync_group(int id) { asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory"); }

#define ASSAY_SUM4(c) "+f"((c)[0]), "+f"((c)[1]), "+f"((c)[2]), "+f"((c)[3])
#define ASSAY_SUM16(c, n) ASSAY_SUM4((c)[n]), ASSAY_SUM4((c)[n + 1]), ASSAY_SUM4((c)[n + 2]), ASSAY_SUM4((c)[n + 3])
#define ASSAY_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define ASSAY_32 ASSAY_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define ASSAY_64                                                                                      \
  ASSAY_32                                                                                            \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, " \
  "%51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// c[kFirst … + N/8] += A · B, one step of 16; `keep` false: c = A · B. A and B may be transposes (Panels::columns).
template <int N, bool kTransposeA, bool kTransposeB, int kFirst = 0, int kTiles>
__device__ void product(float (&c)[kTiles][4], uint64_t a, uint64_t b, bool keep = true) {
  if constexpr (N == 32) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %18, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" ASSAY_16
                 "}, %16, %17, p, 1, 1, %19, %20;}"
                 : ASSAY_SUM16(c, kFirst)
                 : "l"(a), "l"(b), "r"(int(keep)), "n"(int(kTransposeA)), "n"(int(kTransposeB)));
  } else if constexpr (N == 64) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" ASSAY_32
                 "}, %32, %33, p, 1, 1, %35, %36;}"
                 : ASSAY_SUM16(c, kFirst), ASSAY_SUM16(c, kFirst + 4)
                 : "l"(a), "l"(b), "r"(int(keep)), "n"(int(kTransposeA)), "n"(int(kTransposeB)));
  } else {
    static_assert(N == 128);
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" ASSAY_64
        "}, %64, %65, p, 1, 1, %67, %68;}"
        : ASSAY_SUM16(c, kFirst), ASSAY_SUM16(c, kFirst + 4), ASSAY_SUM16(c, kFirst + 8), ASSAY_SUM16(c, kFirst + 12)
        : "l"(a), "l"(b), "r"(int(keep)), "n"(int(kTransposeA)), "n"(int(kTransposeB)));
  }
}
// The same with A, row-major, in registers.
template <int N, bool kTransposeB, int kFirst = 0, int kTiles>
__device__ void product(float (&c)[kTiles][4], const uint32_t (&a)[4], uint64_t b, bool keep = true) {
  if constexpr (N == 32) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %21, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" ASSAY_16
                 "}, {%16, %17, %18, %19}, %20, p, 1, 1, %22;}"
                 : ASSAY_SUM16(c, kFirst)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(keep)), "n"(int(kTransposeB)));
  } else {
    static_assert(N == 64);
    asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" ASSAY_32
                 "}, {%32, %33, %34, %35}, %36, p, 1, 1, %38;}"
                 : ASSAY_SUM16(c, kFirst), ASSAY_SUM16(c, kFirst + 4)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(keep)), "n"(int(kTransposeB)));
  }
}
#undef ASSAY_SUM4
#undef ASSAY_SUM16
#undef ASSAY_16
#undef ASSAY_32
#undef ASSAY_64

}  // namespace assay::ops::cuda::top1
