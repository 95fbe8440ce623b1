// The token shift on the CPU: a task is a run of positions; its rows are read into the
// arithmetic's type, padded.
#include "ops/recurrence/token_shift/kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/recurrence/token_shift/cpu.cc"
#include "ops/cpu/highway.h"
//
#include <utility>
#include <vector>

#include "ops/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace assay::ops::HWY_NAMESPACE {
namespace {

// Aligned rows of the arithmetic's type for one task, and the tensors' rows of its sequence.
template <class R>
class Rows {
 public:
  Rows(const TokenShift& p, int64_t count)
      : p_(p),
        padded((p.width + kLanes<R> - 1) / kLanes<R> * kLanes<R>),
        numbers_(count * padded + kLanes<R>) {
    const auto address = reinterpret_cast<uintptr_t>(numbers_.data());
    next_ = numbers_.data() + (-address % (kLanes<R> * sizeof(R))) / sizeof(R);
  }
  R* take() { return std::exchange(next_, next_ + padded); }

  std::byte* row(const void* tensor, int64_t b, int64_t t) const {
    return element({const_cast<void*>(tensor), p_.time * p_.width, p_.width}, p_.dtype, b, t, 0);
  }
  void read(const void* tensor, int64_t b, int64_t t, R* out) const {
    read_row(row(tensor, b, t), p_.dtype, p_.width, padded, out);
  }
  void write(const R* in, void* tensor, int64_t b, int64_t t) const {
    write_row(in, p_.dtype, p_.width, row(tensor, b, t));
  }
  void read_x(int64_t b, int64_t t, R* out) const {  // from t = −1
    if (t >= 0) return read(p_.x, b, t, out);
    if (!p_.before) return void(std::fill(out, out + padded, R(0)));
    read_row(element({const_cast<void*>(p_.before), p_.width, 0}, p_.dtype, b, 0, 0), p_.dtype,
             p_.width, padded, out);
  }
  // m_i of position t: the mix itself, or in `scratch` its sum with the position's own.
  const R* weight(int64_t i, int64_t b, int64_t t, const R* mix, R* scratch) const {
    if (!p_.own[i]) return mix;
    read(p_.own[i], b, t, scratch);
    fill(scratch, padded, [&](int64_t j) { return hn::Add(load(scratch + j), load(mix + j)); });
    return scratch;
  }
  // The mixes, which are of the arithmetic's type already.
  std::vector<R*> mixes() {
    std::vector<R*> out;
    for (int64_t i = 0; i < p_.count; ++i) {
      const R* row = static_cast<const R*>(p_.mix) + i * p_.width;
      std::fill(std::copy(row, row + p_.width, out.emplace_back(take())), out.back() + padded,
                R(0));
    }
    return out;
  }

 private:
  const TokenShift& p_;

 public:
  const int64_t padded;

