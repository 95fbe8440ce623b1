#pragma once
#include "ops/core/kernel.h"

namespace assay::ops {

// torch's own pool of threads for a CPU kernel, as wide as at::get_num_threads(). A call from
// inside a parallel region runs inline; an exception of the body reaches the caller.
ParallelFor at_parallel_for();

}  // namespace assay::ops
