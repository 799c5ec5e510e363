// The bytes of packed weights: tile after tile of sixteen outputs, block after block of 32 inputs.
//
// A block is cut into eight steps of four inputs; a step has 64 bytes, four for each output, so that lanes are outputs.
//   low nibbles   256 bytes: byte (step, output, input) has step j in its low and step j + 4 in its high half
//   fifth bits     64 bytes: byte (output, input) has the bit of step j in bit j
//   bits 5 and 6  128 bytes: two planes; byte (output, input) of plane p has step 4p + j in bits 2j and 2j + 1
//   whole bytes   512 bytes: byte (step, output, input), signed
// Then come the scales of sixteen outputs. The k-formats have small whole scales in each block and, before each eight
// blocks, a header of float16 factors. A weight is scale * (code - offset) + minimum.
#pragma once
#include "kernels.h"

namespace kvilt {

template <Kind K>
struct Format {
  static constexpr bool k = K == Kind::k4k || K == Kind::k5k || K == Kind::k6k;
  static constexpr bool halves = K == Kind::k6k;  // a scale for each sixteen inputs
  static constexpr bool minimum = K == Kind::k4m || K == Kind::k5m || K == Kind::k4k || K == Kind::k5k;
  static constexpr int bits = K == Kind::k8 ? 8 : K == Kind::k6k ? 6 : K == Kind::k5 || K == Kind::k5m || K == Kind::k5k ? 5 : 4;
  static constexpr int offset = K == Kind::k4 ? 8 : K == Kind::k5 ? 16 : K == Kind::k6k ? 32 : 0;
  static constexpr int codes = bits * 64;                   // bytes
  static constexpr int scales = (k ? 1 : 2) * kTile;        // bytes of one row of scales
  static constexpr int block = codes + scales * (halves || minimum ? 2 : 1);
  static constexpr int header = k ? 2 * kTile * (minimum ? 2 : 1) : 0;

  static constexpr int64_t tile_bytes(int64_t blocks) {
    return blocks * block + (k ? (blocks + kSuper - 1) / kSuper * header : 0);
  }
};

// One code of a block, read alone.
template <int Bits>
inline int code_at(const uint8_t* w, int step, int byte) {
  if constexpr (Bits == 8) return int8_t(w[64 * step + byte]);
  int code = (w[64 * (step % 4) + byte] >> (step < 4 ? 0 : 4)) & 15;
  if constexpr (Bits == 5) code |= ((w[256 + byte] >> step) & 1) << 4;
  if constexpr (Bits == 6) code |= ((w[256 + 64 * (step / 4) + byte] >> (2 * (step % 4))) & 3) << 4;
  return code;
}

inline int64_t tile_bytes(Kind kind, int64_t inputs) {
  const int64_t blocks = (inputs + kBlock - 1) / kBlock;
  switch (kind) {
    case Kind::kFloat: return inputs * kTile * 4;
    case Kind::kHalf:
    case Kind::kBfloat: return inputs * kTile * 2;
    case Kind::k4: return Format<Kind::k4>::tile_bytes(blocks);
    case Kind::k4m: return Format<Kind::k4m>::tile_bytes(blocks);
    case Kind::k5: return Format<Kind::k5>::tile_bytes(blocks);
    case Kind::k5m: return Format<Kind::k5m>::tile_bytes(blocks);
    case Kind::k8: return Format<Kind::k8>::tile_bytes(blocks);
    case Kind::k4k: return Format<Kind::k4k>::tile_bytes(blocks);
    case Kind::k5k: return Format<Kind::k5k>::tile_bytes(blocks);
    case Kind::k6k: return Format<Kind::k6k>::tile_bytes(blocks);
  }
  return 0;
}

}  // namespace kvilt
