// Do other instructions take time away from the tensor cores? In each SM, two warpgroups multiply
// (wgmma) and two repeat one instruction, first each pair alone and then both. `share` is the time
// that the instructions add to the products, relative to their own time alone: 0 if they overlap
// with the products, 1 if the two exclude each other.
#include "cuda_bench.h"
#include "ops/cuda/wgmma.cuh"

namespace {

using namespace assay::ops;
using namespace assay::ops::cuda;

enum class Instruction { fma, add, max, exp2, compare_and_select };
constexpr const char* kNames[] = {"fma", "add", "max", "ex2", "setp + selp"};

template <Instruction kWhich>
__device__ void repeat(float (&x)[16], float a, float b) {
  for (float& y : x) {
    if constexpr (kWhich == Instruction::fma)
      asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(y) : "f"(a), "f"(b));
    if constexpr (kWhich == Instruction::add)
      asm volatile("add.f32 %0, %0, %1;" : "+f"(y) : "f"(a));
    if constexpr (kWhich == Instruction::max)
      asm volatile("max.f32 %0, %0, %1;" : "+f"(y) : "f"(a));
    if constexpr (kWhich == Instruction::exp2) asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(y));
    if constexpr (kWhich == Instruction::compare_and_select)
      asm volatile("{.reg .pred p; setp.gt.f32 p, %0, %1; selp.f32 %0, %0, %1, p;}"
                   : "+f"(y)
                   : "f"(a));
  }
}

// `products` groups of 16 products of 64 × 64 × 16 by the first two warpgroups, `repeats` times 64
// instructions by the others.
template <Instruction kWhich>
__global__ void __launch_bounds__(512, 1) both(float* numbers, int products, int repeats) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const WgmmaTile<64, 64> a{reinterpret_cast<bf16*>(memory)};
  const WgmmaTile<64, 64> b{a.data + 64 * 64};
  float result = 0;
  if (threadIdx.x < 256) {
    const WgmmaDescriptor rows = warp_uniform(a.rows());
    const WgmmaDescriptor columns = warp_uniform(b.rows());
    float c[8][4] = {};
    for (int i = 0; i < products; ++i) {
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 16; ++k)
        wgmma<64, false, false>(c, rows + WgmmaTile<64, 64>::rows_at(0, k % 4),
                                columns + WgmmaTile<64, 64>::rows_at(0, k % 4));
      wgmma_commit_group();
      wgmma_wait_group<0>(c);
    }
    result = c[0][0];
  } else {
    float x[16];
    for (int i = 0; i < 16; ++i) x[i] = float(i) * numbers[1];
    for (int i = 0; i < repeats; ++i)
#pragma unroll
      for (int unrolled = 0; unrolled < 4; ++unrolled) repeat<kWhich>(x, numbers[2], numbers[3]);
    for (float y : x) result += y;
  }
  if (result == 123) numbers[0] = result;  // so that the work is not dropped
}

template <Instruction kWhich>
void compare(float* numbers) {
  const int repeats = 4000;
  const auto ms = [&](int products, int count) {
    return median_ms([&] {
      launch_kernel(both<kWhich>, unsigned(sm_count()), 512, 64 << 10, nullptr, numbers, products,
                    count);
    });
  };
  const double alone = ms(0, repeats);
  const int products = int(1000 * alone / ms(1000, 0));  // take about as long
  const double multiplied = ms(products, 0);
  const double together = ms(products, repeats);
  std::printf("  %-12s %8.3f ms alone, wgmma %8.3f, both %8.3f, share %5.2f\n", kNames[int(kWhich)],
              alone, multiplied, together, (together - multiplied) / alone);
}

}  // namespace

int main() {
  const Machine machine;
  Buffers buffers;
  float* numbers = static_cast<float*>(buffers.raw(64));
  must(cudaMemset(numbers, 0, 64));
  compare<Instruction::fma>(numbers);
  compare<Instruction::add>(numbers);
  compare<Instruction::max>(numbers);
  compare<Instruction::exp2>(numbers);
  compare<Instruction::compare_and_select>(numbers);
  must(cudaDeviceSynchronize());
}
