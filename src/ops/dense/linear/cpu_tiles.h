#pragma once
// Products of bfloat16 on the tile registers of a CPU with AMX: sums of 32 × 32 in four of them.
#include <cstddef>
#include <cstdint>

namespace assay::ops::cpu {

constexpr int64_t kTileRows = 32;   // rows of A; also columns of B
constexpr int64_t kTileDepth = 16;  // words of a step; a word is two neighbouring k in bf16

// Whether this CPU has AMX for bfloat16 and the system lets this process use it.
bool has_tiles();

// Sets up the tile registers of this thread for as long as it exists.
class Tiles {
 public:
  Tiles();
  ~Tiles();
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

// sums [32, 32] = A B, or sums + A B with `add`, summed in f32. A [32, depth]: words in rows `row`
// bytes apart. B [depth, 32]: words. `depth` is a multiple of 16. Denormal numbers count as 0.
void multiply_tiles(int64_t depth, const std::byte* a, int64_t row, const float* b, float* sums,
                    bool add);

}  // namespace assay::ops::cpu
