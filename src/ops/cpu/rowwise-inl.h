// Row-wise operators on the CPU. Compiled once per Highway target: the loops below are
// vectorised by the compiler for that target.
#if defined(ASSAY_OPS_ROWWISE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ASSAY_OPS_ROWWISE_INL_H_
#undef ASSAY_OPS_ROWWISE_INL_H_
#else
#define ASSAY_OPS_ROWWISE_INL_H_
#endif

#include <hwy/aligned_allocator.h>

#include "ops/core/rowwise.h"
#include "ops/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace assay::ops::HWY_NAMESPACE {

// rows whose parts of the gradients of the parameters are summed together
constexpr int64_t kRowwiseBlock = 64;

// The numbers of a part in R: inputs, parameters, outputs or their gradients, and gradients or
// terms of sums. Each is padded with zeros, which add nothing to a sum.
template <class R, class F>
struct RowwisePart {
  static constexpr int kSums = F::kSums + F::kBackwardSums;
  static constexpr int kWeights = kAtLeastOne<F::kParameters + F::kStatistics>;
  const Rowwise<F>& p;
  int64_t padded;
  hwy::AlignedFreeUniquePtr<R[]> memory;
  R* in;
  R* parameters;
  R* out;
  R* din;
  R* terms;
  R statistics[kAtLeastOne<F::kStatistics>];
  explicit RowwisePart(const Rowwise<F>& p)
      : p(p), padded((p.width + kLanes<R> - 1) / kLanes<R> * kLanes<R>) {
    constexpr int kRows = 2 * F::kInputs + F::kParameters + F::kOutputs + kSums;
    memory = hwy::AllocateAligned<R>(size_t(kRows * padded));
    in = memory.get();
    parameters = in + F::kInputs * padded;
    out = parameters + F::kParameters * padded;
    din = out + F::kOutputs * padded;
    terms = din + F::kInputs * padded;
  }
  std::byte* at(const void* data, DType dtype, int64_t offset) const {
    return element({const_cast<void*>(data), 0, 0}, dtype, 0, 0, offset);
  }
  DType output_dtype(int n) const {
    return n < F::kRealOutputs && p.dtype == DType::bf16 ? DType::f32 : p.dtype;
  }
  void read_inputs(int64_t part) {
    const int64_t row = part / p.groups;
    const int64_t group = part % p.groups;
    for (int n = 0; n < F::kInputs; ++n)
      read_row(at(p.in[n], p.dtype, row * p.row_stride[n] + group * p.width), p.dtype, p.width,
               padded, in + n * padded);
    for (int n = 0; n < F::kParameters; ++n) {
      const R* from = static_cast<const R*>(p.parameters) + (n * p.groups + group) * p.width;
      std::copy_n(from, p.width, parameters + n * padded);
      std::fill(parameters + n * padded + p.width, parameters + (n + 1) * padded, R(0));
    }
    for (int n = 0; n < F::kStatistics; ++n)
      statistics[n] = static_cast<const R*>(p.statistics[n])[part];
  }
  void get(int64_t i, R (&x)[F::kInputs], R (&w)[kWeights]) const {
    for (int n = 0; n < F::kInputs; ++n) x[n] = in[n * padded + i];
    for (int n = 0; n < F::kParameters; ++n) w[n] = parameters[n * padded + i];
    for (int n = 0; n < F::kStatistics; ++n) w[F::kParameters + n] = statistics[n];
  }
  void sum_terms(R (&sums)[kSums + 1], int first, int count) const {
    for (int n = first; n < first + count; ++n) {
      Vec<R> total = hn::Zero(Lanes<R>());
      for (int64_t i = 0; i < padded; i += kLanes<R>)
        total = hn::Add(total, load(terms + n * padded + i));
      sums[n] = sum<R>(total);
    }
  }
};

