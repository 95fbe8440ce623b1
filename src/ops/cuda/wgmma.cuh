#pragma once
// Products of a warpgroup (wgmma, bf16 operands, fp32 sums) and the tiles that they read.
// The sums of a 64 × N product are N / 8 C fragments of mma.m16n8k16; a warp has 16 of the rows.
#include "ops/cuda/fragment.cuh"

namespace assay::ops::cuda {

// The matrix descriptor of an operand in shared memory: `low` has its address and leading offset,
// `high` its stride and swizzle. Adding to it moves the address, in units of 16 bytes.
struct WgmmaDescriptor {
  uint32_t low;
  uint32_t high;
  __device__ WgmmaDescriptor operator+(int step) const { return {low + step, high}; }
  __device__ operator uint64_t() const { return uint64_t(high) << 32 | low; }
};

// The widest panel: 64 columns (swizzle 128 B), or 32 (swizzle 64 B) if 64 does not divide D.
template <int D>
constexpr int kPanel = D % 64 == 0 ? 64 : 32;

// [kRows, D] bf16 in D / W panels [kRows, W], one after the other. A row of a panel is
// one swizzled row.
template <int D, int kRows>
struct WgmmaTile {
  static_assert(D % 32 == 0 && kRows % 8 == 0);
  static constexpr int W = kPanel<D>;
  static constexpr int kWidth = D;
  bf16* data;
  __device__ static int offset(int row, int vector) {
    return vector / (W / 8) * kRows * W + row * W + (swizzle<W>(row, vector % (W / 8)) << 3);
  }
  __device__ bf16* at(int row, int vector) const { return data + offset(row, vector); }
  __device__ uint32_t address(int row, int vector) const { return shared_address(at(row, vector)); }

  static __device__ WgmmaDescriptor descriptor(const bf16* from, int leading, int stride) {
    const uint32_t address = shared_address(from);
    return {(address & 0x3ffff) >> 4 | uint32_t(leading >> 4) << 16,
            uint32_t(stride >> 4) | (W == 64 ? 1u : 2u) << 30};
  }
  // rows(): an operand whose rows (A) or columns (B) are the tile's rows, summed over columns.
  // columns(): its transpose. Both begin at row and column 0; add rows_at(row, k) or
  // columns_at(column, k), where k is the step of 16 in the summed dimension.
  __device__ WgmmaDescriptor rows() const { return descriptor(data, 16, 16 * W); }
  __device__ WgmmaDescriptor columns() const { return descriptor(data, kRows * W * 2, 16 * W); }
  static constexpr __device__ int rows_at(int row, int k) {
    return (k * 16 / W * kRows * W + row * W + k * 16 % W) * 2 >> 4;
  }
  static constexpr __device__ int columns_at(int column, int k) {
    return (column / W * kRows * W + k * 16 * W + column % W) * 2 >> 4;
  }
};

// Lets the compiler know that all lanes of the warp have the same descriptor.
__device__ inline WgmmaDescriptor warp_uniform(WgmmaDescriptor x) {
  return {__shfl_sync(~0u, x.low, 0), x.high};
}

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Keeps the compiler from moving uses of sums across a wait.
template <int N>
__device__ void warpgroup_fence_operand(float (&c)[N][4]) {
  each_element(c, [](float& x, int, int) { asm volatile("" : "+f"(x)::"memory"); });
}
// Waits until at most kPending groups are incomplete; then the sums may be used.
template <int kPending, class... Sums>
__device__ void wgmma_wait_group(Sums&... sums) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
  (warpgroup_fence_operand(sums), ...);
}

#define ASSAY_SUM4(c) "+f"((c)[0]), "+f"((c)[1]), "+f"((c)[2]), "+f"((c)[3])
#define ASSAY_SUM16(c, n) \
  ASSAY_SUM4((c)[n]), ASSAY_SUM4((c)[n + 1]), ASSAY_SUM4((c)[n + 2]), ASSAY_SUM4((c)[n + 3])
