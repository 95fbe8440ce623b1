#pragma once
// Memory of the GPU for tests: poisoned with NaN, with margins between rows that have to stay as
// they are; and errors by the worst row.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "ops/cuda/launch.cuh"
#include "ops/cuda/types.cuh"

namespace assay::ops {

using Numbers = std::vector<double>;

inline void must(cudaError_t error) {
  if (error != cudaSuccess) throw Error(std::string("CUDA: ") + cudaGetErrorString(error));
}

inline bool gpu_is_seen() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

// Memory of the GPU, NaN all over.
struct Memory {
  void* data = nullptr;
  size_t size;
  explicit Memory(size_t size) : size(size) {
    must(cudaMalloc(&data, std::max<size_t>(size, 1)));
    must(cudaMemset(data, 0xff, size));
  }
  Memory(const Memory&) = delete;
  ~Memory() { cudaFree(data); }
  std::vector<unsigned char> bytes() const {
    std::vector<unsigned char> out(size);
    must(cudaMemcpy(out.data(), data, size, cudaMemcpyDeviceToHost));
    return out;
  }
};

// Runs `work` twice: both runs must leave the same bytes in the memory that they write.
void expect_equal_runs(const auto& work, const std::vector<const Memory*>& written) {
  std::vector<std::vector<unsigned char>> first;
  for (int run = 0; run < 2; ++run) {
    work();
    must(cudaDeviceSynchronize());
    std::vector<std::vector<unsigned char>> bytes;
    for (const Memory* memory : written) bytes.push_back(memory->bytes());
    if (run == 0) first = bytes;
    else EXPECT_EQ(first, bytes) << "two runs differ";
  }
}

inline size_t size_of(DType dtype) { return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2; }
inline DType real_of(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }
inline double tolerance(DType dtype) {
  return dtype == DType::f64 ? 1e-10 : dtype == DType::f32 ? 1e-5 : 1e-2;
}

inline double get(DType dtype, const unsigned char* from) {
  return cuda::with_type(dtype, [&](auto x) {
    std::memcpy(&x, from, sizeof x);
    return double(cuda::to_compute(x));
  });
}
inline void put(DType dtype, unsigned char* to, double value) {
  cuda::with_type(dtype, [&](auto x) {
    x = cuda::from_compute<decltype(x)>(cuda::Real<decltype(x)>(value));
    std::memcpy(to, &x, sizeof x);
  });
}

// [batch, time, width] on the GPU, `offset` elements into its memory, `margin` elements
// between the rows.
struct Sequence {
  DType dtype;
  int64_t batch;
  int64_t time;
  int64_t width;
  int64_t offset;
  int64_t time_stride;
  int64_t batch_stride;
  Memory memory;
  Sequence(DType dtype, int64_t batch, int64_t time, int64_t width, int64_t offset, int64_t margin)
      : dtype(dtype),
        batch(batch),
        time(time),
        width(width),
        offset(offset),
        time_stride(width + margin),
        batch_stride(time * (width + margin) + margin),
        memory((offset + batch * batch_stride) * size_of(dtype)) {}
  size_t byte(int64_t b, int64_t t, int64_t i) const {
    return (offset + b * batch_stride + t * time_stride + i) * size_of(dtype);
  }
  View view() const {
    return {static_cast<char*>(memory.data) + byte(0, 0, 0), batch_stride, time_stride};
  }
  // Writes `values` and gives them back as they were rounded.
  Numbers set(Numbers values) {
    std::vector<unsigned char> bytes = memory.bytes();
    for_each([&](size_t i, size_t at) {
      put(dtype, &bytes[at], values[i]);
      values[i] = get(dtype, &bytes[at]);
    });
    must(cudaMemcpy(memory.data, bytes.data(), bytes.size(), cudaMemcpyHostToDevice));
    return values;
  }
  Numbers values() const {
    std::vector<unsigned char> bytes = memory.bytes();
    Numbers out(batch * time * width);
    for_each([&](size_t i, size_t at) { out[i] = get(dtype, &bytes[at]); });
    for_each([&](size_t, size_t at) { std::memset(&bytes[at], 0xff, size_of(dtype)); });
    for (unsigned char byte : bytes) EXPECT_EQ(byte, 0xff) << "written outside the rows";
    return out;
  }
  void for_each(auto&& f) const {
    for (int64_t b = 0, n = 0; b < batch; ++b)
      for (int64_t t = 0; t < time; ++t)
        for (int64_t i = 0; i < width; ++i) f(size_t(n++), byte(b, t, i));
  }
};

struct Array : Sequence {  // contiguous
  Array(DType dtype, int64_t size) : Sequence(dtype, 1, 1, size, 0, 0) {}
  void* data() const { return memory.data; }
};

// Σ x[i + n] y[j + n] over n < count.
inline double dot(const Numbers& x, int64_t i, const Numbers& y, int64_t j, int64_t count) {
  double sum = 0;
  for (int64_t n = 0; n < count; ++n) sum += x[i + n] * y[j + n];
  return sum;
}

// The largest ‖row − reference row‖ / ‖reference row‖.
inline double worst_row(const Numbers& got, const Numbers& reference, int64_t width) {
  EXPECT_EQ(got.size(), reference.size());
  double worst = 0;
  for (size_t row = 0; row < reference.size(); row += width) {
    double difference = 0;
    double norm = 0;
    for (size_t i = row; i < row + width; ++i) {
      difference += (got[i] - reference[i]) * (got[i] - reference[i]);
      norm += reference[i] * reference[i];
    }
    const double error = std::sqrt(difference / std::max(norm, 1e-300));
    if (!(error <= worst)) worst = error;  // NaN too
    if (std::isnan(worst)) return worst;
  }
  return worst;
}

// The largest (‖row − reference row‖ − its slack) / ‖reference row‖.
inline double worst_beyond(const Numbers& got, const Numbers& reference, const Numbers& slack) {
  const size_t width = reference.size() / slack.size();
  double worst = 0;
  for (size_t row = 0; row < slack.size(); ++row) {
    double difference = 0;
    double norm = 0;
    for (size_t i = row * width; i < (row + 1) * width; ++i) {
      difference += (got[i] - reference[i]) * (got[i] - reference[i]);
      norm += reference[i] * reference[i];
    }
    const double error = (std::sqrt(difference) - slack[row]) / std::max(std::sqrt(norm), 1e-300);
    if (!(error <= worst)) worst = error;  // NaN too
    if (std::isnan(worst)) return worst;
  }
  return worst;
}

// Each row of `width` numbers at length 1.
inline Numbers unit_rows(Numbers x, int64_t width) {
  for (size_t i = 0; i < x.size(); i += width) {
    double square = 0;
    for (int64_t d = 0; d < width; ++d) square += x[i + d] * x[i + d];
    for (int64_t d = 0; d < width; ++d) x[i + d] /= std::sqrt(square);
  }
  return x;
}

struct Random {
  std::mt19937_64 engine;
  Numbers normal(int64_t count, double mean = 0, double deviation = 1) {
    std::normal_distribution<double> draw(mean, deviation);
    Numbers out(count);
    for (double& x : out) x = draw(engine);
    return out;
  }
  Numbers uniform(int64_t count, double low, double high) {
    std::uniform_real_distribution<double> draw(low, high);
    Numbers out(count);
    for (double& x : out) x = draw(engine);
    return out;
  }
};

}  // namespace assay::ops
