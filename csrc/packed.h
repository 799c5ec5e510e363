// The bytes of packed weights: tile after tile of sixteen outputs, block after block of 32 inputs.
//
// A block is cut into eight steps of four inputs; a step has 64 bytes, four for each output, so that lanes are outputs.
//   low nibbles   256 bytes: byte (step, output, input) has step j in its low and step j + 4 in its high half
//   fifth bits     64 bytes: byte (output, input) has the bit of step j in bit j
//   bits 5 and 6  128 bytes: two planes; byte (output, input) of plane p has step 4p + j in bits 2j and 2j + 1
//   MXFP4, IQ4    as low nibbles; they stand for sixteen numbers, kFp4Numbers and kIq4Numbers
//   two bits      as bits 5 and 6, from the beginning
//   third bits    as fifth bits, behind two bits
//   whole bytes   512 bytes: byte (step, output, input), signed
// AMX multiplies rows of 32 inputs, so there the codes of an output stand together (the layout kRows):
//   low nibbles   32 bytes of two outputs, four words of 64 bits: nibble n of word q is input 4q + n % 4 + n / 8 * 16 of
//                 the first output if n / 4 is even, of the second if it is odd
//   fifth bits     4 bytes of each output behind them: bit i is that of input i; third bits likewise behind two bits
//   six bits      low nibbles as 16 bytes of each output: byte i has input i in its low and input i + 16 in its high half.
//                 Bits 5 and 6 as 8 bytes of each output: byte j has the inputs j, j + 8, j + 16 and j + 24
//   two bits      as bits 5 and 6, from the beginning
//   whole bytes   32 bytes of each output
//   F16, BF16     32 numbers of each output; in the other layout (kLanes), and for F32 in both, a column of sixteen
//                 outputs for each input
// Both layouts have the same size. Then come the scales of sixteen outputs. The k-formats have small whole scales in each block and, before each eight
// blocks, a header of float16 factors. Q2_K has a scale in the low and a minimum in the high half of each byte of scales,
// one row of them for each sixteen inputs. A weight is scale * (code - offset) + minimum.
#pragma once
#include "kernels.h"