#define ASSAY_SUM32(c, n) ASSAY_SUM16(c, n), ASSAY_SUM16(c, n + 4)
#define ASSAY_SUM64(c, n) ASSAY_SUM32(c, n), ASSAY_SUM32(c, n + 8)
#define ASSAY_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define ASSAY_32 \
  ASSAY_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define ASSAY_64                                                                       \
  ASSAY_32                                                                             \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define ASSAY_WGMMA(n, keep, registers, operands)                                   \
  "{.reg .pred p; setp.ne.b32 p, " keep ", 0; wgmma.mma_async.sync.aligned.m64n" #n \
  "k16.f32.bf16.bf16 {" registers "}, " operands ";}"

// c[kFirst … + N / 8] += A B for one step of 16 in the summed dimension; c = A B unless `keep`. A
// and B may be transposes (WgmmaTile::columns).
template <int N, bool kTransposeA, bool kTransposeB, int kFirst = 0, int kTiles>
__device__ void wgmma(float (&c)[kTiles][4], uint64_t a, uint64_t b, bool keep = true) {
  static_assert(kFirst + N / 8 <= kTiles);
  if constexpr (N == 32) {
    asm volatile(ASSAY_WGMMA(32, "%18", ASSAY_16, "%16, %17, p, 1, 1, %19, %20")
                 : ASSAY_SUM16(c, kFirst)
                 : "l"(a), "l"(b), "r"(int(keep)), "n"(int(kTransposeA)), "n"(int(kTransposeB)));
  } else if constexpr (N == 64) {
    asm volatile(ASSAY_WGMMA(64, "%34", ASSAY_32, "%32, %33, p, 1, 1, %35, %36")
                 : ASSAY_SUM32(c, kFirst)
                 : "l"(a), "l"(b), "r"(int(keep)), "n"(int(kTransposeA)), "n"(int(kTransposeB)));
  } else {
    static_assert(N == 128);
    asm volatile(ASSAY_WGMMA(128, "%66", ASSAY_64, "%64, %65, p, 1, 1, %67, %68")
                 : ASSAY_SUM64(c, kFirst)
                 : "l"(a), "l"(b), "r"(int(keep)), "n"(int(kTransposeA)), "n"(int(kTransposeB)));
  }
}
// As wgmma above, with A, row-major, in registers.
template <int N, bool kTransposeB, int kFirst = 0, int kTiles>
__device__ void wgmma(float (&c)[kTiles][4], const uint32_t (&a)[4], uint64_t b, bool keep = true) {
  static_assert(kFirst + N / 8 <= kTiles);
  if constexpr (N == 32) {
    asm volatile(ASSAY_WGMMA(32, "%21", ASSAY_16, "{%16, %17, %18, %19}, %20, p, 1, 1, %22")
                 : ASSAY_SUM16(c, kFirst)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(keep)),
                   "n"(int(kTransposeB)));
  } else {
    static_assert(N == 64);
    asm volatile(ASSAY_WGMMA(64, "%37", ASSAY_32, "{%32, %33, %34, %35}, %36, p, 1, 1, %38")
                 : ASSAY_SUM32(c, kFirst)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(keep)),
                   "n"(int(kTransposeB)));
  }
}
#undef ASSAY_SUM4
#undef ASSAY_SUM16
#undef ASSAY_SUM32
#undef ASSAY_SUM64
#undef ASSAY_16
#undef ASSAY_32
#undef ASSAY_64
#undef ASSAY_WGMMA

// sum [64, D] += weights [64, 16 kSteps] · rows, where rows(column, k) is the descriptor of the
// transposed operand from that column and step on. Products of at most 64 columns do not spill.
template <int D, int kSteps, class At>
__device__ void wgmma_rows(float (&sum)[D / 8][4], const uint32_t (&weights)[kSteps][4],
                           At&& rows) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    wgmma<64, true>(sum, weights[k], rows(0, k));
    if constexpr (D == 96) wgmma<32, true, 8>(sum, weights[k], rows(64, k));
    if constexpr (D >= 128) wgmma<64, true, 8>(sum, weights[k], rows(64, k));
    if constexpr (D == 256) {
      wgmma<64, true, 16>(sum, weights[k], rows(128, k));
      wgmma<64, true, 24>(sum, weights[k], rows(192, k));
    }
  }
}

}  // namespace assay::ops::cuda
