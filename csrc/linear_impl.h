// Quantized activations, products with packed weights, embedding rows.
#pragma once
#include <array>
#include <utility>

#include "dots_impl.h"
#include "elementwise_impl.h"
#include "kernels.h"
#include "packed.h"
#include "vectors.h"

namespace kvilt::KVILT_ISA {

constexpr float kNothing = 1e-30f;   // a peak below it counts as zero: its inverse would not be a number
constexpr float kRestShare = 4.0f;   // a block has a rest if its squared peak is this many times the row's mean

// A row's inputs, block by block; the last one may be filled up with zeros.
struct Blocks {
  const float* from;
  int64_t whole;
  float last[kBlock] = {};

  Blocks(const Rows& x, int64_t row) : from(x.plain + row * x.inputs), whole(x.inputs / kBlock) {
    std::memcpy(last, from + whole * kBlock, (x.inputs - whole * kBlock) * sizeof(float));
  }
  const float* operator[](int64_t b) const { return b < whole ? from + b * kBlock : last; }
};

// A block as bytes, with its floats `rows` apart.
inline void quantize_block(F16x low, F16x high, int64_t rows, int8_t* values, float* floats) {
  const float peak = largest(larger(absolute(low), absolute(high)));
  const float scale = peak / 127.0f;
  const float inverse = peak > kNothing ? 127.0f / peak : 0.0f;
  const float first = scale * float(store_bytes(values, low * inverse));
  const float second = scale * float(store_bytes(values + 16, high * inverse));
  floats[0] = scale;
  floats[rows] = first + second;
  floats[2 * rows] = first;
  floats[3 * rows] = second;
}

// The squared peak above which a row's blocks have a rest.
inline float rest_limit(const float* scales, int64_t blocks, int64_t stride) {
  float sum = 0;
  for (int64_t b = 0; b < blocks; ++b) sum += scales[b * stride] * scales[b * stride];
  return sum * (kRestShare / float(blocks));
}

inline void quantize(const Rows& x, int64_t group) {
  const int64_t rows = x.count(group), start = group * kGroup * x.blocks;
  int8_t *values = x.values + start * kBlock, *rest_values = x.rest_values + start * kBlock;
  float *floats = x.floats + start * 4, *rest_floats = x.rest_floats + start * 4, limits[kGroup];
  for (int64_t r = 0; r < rows; ++r) {
    const Blocks blocks(x, group * kGroup + r);
    for (int64_t b = 0; b < x.blocks; ++b) {
      const F16x low = load(blocks[b]), high = load(blocks[b] + 16);
      quantize_block(low, high, rows, values + (b * rows + r) * kBlock, floats + b * rows * 4 + r);
    }
    limits[r] = rest_limit(floats + r, x.blocks, rows * 4);
  }
  int32_t* rests = x.rests_of(group);
  int32_t found = 0;
  for (int64_t b = 0; b < x.blocks; ++b, values += rows * kBlock, floats += rows * 4)
    for (int64_t r = 0; r < rows; ++r) {
      const float scale = floats[r];
      if (!(scale * scale > limits[r])) continue;
      const Blocks blocks(x, group * kGroup + r);
      const int8_t* own = values + r * kBlock;
      const F16x low = fma(load_byte(own), -scale, load(blocks[b]));  // what eight bits leave
      const F16x high = fma(load_byte(own + 16), -scale, load(blocks[b] + 16));
      quantize_block(low, high, 1, rest_values + found * kBlock, rest_floats + found * 4);
      rests[++found] = int32_t(b * kGroup + r);
    }
  rests[0] = found;
}

// Bytes of weights to ask for ahead. The machine's own prefetching stops where a page ends, and a block takes many rows
// so long that memory would stand idle meanwhile.
constexpr int kAhead = 2560;

// What sixteen outputs have besides their codes, for a block of inputs: w = scale * code + low. The k-formats whose
// scales hold for half a block have two of each.
struct Scales {
  F16x scale[2], low[2];
};

template <Kind K>
inline Scales scales_of(const uint8_t* at, F16x factor, F16x low_factor) {
  using F = Format<K>;
  constexpr float offset = float(K == Kind::k8 ? kByteOffset : F::offset);
  if constexpr (F::halves) {
    const F16x first = load_byte(reinterpret_cast<const int8_t*>(at)) * factor;
    const F16x second = load_byte(reinterpret_cast<const int8_t*>(at + F::scales)) * factor;
    return {{first, second}, {first * -offset, second * -offset}};
  } else if constexpr (F::k) {
    return {{load_unsigned(at) * factor}, {load_unsigned(at + F::scales) * low_factor}};
  } else {
    const F16x scale = load_half(reinterpret_cast<const uint16_t*>(at));
    if constexpr (F::minimum) return {{scale}, {load_half(reinterpret_cast<const uint16_t*>(at + F::scales))}};
    return {{scale}, {scale * -offset}};
  }
}

// A row's block with a part of a tile. `floats` are the row's scale and sums, `Rows` apart; `scales` gives the tile's.
template <Kind K, int Rows, typename Given>
inline __attribute__((always_inline)) Part add_block(Part sum, const Codes<Format<K>::bits>& codes, int part,
                                                     const int8_t* values, const float* floats, Given scales) {
  if constexpr (Format<K>::halves) {
    const Part first = to_float(dots<0, 4>(codes, values)), second = to_float(dots<4, 4>(codes, values));
    const Scales& of = scales();
    sum = fma(first, part_of(of.scale[0], part) * floats[0], sum);
    sum = fma(part_of(of.low[0], part), floats[2 * Rows], sum);
    sum = fma(second, part_of(of.scale[1], part) * floats[0], sum);
    return fma(part_of(of.low[1], part), floats[3 * Rows], sum);
  } else {
    const Part dot = to_float(dots<0, 8>(codes, values));
    const Scales& of = scales();
    sum = fma(dot, part_of(of.scale[0], part) * floats[0], sum);
    if constexpr (Format<K>::minimum || Format<K>::offset != 0 || (K == Kind::k8 && kByteOffset != 0))
      sum = fma(part_of(of.low[0], part), floats[Rows], sum);
    return sum;
  }
}

// G groups of R rows each through one tile. The order of a row's operations does not depend on G and R.
template <Kind K, int R, int G>
void packed_rows(const uint8_t* w, const Rows& x, int64_t group, F16x* out) {
  using F = Format<K>;
  const int64_t next = kGroup * x.blocks;  // blocks from one group to the other
  const int8_t* values = x.values + group * next * kBlock;
  const float* floats = x.floats + group * next * 4;
  Part sums[kParts * G * R] = {};
  F16x factor = {}, low_factor = {};
  for (int64_t b = 0; b < x.blocks; ++b, w += F::block, values += R * kBlock, floats += R * 4) {
    if constexpr (F::k)
      if (b % kSuper == 0) {
        factor = load_half(reinterpret_cast<const uint16_t*>(w));
        if constexpr (F::minimum) low_factor = load_half(reinterpret_cast<const uint16_t*>(w + 2 * kTile));
        w += F::header;
      }
    if constexpr (R > 1)
      for (int line = 0; line < F::block; line += 64) __builtin_prefetch(w + kAhead + line);
    const auto through = [&](int part, auto scales) __attribute__((always_inline)) {
      const Codes<F::bits> codes(w, part);
#pragma GCC unroll 2
      for (int g = 0; g < G; ++g)
#pragma GCC unroll kUnrolled
        for (int r = 0; r < R; ++r) {
          Part& sum = sums[(part * G + g) * R + r];
          sum = add_block<K, R>(sum, codes, part, values + (g * next + r) * kBlock, floats + g * next * 4 + r, scales);
        }
    };
    const auto read = [&] { return scales_of<K>(w + F::codes, factor, low_factor); };
    if constexpr (R == 1) {  // scales read late, so that there are registers for the codes
      for (int part = 0; part < kParts; ++part) through(part, read);
    } else {
      const Scales once = read();
      for (int part = 0; part < kParts; ++part) through(part, [&]() -> const Scales& { return once; });
    }
  }
  for (int r = 0; r < G * R; ++r) out[r] = joined(sums + r, G * R);
}

// Adds the rests of a group to its rows' products with one tile.
template <Kind K>
void add_rests(const uint8_t* w, const Rows& x, int64_t group, F16x* out) {
  using F = Format<K>;
  const int32_t *rests = x.rests_of(group) + 1, count = rests[-1];
  if (count == 0) return;
  const int8_t* values = x.rest_values + group * kGroup * x.blocks * kBlock;
  const float* floats = x.rest_floats + group * kGroup * x.blocks * 4;
  const int64_t rows = x.count(group);
  Part sums[kParts * kGroup];
  for (int64_t r = 0; r < rows; ++r)
    for (int part = 0; part < kParts; ++part) sums[part * kGroup + r] = part_of(out[r], part);
  F16x factor = {}, low_factor = {};
  for (int32_t first = 0, last; first < count; first = last) {
    const int64_t block = rests[first] / kGroup;
    for (last = first + 1; last < count && rests[last] / kGroup == block;) ++last;
    const uint8_t* super = w + F::tile_bytes(block / kSuper * kSuper);
    const uint8_t* at = super + F::header + block % kSuper * F::block;
    if constexpr (F::k) factor = load_half(reinterpret_cast<const uint16_t*>(super));
    if constexpr (F::k && F::minimum) low_factor = load_half(reinterpret_cast<const uint16_t*>(super + 2 * kTile));
    const Scales once = scales_of<K>(at + F::codes, factor, low_factor);
    for (int part = 0; part < kParts; ++part) {
      const Codes<F::bits> codes(at, part);
      for (int32_t i = first; i < last; ++i) {
        Part& sum = sums[part * kGroup + rests[i] % kGroup];
        sum = add_block<K, 1>(sum, codes, part, values + i * kBlock, floats + i * 4,
                              [&]() -> const Scales& { return once; });
      }
    }
  }
  for (int64_t r = 0; r < rows; ++r) out[r] = joined(sums + r, kGroup);
}

template <Kind K>
inline F16x load_weights(const uint8_t* w, int64_t at) {
  if constexpr (K == Kind::kFloat) return load(reinterpret_cast<const float*>(w) + at);
  else if constexpr (K == Kind::kHalf) return load_half(reinterpret_cast<const uint16_t*>(w) + at);
  else return load_bfloat(reinterpret_cast<const uint16_t*>(w) + at);
}

template <Kind K, int R>
void float_rows(const uint8_t* w, const float* plain, int64_t inputs, F16x* out) {
  F16x acc[R] = {};
  for (int64_t k = 0; k < inputs; ++k) {
    const F16x column = load_weights<K>(w, k * kTile);
    for (int r = 0; r < R; ++r) acc[r] = fma(column, plain[r * inputs + k], acc[r]);
  }
  for (int r = 0; r < R; ++r) out[r] = acc[r];
}

template <Kind K, int R>
void plain_rows(const uint8_t* w, const Rows& x, int64_t group, F16x* out) {
  const float* plain = x.plain + group * kGroup * x.inputs;
  constexpr int most = sizeof(F16x) / kRegisterBytes * 8 > 8 ? 4 : 8;  // rows whose sums stay in registers
  float_rows<K, R < most ? R : most>(w, plain, x.inputs, out);
  if constexpr (R > most) float_rows<K, R - most>(w, plain + most * x.inputs, x.inputs, out + most);
}

// One instantiation for each kind of weight and number of rows.
using Product = void (*)(const uint8_t* w, const Rows& x, int64_t group, F16x* out);
struct Products {
  Product of[kGroup];
  Product two;  // whole groups
  Product rests;
};

template <Kind K, int... R>
constexpr Products products(std::integer_sequence<int, R...>) {
  if constexpr (K == Kind::kFloat || K == Kind::kHalf || K == Kind::kBfloat)
    return {{plain_rows<K, R + 1>...}, nullptr, nullptr};
  else return {{packed_rows<K, R + 1, 1>...}, packed_rows<K, kGroup, 2>, add_rests<K>};
}
template <int... K>
constexpr std::array<Products, kKinds> all_products(std::integer_sequence<int, K...>) {
  return {products<Kind(K)>(std::make_integer_sequence<int, kGroup>())...};
}
constexpr std::array<Products, kKinds> kProducts = all_products(std::make_integer_sequence<int, kKinds>());

constexpr int kMost = 2 * kGroup;  // rows that go through a tile together

// How many groups from this one on go through a tile together.
inline int64_t together(const Packed& w, const Rows& x, int64_t group, int64_t last) {
  return kProducts[int(w.kind)].two && group + 2 <= last && x.count(group + 1) == kGroup ? 2 : 1;
}

inline void product(const Packed& w, int64_t tile, const Rows& x, int64_t group, int64_t groups, F16x* out) {
  const Products& products = kProducts[int(w.kind)];
  const Product product = groups == 2 ? products.two : products.of[x.count(group) - 1];
  const uint8_t* from = w.data + tile * tile_bytes(w.kind, w.inputs);
  product(from, x, group, out);
  if (!products.rests) return;  // plain weights take activations as they are
  for (const int64_t end = group + groups; group < end; ++group, out += kGroup) products.rests(from, x, group, out);
}

// Sixteen floats of a row's outputs; the last tile may have fewer.
inline F16x load_lanes(const float* p, int64_t count) {
  if (count >= kTile) return load(p);
  float lanes[kTile] = {};
  std::memcpy(lanes, p, count * sizeof(float));
  return load(lanes);
}
inline void store_lanes(float* p, F16x v, int64_t count) {
  if (count >= kTile) return store(p, v);
  float lanes[kTile];
  store(lanes, v);
  std::memcpy(p, lanes, count * sizeof(float));
}

inline void linear(const Packed& w, int64_t tile, const Rows& x, int64_t first, int64_t last, const Target& to) {
  const int64_t at = tile * kTile, lanes = w.outputs - at;
  const F16x bias = to.bias ? load_lanes(to.bias + at, lanes) : F16x{};
  F16x acc[kMost];
  for (int64_t group = first, groups; group < last; group += groups) {
    groups = together(w, x, group, last);
    product(w, tile, x, group, groups, acc);
    const int64_t rows = groups == 2 ? kMost : x.count(group);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t place = (group * kGroup + r) * w.outputs + at;
      F16x value = to.bias ? acc[r] + bias : acc[r];
      if (to.onto) value = load_lanes(to.onto + place, lanes) + value;
      store_lanes(to.out + place, value, lanes);
    }
  }
}

