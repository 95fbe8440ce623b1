#include "ops/cpu/cpu_tiles.h"

#if defined(__x86_64__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>

namespace assay::ops::cpu {
namespace {

constexpr long kRequestPermission = 0x1023;  // of arch_prctl: ARCH_REQ_XCOMP_PERM
constexpr long kTileData = 18;               // the part of a thread's state that tiles are

// The operand of ldtilecfg: all eight registers have 16 rows of 64 bytes.
struct alignas(64) Configuration {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// GCC does not take the attribute of a constructor.
__attribute__((target("amx-tile"))) void configure() {
  static const Configuration configuration;
  _tile_loadconfig(&configuration);
}
__attribute__((target("amx-tile"))) void release() { _tile_release(); }

// Registers 0 to 3 have the sums, 4 has A, and 5 to 7 have B in turn.
template <int kCount>
__attribute__((target("amx-tile,amx-bf16"))) void multiply_row(int64_t depth, const float* a,
                                                               int64_t a_row, const float* b,
                                                               int64_t b_row, float* c,
                                                               int64_t c_row, bool add) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  if (add) {
    _tile_loadd(0, c, 4 * c_row);
    if constexpr (kCount > 1) _tile_loadd(1, c + kTile, 4 * c_row);
    if constexpr (kCount > 2) _tile_loadd(2, c + 2 * kTile, 4 * c_row);
    if constexpr (kCount > 3) _tile_loadd(3, c + 3 * kTile, 4 * c_row);
  }
  for (int64_t k = 0; k < depth; k += kTile) {
    const float* right = b + k * b_row;
    _tile_loadd(4, a + k, 4 * a_row);
    _tile_loadd(5, right, 4 * b_row);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (kCount > 1) {
      _tile_loadd(6, right + kTile, 4 * b_row);
      _tile_dpbf16ps(1, 4, 6);
    }
    if constexpr (kCount > 2) {
      _tile_loadd(7, right + 2 * kTile, 4 * b_row);
      _tile_dpbf16ps(2, 4, 7);
    }
    if constexpr (kCount > 3) {
      _tile_loadd(5, right + 3 * kTile, 4 * b_row);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  _tile_stored(0, c, 4 * c_row);
  if constexpr (kCount > 1) _tile_stored(1, c + kTile, 4 * c_row);
  if constexpr (kCount > 2) _tile_stored(2, c + 2 * kTile, 4 * c_row);
  if constexpr (kCount > 3) _tile_stored(3, c + 3 * kTile, 4 * c_row);
}

}  // namespace

bool has_tiles() {
  static const bool found = __builtin_cpu_supports("amx-bf16") &&
                            syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return found;
}

Tiles::Tiles() { configure(); }
Tiles::~Tiles() { release(); }

// Registers 0 to 3 have the quarters of the sums, 4 and 5 the halves of A, 6 and 7 those of B.
__attribute__((target("amx-tile,amx-bf16"))) void multiply_tiles(int64_t depth, const std::byte* a,
                                                                 int64_t a_row, const float* b,
                                                                 float* sums, bool add) {
  constexpr int64_t kColumns = 2 * kTile;
  constexpr int64_t kRow = kColumns * 4;  // bytes of a row of B or of the sums
  float* const lower = sums + kTile * kColumns;
  if (add) {
    _tile_loadd(0, sums, kRow);
    _tile_loadd(1, sums + kTile, kRow);
    _tile_loadd(2, lower, kRow);
    _tile_loadd(3, lower + kTile, kRow);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < depth; k += kTile) {
    _tile_loadd(6, b + k * kColumns, kRow);
    _tile_loadd(7, b + k * kColumns + kTile, kRow);
    _tile_loadd(4, a + 4 * k, 4 * a_row);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a + 4 * (kTile * a_row + k), 4 * a_row);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, kRow);
  _tile_stored(1, sums + kTile, kRow);
  _tile_stored(2, lower, kRow);
  _tile_stored(3, lower + kTile, kRow);
}

void multiply_row_of_tiles(int64_t columns, int64_t depth, const float* a, int64_t a_row,
                           const float* b, int64_t b_row, float* c, int64_t c_row, bool add) {
  constexpr auto kOf =
      std::array{multiply_row<1>, multiply_row<2>, multiply_row<3>, multiply_row<4>};
  kOf[size_t(columns / kTile - 1)](depth, a, a_row, b, b_row, c, c_row, add);
}

}  // namespace assay::ops::cpu

#else

namespace assay::ops::cpu {

bool has_tiles() { return false; }
Tiles::Tiles() = default;
Tiles::~Tiles() = default;
void multiply_tiles(int64_t, const std::byte*, int64_t, const float*, float*, bool) {}
void multiply_row_of_tiles(int64_t, int64_t, const float*, int64_t, const float*, int64_t, float*,
                           int64_t, bool) {}

}  // namespace assay::ops::cpu

#endif