template <class R, class F>
void rowwise_forward(const Rowwise<F>& p, const ParallelFor& parallel) {
  parallel(p.rows * p.groups, std::max<int64_t>(1, 16384 / p.width),
           [&](int64_t begin, int64_t end) HWY_ATTR {
             RowwisePart<R, F> r(p);
             R x[F::kInputs];
             R w[RowwisePart<R, F>::kWeights];
             R y[F::kOutputs];
             R sums[RowwisePart<R, F>::kSums + 1];
             R terms[F::kSums + 1];
             for (int64_t part = begin; part < end; ++part) {
               r.read_inputs(part);
               if (F::kSums > 0) {
#pragma clang loop vectorize(assume_safety)
                 for (int64_t i = 0; i < r.padded; ++i) {
                   r.get(i, x, w);
                   F::terms(x, w, terms);
                   for (int n = 0; n < F::kSums; ++n) r.terms[n * r.padded + i] = terms[n];
                 }
                 r.sum_terms(sums, 0, F::kSums);
                 F::finish(sums, R(p.width), R(p.eps));
               }
#pragma clang loop vectorize(assume_safety)
               for (int64_t i = 0; i < r.padded; ++i) {
                 r.get(i, x, w);
                 F::forward(x, w, sums, y);
                 for (int n = 0; n < F::kOutputs; ++n) r.out[n * r.padded + i] = y[n];
               }
               for (int n = 0; n < F::kOutputs; ++n)
                 write_row(r.out + n * r.padded, r.output_dtype(n), p.width,
                           r.at(p.out[n], r.output_dtype(n), part * p.width));
             }
           });
}

// dparameters: of the block, [kParameters, groups, padded].
template <class R, class F>
void rowwise_backward_part(const RowwiseBackward<F>& bwd, int64_t part, RowwisePart<R, F>& r,
                           R* dparameters) {
  const Rowwise<F>& p = bwd.forward;
  R x[F::kInputs];
  R w[RowwisePart<R, F>::kWeights];
  R dy[F::kOutputs];
  R dx[F::kInputs];
  R sums[RowwisePart<R, F>::kSums + 1];
  R terms[F::kSums + F::kBackwardSums + 1];
  const auto get_gradients = [&](int64_t i) HWY_ATTR {
    for (int n = 0; n < F::kOutputs; ++n) dy[n] = r.out[n * r.padded + i];
  };
  const int64_t group = part % p.groups;
  r.read_inputs(part);
  for (int n = 0; n < F::kOutputs; ++n)
    read_row(r.at(bwd.dout[n], r.output_dtype(n), part * p.width), r.output_dtype(n), p.width,
             r.padded, r.out + n * r.padded);
  if (r.kSums > 0) {
#pragma clang loop vectorize(assume_safety)
    for (int64_t i = 0; i < r.padded; ++i) {
      r.get(i, x, w);
      get_gradients(i);
      F::terms(x, w, terms);
      F::backward_terms(x, w, dy, terms + F::kSums);
      for (int n = 0; n < r.kSums; ++n) r.terms[n * r.padded + i] = terms[n];
    }
    r.sum_terms(sums, 0, r.kSums);
    F::finish(sums, R(p.width), R(p.eps));
    F::finish_backward(sums, R(p.width), R(p.eps));
  }
  if constexpr (F::kStatisticGradients)
    for (int n = 0; n < F::kStatistics; ++n)
      static_cast<R*>(bwd.dstatistics[n])[part] = sums[r.kSums - F::kStatistics + n];
#pragma clang loop vectorize(assume_safety)
  for (int64_t i = 0; i < r.padded; ++i) {
    R dw[RowwisePart<R, F>::kWeights];
    r.get(i, x, w);
    get_gradients(i);
    F::backward(x, w, sums, dy, dx, dw);
    for (int n = 0; n < F::kInputs; ++n) r.din[n * r.padded + i] = dx[n];
    for (int n = 0; n < kParameterGradients<F>; ++n)
      dparameters[(n * p.groups + group) * r.padded + i] += dw[n];
  }
  for (int n = 0; n < F::kInputs; ++n)
    write_row(r.din + n * r.padded, p.dtype, p.width,
              r.at(bwd.din[n], p.dtype, part / p.groups * bwd.din_stride[n] + group * p.width));
}

