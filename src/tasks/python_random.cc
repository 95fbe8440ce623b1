#include "tasks/python_random.h"

#include <bit>
#include <cmath>
#include <numeric>
#include <unordered_set>

#include "base/error.h"

namespace assay::tasks {

PythonRandom::PythonRandom(uint64_t seed) {
  std::vector<uint32_t> key = {uint32_t(seed)};
  if (seed >> 32) key.push_back(uint32_t(seed >> 32));
  state_[0] = 19650218u;
  for (size_t i = 1; i < 624; ++i)
    state_[i] = 1812433253u * (state_[i - 1] ^ state_[i - 1] >> 30) + uint32_t(i);
  size_t i = 1;
  size_t j = 0;
  const auto advance = [&] {
    if (++i < 624) return;
    state_[0] = state_[623];
    i = 1;
  };
  for (size_t k = 624; k > 0; --k) {
    state_[i] =
        (state_[i] ^ (state_[i - 1] ^ state_[i - 1] >> 30) * 1664525u) + key[j] + uint32_t(j);
    advance();
    j = (j + 1) % key.size();
  }
  for (size_t k = 623; k > 0; --k) {
    state_[i] = (state_[i] ^ (state_[i - 1] ^ state_[i - 1] >> 30) * 1566083941u) - uint32_t(i);
    advance();
  }
  state_[0] = 0x80000000u;
}

uint32_t PythonRandom::next() {
  if (index_ == 624) {
    for (size_t i = 0; i < 624; ++i) {
      const uint32_t y = (state_[i] & 0x80000000u) | (state_[(i + 1) % 624] & 0x7FFFFFFFu);
      state_[i] = state_[(i + 397) % 624] ^ y >> 1 ^ (y & 1 ? 0x9908B0DFu : 0);
    }
    index_ = 0;
  }
  uint32_t y = state_[index_++];
  y ^= y >> 11;
  y ^= y << 7 & 0x9D2C5680u;
  y ^= y << 15 & 0xEFC60000u;
  return y ^ y >> 18;
}

uint64_t PythonRandom::below(uint64_t n) {
  const int bits = std::bit_width(n);
  const auto draw = [&] {
    if (bits <= 32) return uint64_t(next() >> (32 - bits));
    const uint64_t low = next();  // words of a long number come lowest first
    return low | uint64_t(next() >> (64 - bits)) << 32;
  };
  uint64_t value = draw();
  while (value >= n) value = draw();
  return value;
}

std::vector<size_t> PythonRandom::sample(size_t population, size_t count) {
  if (count > population) fail("{} examples cannot be drawn from {} documents", count, population);
  size_t set_size = 21;
  if (count > 5)
    set_size += size_t(std::pow(4, std::ceil(std::log(double(count) * 3) / std::log(4.0))));
  std::vector<size_t> drawn;
  if (population <= set_size) {
    std::vector<size_t> pool(population);
    std::iota(pool.begin(), pool.end(), size_t{0});
    for (size_t i = 0; i < count; ++i) {
      const size_t j = below(population - i);
      drawn.push_back(pool[j]);
      pool[j] = pool[population - i - 1];
    }
    return drawn;
  }
  std::unordered_set<size_t> selected;
  while (drawn.size() < count)
    if (const size_t j = below(population); selected.insert(j).second) drawn.push_back(j);
  return drawn;
}

}  // namespace assay::tasks
