#pragma once
// Counter-based random numbers: every number is a pure function of (seed, purpose, step, index), so
// nothing is stored in a checkpoint and the order of evaluation never matters. Philox 4x32-10
// [Salmon et al., SC 2011].
#include <array>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <string_view>

namespace assay {

// FNV-1a of a name, for use as a purpose: purpose("initialisation").
constexpr uint64_t purpose(std::string_view name) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

// One Philox block: 128 random bits of a 64-bit key and a 128-bit counter.
constexpr std::array<uint32_t, 4> philox(uint64_t key, uint64_t high, uint64_t low) {
  std::array<uint32_t, 4> x{uint32_t(low), uint32_t(low >> 32), uint32_t(high),
                            uint32_t(high >> 32)};
  uint32_t k0 = uint32_t(key);
  uint32_t k1 = uint32_t(key >> 32);
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    const uint64_t a = uint64_t{0xD2511F53u} * x[0];
    const uint64_t b = uint64_t{0xCD9E8D57u} * x[2];
    x = {uint32_t(b >> 32) ^ x[1] ^ k0, uint32_t(b), uint32_t(a >> 32) ^ x[3] ^ k1, uint32_t(a)};
  }
  return x;
}

// The stream of numbers of one (seed, purpose, step). at(index) is random access; next() walks it.
class Random {
 public:
  Random(uint64_t seed, uint64_t purpose, uint64_t step = 0)
      : key_(seed ^ (purpose * 0x9E3779B97F4A7C15u)), step_(step) {}
  Random(uint64_t seed, std::string_view name, uint64_t step = 0)
      : Random(seed, assay::purpose(name), step) {}

  uint64_t at(uint64_t index) const {
    const auto bits = philox(key_, step_, index);
    return (uint64_t{bits[1]} << 32) | bits[0];
  }
  uint64_t next() { return at(index_++); }
  // [0, 1)
  double uniform() { return double(next() >> 11) * 0x1p-53; }
  // 0 … n − 1
  uint64_t below(uint64_t n) {
    return uint64_t((static_cast<unsigned __int128>(next()) * n) >> 64);
  }
  double normal() {  // mean 0, variance 1; Box–Muller
    const double radius = std::sqrt(-2 * std::log1p(-uniform()));
    return radius * std::cos(2 * std::numbers::pi * uniform());
  }

 private:
  uint64_t key_;
  uint64_t step_;
  uint64_t index_ = 0;
};

// A pseudo-random permutation of 0 … size − 1 evaluated one element at a time, in O(1) memory: a
// 4-round Feistel network over the next power of four, walked until it lands inside the range.
class Permutation {
 public:
  Permutation(uint64_t size, uint64_t seed, uint64_t purpose, uint64_t step = 0)
      : size_(size), key_(seed ^ (purpose * 0x9E3779B97F4A7C15u)), step_(step) {
    while ((uint64_t{1} << (2 * half_bits_)) < size) ++half_bits_;
  }
  uint64_t operator()(uint64_t index) const {
    do index = shuffle(index);
    while (index >= size_);
    return index;
  }

 private:
  uint64_t shuffle(uint64_t index) const {
    const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
    uint64_t left = index >> half_bits_;
    uint64_t right = index & mask;
    for (uint64_t round = 0; round < 4; ++round) {
      const uint64_t mixed = left ^ (philox(key_, step_ * 4 + round, right)[0] & mask);
      left = right;
      right = mixed;
    }
    return (left << half_bits_) | right;
  }
  uint64_t size_;
  uint64_t key_;
  uint64_t step_;
  int half_bits_ = 1;
};

}  // namespace assay
