#pragma once
// PTX instructions that CUDA C++ has no function for, or only for GPUs from Hopper on. Each wrapper
// has the name of its instruction. wgmma is in wgmma.cuh.
#include <cuda.h>

#include "ops/cuda/types.cuh"

namespace assay::ops::cuda {

__device__ inline uint32_t shared_address(const void* p) { return __cvta_generic_to_shared(p); }

// 2^x with an error of two units in the last place; subnormal results are flushed to 0.
__device__ inline float ex2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// The larger number, or NaN if one of them is NaN.
__device__ inline float max_nan(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

// Loads four 8 × 8 matrices of b16 from shared memory. Lane i passes the address of row i % 8 of
// matrix i / 8; a row is 16 bytes and 16-byte aligned.
__device__ inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
__device__ inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
__device__ inline void stmatrix_x4(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
// Transposes an 8 × 8 matrix of b16 that is spread over the warp as ldmatrix leaves it. volatile,
// because the whole warp must execute it even where only some lanes use the result.
__device__ inline void movmatrix_trans(uint32_t& x) {
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(x));
}

// c [16 × 8] += a [16 × 16] b [16 × 8]; bf16 operands, fp32 sums. The layouts are in fragment.cuh.
__device__ inline void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// c [16 × 8] += a [16 × 8] b [8 × 8]; tf32 operands, of which the low 13 bits are ignored.
__device__ inline void mma_m16n8k8(float (&c)[4], const float (&a)[4], float b0, float b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
        "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// Asynchronous copy of 16 bytes (4 bytes) from global to shared memory; zero-fills unless `wanted`.
__device__ inline void cp_async_16(void* to, const void* from, bool wanted = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(wanted ? 16 : 0));
}
__device__ inline void cp_async_4(void* to, const void* from, bool wanted = true) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(wanted ? 4 : 0));
}
__device__ inline void cp_async_commit_group() { asm volatile("cp.async.commit_group;"); }
template <int kPending>
__device__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
__device__ inline void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }
__device__ inline void prefetch_l2(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

// Whether the code is for GPUs with bulk copies and barriers that count their bytes.
#if __CUDA_ARCH__ >= 900
constexpr bool kHasBulkCopies = true;
#else
constexpr bool kHasBulkCopies = false;
#endif

// A barrier in shared memory that counts arrivals and the bytes of bulk copies.
struct Mbarrier {
  uint64_t* word;
  __device__ uint32_t address() const { return shared_address(word); }
  __device__ void init(int arrivals) const {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(arrivals)
                 : "memory");
  }
  __device__ void arrive() const {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address()) : "memory");
  }
  __device__ void arrive_expect_tx(uint32_t bytes) const {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()),
                 "r"(bytes)
                 : "memory");
  }
  // Waits until the phase with this parity is complete.
  __device__ void wait(uint32_t parity) const {
    asm volatile(
        "{.reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;}" ::"r"(address()),
        "r"(parity)
        : "memory");
  }
};
// Makes initialised mbarriers visible to the copy engine.
__device__ inline void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Makes what threads wrote to shared memory visible to wgmma and the copy engine. It comes before
// the barrier after which they read.
__device__ inline void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Bulk copy of contiguous bytes by the copy engine: a multiple of 16, both
// addresses 16-byte aligned.
__device__ inline void cp_async_bulk(void* to, const void* from, uint32_t bytes, Mbarrier barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(barrier.address())
      : "memory");
}
// Copies a box of a tensor, at these coordinates, innermost first. Positions past the ends of the
// tensor become zeros.
__device__ inline void cp_async_bulk_tensor_4d(void* to, const CUtensorMap& from, int x0, int x1,
                                               int x2, int x3, Mbarrier barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(shared_address(to)),
      "l"(&from), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(barrier.address())
      : "memory");
}
// Bulk copy from shared to global memory. Returns when the copy is complete.
__device__ inline void cp_async_bulk_store(void* to, const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;\n cp.async.bulk.wait_group 0;" ::: "memory");
}

// Named barriers of a block; id 0 is __syncthreads(). Warpgroup w has barrier kWarpgroup0 + w.
enum class NamedBarrier : int { kWarpgroup0 = 1 };
__device__ inline NamedBarrier warpgroup_barrier(int warpgroup) {
  return NamedBarrier(int(NamedBarrier::kWarpgroup0) + warpgroup);
}
template <int kThreads>
__device__ void named_barrier_sync(NamedBarrier id) {
  static_assert(kThreads % 32 == 0);
  asm volatile("bar.sync %0, %1;" ::"r"(int(id)), "n"(kThreads) : "memory");
}

// Registers that each thread of a warpgroup gives back or takes.
template <int kRegisters>
__device__ void setmaxnreg_dec() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ void setmaxnreg_inc() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Programmatic dependent launch. griddep_launch_dependents lets the next kernel of
// the stream start;
// griddep_wait waits until the results of all earlier kernels are visible. Code for compute_80 has
// neither, and launch_pdl() does not overlap its kernels.
__device__ inline void griddep_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ inline void griddep_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Barriers of a cluster of blocks, and memory of its first block. In code for compute_80, every
// block is a cluster of its own.
#if __CUDA_ARCH__ >= 900
__device__ inline void cluster_arrive() { __cluster_barrier_arrive(); }
__device__ inline void cluster_arrive_relaxed() { __cluster_barrier_arrive_relaxed(); }
__device__ inline void cluster_wait() { __cluster_barrier_wait(); }
template <class T>
__device__ T* in_first_block(T* shared) {
  return static_cast<T*>(__cluster_map_shared_rank(shared, 0));
}
#else
__device__ inline void cluster_arrive() {}
__device__ inline void cluster_arrive_relaxed() {}
__device__ inline void cluster_wait() { __syncthreads(); }
template <class T>
__device__ T* in_first_block(T* shared) {
  return shared;
}
#endif

}  // namespace assay::ops::cuda
