// Packed weights in the layout of rows as bfloat16: a block of a tile becomes sixteen rows of 32 inputs.
//
// Codes of four and five bits are looked up: the numbers that an output's codes stand for, its scale and minimum included,
// are a table in a register. Others are converted one by one. Numbers are rounded once, to the nearest.
#pragma once
#include <array>
#include <utility>

#include "bfloat_impl.h"
#include "blocks_impl.h"
#include "packed.h"

namespace kvilt::KVILT_ISA {

constexpr int64_t kBlockNumbers = kTile * kBlock;  // of a block of a tile
constexpr int kUnpackAhead = 2048;                 // bytes of packed weights to prefetch ahead

template <typename T>
inline T read(const uint8_t* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

// Numbers of four bits lose the lower half of their floats without rounding, which takes 0 to 1 of the last bit that is
// kept. They are made larger by this factor before, which adds 0.35 to 0.71 of that bit, on average a half: the error has
// no side, and numbers that need no rounding stay as they are.
constexpr float kBeforeCut = 1.0f + 0.00276f;  // 1 + 2^-8.5

// Scales of a block's outputs, to be read one by one.
template <WeightKind K>
struct OutputScales {
  using F = PackedFormat<K>;
  alignas(64) float scale[F::halves ? 2 : 1][kTile], low[F::halves ? 2 : 1][kTile];

  explicit OutputScales(const TileScales& of) {
    for (int half = 0; half < (F::halves ? 2 : 1); ++half) {
      store(scale[half], F::bits == 4 ? of.scale[half] * splat(kBeforeCut) : of.scale[half]);
      if constexpr (F::minimum) store(low[half], F::bits == 4 ? of.low[half] * splat(kBeforeCut) : of.low[half]);
    }
    // In memory, whatever the compiler knows of it: a load broadcasts a scale, but from a register it takes a shuffle,
    // and shuffles are what unpacking is bound by.
    __asm__("" : "+m"(scale), "+m"(low));
  }
  // The numbers that codes of an output stand for, in one half of the block; codes less their offset.
  f32x16 apply(f32x16 codes, int output, int half = 0) const {
    if constexpr (F::minimum) return fma(codes, splat(scale[half][output]), splat(low[half][output]));
    else return codes * splat(scale[half][output]);
  }
};

inline f32x16 count_from(float first) {
  return {_mm512_add_ps(_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), _mm512_set1_ps(first))};
}

// The nibbles of two outputs, twice.
inline __m512i two_outputs(const uint8_t* p) {
  return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

// The nibbles of two outputs as words: those of the first output in the low and of the second in the high bytes.
inline __m512i nibble_words(const uint8_t* p) {
  constexpr auto shifts = [] {
    std::array<uint8_t, 64> made{};
    for (int word = 0; word < kBlock; ++word)
      for (int output = 0; output < 2; ++output)
        made[2 * word + output] = uint8_t(4 * (word / 16 * 8 + output * 4 + word % 4));
    return made;
  }();
  alignas(64) static constexpr std::array<uint8_t, 64> kShifts = shifts;
  const __m512i words = _mm512_multishift_epi64_epi8(_mm512_load_si512(kShifts.data()), two_outputs(p));
  return _mm512_and_si512(words, _mm512_set1_epi8(15));
}

// Where the float of each code of one of two outputs has its upper half, as bytes of a table of sixteen floats.
inline __m512i upper_halves(__m512i both, int output) {
  constexpr auto shifts = [](int output) {
    std::array<uint8_t, 64> made{};
    for (int byte = 0; byte < 64; ++byte)
      made[byte] = uint8_t((4 * (byte / 32 * 8 + output * 4 + byte / 2 % 4) - 2) & 63);
    return made;
  };
  alignas(64) static constexpr std::array<uint8_t, 64> kShifts[2] = {shifts(0), shifts(1)};
  const __m512i codes = _mm512_multishift_epi64_epi8(_mm512_load_si512(kShifts[output].data()), both);
  return _mm512_ternarylogic_epi32(codes, _mm512_set1_epi8(15 << 2), _mm512_set1_epi16(0x0302), 0xea);  // a & b | c
}

// Two outputs with codes of four bits. Their tables are floats, of which the upper halves are looked up byte by byte: one
// instruction, where looking up words takes two.
template <WeightKind K>
inline void two_rows_of_four_bits(const uint8_t* w, int output, const OutputScales<K>& of, uint16_t* out) {
  using F = PackedFormat<K>;
  const auto numbers = [] {
    if constexpr (F::coding == kFp4Coding) return load_unsigned(kFp4Numbers);
    else if constexpr (F::coding == kIq4Coding) return load_byte(kIq4Numbers);
    else return count_from(0);
  }() - float(F::offset);
  const __m512i both = two_outputs(w + output * 16);
  for (int i = 0; i < 2; ++i) {
    const __m512i table = _mm512_castps_si512(of.apply(numbers, output + i).v);
    _mm512_store_si512(out + kBlock * i, _mm512_permutexvar_epi8(upper_halves(both, i), table));
  }
}

// Two outputs with codes of five bits: tables of 32 words.
template <WeightKind K>
inline void two_rows_of_five_bits(const uint8_t* w, int output, const OutputScales<K>& of, uint16_t* out) {
  using F = PackedFormat<K>;
  const __m512i nibbles = nibble_words(w + output * 16);
  for (int i = 0; i < 2; ++i) {
    const __m512i table =
        to_bfloats(of.apply(count_from(-F::offset), output + i), of.apply(count_from(16 - F::offset), output + i));
    const __m512i low = i ? _mm512_srli_epi16(nibbles, 8) : _mm512_and_si512(nibbles, _mm512_set1_epi16(15));
    const auto plane = read<uint32_t>(w + 256 + 4 * (output + i));
    const __m512i words = _mm512_mask_add_epi16(low, plane, low, _mm512_set1_epi16(16));
    _mm512_store_si512(out + kBlock * i, _mm512_permutexvar_epi16(words, table));
  }
}

// The codes of an output's block as bytes.
template <int Coding>
inline __m256i code_bytes(const uint8_t* w, int output) {
  const auto two_bits = [&](int at) {
    const __m256i eight = _mm256_set1_epi64x(read<int64_t>(w + at + 8 * output));
    return _mm256_and_si256(_mm256_srlv_epi64(eight, _mm256_setr_epi64x(0, 2, 4, 6)), _mm256_set1_epi8(3));
  };
  if constexpr (Coding == 8) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + kBlock * output));
  else if constexpr (Coding == 2) return two_bits(0);
  else if constexpr (Coding == 3) {
    const __m256i low = two_bits(0);
    return _mm256_mask_add_epi8(low, read<uint32_t>(w + 128 + 4 * output), low, _mm256_set1_epi8(4));
  } else {
    static_assert(Coding == 6);
    const __m128i both = _mm_loadu_si128(reinterpret_cast<const __m128i*>(w + 16 * output));
    const __m256i nibbles = _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(both, 4), both), _mm256_set1_epi8(15));
    return _mm256_or_si256(nibbles, _mm256_slli_epi16(two_bits(256), 4));
  }
}

