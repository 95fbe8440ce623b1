#pragma once
// The copy engine of sm_90: bytes that come to shared memory while threads do something else, and the barriers that
// tell of their arrival.
#include "ops/cuda.cuh"

namespace assay::ops::cuda {

// A barrier in shared memory that counts arrivals and bytes.
struct Barrier {
  uint64_t* word;
  __device__ uint32_t address() const { return __cvta_generic_to_shared(word); }
  __device__ void init(int arrivals) const {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(arrivals) : "memory");
  }
  __device__ void arrive() const {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address()) : "memory");
  }
  __device__ void arrive_and_expect(uint32_t bytes) const {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()), "r"(bytes) : "memory");
  }
  // Until the phase of this parity has ended.
  __device__ void wait(uint32_t parity) const {
    asm volatile(
        "{.reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;}" ::"r"(address()),
        "r"(parity)
        : "memory");
  }
};
// Contiguous bytes, a multiple of 16, by the copy engine; `barrier` counts them.
__device__ inline void copy_bulk(void* to, const void* from, uint32_t bytes, Barrier barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   uint32_t(__cvta_generic_to_shared(to))),
               "l"(from), "r"(bytes), "r"(barrier.address())
               : "memory");
}

}  // namespace assay::ops::cuda
