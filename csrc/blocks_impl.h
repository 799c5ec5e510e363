// Rows of activations as bytes, and one block of a tile with one block of a row: what every product is made of.
#pragma once
#include "dots_impl.h"
#include "elementwise_impl.h"
#include "kernels.h"
#include "packed.h"
#include "vectors.h"

namespace kvilt::KVILT_ISA {

constexpr float kTinyPeak = 1e-30f;      // a smaller peak counts as zero: its inverse would not be a number
constexpr float kRemainderShare = 4.0f;  // a block whose squared peak is more times the row's mean has a remainder

struct BlockHalves {
  f32x16 low, high;
};

// A row's inputs, block by block; the last one may be filled up with zeros.
struct RowBlocks {
  const float* from;
  int64_t whole;
  float last[kBlock] = {};

  RowBlocks(const QuantizedRows& x, int64_t row) : from(x.plain + row * x.inputs), whole(x.inputs / kBlock) {
    std::memcpy(last, from + whole * kBlock, (x.inputs - whole * kBlock) * sizeof(float));
  }
  BlockHalves halves(int64_t b) const {
    const float* at = b < whole ? from + b * kBlock : last;
    return {load(at), load(at + 16)};
  }
};

struct BlockPlace {
  int8_t* values;
  float* floats;  // `stride` apart
};

// Up to sixteen blocks as bytes: read(i) gives the inputs of one, place(i) where it goes.
template <typename Read, typename Place>
inline __attribute__((always_inline)) void quantize_blocks(int64_t count, int64_t stride, Read read, Place place) {
  f32x16 sizes[kTile];
  for (int64_t i = 0; i < count; ++i) {
    const BlockHalves block = read(i);
    sizes[i] = max(abs(block.low), abs(block.high));
  }
  for (int64_t i = count; i < kTile; ++i) sizes[i] = f32x16{};
  const f32x16 peaks = largest_of_each(sizes);
  float scales[kTile], inverses[kTile];
  store(scales, peaks / splat(127.0f));
  store(inverses, zero_below(peaks, splat(kTinyPeak), splat(127.0f) / peaks));
  for (int64_t i = 0; i < count; ++i) {
    const BlockHalves block = read(i);
    const BlockPlace to = place(i);
    const float first = scales[i] * float(store_bytes(to.values, block.low * inverses[i]));
    const float second = scales[i] * float(store_bytes(to.values + 16, block.high * inverses[i]));
    to.floats[0] = scales[i];
    to.floats[stride] = first + second;
    to.floats[2 * stride] = first;
    to.floats[3 * stride] = second;
  }
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
  const int64_t rows = x.count(group), start = group * kRowGroup, first = start / kWidth * kWidth;
  const int64_t width = x.rows - first < kWidth ? x.rows - first : kWidth;
  int8_t* values = x.values + (first * x.blocks + start - first) * kBlock;
  float *floats = x.floats + first * x.blocks * 4 + start - first, limits[kRowGroup];
  const auto place = [&](int64_t row, int64_t b) {
    return BlockPlace{values + (b * width + row) * kBlock, floats + b * width * 4 + row};
  };
  for (int64_t row = 0; row < rows; ++row) {
    const RowBlocks inputs(x, start + row);
    for (int64_t b = 0; b < x.blocks; b += kTile)
      quantize_blocks(
          x.blocks - b < kTile ? x.blocks - b : kTile, width, [&](int64_t i) { return inputs.halves(b + i); },
          [&](int64_t i) { return place(row, b + i); });
    limits[row] = remainder_limit(floats + row, x.blocks, width * 4);
  }
  struct Found {
    int64_t row, block;
  } found[kTile];
  int64_t count = 0;
  const auto quantize_found = [&] {
    const auto remainder = [&](int64_t i) {  // what eight bits leave
      const auto [row, b] = found[i];
      const auto [bytes, scale] = place(row, b);
      const auto [low, high] = RowBlocks(x, start + row).halves(b);
      return BlockHalves{fma(load_byte(bytes), -*scale, low), fma(load_byte(bytes + 16), -*scale, high)};
    };
    quantize_blocks(count, 1, remainder, [&](int64_t i) {
      Remainder& to = x.remainders[(start + found[i].row) * x.blocks + found[i].block];
      return BlockPlace{to.values, to.floats};
    });
    count = 0;
  };
  uint64_t* blocks_with = x.blocks_with + group * x.words();
  std::memset(blocks_with, 0, size_t(x.words()) * sizeof(uint64_t));
  for (int64_t b = 0; b < x.blocks; ++b) {
    uint8_t with = 0;
    for (int64_t row = 0; row < rows; ++row) {
      const float scale = *place(row, b).floats;
      if (!(scale * scale > limits[row])) continue;
      with |= uint8_t(1 << row);
      found[count++] = {row, b};
      if (count == kTile) quantize_found();
    }
    x.rows_with[group * x.blocks + b] = with;
    blocks_with[b / 64] |= uint64_t(with != 0) << b % 64;
  }
  if (count) quantize_found();
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

constexpr int64_t kSpan = 8;  // groups whose remainders are added together: a bit for each row

// Calls work(first, last) for spans of the groups.
template <typename Work>
inline void over_spans(int64_t first, int64_t last, Work work) {
  for (; first < last; first += kSpan) work(first, last - first < kSpan ? last : first + kSpan);
}

// Adds the remainders of groups [first, last), at most kSpan of them, to their rows' products with one tile.
template <WeightKind K>
void add_remainders(const uint8_t* w, const QuantizedRows& x, int64_t first, int64_t last, f32x16* out) {
  using F = PackedFormat<K>;
  const Remainder* remainders = x.remainders + first * kRowGroup * x.blocks;
  for (int64_t word = 0; word < x.words(); ++word) {
    uint64_t blocks = 0;
    for (int64_t group = first; group < last; ++group) blocks |= x.blocks_with[group * x.words() + word];
    for (; blocks; blocks &= blocks - 1) {
      const int64_t block = word * 64 + __builtin_ctzll(blocks);
      uint64_t with = 0;
      for (int64_t group = first; group < last; ++group)
        with |= uint64_t(x.rows_with[group * x.blocks + block]) << (group - first) * kRowGroup;
      const uint8_t* super = w + F::tile_bytes(block / kSuperBlock * kSuperBlock);
      const uint8_t* at = super + F::header + block % kSuperBlock * F::block;
      f32x16 factor = {}, low_factor = {};
      if constexpr (F::k) factor = load_half(reinterpret_cast<const uint16_t*>(super));
      if constexpr (F::k && F::minimum) low_factor = load_half(reinterpret_cast<const uint16_t*>(super + 2 * kTile));
      const TileScales once = scales_of<K>(at + F::codes, factor, low_factor);
      const auto scales = [&]() -> const TileScales& { return once; };
      for (int part = 0; part < kParts; ++part) {
        const Codes<F::coding> codes(at, part);
        for (uint64_t rows = with; rows; rows &= rows - 1) {
          const int64_t row = __builtin_ctzll(rows);
          const auto& [values, floats] = remainders[row * x.blocks + block];
          put_part(out[row], part, add_block<K, 1>(part_of(out[row], part), codes, part, values, floats, scales));
        }
      }
    }
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

// Sixteen outputs of a gate from `at` on: out = activation(gate + bias) * (up + bias).
struct GateOutputs {
  const float *gate_bias, *up_bias;
  int64_t at, lanes;
  Activation activation;
  f32x16 gate_add = gate_bias ? load_lanes(gate_bias + at, lanes) : f32x16{};
  f32x16 up_add = up_bias ? load_lanes(up_bias + at, lanes) : f32x16{};

  void store_row(float* row, f32x16 gate, f32x16 up) const {
    const f32x16 opened = gated(gate_bias ? gate + gate_add : gate, up_bias ? up + up_add : up, activation);
    store_lanes(row + at, opened, lanes);
  }
};

}  // namespace kvilt::KVILT_ISA
