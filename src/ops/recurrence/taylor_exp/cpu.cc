#include <vector>

#include "ops/recurrence/taylor_exp/kernel.h"

namespace assay::ops::cpu {
namespace {

constexpr int64_t kGrain = 64;  // rows

template <class T>
void forward(const TaylorFeatures& p, T* y, int64_t begin, int64_t end) {
  const int64_t K = p.key_dim;
  const int64_t F = feature_count(K);
  const T* weights = static_cast<const T*>(p.weights);
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(p.x) + row * K;
    T* out = y + row * F;
    T* product = out + 1 + K;
    out[0] = 1;
    for (int64_t i = 0; i < K; ++i) out[1 + i] = x[i];
    for (int64_t i = 0; i < K; product += K - i++)
      for (int64_t j = i; j < K; ++j) product[j - i] = x[i] * x[j];
    if (weights)
      for (int64_t f = 0; f < F; ++f) out[f] *= weights[f];
  }
}

template <class T>
void backward(const TaylorFeatures& p, const T* dy, T* dx, int64_t begin, int64_t end) {
  const int64_t K = p.key_dim;
  const int64_t F = feature_count(K);
  const T* weights = static_cast<const T*>(p.weights);
  std::vector<T> weighted(size_t(F), 1);
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(p.x) + row * K;
    for (int64_t f = 0; f < F; ++f)
      weighted[size_t(f)] = dy[row * F + f] * (weights ? weights[f] : 1);
    T* out = dx + row * K;
    for (int64_t i = 0; i < K; ++i) out[i] = weighted[size_t(1 + i)];
    const T* g = weighted.data() + 1 + K;
    for (int64_t i = 0; i < K; g += K - i++) {
      T sum = 0;
      for (int64_t j = i; j < K; ++j) {
        sum += g[j - i] * x[j];
        out[j] += g[j - i] * x[i];
      }
      out[i] += sum;
    }
  }
}

}  // namespace

void taylor_features(const TaylorFeatures& p, void* y, const ParallelFor& parallel) {
  parallel(p.rows, kGrain, [&](int64_t begin, int64_t end) {
    if (p.dtype == DType::f64) forward(p, static_cast<double*>(y), begin, end);
    else forward(p, static_cast<float*>(y), begin, end);
  });
}

void taylor_features(const TaylorFeatures& p, const void* dy, void* dx,
                     const ParallelFor& parallel) {
  parallel(p.rows, kGrain, [&](int64_t begin, int64_t end) {
    if (p.dtype == DType::f64)
      backward(p, static_cast<const double*>(dy), static_cast<double*>(dx), begin, end);
    else backward(p, static_cast<const float*>(dy), static_cast<float*>(dx), begin, end);
  });
}

}  // namespace assay::ops::cpu