template <class F>
int64_t rowwise_blocks(const Rowwise<F>& p) {
  return (p.rows + kRowwiseBlock - 1) / kRowwiseBlock;
}
template <class R, class F>
int64_t rowwise_sums(const Rowwise<F>& p) {  // numbers that a block adds up
  return kParameterGradients<F> * p.groups * ((p.width + kLanes<R> - 1) / kLanes<R> * kLanes<R>);
}

template <class R, class F>
void rowwise_backward(const RowwiseBackward<F>& bwd, void* workspace, const ParallelFor& parallel) {
  const Rowwise<F>& p = bwd.forward;
  const int64_t size = rowwise_sums<R>(p);
  R* sums = static_cast<R*>(workspace);
  std::fill(sums, sums + rowwise_blocks(p) * size, R(0));
  parallel(rowwise_blocks(p), 1, [&](int64_t begin, int64_t end) HWY_ATTR {
    RowwisePart<R, F> r(p);
    for (int64_t block = begin; block < end; ++block) {
      const int64_t last = std::min(p.rows, (block + 1) * kRowwiseBlock) * p.groups;
      for (int64_t part = block * kRowwiseBlock * p.groups; part < last; ++part)
        rowwise_backward_part(bwd, part, r, sums + block * size);
    }
  });
  for (int64_t block = 1; block < rowwise_blocks(p); ++block)
    for (int64_t i = 0; i < size; ++i) sums[i] += sums[block * size + i];
  const int64_t rows = kParameterGradients<F> * p.groups;
  for (int64_t i = 0; i < rows; ++i)
    std::copy_n(sums + i * (size / rows), p.width, static_cast<R*>(bwd.dparameters) + i * p.width);
}

// The functions of one operator that are compiled once per target, and their export under HWY_ONCE.
#define ASSAY_ROWWISE_TARGET(F)                                                                    \
  HWY_BEFORE_NAMESPACE();                                                                          \
  namespace assay::ops::HWY_NAMESPACE {                                                            \
  size_t F##_bytes(const RowwiseBackward<F>& bwd) {                                                \
    const Rowwise<F>& p = bwd.forward;                                                             \
    return size_t(rowwise_blocks(p)) * (p.dtype == DType::f64                                      \
                                            ? size_t(rowwise_sums<double>(p)) * 8                  \
                                            : size_t(rowwise_sums<float>(p)) * 4);                 \
  }                                                                                                \
  void F##_forward(const Rowwise<F>& p, const ParallelFor& parallel) {                             \
    p.dtype == DType::f64 ? rowwise_forward<double>(p, parallel)                                   \
                          : rowwise_forward<float>(p, parallel);                                   \
  }                                                                                                \
  void F##_backward(const RowwiseBackward<F>& bwd, void* workspace, const ParallelFor& parallel) { \
    bwd.forward.dtype == DType::f64 ? rowwise_backward<double>(bwd, workspace, parallel)           \
                                    : rowwise_backward<float>(bwd, workspace, parallel);           \
  }                                                                                                \
  }                                                                                                \
  HWY_AFTER_NAMESPACE();
#define ASSAY_ROWWISE_EXPORT(F)                                                                    \
  namespace assay::ops {                                                                           \
  HWY_EXPORT(F##_bytes);                                                                           \
  HWY_EXPORT(F##_forward);                                                                         \
  HWY_EXPORT(F##_backward);                                                                        \
  template <>                                                                                      \
  size_t cpu::workspace_bytes(const RowwiseBackward<F>& bwd) {                                     \
    return HWY_DYNAMIC_DISPATCH(F##_bytes)(bwd);                                                   \
  }                                                                                                \
  template <>                                                                                      \
  void cpu::rowwise(const Rowwise<F>& p, const ParallelFor& parallel) {                            \
    HWY_DYNAMIC_DISPATCH(F##_forward)(p, parallel);                                                \
  }                                                                                                \
  template <>                                                                                      \
  void cpu::rowwise(const RowwiseBackward<F>& bwd, void* workspace, const ParallelFor& parallel) { \
    HWY_DYNAMIC_DISPATCH(F##_backward)(bwd, workspace, parallel);                                  \
  }                                                                                                \
  }

}  // namespace assay::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
