#pragma once
// Python's random.Random, number for number, as far as few-shot selection uses it.
//   generator   MT19937 [Matsumoto, Nishimura 1998], seeded with init_by_array of the 32-bit digits
//   of the seed
//   below(n)    bits of the generator's upper end, drawn again while they are n or more
//   sample      CPython's Random.sample: a partial shuffle, or for small samples of large
//   populations drawing again
#include <array>
#include <cstdint>
#include <vector>

namespace assay::tasks {

class PythonRandom {
 public:
  explicit PythonRandom(uint64_t seed);
  uint32_t next();             // 32 random bits
  uint64_t below(uint64_t n);  // 0 … n − 1, n ≥ 1
  // Indices of `count` of `population` elements, in the order drawn. BadInput when
  // count > population.
  std::vector<size_t> sample(size_t population, size_t count);

 private:
  std::array<uint32_t, 624> state_;
  size_t index_ = 624;
};

}  // namespace assay::tasks
