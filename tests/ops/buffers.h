#pragma once
// Memory for tests of kernels: numbers as double on one side, in the kernel's type on the other.
#include <bit>
#include <cmath>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "base/random.h"
#include "ops/core/kernel.h"

namespace assay::ops {

using Numbers = std::vector<double>;

inline DType real_of(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }
inline const char* name_of(DType dtype) {
  return dtype == DType::f64 ? "f64" : dtype == DType::f32 ? "f32" : "bf16";
}

// `size` numbers of one dtype; NaN until written.
class Buffer {
 public:
  Buffer(DType dtype, int64_t size)
      : Buffer(dtype, Numbers(size, std::numeric_limits<double>::quiet_NaN())) {}
  Buffer(DType dtype, const Numbers& numbers)
      : dtype_(dtype), size_(numbers.size()), memory_(numbers.size()) {
    for (size_t i = 0; i < size_; ++i) set(i, numbers[i]);
  }
  // An empty buffer stands for an absent tensor
  void* data() { return size_ ? memory_.data() : nullptr; }
  Numbers numbers() const {
    Numbers out(size_);
    for (size_t i = 0; i < size_; ++i) out[i] = get(i);
    return out;
  }

 private:
  template <class T>
  T* as() {
    return reinterpret_cast<T*>(memory_.data());
  }
  template <class T>
  const T* as() const {
    return reinterpret_cast<const T*>(memory_.data());
  }
  void set(size_t i, double x) {
    if (dtype_ == DType::f64) as<double>()[i] = x;
    else if (dtype_ == DType::f32) as<float>()[i] = float(x);
    // Callers pass numbers that bf16 holds exactly
    else as<uint16_t>()[i] = std::bit_cast<uint32_t>(float(x)) >> 16;
  }
  double get(size_t i) const {
    if (dtype_ == DType::f64) return as<double>()[i];
    if (dtype_ == DType::f32) return as<float>()[i];
    return std::bit_cast<float>(uint32_t{as<uint16_t>()[i]} << 16);
  }
  DType dtype_;
  size_t size_;
  std::vector<double> memory_;
};

// Normal numbers around `mean`, rounded to what `dtype` holds exactly.
inline Numbers normal(uint64_t seed, const std::string& name, int64_t size, DType dtype,
                      double mean = 0, double scale = 1) {
  Random random(seed, name);
  Numbers out(size);
  for (double& x : out) {
    x = mean + scale * random.normal();
    if (dtype == DType::f32) x = float(x);
    if (dtype == DType::bf16)
      x = std::bit_cast<float>(std::bit_cast<uint32_t>(float(x)) & 0xFFFF0000u);
  }
  return out;
}

// max over rows of ‖actual − expected‖ / ‖sizes‖; infinite when a number is missing or not finite.
inline double worst_row_error(const Numbers& actual, const Numbers& expected, const Numbers& sizes,
                              int64_t row) {
  if (actual.size() != expected.size()) return std::numeric_limits<double>::infinity();
  double worst = 0;
  for (size_t begin = 0; begin < expected.size(); begin += row) {
    double difference = 0;
    double norm = 0;
    for (size_t i = begin; i < begin + row; ++i) {
      difference += std::pow(actual[i] - expected[i], 2);
      norm += std::pow(sizes[i], 2);
    }
    const double error = difference == 0 ? 0 : std::sqrt(difference / norm);
    worst = std::isfinite(error) ? std::max(worst, error) : std::numeric_limits<double>::infinity();
  }
  return worst;
}
inline double worst_row_error(const Numbers& actual, const Numbers& expected, int64_t row) {
  return worst_row_error(actual, expected, expected, row);
}

// A pool of `threads` that cuts the work as evenly as it can, whatever the grain.
inline ParallelFor pool(int threads) {
  return [threads](int64_t size, int64_t, const std::function<void(int64_t, int64_t)>& body) {
    std::vector<std::thread> workers;
    for (int i = 0; i < threads; ++i) {
      const int64_t begin = i * size / threads;
      const int64_t end = (i + 1) * size / threads;
      if (begin < end) workers.emplace_back([&body, begin, end] { body(begin, end); });
    }
    for (std::thread& worker : workers) worker.join();
  };
}

// Scratch, poisoned, on a 64-byte boundary.
class Workspace {
 public:
  explicit Workspace(size_t bytes) : memory_(bytes + 64, std::byte{0xFF}) {}
  void* data() {
    const auto address = reinterpret_cast<uintptr_t>(memory_.data());
    return reinterpret_cast<void*>((address + 63) / 64 * 64);
  }

 private:
  std::vector<std::byte> memory_;
};

}  // namespace assay::ops