template <WeightKind K>
inline __m512i converted_row(const uint8_t* w, int output, const OutputScales<K>& of) {
  using F = PackedFormat<K>;
  const __m256i codes = code_bytes<F::coding>(w, output);
  const auto floats = [](__m128i bytes) -> f32x16 {
    return f32x16{_mm512_cvtepi32_ps(F::signed_codes ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes))} -
           float(F::offset);
  };
  const f32x16 low = floats(_mm256_castsi256_si128(codes)), high = floats(_mm256_extracti128_si256(codes, 1));
  return to_bfloats(of.apply(low, output), of.apply(high, output, F::halves));
}

// A block of a tile as bfloat16 [16][32].
template <WeightKind K>
inline void unpack_block(const uint8_t* tile, int64_t b, uint16_t* out) {
  using F = PackedFormat<K>;
  const uint8_t* super = tile + F::tile_bytes(b / kSuperBlock * kSuperBlock);
  const uint8_t* at = super + F::header + b % kSuperBlock * F::block;
  for (int line = 0; line < F::block; line += 64) __builtin_prefetch(at + kUnpackAhead + line);
  f32x16 factor = {}, low_factor = {};
  if constexpr (F::k) factor = load_half(reinterpret_cast<const uint16_t*>(super));
  if constexpr (F::k && F::minimum) low_factor = load_half(reinterpret_cast<const uint16_t*>(super + 2 * kTile));
  const OutputScales<K> scales(scales_of<K>(at + F::codes, factor, low_factor));
#pragma GCC unroll 8
  for (int output = 0; output < kTile; output += 2) {
    uint16_t* rows = out + kBlock * output;
    if constexpr (F::bits == 4) two_rows_of_four_bits<K>(at, output, scales, rows);
    else if constexpr (F::bits == 5) two_rows_of_five_bits<K>(at, output, scales, rows);
    else {
      _mm512_store_si512(rows, converted_row<K>(at, output, scales));
      _mm512_store_si512(rows + kBlock, converted_row<K>(at, output + 1, scales));
    }
  }
}

// Where a block of a tile is as bfloat16: in `room`, unless it is that already.
template <WeightKind K>
inline const uint16_t* block_of(const uint8_t* tile, int64_t b, uint16_t* room) {
  const auto* plain = reinterpret_cast<const uint16_t*>(tile) + b * kBlockNumbers;
  if constexpr (K == WeightKind::kBfloat16) return plain;
  else if constexpr (K == WeightKind::kFloat16)
    for (int64_t i = 0; i < kBlockNumbers; i += kBlock)
      _mm512_store_si512(room + i, to_bfloats(load_half(plain + i), load_half(plain + i + 16)));
  else unpack_block<K>(tile, b, room);
  return room;
}

// Blocks of a tile as bfloat16.
struct UnpackedBlocks {
  const uint16_t* first;
  int64_t step;  // numbers from block to block
};

// Blocks [first, first + count): in every second place of `room`, unless they are bfloat16 already.
template <WeightKind K>
UnpackedBlocks blocks_of(const uint8_t* tile, int64_t first, int64_t count, uint16_t* room) {
  if constexpr (K == WeightKind::kBfloat16) return {block_of<K>(tile, first, room), kBlockNumbers};
  for (int64_t i = 0; i < count; ++i) block_of<K>(tile, first + i, room + 2 * i * kBlockNumbers);
  return {room, 2 * kBlockNumbers};
}

using Unpack = UnpackedBlocks (*)(const uint8_t* tile, int64_t first, int64_t count, uint16_t* room);

template <WeightKind K>
constexpr Unpack unpack_of() {
  if constexpr (K == WeightKind::kFloat32) return nullptr;
  else return blocks_of<K>;
}
template <int... K>
constexpr std::array<Unpack, kWeightKinds> all_unpacks(std::integer_sequence<int, K...>) {
  return {unpack_of<WeightKind(K)>()...};
}
constexpr std::array<Unpack, kWeightKinds> kUnpacks = all_unpacks(std::make_integer_sequence<int, kWeightKinds>());

}  // namespace kvilt::KVILT_ISA
