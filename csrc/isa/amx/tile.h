// The tile registers of Intel AMX (Intel SDM volume 1, chapter 18).
//
// Written as assembly: gcc 12's own wrappers do not tell the compiler that loading a tile reads memory.
// A tile register is named by a number that the instruction holds, so it is a template argument.
#pragma once
#include <cstddef>
#include <cstdint>

namespace twostep::amx {

// What LDTILECFG reads: rows and bytes of a row of each of the eight tiles.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  constexpr void set(int tile, int num_rows, int bytes) {
    rows[tile] = static_cast<uint8_t>(num_rows);
    row_bytes[tile] = static_cast<uint16_t>(bytes);
  }
};
static_assert(sizeof(TileConfig) == 64);

// The tiles of the running thread, from here to the end of the scope. Outside, they are in their
// initial state, so that switching threads saves nothing.
class Tiles {
 public:
  explicit Tiles(const TileConfig& config) { asm volatile("ldtilecfg %0" : : "m"(config)); }
  ~Tiles() { asm volatile("tilerelease"); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

template <int tile>
inline void zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(tile));
}
template <int tile>
inline void load(const void* rows, size_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(rows), "r"(stride), "i"(tile) : "memory");
}
template <int tile>
inline void store(void* rows, size_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(rows), "r"(stride), "i"(tile) : "memory");
}

// sum [rows of a][16] int32 += a [rows][4 k] int8 times b [k][16][4] int8.
template <int sum, int a, int b>
inline void dot_s8() {
  asm volatile("tdpbssd %%tmm%c0, %%tmm%c1, %%tmm%c2" : : "i"(b), "i"(a), "i"(sum));
}
// sum [rows of a][16] float32 += a [rows][2 k] bf16 times b [k][16][2] bf16.
template <int sum, int a, int b>
inline void dot_bf16() {
  asm volatile("tdpbf16ps %%tmm%c0, %%tmm%c1, %%tmm%c2" : : "i"(b), "i"(a), "i"(sum));
}

}  // namespace twostep::amx
