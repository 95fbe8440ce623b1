#include "ops/core/parallel.h"

#include <ATen/Parallel.h>

#include <atomic>
#include <exception>

// at::parallel_for is an inline function that wants -fopenmp, and clang would then link a second
// OpenMP runtime. torch's pool is libgomp's, so its entry points are called as a compiler would.
extern "C" {
void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags);
int omp_get_num_threads();
int omp_get_thread_num();
}

namespace assay::ops {
namespace {

struct Region {
  int64_t size;
  int64_t grain;
  const std::function<void(int64_t, int64_t)>& body;
  std::atomic_flag failed = ATOMIC_FLAG_INIT;
  std::exception_ptr exception;
};

void run_part(void* data) {
  Region& region = *static_cast<Region*>(data);
  const int64_t parts =
      std::min<int64_t>(omp_get_num_threads(), (region.size + region.grain - 1) / region.grain);
  const int64_t part = omp_get_thread_num();
  if (part >= parts) return;
  try {
    region.body(part * region.size / parts, (part + 1) * region.size / parts);
  } catch (...) {
    if (!region.failed.test_and_set()) region.exception = std::current_exception();
  }
}

void parallel_for(int64_t size, int64_t grain, const std::function<void(int64_t, int64_t)>& body) {
  if (size <= 0) return;
  grain = std::max<int64_t>(grain, 1);
  if (size <= grain || at::get_num_threads() == 1 || at::in_parallel_region()) return body(0, size);
  Region region{size, grain, body};
  GOMP_parallel(run_part, &region, 0, 0);  // 0 threads: as many as at::set_num_threads said
  if (region.exception) std::rethrow_exception(region.exception);
}

}  // namespace

ParallelFor at_parallel_for() { return parallel_for; }

}  // namespace assay::ops
