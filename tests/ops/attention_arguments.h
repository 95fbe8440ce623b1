#pragma once
// Queries, keys and values for the tests of attention operators, and what is compared of them.
#include <gtest/gtest.h>

#include "ops/golden.h"

namespace assay::ops {

struct Qkv {
  at::Tensor q;
  at::Tensor k;
  at::Tensor v;
  Qkv as(at::ScalarType dtype, at::Device device = at::kCPU) const {
    auto copy = [&](const at::Tensor& x) {
      return x.detach().clone().to(device, dtype).requires_grad_();
    };
    return {copy(q), copy(k), copy(v)};
  }
  // Gradients of Σ weights ⊙ out by q, k, v.
  std::vector<at::Tensor> gradients(const at::Tensor& out, const at::Tensor& weights) const {
    return torch::autograd::grad(
        {(out.to(at::kDouble) * weights.to(out.device(), at::kDouble)).sum()}, {q, k, v}, {},
        /*retain_graph=*/true);
  }
};

struct Shape {
  int64_t batch = 2;
  int64_t time = 65;
  int64_t past = 0;
  int64_t heads = 4;
  int64_t kv_heads = 2;
  int64_t head_dim = 20;
};
inline std::ostream& operator<<(std::ostream& os, const Shape& s) {
  return os << "B " << s.batch << " T " << s.time << " past " << s.past << " H " << s.heads
            << " Hk " << s.kv_heads << " D " << s.head_dim << " seed 7";
}

// Unit queries and keys rounded to bfloat16, so that every precision reads the same numbers.
inline Qkv random_qkv(const Shape& s) {
  torch::manual_seed(7);
  auto unit = [](const at::Tensor& x) {
    return (x / x.norm(2, -1, true)).to(at::kBFloat16).to(at::kDouble);
  };
  const int64_t size = s.past + s.time;
  return {unit(at::randn({s.batch, s.time, s.heads, s.head_dim}, at::kDouble)),
          unit(at::randn({s.batch, size, s.kv_heads, s.head_dim}, at::kDouble)),
          at::randn({s.batch, size, s.kv_heads, s.head_dim}, at::kDouble)
              .to(at::kBFloat16)
              .to(at::kDouble)};
}

// The worst row, where a row counts as at least as long as their mean and 0.3: the terms of
// a gradient's row, which are of order 1 here, may cancel to nothing, and rounding goes
// with the terms.
inline double gradient_error(const at::Tensor& actual, const at::Tensor& expected) {
  if (actual.sizes() != expected.sizes()) return INFINITY;
  const at::Tensor size = expected.to(at::kDouble).norm(2, -1);
  const at::Tensor error = (actual.to(at::kDouble) - expected).norm(2, -1);
  const at::Tensor ratio = error / size.clamp_min(std::max(size.mean().item<double>(), 0.3));
  return ratio.nan_to_num(INFINITY, INFINITY).max().item<double>();
}
inline void expect_close(const std::vector<at::Tensor>& actual,
                         const std::vector<at::Tensor>& expected, double tolerance) {
  for (size_t i = 0; i < expected.size(); ++i)
    EXPECT_LE(gradient_error(actual[i].cpu(), expected[i].cpu()), tolerance) << "gradient of "
                                                                             << "qkv"[i];
}

// While it lives, torch fills what it allocates and leaves uninitialised, outputs and workspaces,
// with NaN or all ones.
class PoisonedMemory {
 public:
  PoisonedMemory() { at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true); }
  ~PoisonedMemory() { at::globalContext().setDeterministicAlgorithms(false, false); }
};

// The bits of what `call` returns with one thread and with two.
template <class Call>
void expect_same_bits_for_any_threads(const Call& call) {
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const std::vector<at::Tensor> one = call();
  at::set_num_threads(2);
  const std::vector<at::Tensor> two = call();
  at::set_num_threads(threads);
  for (size_t i = 0; i < one.size(); ++i) EXPECT_TRUE(at::equal(one[i], two[i])) << "tensor " << i;
}

inline std::string error_of(const auto& call) {
  try {
    call();
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

}  // namespace assay::ops