inline void gated(const Packed& gate, const Packed& up, int64_t tile, const Rows& x, int64_t first, int64_t last,
                  const float* gate_bias, const float* up_bias, int activation, float* out) {
  const int64_t at = tile * kTile, lanes = gate.outputs - at;
  const F16x gate_add = gate_bias ? load_lanes(gate_bias + at, lanes) : F16x{};
  const F16x up_add = up_bias ? load_lanes(up_bias + at, lanes) : F16x{};
  F16x a[kMost], b[kMost];
  for (int64_t group = first, groups; group < last; group += groups) {
    groups = together(gate, x, group, last) == 2 ? together(up, x, group, last) : 1;
    product(gate, tile, x, group, groups, a);
    product(up, tile, x, group, groups, b);
    const int64_t rows = groups == 2 ? kMost : x.count(group);
    for (int64_t r = 0; r < rows; ++r) {
      const F16x opened = activated(gate_bias ? a[r] + gate_add : a[r], activation);
      store_lanes(out + (group * kGroup + r) * gate.outputs + at, opened * (up_bias ? b[r] + up_add : b[r]), lanes);
    }
  }
}

// ---- embedding rows ----

template <Kind K>
void embed_packed(const Packed& w, int64_t row, float grow, float* out) {
  using F = Format<K>;
  const int64_t blocks = w.blocks();
  const int lane = int(row % kTile);
  const uint8_t* at = w.data + row / kTile * F::tile_bytes(blocks);
  const auto half = [&](const uint8_t* p) { return half_to_float(reinterpret_cast<const uint16_t*>(p)[lane]); };
  float factor = 1, low_factor = 1;
  for (int64_t b = 0; b < blocks; ++b, at += F::block) {
    if constexpr (F::k)
      if (b % kSuper == 0) {
        factor = half(at);
        if constexpr (F::minimum) low_factor = half(at + 2 * kTile);
        at += F::header;
      }
    const uint8_t* scales = at + F::codes;
    for (int i = 0; i < kBlock && b * kBlock + i < w.inputs; ++i) {
      const int code = code_at<F::bits>(at, i / 4, 4 * lane + i % 4) - F::offset;
      float value;
      if constexpr (F::halves) {
        value = float(int8_t(scales[i / 16 * F::scales + lane])) * factor * float(code);
      } else {
        const float scale = F::k ? float(scales[lane]) * factor : half(scales);
        value = scale * float(code);
        if constexpr (F::k && F::minimum) value = value + float(scales[F::scales + lane]) * low_factor;
        else if constexpr (F::minimum) value = value + half(scales + F::scales);
      }
      out[b * kBlock + i] = value * grow;
    }
  }
}

