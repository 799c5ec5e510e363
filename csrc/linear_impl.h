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
// takes so long that memory would be idle meanwhile. With 2560 bytes blocks came too late.
constexpr int kAhead = 8192;
constexpr int kLine = 64;  // bytes

// G groups of R rows each through one tile. The order of a row's operations does not depend on G and R.
template <WeightKind K, int R, int G>
void packed_rows(const uint8_t* w, const QuantizedRows& x, int64_t group, f32x16* out) {
  using F = PackedFormat<K>;
  const int64_t next = kRowGroup * x.blocks;  // blocks from one group to the other
  const int8_t* values = x.values + group * next * kBlock;
  const float* floats = x.floats + group * next * 4;
  Part sums[kParts * G * R];
  set_zero(sums);
  f32x16 factor = {}, low_factor = {};
  for (int64_t b = 0; b < x.blocks; ++b, w += F::block, values += R * kBlock, floats += R * 4) {
    if constexpr (F::k)
      if (b % kSuperBlock == 0) {
        factor = load_half(reinterpret_cast<const uint16_t*>(w));
        if constexpr (F::minimum) low_factor = load_half(reinterpret_cast<const uint16_t*>(w + 2 * kTile));
        w += F::header;
      }
    for (int line = 0; line < F::block; line += kLine) __builtin_prefetch(w + kAhead + line);
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
#pragma GCC unroll 16
  for (int r = 0; r < G * R; ++r) out[r] = joined(sums + r, G * R);
}

template <WeightKind K>
inline void prefetch_column(const uint8_t* w, int64_t k) {
  constexpr int64_t kColumn = kTile * (K == WeightKind::kFloat32 ? 4 : 2);  // bytes
  if (k * kColumn % kLine == 0) __builtin_prefetch(w + k * kColumn + kAhead);
}

template <WeightKind K, int R>
void float_rows(const uint8_t* w, const float* plain, int64_t inputs, f32x16* out) {
  f32x16 acc[R];
  set_zero(acc);
  for (int64_t k = 0; k < inputs; ++k) {
    prefetch_column<K>(w, k);
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
  void (*remainders)(const uint8_t* w, const QuantizedRows& x, int64_t first, int64_t last, f32x16* out);
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

constexpr int kSpanRows = kSpan * kRowGroup;

// How many groups from this one on go through a tile together.
inline int64_t together(const TileProducts& products, const QuantizedRows& x, int64_t group, int64_t last) {
  return products.two && group + 2 <= last && x.count(group + 1) == kRowGroup ? 2 : 1;
}

// The rows of groups [first, last), at most kSpan of them, through one tile.
inline void product(const PackedWeight& w, int64_t tile, const QuantizedRows& x, int64_t first, int64_t last,
                    f32x16* out) {
  const TileProducts& products = kProducts[int(w.kind)];
  const uint8_t* from = tile_at(w, tile);
  for (int64_t group = first, groups; group < last; group += groups) {
    groups = together(products, x, group, last);
    const TileProduct product = groups == 2 ? products.two : products.of[x.count(group) - 1];
    product(from, x, group, out + (group - first) * kRowGroup);
  }
  if (products.remainders) products.remainders(from, x, first, last, out);  // plain weights have none
}

inline void linear_tile(const PackedWeight& w, int64_t tile, const QuantizedRows& x, int64_t first, int64_t last,
                        const LinearOutput& to) {
  const int64_t at = tile * kTile, lanes = w.outputs - at;
  const f32x16 bias = to.bias ? load_lanes(to.bias + at, lanes) : f32x16{};
  over_spans(first, last, [&](int64_t begin, int64_t end) {
    f32x16 sums[kSpanRows];
    product(w, tile, x, begin, end, sums);
    const f32x16* sum = sums;
    for (int64_t row = begin * kRowGroup; row < x.last_row(end); ++row, ++sum)
      store_outputs(to, row * w.outputs + at, *sum, bias, lanes);
  });
}

inline void gate_up_tile(const PackedWeight& gate, const PackedWeight& up, int64_t tile, const QuantizedRows& x,
                         int64_t first, int64_t last, const float* gate_bias, const float* up_bias,
                         Activation activation, float* out) {
  const int64_t at = tile * kTile;
  const GateOutputs outputs{gate_bias, up_bias, at, gate.outputs - at, activation};
  over_spans(first, last, [&](int64_t begin, int64_t end) {
    f32x16 gates[kSpanRows], ups[kSpanRows];
    product(gate, tile, x, begin, end, gates);
    product(up, tile, x, begin, end, ups);
    const f32x16 *a = gates, *b = ups;
    for (int64_t row = begin * kRowGroup; row < x.last_row(end); ++row, ++a, ++b)
      outputs.store_row(out + row * gate.outputs, *a, *b);
  });
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