namespace kvilt {

// How codes are read: by their bits, or as the four bits of MXFP4. Those are unsigned here, kFp4Offset more than the
// number they stand for.
constexpr int kFp4Coding = 104;
constexpr int kFp4Offset = 12;
constexpr uint8_t kFp4Numbers[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// Likewise the four bits of IQ4, which stand for signed bytes.
constexpr int kIq4Coding = 105;
constexpr int8_t kIq4Numbers[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

template <WeightKind K>
struct PackedFormat {
  static constexpr bool k = K == WeightKind::kQ2K || K == WeightKind::kQ3K || K == WeightKind::kQ4K ||
                            K == WeightKind::kQ5K || K == WeightKind::kQ6K || K == WeightKind::kIq4K;
  // A scale for each sixteen inputs.
  static constexpr bool halves = K == WeightKind::kQ2K || K == WeightKind::kQ3K || K == WeightKind::kQ6K;
  static constexpr bool minimum = K == WeightKind::kQ4Min || K == WeightKind::kQ5Min || K == WeightKind::kQ2K ||
                                  K == WeightKind::kQ4K || K == WeightKind::kQ5K;
  static constexpr bool signed_codes = K == WeightKind::kQ8 || K == WeightKind::kIq4K;
  static constexpr int bits = K == WeightKind::kQ8                                                       ? 8
                              : K == WeightKind::kQ6K                                                    ? 6
                              : K == WeightKind::kQ5 || K == WeightKind::kQ5Min || K == WeightKind::kQ5K ? 5
                              : K == WeightKind::kQ3K                                                    ? 3
                              : K == WeightKind::kQ2K                                                    ? 2
                                                                                                         : 4;
  static constexpr int coding = K == WeightKind::kFp4 ? kFp4Coding : K == WeightKind::kIq4K ? kIq4Coding : bits;
  static constexpr int offset = K == WeightKind::kQ4    ? 8
                                : K == WeightKind::kQ3K ? 4
                                : K == WeightKind::kQ5  ? 16
                                : K == WeightKind::kQ6K ? 32
                                : K == WeightKind::kFp4 ? kFp4Offset
                                                        : 0;
  static constexpr int codes = bits * 64;                                     // bytes
  static constexpr int scales = (k ? 1 : 2) * kTile;                          // bytes of one row of scales
  static constexpr int block = codes + scales * (halves || minimum ? 2 : 1);  // those of Q2_K share their bytes
  static constexpr int header = k ? 2 * kTile * (minimum ? 2 : 1) : 0;

  static constexpr int64_t tile_bytes(int64_t blocks) {
    return blocks * block + (k ? (blocks + kSuperBlock - 1) / kSuperBlock * header : 0);
  }
};

// One code of a block, read alone.
template <int Coding>
inline int code_at(const uint8_t* w, int step, int byte) {
  if constexpr (Coding == 8) return int8_t(w[64 * step + byte]);
  if constexpr (Coding == 2 || Coding == 3) {
    int code = (w[64 * (step / 4) + byte] >> (2 * (step % 4))) & 3;
    if constexpr (Coding == 3) code |= ((w[128 + byte] >> step) & 1) << 2;
    return code;
  }
  int code = (w[64 * (step % 4) + byte] >> (step < 4 ? 0 : 4)) & 15;
  if constexpr (Coding == kFp4Coding) return kFp4Numbers[code];
  if constexpr (Coding == kIq4Coding) return kIq4Numbers[code];
  if constexpr (Coding == 5) code |= ((w[256 + byte] >> step) & 1) << 4;
  if constexpr (Coding == 6) code |= ((w[256 + 64 * (step / 4) + byte] >> (2 * (step % 4))) & 3) << 4;
  return code;
}

// The same in the layout of rows: that of one input of one output.
template <int Coding>
inline int code_in_row(const uint8_t* w, int output, int input) {
  const auto two_bits = [&](int at) { return (w[at + 8 * output + input % 8] >> (input / 8 * 2)) & 3; };
  const auto one_bit = [&](int at) { return (w[at + 4 * output + input / 8] >> (input % 8)) & 1; };
  if constexpr (Coding == 8) return int8_t(w[kBlock * output + input]);
  if constexpr (Coding == 2) return two_bits(0);
  if constexpr (Coding == 3) return two_bits(0) | one_bit(128) << 2;
  if constexpr (Coding == 6) return ((w[16 * output + input % 16] >> (input / 16 * 4)) & 15) | two_bits(256) << 4;
  const int nibble = input / 16 * 8 + output % 2 * 4 + input % 4;
  const int code = (w[output / 2 * 32 + input % 16 / 4 * 8 + nibble / 2] >> (nibble % 2 * 4)) & 15;
  if constexpr (Coding == kFp4Coding) return kFp4Numbers[code];
  if constexpr (Coding == kIq4Coding) return kIq4Numbers[code];
  if constexpr (Coding == 5) return code | one_bit(256) << 4;
  return code;
}

inline int64_t tile_bytes(WeightKind kind, int64_t inputs) {
  const int64_t blocks = (inputs + kBlock - 1) / kBlock;
  switch (kind) {
    case WeightKind::kFloat32: return inputs * kTile * 4;
    case WeightKind::kFloat16:
    case WeightKind::kBfloat16: return blocks * kBlock * kTile * 2;
    case WeightKind::kQ4: return PackedFormat<WeightKind::kQ4>::tile_bytes(blocks);
    case WeightKind::kQ4Min: return PackedFormat<WeightKind::kQ4Min>::tile_bytes(blocks);
    case WeightKind::kQ5: return PackedFormat<WeightKind::kQ5>::tile_bytes(blocks);
    case WeightKind::kQ5Min: return PackedFormat<WeightKind::kQ5Min>::tile_bytes(blocks);
    case WeightKind::kQ8: return PackedFormat<WeightKind::kQ8>::tile_bytes(blocks);
    case WeightKind::kQ4K: return PackedFormat<WeightKind::kQ4K>::tile_bytes(blocks);
    case WeightKind::kQ5K: return PackedFormat<WeightKind::kQ5K>::tile_bytes(blocks);
    case WeightKind::kQ6K: return PackedFormat<WeightKind::kQ6K>::tile_bytes(blocks);
    case WeightKind::kFp4: return PackedFormat<WeightKind::kFp4>::tile_bytes(blocks);
    case WeightKind::kQ2K: return PackedFormat<WeightKind::kQ2K>::tile_bytes(blocks);
    case WeightKind::kQ3K: return PackedFormat<WeightKind::kQ3K>::tile_bytes(blocks);
    case WeightKind::kIq4K: return PackedFormat<WeightKind::kIq4K>::tile_bytes(blocks);
  }
  return 0;
}

inline const uint8_t* tile_at(const PackedWeight& w, int64_t tile) {
  return w.data + tile * tile_bytes(w.kind, w.inputs);
}

}  // namespace kvilt