template <Kind K>
void embed_float(const Packed& w, int64_t row, float grow, float* out) {
  const uint8_t* tile = w.data + row / kTile * tile_bytes(K, w.inputs);
  for (int64_t k = 0; k < w.inputs; ++k) {
    const int64_t at = k * kTile + row % kTile;
    float value;
    if constexpr (K == Kind::kFloat) value = reinterpret_cast<const float*>(tile)[at];
    else if constexpr (K == Kind::kHalf) value = half_to_float(reinterpret_cast<const uint16_t*>(tile)[at]);
    else value = bfloat_to_float(reinterpret_cast<const uint16_t*>(tile)[at]);
    out[k] = value * grow;
  }
}

inline void embed(const Packed& w, int64_t row, float grow, float* out) {
  switch (w.kind) {
    case Kind::kFloat: return embed_float<Kind::kFloat>(w, row, grow, out);
    case Kind::kHalf: return embed_float<Kind::kHalf>(w, row, grow, out);
    case Kind::kBfloat: return embed_float<Kind::kBfloat>(w, row, grow, out);
    case Kind::k4: return embed_packed<Kind::k4>(w, row, grow, out);
    case Kind::k4m: return embed_packed<Kind::k4m>(w, row, grow, out);
    case Kind::k5: return embed_packed<Kind::k5>(w, row, grow, out);
    case Kind::k5m: return embed_packed<Kind::k5m>(w, row, grow, out);
    case Kind::k8: return embed_packed<Kind::k8>(w, row, grow, out);
    case Kind::k4k: return embed_packed<Kind::k4k>(w, row, grow, out);
    case Kind::k5k: return embed_packed<Kind::k5k>(w, row, grow, out);
    case Kind::k6k: return embed_packed<Kind::k6k>(w, row, grow, out);
  }
}

}  // namespace kvilt::KVILT_ISA
