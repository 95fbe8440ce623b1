// Few queries with a long past on the CPU: one task per query and head, which reads rows of keys
// and values where they lie.
#include "ops/attention/top1_chunk/kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/attention/top1_chunk/decode/cpu_step.cc"
#include "ops/cpu/highway.h"
//
#include "ops/attention/top1_chunk/cpu-inl.h"

HWY_BEFORE_NAMESPACE();
namespace assay::ops::HWY_NAMESPACE {
namespace {

template <class R>
struct StepScratch {
  R* q;
  R* row;
  R* out;
  R* logits;
  R* best;
  StepScratch(WorkspaceArena& carve, const Problem<R>& p)
      : q(carve.take<R>(p.depth)),
        row(carve.take<R>(p.depth)),
        out(carve.take<R>(p.depth)),
        logits(carve.take<R>(padded<R>((p.top_k + 1) * p.C))),
        best(carve.take<R>(p.top_k)) {}
};

// A query t of head h, read as s.q = scale · log₂e · q; its chunk is `own`.
template <class R>
struct Step {
  const Problem<R>& p;
  StepScratch<R> s;
  int64_t b;
  int64_t h;
  int64_t t;
  int64_t own;

  R with(const View& view, int64_t time) const {
    read_row(element(view, p.dtype, b, time, h / p.group * p.head_dim), p.dtype, p.head_dim,
             p.depth, s.row);
    return dot(s.q, s.row, p.depth);
  }
  // Row i of a chunk's summary, times the query.
  R with_summary(int64_t chunk, int64_t i) const {
    const int64_t parts = p.dtype == DType::bf16 ? 2 : 1;
    const int64_t offset = (h / p.group * parts + i) * p.head_dim;
    read_row(element(p.summaries, p.dtype, b, chunk, offset), p.dtype, p.head_dim, p.depth, s.row);
    return dot(s.q, s.row, p.depth);
  }
  // In bfloat16, row 0 is what rounding left of the mean in row 1.
  R approximate(int64_t chunk) const {
    if (p.dtype != DType::bf16) return with_summary(chunk, 0);
    return with_summary(chunk, 1) + with_summary(chunk, 0);
  }
  R exact(int64_t chunk) const {
    for (int64_t j = 0; j < p.C; ++j) s.logits[j] = with(p.k, chunk * p.C + j);
    return logsumexp2(s.logits, p.C);
  }

  void choose(int64_t* selected) const {
    std::fill_n(selected, p.top_k, int64_t{-1});
    for (int64_t c = 0; c < own; ++c)
      consider(p.selection == Selection::exact ? exact(c) : approximate(c), c, c, p.top_k, s.best,
               selected);
  }

  // f(position, number) for every key read.
  template <class F>
  int64_t for_each_key(const int64_t* selected, const F& f) const {
    int64_t n = 0;
    for (int64_t slot = 0; slot < p.top_k; ++slot)
      for (int64_t j = 0; j < p.C && selected[slot] >= 0 && selected[slot] < own; ++j)
        f(selected[slot] * p.C + j, n++);
    for (int64_t j = own * p.C; j <= p.past + t; ++j) f(j, n++);
    return n;
  }
  void attend(const int64_t* selected) const {
    const int64_t n =
        for_each_key(selected, [&](int64_t j, int64_t i) { s.logits[i] = with(p.k, j); });
    R top = largest_of(s.logits, n);
    exponentials(s.logits, n, n, top);
    const R total = sum_of(s.logits, n);
    if (total != total) top = total;  // maxima may pass over a NaN
    std::fill_n(s.out, p.depth, R(0));
    for_each_key(selected, [&](int64_t j, int64_t i) HWY_ATTR {
      read_row(element(p.v, p.dtype, b, j, h / p.group * p.head_dim), p.dtype, p.head_dim, p.depth,
               s.row);
      const Vec<R> weight = hn::Set(Lanes<R>(), s.logits[i]);
      for (int64_t d = 0; d < p.depth; d += kLanes<R>)
        store<R>(hn::MulAdd(weight, load(s.row + d), load(s.out + d)), s.out + d);
    });
    write_scaled(p, p.out, b, t, h, R(1) / total, s.out);
    static_cast<R*>(p.logsumexp)[p.row(b, h, t)] =
        static_cast<R>((top + std::log2(total)) / kLog2E);
  }
};

template <class R>
void steps(const Top1ChunkForward& call, void* workspace, const ParallelFor& parallel) {
  const Problem<R> p(call);
  WorkspaceArena count;
  StepScratch<R>(count, p);
  for_each(p.batch * p.heads * p.time, static_cast<std::byte*>(workspace), count.used(), parallel,
           [&](int64_t i, std::byte* memory) HWY_ATTR {
             WorkspaceArena carve(memory);
             const int64_t t = i % p.time;
             const int64_t h = i / p.time % p.heads;
             const int64_t b = i / p.time / p.heads;
             const Step<R> step{p, {carve, p}, b, h, t, (p.past + t) / p.C};
             const bool by_mean = p.selection == Selection::approx && !p.forced;
             read_scaled(p, p.q, b, t, h, R(by_mean ? 1 : p.scale * kLog2E), step.s.q);
             int64_t* selected = p.selected + i * p.top_k;
             if (!p.forced) step.choose(selected);
             if (by_mean) scale_row(step.s.q, p.depth, R(p.scale * kLog2E), step.s.q);
             step.attend(selected);
           });
}

template <class R>
size_t step_bytes_of(const Top1ChunkForward& call) {
  const Problem<R> p(call);
  WorkspaceArena count;
  StepScratch<R>(count, p);
  return std::min(kWorkers, p.batch * p.heads * p.time) * count.used();
}

size_t top1_chunk_step_bytes(const Top1ChunkForward& p) {
  return p.dtype == DType::f64 ? step_bytes_of<double>(p) : step_bytes_of<float>(p);
}
void top1_chunk_run_steps(const Top1ChunkForward& p, void* workspace, const ParallelFor& parallel) {
  p.dtype == DType::f64 ? steps<double>(p, workspace, parallel)
                        : steps<float>(p, workspace, parallel);
}

}  // namespace
}  // namespace assay::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace assay::ops::cpu {
HWY_EXPORT(top1_chunk_step_bytes);
size_t step_workspace_bytes(const Top1ChunkForward& p) {
  return HWY_DYNAMIC_DISPATCH(top1_chunk_step_bytes)(p);
}
ASSAY_CPU_WORKSPACE_KERNEL(top1_chunk_step, top1_chunk_run_steps, Top1ChunkForward)
}  // namespace assay::ops::cpu
#endif
