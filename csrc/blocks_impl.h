// Rows of activations as bytes, and one block of a tile with one block of a row: what every product is made of.
#pragma once
#include "dots_impl.h"
#include "kernels.h"
#include "packed.h"
#include "vectors.h"

namespace kvilt::KVILT_ISA {

constexpr float kTinyPeak = 1e-30f;      // a peak below it counts as zero: its inverse would not be a number
constexpr float kRemainderShare = 4.0f;  // a block whose squared peak is more times the row's mean has a remainder

// A row's inputs, block by block; the last one may be filled up with zeros.
struct RowBlocks {
  const float* from;
  int64_t whole;
  float last[kBlock] = {};

  RowBlocks(const QuantizedRows& x, int64_t row) : from(x.plain + row * x.inputs), whole(x.inputs / kBlock) {
    std::memcpy(last, from + whole * kBlock, (x.inputs - whole * kBlock) * sizeof(float));
  }
  const float* operator[](int64_t b) const { return b < whole ? from + b * kBlock : last; }
};

// A block as bytes, with its floats `rows` apart.
inline void quantize_block(f32x16 low, f32x16 high, int64_t rows, int8_t* values, float* floats) {
  const float peak = reduce_max(max(abs(low), abs(high)));
  const float scale = peak / 127.0f;
  const float inverse = peak > kTinyPeak ? 127.0f / peak : 0.0f;
  const float first = scale * float(store_bytes(values, low * inverse));
  const float second = scale * float(store_bytes(values + 16, high * inverse));
  floats[0] = scale;
  floats[rows] = first + second;
  floats[2 * rows] = first;
  floats[3 * rows] = second;
}

// The squared peak above which a row's blocks have a remainder.
inline float remainder_limit(const float* scales, int64_t blocks, int64_t stride) {
  float sum = 0;
  for (int64_t b = 0; b < blocks; ++b) sum += scales[b * stride] * scales[b * stride];
  return sum * (kRemainderShare / float(blocks));
}

// `kWidth` rows stand together, kRowGroup or twice as many; see QuantizedRows.
template <int kWidth>
inline void quantize_group(const QuantizedRows& x, int64_t group) {
  const int64_t rows = x.count(group), start = group * kRowGroup * x.blocks, first = group * kRowGroup % kWidth;
  const int64_t stand = start - first * x.blocks, left = x.rows - (group * kRowGroup - first);
  const int64_t width = left < kWidth ? left : kWidth;
  int8_t *values = x.values + (stand + first) * kBlock, *remainder_values = x.remainder_values + start * kBlock;
  float *floats = x.floats + stand * 4 + first, *remainder_floats = x.remainder_floats + start * 4, limits[kRowGroup];
  for (int64_t r = 0; r < rows; ++r) {
    const RowBlocks blocks(x, group * kRowGroup + r);
    for (int64_t b = 0; b < x.blocks; ++b) {
      const f32x16 low = load(blocks[b]), high = load(blocks[b] + 16);
      quantize_block(low, high, width, values + (b * width + r) * kBlock, floats + b * width * 4 + r);
    }
    limits[r] = remainder_limit(floats + r, x.blocks, width * 4);
  }
  int32_t* remainders = x.remainders_of(group);
  int32_t found = 0;
  for (int64_t b = 0; b < x.blocks; ++b, values += width * kBlock, floats += width * 4)
    for (int64_t r = 0; r < rows; ++r) {
      const float scale = floats[r];
      if (!(scale * scale > limits[r])) continue;
      const RowBlocks blocks(x, group * kRowGroup + r);
      const int8_t* own = values + r * kBlock;
      const f32x16 low = fma(load_byte(own), -scale, load(blocks[b]));  // what eight bits leave
      const f32x16 high = fma(load_byte(own + 16), -scale, load(blocks[b] + 16));
      quantize_block(low, high, 1, remainder_values + found * kBlock, remainder_floats + found * 4);
      remainders[++found] = int32_t(b * kRowGroup + r);
    }
  remainders[0] = found;
}

inline int64_t quantize_items(const QuantizedRows& x) { return x.groups(); }
inline void quantize(const QuantizedRows& x, int64_t group) { quantize_group<kRowGroup>(x, group); }

// What sixteen outputs have besides their codes, for a block of inputs: w = scale * code + low. The k-formats whose
// scales hold for half a block have two of each.
struct TileScales {
  f32x16 scale[2], low[2];
};

template <WeightKind K>
inline TileScales scales_of(const uint8_t* at, f32x16 factor, f32x16 low_factor) {
  using F = PackedFormat<K>;
  constexpr float offset = float(F::signed_codes ? kByteOffset : F::offset);
  if constexpr (F::halves && F::minimum) {
    return {{load_low_nibbles(at) * factor, load_low_nibbles(at + F::scales) * factor},
            {load_high_nibbles(at) * low_factor, load_high_nibbles(at + F::scales) * low_factor}};
  } else if constexpr (F::halves) {
    const f32x16 first = load_byte(reinterpret_cast<const int8_t*>(at)) * factor;
    const f32x16 second = load_byte(reinterpret_cast<const int8_t*>(at + F::scales)) * factor;
    return {{first, second}, {first * -offset, second * -offset}};
  } else if constexpr (F::k && F::minimum) {
    return {{load_unsigned(at) * factor}, {load_unsigned(at + F::scales) * low_factor}};
  } else if constexpr (F::k) {
    const f32x16 scale = load_byte(reinterpret_cast<const int8_t*>(at)) * factor;
    return {{scale}, {scale * -offset}};
  } else {
    const auto* bits = reinterpret_cast<const uint16_t*>(at);
    const f32x16 scale = K == WeightKind::kFp4 ? load_bfloat(bits) : load_half(bits);
    if constexpr (F::minimum) return {{scale}, {load_half(reinterpret_cast<const uint16_t*>(at + F::scales))}};
    return {{scale}, {scale * -offset}};
  }
}

// A row's block with a part of a tile. `floats` are the row's scale and sums, `kStride` apart; `scales` gives the
// tile's.
template <WeightKind K, int kStride, typename ReadScales>
inline __attribute__((always_inline)) Part add_block(Part sum, const Codes<PackedFormat<K>::coding>& codes, int part,
                                                     const int8_t* values, const float* floats, ReadScales scales) {
  if constexpr (PackedFormat<K>::halves) {
    const Part first = to_float(dots<0, 4>(codes, values)), second = to_float(dots<4, 4>(codes, values));
    const TileScales& of = scales();
    sum = fma(first, part_of(of.scale[0], part) * floats[0], sum);
    sum = fma(part_of(of.low[0], part), floats[2 * kStride], sum);
    sum = fma(second, part_of(of.scale[1], part) * floats[0], sum);
    return fma(part_of(of.low[1], part), floats[3 * kStride], sum);
  } else {
    const Part dot = to_float(dots<0, 8>(codes, values));
    const TileScales& of = scales();
    sum = fma(dot, part_of(of.scale[0], part) * floats[0], sum);
    if constexpr (PackedFormat<K>::minimum || PackedFormat<K>::offset != 0 ||
                  (PackedFormat<K>::signed_codes && kByteOffset != 0))
      sum = fma(part_of(of.low[0], part), floats[kStride], sum);
    return sum;
  }
}

#if defined(__ARM_FEATURE_MATMUL_INT8)

// Two neighbouring rows: the sums of both at once, and then the operations of `add_block` in its order.
template <WeightKind K, int kStride, typename ReadScales>
inline __attribute__((always_inline)) void add_two_blocks(Part* sums, const Codes<PackedFormat<K>::coding>& codes,
                                                          int part, const int8_t* values, const float* floats,
                                                          ReadScales scales) {
  using F = PackedFormat<K>;
  const int8_t* other = values + kBlock;
  if constexpr (F::halves) {
    const auto [first_x, first_y] = dots_of_two<0, 4>(codes, values, other);
    const auto [second_x, second_y] = dots_of_two<4, 4>(codes, values, other);
    const TileScales& of = scales();
    const Ints first[2] = {first_x, first_y}, second[2] = {second_x, second_y};
    for (int r = 0; r < 2; ++r, ++floats) {
      Part sum = fma(to_float(first[r]), part_of(of.scale[0], part) * floats[0], sums[r]);
      sum = fma(part_of(of.low[0], part), floats[2 * kStride], sum);
      sum = fma(to_float(second[r]), part_of(of.scale[1], part) * floats[0], sum);
      sums[r] = fma(part_of(of.low[1], part), floats[3 * kStride], sum);
    }
  } else {
    const auto [x, y] = dots_of_two<0, 8>(codes, values, other);
    const TileScales& of = scales();
    const Ints whole[2] = {x, y};
    for (int r = 0; r < 2; ++r, ++floats) {
      sums[r] = fma(to_float(whole[r]), part_of(of.scale[0], part) * floats[0], sums[r]);
      if constexpr (F::minimum || F::offset != 0) sums[r] = fma(part_of(of.low[0], part), floats[kStride], sums[r]);
    }
  }
}

#endif

// Sixteen weights of a column that are not packed.
template <WeightKind K>
inline f32x16 load_weights(const uint8_t* w, int64_t at) {
  if constexpr (K == WeightKind::kFloat32) return load(reinterpret_cast<const float*>(w) + at);
  else if constexpr (K == WeightKind::kFloat16) return load_half(reinterpret_cast<const uint16_t*>(w) + at);
  else return load_bfloat(reinterpret_cast<const uint16_t*>(w) + at);
}

// Sixteen floats of a row's outputs; the last tile may have fewer.
inline f32x16 load_lanes(const float* p, int64_t count) {
  if (count >= kTile) return load(p);
  float lanes[kTile] = {};
  std::memcpy(lanes, p, count * sizeof(float));
  return load(lanes);
}
inline void store_lanes(float* p, f32x16 v, int64_t count) {
  if (count >= kTile) return store(p, v);
  float lanes[kTile];
  store(lanes, v);
  std::memcpy(p, lanes, count * sizeof(float));
}

// Sixteen outputs of a row: out = product + bias + residual. `place` is where they begin.
inline void store_outputs(const LinearOutput& to, int64_t place, f32x16 product, f32x16 bias, int64_t lanes) {
  f32x16 value = to.bias ? product + bias : product;
  if (to.residual) value = load_lanes(to.residual + place, lanes) + value;
  store_lanes(to.out + place, value, lanes);
}

}  // namespace kvilt::KVILT_ISA
