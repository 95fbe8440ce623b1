#pragma once
// Results of operators on rows compared with float64.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>

namespace assay::ops {

inline double tolerance(at::ScalarType dtype) {
  return dtype == at::kDouble ? 1e-12 : dtype == at::kFloat ? 2e-6 : 1e-2;
}

// The largest ‖a_i − b_i‖ / ‖b_i‖ over rows of the last dimension.
inline void expect_rows(const at::Tensor& a, const at::Tensor& b, at::ScalarType dtype,
                        const char* what) {
  ASSERT_EQ(a.sizes(), b.sizes()) << what;
  const at::Tensor x = a.detach().to(at::kCPU, at::kDouble);
  const at::Tensor y = b.detach().to(at::kCPU, at::kDouble);
  const double error = ((x - y).norm(2, -1) / y.norm(2, -1).clamp_min(1e-300)).max().item<double>();
  EXPECT_LE(error, tolerance(dtype)) << what;
}

// As expect_rows, but rows of less than the mean length count as rows of this length: a sum that
// is nearly 0 has the absolute error of its terms.
inline void expect_summed_rows(const at::Tensor& a, const at::Tensor& b, at::ScalarType dtype,
                               const std::string& what) {
  ASSERT_EQ(a.sizes(), b.sizes()) << what;
  const at::Tensor x = a.detach().to(at::kCPU, at::kDouble);
  const at::Tensor y = b.detach();
  const at::Tensor length = y.norm(2, -1);
  const at::Tensor error = (x - y).norm(2, -1);
  EXPECT_LE((error / at::maximum(length, length.mean())).max().item<double>(), tolerance(dtype))
      << what;
}

}  // namespace assay::ops
