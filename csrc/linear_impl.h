// Products with packed weights.
#pragma once
#include <array>
#include <utility>

#include "blocks_impl.h"
#include "elementwise_impl.h"
#include "embed_impl.h"
#include "kernels.h"
#include "packed.h"
#include "vectors.h"

namespace kvilt::KVILT_ISA {

// Bytes of weights to prefetch ahead. The hardware prefetcher stops at the end of a page, and a block with many rows
// takes so long that memory would be idle meanwhile.
constexpr int kAhead = 2560;

// G groups of R rows each through one tile. The order of a row's operations does not depend on G and R.
template <WeightKind K, int R, int G>
void packed_rows(const uint8_t* w, const QuantizedRows& x, int64_t group, f32x16* out) {
  using F = PackedFormat<K>;
  const int64_t next = kRowGroup * x.blocks;  // blocks from one group to the other
  const int8_t* values = x.values + group * next * kBlock;
  const float* floats = x.floats + group * next * 4;
  Part sums[kParts * G * R] = {};
  f32x16 factor = {}, low_factor = {};
  for (int64_t b = 0; b < x.blocks; ++b, w += F::block, values += R * kBlock, floats += R * 4) {
    if constexpr (F::k)
      if (b % kSuperBlock == 0) {
        factor = load_half(reinterpret_cast<const uint16_t*>(w));
        if constexpr (F::minimum) low_factor = load_half(reinterpret_cast<const uint16_t*>(w + 2 * kTile));
        w += F::header;
      }
    if constexpr (R > 1)
      for (int line = 0; line < F::block; line += 64) __builtin_prefetch(w + kAhead + line);
    const auto through = [&](int part, auto scales) __attribute__((always_inline)) {
      const Codes<F::coding> codes(w, part);
#if defined(__ARM_FEATURE_MATMUL_INT8)
      if constexpr (R % 2 == 0) {
        for (int g = 0; g < G; ++g)
#pragma GCC unroll kUnrolled
          for (int r = 0; r < R; r += 2)
            add_two_blocks<K, R>(&sums[(part * G + g) * R + r], codes, part, values + (g * next + r) * kBlock,
                                 floats + g * next * 4 + r, scales);
        return;
      }
#endif
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
      const TileScales once = read();
      for (int part = 0; part < kParts; ++part) through(part, [&]() -> const TileScales& { return once; });
    }
  }
  for (int r = 0; r < G * R; ++r) out[r] = joined(sums + r, G * R);
}

// Adds the remainders of a group to its rows' products with one tile.
template <WeightKind K>
void add_remainders(const uint8_t* w, const QuantizedRows& x, int64_t group, f32x16* out) {
  using F = PackedFormat<K>;
  const int32_t *remainders = x.remainders_of(group) + 1, count = remainders[-1];
  if (count == 0) return;
  const int8_t* values = x.remainder_values + group * kRowGroup * x.blocks * kBlock;
  const float* floats = x.remainder_floats + group * kRowGroup * x.blocks * 4;
  const int64_t rows = x.count(group);
  Part sums[kParts * kRowGroup];
  for (int64_t r = 0; r < rows; ++r)
    for (int part = 0; part < kParts; ++part) sums[part * kRowGroup + r] = part_of(out[r], part);
  f32x16 factor = {}, low_factor = {};
  for (int32_t first = 0, last; first < count; first = last) {
    const int64_t block = remainders[first] / kRowGroup;
    for (last = first + 1; last < count && remainders[last] / kRowGroup == block;) ++last;
    const uint8_t* super = w + F::tile_bytes(block / kSuperBlock * kSuperBlock);
    const uint8_t* at = super + F::header + block % kSuperBlock * F::block;
    if constexpr (F::k) factor = load_half(reinterpret_cast<const uint16_t*>(super));
    if constexpr (F::k && F::minimum) low_factor = load_half(reinterpret_cast<const uint16_t*>(super + 2 * kTile));
    const TileScales once = scales_of<K>(at + F::codes, factor, low_factor);
    for (int part = 0; part < kParts; ++part) {
      const Codes<F::coding> codes(at, part);
      for (int32_t i = first; i < last; ++i) {
        Part& sum = sums[part * kRowGroup + remainders[i] % kRowGroup];
        sum = add_block<K, 1>(sum, codes, part, values + i * kBlock, floats + i * 4,
                              [&]() -> const TileScales& { return once; });
      }
    }
  }
  for (int64_t r = 0; r < rows; ++r) out[r] = joined(sums + r, kRowGroup);
}

template <WeightKind K, int R>
void float_rows(const uint8_t* w, const float* plain, int64_t inputs, f32x16* out) {
  f32x16 acc[R] = {};
  for (int64_t k = 0; k < inputs; ++k) {
    const f32x16 column = load_weights<K>(w, k * kTile);
    for (int r = 0; r < R; ++r) acc[r] = fma(column, plain[r * inputs + k], acc[r]);
  }
  for (int r = 0; r < R; ++r) out[r] = acc[r];
}

template <WeightKind K, int R>
void plain_rows(const uint8_t* w, const QuantizedRows& x, int64_t group, f32x16* out) {
  const float* plain = x.plain + group * kRowGroup * x.inputs;
  constexpr int most = sizeof(f32x16) / kRegisterBytes * 8 > 8 ? 4 : 8;  // rows whose sums stay in registers
  float_rows < K, R<most ? R : most>(w, plain, x.inputs, out);
  if constexpr (R > most) float_rows<K, R - most>(w, plain + most * x.inputs, x.inputs, out + most);
}

// One instantiation for each kind of weight and number of rows.
using TileProduct = void (*)(const uint8_t* w, const QuantizedRows& x, int64_t group, f32x16* out);
struct TileProducts {
  TileProduct of[kRowGroup];
  TileProduct two;  // whole groups
  TileProduct remainders;
};

template <WeightKind K, int... R>
constexpr TileProducts products(std::integer_sequence<int, R...>) {
  if constexpr (K == WeightKind::kFloat32 || K == WeightKind::kFloat16 || K == WeightKind::kBfloat16)
    return {{plain_rows<K, R + 1>...}, nullptr, nullptr};
  else return {{packed_rows<K, R + 1, 1>...}, packed_rows<K, kRowGroup, 2>, add_remainders<K>};
}
template <int... K>
constexpr std::array<TileProducts, kWeightKinds> all_products(std::integer_sequence<int, K...>) {
  return {products<WeightKind(K)>(std::make_integer_sequence<int, kRowGroup>())...};
}
constexpr std::array<TileProducts, kWeightKinds> kProducts =
    all_products(std::make_integer_sequence<int, kWeightKinds>());

constexpr int kRowsAtOnce = 2 * kRowGroup;  // rows that go through a tile together

// How many groups from this one on go through a tile together.
inline int64_t together(const PackedWeight& w, const QuantizedRows& x, int64_t group, int64_t last) {
  return kProducts[int(w.kind)].two && group + 2 <= last && x.count(group + 1) == kRowGroup ? 2 : 1;
}

inline void product(const PackedWeight& w, int64_t tile, const QuantizedRows& x, int64_t group, int64_t groups,
                    f32x16* out) {
  const TileProducts& products = kProducts[int(w.kind)];
  const TileProduct product = groups == 2 ? products.two : products.of[x.count(group) - 1];
  const uint8_t* from = w.data + tile * tile_bytes(w.kind, w.inputs);
  product(from, x, group, out);
  if (!products.remainders) return;  // plain weights take activations as they are
  for (const int64_t end = group + groups; group < end; ++group, out += kRowGroup)
    products.remainders(from, x, group, out);
}

inline void linear_tile(const PackedWeight& w, int64_t tile, const QuantizedRows& x, int64_t first, int64_t last,
                        const LinearOutput& to) {
  const int64_t at = tile * kTile, lanes = w.outputs - at;
  const f32x16 bias = to.bias ? load_lanes(to.bias + at, lanes) : f32x16{};
  f32x16 acc[kRowsAtOnce];
  for (int64_t group = first, groups; group < last; group += groups) {
    groups = together(w, x, group, last);
    product(w, tile, x, group, groups, acc);
    const int64_t rows = groups == 2 ? kRowsAtOnce : x.count(group);
    for (int64_t r = 0; r < rows; ++r) store_outputs(to, (group * kRowGroup + r) * w.outputs + at, acc[r], bias, lanes);
  }
}

inline void gate_up_tile(const PackedWeight& gate, const PackedWeight& up, int64_t tile, const QuantizedRows& x,
                         int64_t first, int64_t last, const float* gate_bias, const float* up_bias,
                         Activation activation, float* out) {
  const int64_t at = tile * kTile, lanes = gate.outputs - at;
  const f32x16 gate_add = gate_bias ? load_lanes(gate_bias + at, lanes) : f32x16{};
  const f32x16 up_add = up_bias ? load_lanes(up_bias + at, lanes) : f32x16{};
  f32x16 a[kRowsAtOnce], b[kRowsAtOnce];
  for (int64_t group = first, groups; group < last; group += groups) {
    groups = together(gate, x, group, last) == 2 ? together(up, x, group, last) : 1;
    product(gate, tile, x, group, groups, a);
    product(up, tile, x, group, groups, b);
    const int64_t rows = groups == 2 ? kRowsAtOnce : x.count(group);
    for (int64_t r = 0; r < rows; ++r) {
      const f32x16 value = gated(gate_bias ? a[r] + gate_add : a[r], up_bias ? b[r] + up_add : b[r], activation);
      store_lanes(out + (group * kRowGroup + r) * gate.outputs + at, value, lanes);
    }
  }
}

inline void linear_tiles(const PackedWeight& w, int64_t tile, int64_t last_tile, const QuantizedRows& x, int64_t first,
                         int64_t last, const LinearOutput& to) {
  for (; tile < last_tile; ++tile) linear_tile(w, tile, x, first, last, to);
}

inline void gate_up_tiles(const PackedWeight& gate, const PackedWeight& up, int64_t tile, int64_t last_tile,
                          const QuantizedRows& x, int64_t first, int64_t last, const float* gate_bias,
                          const float* up_bias, Activation activation, float* out) {
  for (; tile < last_tile; ++tile) gate_up_tile(gate, up, tile, x, first, last, gate_bias, up_bias, activation, out);
}

inline void expert_sum(const ExpertSum& sum, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += kTile) {
    const int64_t lanes = n - i;
    f32x16 total = sum.start ? load_lanes(sum.start + i, lanes) : f32x16{};
    for (int64_t e = 0; e < sum.count; ++e)
      total = fma(load_lanes(sum.made + sum.rows[e] * n + i, lanes), sum.weights[e], total);
    if (sum.shared) total = fma(load_lanes(sum.shared + i, lanes), sum.shared_weight, total);
    store_lanes(out + i, total, lanes);
  }
}

}  // namespace kvilt::KVILT_ISA