 private:
  std::vector<R> numbers_;
  R* next_;
};

template <class R>
void forward(const TokenShift& p, int64_t b, int64_t begin, int64_t end) {
  Rows<R> rows(p, p.count + 4);
  const auto mix = rows.mixes();
  R* now = rows.take();
  R* before = rows.take();
  R* scratch = rows.take();
  R* y = rows.take();
  rows.read_x(b, begin - 1, before);
  for (int64_t t = begin; t < end; ++t) {
    rows.read_x(b, t, now);
    for (int64_t i = 0; i < p.count; ++i) {
      const R* m = rows.weight(i, b, t, mix[size_t(i)], scratch);
      fill(y, rows.padded, [&](int64_t j) {
        return hn::MulAdd(hn::Sub(load(before + j), load(now + j)), load(m + j), load(now + j));
      });
      rows.write(y, p.y[i], b, t);
    }
    std::swap(now, before);
  }
}

// Towards the begin, so that each gradient is read once: position t + 1 hands down what it owes t.
template <class R>
void backward(const TokenShiftBackward& bwd, int64_t b, int64_t begin, int64_t end, R* dmix) {
  const TokenShift& p = bwd.forward;
  Rows<R> rows(p, 2 * p.count + 7);
  const auto mix = rows.mixes();
  std::vector<R*> sums;
  for (int64_t i = 0; i < p.count; ++i)
    std::fill_n(sums.emplace_back(rows.take()), rows.padded, R(0));
  R* now = rows.take();
  R* before = rows.take();
  R* scratch = rows.take();
  R* dy = rows.take();
  R* dx = rows.take();
  R* owed = rows.take();
  R* down = rows.take();
  std::fill_n(owed, rows.padded, R(0));
  for (int64_t i = 0; i < p.count && end < p.time; ++i) {
    const R* m = rows.weight(i, b, end, mix[size_t(i)], scratch);
    rows.read(bwd.dy[i], b, end, dy);
    fill(owed, rows.padded,
         [&](int64_t j) { return hn::MulAdd(load(dy + j), load(m + j), load(owed + j)); });
  }
  rows.read_x(b, end - 1, now);
  for (int64_t t = end - 1; t >= begin; --t) {
    rows.read_x(b, t - 1, before);
    std::swap(dx, owed);
    std::fill_n(owed, rows.padded, R(0));
    for (int64_t i = 0; i < p.count; ++i) {
      const R* m = rows.weight(i, b, t, mix[size_t(i)], scratch);
      R* sum = sums[size_t(i)];
      rows.read(bwd.dy[i], b, t, dy);
      for (int64_t j = 0; j < rows.padded; j += kLanes<R>) {
        const Vec<R> g = load(dy + j);
        const Vec<R> past = hn::Mul(g, load(m + j));
        const Vec<R> own = hn::Mul(g, hn::Sub(load(before + j), load(now + j)));
        store<R>(hn::Add(load(dx + j), hn::Sub(g, past)), dx + j);
        store<R>(hn::Add(load(owed + j), past), owed + j);
        store<R>(hn::Add(load(sum + j), own), sum + j);
        store<R>(own, down + j);
      }
      if (bwd.down[i]) rows.write(down, bwd.down[i], b, t);
    }
    rows.write(dx, bwd.dx, b, t);
    std::swap(now, before);
  }
  for (int64_t i = 0; i < p.count; ++i) std::copy_n(sums[size_t(i)], p.width, dmix + i * p.width);
}

// task(sequence, first position, one past the last, number of the run)
template <class Task>
void over_runs(const TokenShift& p, const ParallelFor& parallel, const Task& task) {
  const int64_t runs = runs_of_sequence(p);
  parallel(p.batch * runs, std::max<int64_t>(1, 65536 / (kShiftRun * p.width)),
           [&](int64_t first, int64_t last) {
             for (int64_t run = first; run < last; ++run) {
               const int64_t begin = run % runs * kShiftRun;
               task(run / runs, begin, std::min(begin + kShiftRun, p.time), run);
             }
           });
}

void forward_all(const TokenShift& p, const ParallelFor& parallel) {
  over_runs(p, parallel, [&](int64_t b, int64_t begin, int64_t end, int64_t) {
    p.dtype == DType::f64 ? forward<double>(p, b, begin, end) : forward<float>(p, b, begin, end);
  });
}

template <class R>
void backward_runs(const TokenShiftBackward& bwd, const ParallelFor& parallel) {
  const TokenShift& p = bwd.forward;
  over_runs(p, parallel, [&](int64_t b, int64_t begin, int64_t end, int64_t run) {
    backward<R>(bwd, b, begin, end, static_cast<R*>(bwd.dmix) + run * p.count * p.width);
  });
}
void backward_all(const TokenShiftBackward& bwd, const ParallelFor& parallel) {
  bwd.forward.dtype == DType::f64 ? backward_runs<double>(bwd, parallel)
                                  : backward_runs<float>(bwd, parallel);
}

}  // namespace
}  // namespace assay::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace assay::ops::cpu {
ASSAY_CPU_KERNEL(token_shift, forward_all, TokenShift)
ASSAY_CPU_KERNEL(token_shift, backward_all, TokenShiftBackward)
}  // namespace assay::ops::cpu
#endif
