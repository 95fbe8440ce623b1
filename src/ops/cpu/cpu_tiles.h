#pragma once
// Products of bfloat16 on the tile registers of a CPU with AMX, summed in f32. Each register has 16
// rows of 16 numbers or words; a word is two neighbouring k in bfloat16. Denormals count as 0.
#include <cstddef>
#include <cstdint>

namespace assay::ops::cpu {

constexpr int64_t kTile = 16;

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

// sums [32, 32] = A B, or sums + A B with `add`. A [32, depth]: words in rows `a_row` words apart.
// B [depth, 32]: words. `depth` is a multiple of 16.
void multiply_tiles(int64_t depth, const std::byte* a, int64_t a_row, const float* b, float* sums,
                    bool add);
// C [16, columns] = A B, or C + A B with `add`; 16, 32, 48 or 64 columns. A [16, depth] and B
// [depth, columns]: words. Rows are `a_row`, `b_row` and `c_row` words or numbers apart. `depth`
// is a multiple of 16.
void multiply_row_of_tiles(int64_t columns, int64_t depth, const float* a, int64_t a_row,
                           const float* b, int64_t b_row, float* c, int64_t c_row, bool add);

}  // namespace assay::ops::cpu
