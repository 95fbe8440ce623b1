#include "ops/dense/linear/cpu_tiles.h"

#if defined(__x86_64__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

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

constexpr int64_t kHalf = 16;  // rows of a register, and numbers or words of a row

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
                                                                 int64_t row, const float* b,
                                                                 float* sums, bool add) {
  constexpr int64_t kRow = kTileRows * 4;  // bytes of a row of B or of the sums
  float* const lower = sums + kHalf * kTileRows;
  if (add) {
    _tile_loadd(0, sums, kRow);
    _tile_loadd(1, sums + kHalf, kRow);
    _tile_loadd(2, lower, kRow);
    _tile_loadd(3, lower + kHalf, kRow);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < depth; k += kTileDepth) {
    _tile_loadd(6, b + k * kTileRows, kRow);
    _tile_loadd(7, b + k * kTileRows + kHalf, kRow);
    _tile_loadd(4, a + 4 * k, row);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a + kHalf * row + 4 * k, row);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, kRow);
  _tile_stored(1, sums + kHalf, kRow);
  _tile_stored(2, lower, kRow);
  _tile_stored(3, lower + kHalf, kRow);
}

}  // namespace assay::ops::cpu

#else

namespace assay::ops::cpu {

bool has_tiles() { return false; }
Tiles::Tiles() = default;
Tiles::~Tiles() = default;
void multiply_tiles(int64_t, const std::byte*, int64_t, const float*, float*, bool) {}

}  // namespace assay::ops::cpu

#endif
