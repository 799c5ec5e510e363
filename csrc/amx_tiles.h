// Tiles of bytes or of bfloat16: the instructions of AMX, or plain functions that do the same, for machines without them.
//
// KVILT_AMX_EMULATED chooses the functions. Only the instructions that the kernels need are here. Tiles are named by
// literals, since they are part of an instruction.
#pragma once
#include <bit>
#include <cstdint>
#include <cstring>

namespace kvilt::KVILT_ISA {

// Rows and bytes of a row of each tile, as LDTILECFG reads them.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  constexpr void set(int tile, int count, int bytes) {
    rows[tile] = uint8_t(count);
    row_bytes[tile] = uint16_t(bytes);
  }
};
static_assert(sizeof(TileShapes) == 64);

#if defined(KVILT_AMX_EMULATED)

struct EmulatedTiles {
  TileShapes shapes;
  uint8_t bytes[8][16][64];

  void configure(const TileShapes& to) {
    shapes = to;
    std::memset(bytes, 0, sizeof bytes);
  }
  void zero(int tile) { std::memset(bytes[tile], 0, sizeof bytes[tile]); }
  void load(int tile, const void* from, int64_t stride) {
    zero(tile);
    for (int row = 0; row < shapes.rows[tile]; ++row)
      std::memcpy(bytes[tile][row], static_cast<const uint8_t*>(from) + row * stride, shapes.row_bytes[tile]);
  }
  void save(int tile, void* to, int64_t stride) const {
    for (int row = 0; row < shapes.rows[tile]; ++row)
      std::memcpy(static_cast<uint8_t*>(to) + row * stride, bytes[tile][row], shapes.row_bytes[tile]);
  }
  // Signed bytes of `a` times unsigned bytes of `b`, four neighbours to a sum of 32 bits.
  void multiply_bytes(int to, int a, int b) {
    for (int m = 0; m < shapes.rows[to]; ++m)
      for (int k = 0; k < shapes.row_bytes[a] / 4; ++k)
        for (int n = 0; n < shapes.row_bytes[to] / 4; ++n) {
          int32_t sum;
          std::memcpy(&sum, &bytes[to][m][4 * n], 4);
          for (int i = 0; i < 4; ++i) sum += int32_t(int8_t(bytes[a][m][4 * k + i])) * bytes[b][k][4 * n + i];
          std::memcpy(&bytes[to][m][4 * n], &sum, 4);
        }
  }
  // The order of Intel's description: first and second numbers of pairs apart, then both sums to what was there.
  void multiply_bfloats(int to, int a, int b) {
    const auto number = [&](int tile, int row, int at) {
      uint32_t bits = 0;
      std::memcpy(reinterpret_cast<char*>(&bits) + 2, &bytes[tile][row][2 * at], 2);
      return std::bit_cast<float>(bits);
    };
    const int columns = shapes.row_bytes[to] / 4;
    float second[16][2][16];  // of b: [pair][which][column]
    for (int k = 0; k < shapes.rows[b]; ++k)
      for (int n = 0; n < columns; ++n)
        for (int i = 0; i < 2; ++i) second[k][i][n] = number(b, k, 2 * n + i);
    for (int m = 0; m < shapes.rows[to]; ++m) {
      float sums[2][16] = {}, total[16];
      for (int k = 0; k < shapes.rows[b]; ++k)
        for (int i = 0; i < 2; ++i) {
          const float first = number(a, m, 2 * k + i);
          for (int n = 0; n < columns; ++n) sums[i][n] = __builtin_fmaf(first, second[k][i][n], sums[i][n]);
        }
      std::memcpy(total, bytes[to][m], sizeof total);
      for (int n = 0; n < columns; ++n) total[n] += sums[0][n] + sums[1][n];
      std::memcpy(bytes[to][m], total, size_t(columns) * 4);
    }
  }
};
inline thread_local EmulatedTiles tiles_of_thread;

inline void configure_tiles(const TileShapes& shapes) { tiles_of_thread.configure(shapes); }
inline void release_tiles() {}
#define KVILT_TILE_LOAD(tile, from, stride) tiles_of_thread.load(tile, from, stride)
#define KVILT_TILE_STORE(tile, to, stride) tiles_of_thread.save(tile, to, stride)
#define KVILT_TILE_ZERO(tile) tiles_of_thread.zero(tile)
#define KVILT_TILE_MULTIPLY_BYTES(to, a, b) tiles_of_thread.multiply_bytes(to, a, b)
#define KVILT_TILE_MULTIPLY_BFLOATS(to, a, b) tiles_of_thread.multiply_bfloats(to, a, b)

#else

// The instructions with their operands in memory named: the compiler's own functions do not say what they read and
// write, and stores before them and loads after them are then removed.
struct TileMemory {
  char bytes[1024];
};

inline void configure_tiles(const TileShapes& shapes) { __asm__ volatile("ldtilecfg %0" : : "m"(shapes)); }
inline void release_tiles() { __asm__ volatile("tilerelease"); }
#define KVILT_TILE_LOAD(tile, from, stride)           \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile \
                   :                                  \
                   : "r"(from), "r"(int64_t(stride)), "m"(*reinterpret_cast<const TileMemory*>(from)))
#define KVILT_TILE_STORE(tile, to, stride)                    \
  __asm__ volatile("tilestored %%tmm" #tile ", (%1,%2,1)"     \
                   : "=m"(*reinterpret_cast<TileMemory*>(to)) \
                   : "r"(to), "r"(int64_t(stride)))
#define KVILT_TILE_ZERO(tile) __asm__ volatile("tilezero %tmm" #tile)
#define KVILT_TILE_MULTIPLY_BYTES(to, a, b) __asm__ volatile("tdpbsud %tmm" #b ", %tmm" #a ", %tmm" #to)
#define KVILT_TILE_MULTIPLY_BFLOATS(to, a, b) __asm__ volatile("tdpbf16ps %tmm" #b ", %tmm" #a ", %tmm" #to)

#endif

}  // namespace kvilt::KVILT_ISA
