// Products of many rows with packed weights, by tiles of AMX with bytes.
//
// A tile multiplies sixteen rows with a block of 32 inputs of sixteen outputs. Its sums are whole numbers, the same as
// those of AVX-512 VNNI, and the scales are applied in the same order, so that a result has the bits that the AVX-512
// kernels give. Those take what has eight rows or fewer, and weights that are not packed.
//
// The codes of a few blocks are unpacked once, into a buffer that stays in the nearest cache, for all rows of a call.
#pragma once
#include <array>
#include <utility>

#include "amx_tiles.h"
#include "blocks_impl.h"
#include "elementwise_impl.h"
#include "embed_impl.h"
#include "kernel_table.h"

namespace kvilt::KVILT_ISA {

constexpr int kWide = 2 * kRowGroup;   // rows that go through a tile together
constexpr int64_t kBlocksAtOnce = 16;  // blocks whose codes are unpacked at once
constexpr int64_t kMostGroups = 32;    // groups of rows whose sums are held at once
constexpr int64_t kMostRows = kMostGroups * kRowGroup;
constexpr int kSums = kWide * kTile;            // of a tile
constexpr int kUnpackedBytes = kBlock * kTile;  // of a block's codes

// Some blocks of a tile: codes as bytes, scales as floats.
template <WeightKind K>
struct UnpackedBlocks {
  alignas(64) uint8_t codes[kBlocksAtOnce][kUnpackedBytes];
  TileScales scales[kBlocksAtOnce];
};

// Reads the blocks of a tile one after the other.
template <WeightKind K>
struct BlockReader {
  using F = PackedFormat<K>;
  const uint8_t* at;
  int64_t block = 0;
  f32x16 factor = {}, low_factor = {};

  void read(int64_t count, UnpackedBlocks<K>& to) {
    for (int64_t i = 0; i < count; ++i, ++block, at += F::block) {
      if constexpr (F::k)
        if (block % kSuperBlock == 0) {
          factor = load_half(reinterpret_cast<const uint16_t*>(at));
          if constexpr (F::minimum) low_factor = load_half(reinterpret_cast<const uint16_t*>(at + 2 * kTile));
          at += F::header;
        }
      const Codes<F::coding> codes(at, 0);
      for (int step = 0; step < 8; ++step) _mm512_store_si512(to.codes[i] + 64 * step, codes.v[step]);
      to.scales[i] = scales_of<K>(at + F::codes, factor, low_factor);
    }
  }
};

// Tiles 0 to 3 hold sums, 4 and 5 rows, 6 and 7 codes. Formats with two scales for a block take its halves apart.
inline void configure(int rows, bool halves) {
  TileShapes shapes;
  for (int tile = 0; tile < 4; ++tile) shapes.set(tile, rows, 64);
  for (int tile = 4; tile < 6; ++tile) shapes.set(tile, rows, halves ? 16 : 32);
  for (int tile = 6; tile < 8; ++tile) shapes.set(tile, halves ? 4 : 8, 64);
  configure_tiles(shapes);
}

// The sums of a block. Two blocks are under way at a time, each with its own tiles.
template <bool kHalves, int kSlot>
inline __attribute__((always_inline)) void multiply(const int8_t* values, const uint8_t* codes, int32_t* sums) {
  if constexpr (kHalves) {
    KVILT_TILE_LOAD(4, values, kBlock);
    KVILT_TILE_LOAD(5, values + 16, kBlock);
    KVILT_TILE_LOAD(6, codes, 64);
    KVILT_TILE_LOAD(7, codes + 256, 64);
    if constexpr (kSlot == 0) {
      KVILT_TILE_ZERO(0);
      KVILT_TILE_ZERO(1);
      KVILT_TILE_MULTIPLY_BYTES(0, 4, 6);
      KVILT_TILE_MULTIPLY_BYTES(1, 5, 7);
      KVILT_TILE_STORE(0, sums, 64);
      KVILT_TILE_STORE(1, sums + kSums, 64);
    } else {
      KVILT_TILE_ZERO(2);
      KVILT_TILE_ZERO(3);
      KVILT_TILE_MULTIPLY_BYTES(2, 4, 6);
      KVILT_TILE_MULTIPLY_BYTES(3, 5, 7);
      KVILT_TILE_STORE(2, sums, 64);
      KVILT_TILE_STORE(3, sums + kSums, 64);
    }
  } else if constexpr (kSlot == 0) {
    KVILT_TILE_LOAD(4, values, kBlock);
    KVILT_TILE_LOAD(6, codes, 64);
    KVILT_TILE_ZERO(0);
    KVILT_TILE_MULTIPLY_BYTES(0, 4, 6);
    KVILT_TILE_STORE(0, sums, 64);
  } else {
    KVILT_TILE_LOAD(5, values, kBlock);
    KVILT_TILE_LOAD(7, codes, 64);
    KVILT_TILE_ZERO(1);
    KVILT_TILE_MULTIPLY_BYTES(1, 5, 7);
    KVILT_TILE_STORE(1, sums, 64);
  }
}

// One row's sums of a block, scaled: the operations of `add_block` in its order. `floats` are `width` apart.
template <WeightKind K>
inline __attribute__((always_inline)) f32x16 add_sums(f32x16 total, const int32_t* sums, const TileScales& of,
                                                      const float* floats, int64_t width) {
  using F = PackedFormat<K>;
  const auto whole = [](const int32_t* p)
                         __attribute__((always_inline)) { return to_float(i32x16{_mm512_load_si512(p)}); };
  total = fma(whole(sums), of.scale[0] * floats[0], total);
  if constexpr (F::halves) {
    total = fma(of.low[0], floats[2 * width], total);
    total = fma(whole(sums + kSums), of.scale[1] * floats[0], total);
    return fma(of.low[1], floats[3 * width], total);
  } else if constexpr (F::minimum || F::offset != 0 || F::signed_codes) {
    return fma(of.low[0], floats[width], total);
  }
  return total;
}

// Sixteen rows: their totals stay in registers. What `ahead` points to is asked for meanwhile, unless it is null: a few
// lines with each block, since a core can wait for few at a time.
template <WeightKind K>
void add_blocks(const UnpackedBlocks<K>& w, int64_t blocks, const int8_t* values, const float* floats, f32x16* totals,
                const uint8_t* ahead) {
  constexpr bool kHalves = PackedFormat<K>::halves;
  alignas(64) int32_t sums[2][2 * kSums];
  f32x16 total[kWide];
#pragma GCC unroll 16
  for (int r = 0; r < kWide; ++r) total[r] = totals[r];
  const auto apply = [&](int64_t b, const int32_t* from) __attribute__((always_inline)) {
    if (ahead)
      for (int line = 0; line < PackedFormat<K>::block; line += 64)
        __builtin_prefetch(ahead + b * PackedFormat<K>::block + line);
#pragma GCC unroll 16
    for (int r = 0; r < kWide; ++r)
      total[r] = add_sums<K>(total[r], from + r * kTile, w.scales[b], floats + b * 4 * kWide + r, kWide);
  };
  const auto row_block = [&](int64_t b) { return values + b * kWide * kBlock; };
  multiply<kHalves, 0>(row_block(0), w.codes[0], sums[0]);
  for (int64_t b = 0; b + 1 < blocks; b += 2) {
    multiply<kHalves, 1>(row_block(b + 1), w.codes[b + 1], sums[1]);
    apply(b, sums[0]);
    if (b + 2 < blocks) multiply<kHalves, 0>(row_block(b + 2), w.codes[b + 2], sums[0]);
    apply(b + 1, sums[1]);
  }
  if (blocks % 2) apply(blocks - 1, sums[0]);
#pragma GCC unroll 16
  for (int r = 0; r < kWide; ++r) totals[r] = total[r];
}

// Nine to fifteen rows, the last of a batch.
template <WeightKind K>
void add_blocks_of_last(const UnpackedBlocks<K>& w, int64_t blocks, int64_t rows, const int8_t* values,
                        const float* floats, f32x16* totals) {
  alignas(64) int32_t sums[2 * kSums];
  for (int64_t b = 0; b < blocks; ++b, values += rows * kBlock, floats += 4 * rows) {
    multiply<PackedFormat<K>::halves, 0>(values, w.codes[b], sums);
    for (int64_t r = 0; r < rows; ++r)
      totals[r] = add_sums<K>(totals[r], sums + r * kTile, w.scales[b], floats + r, rows);
  }
}

// The rows of groups [first, last), an even number of them, through one tile: totals [rows].
template <WeightKind K>
void wide_product(const uint8_t* w, const QuantizedRows& x, int64_t first, int64_t last, f32x16* totals) {
  constexpr bool kHalves = PackedFormat<K>::halves;
  const int64_t from = first * kRowGroup, to = x.last_row(last);
  const int64_t whole = from + (to - from) / kWide * kWide;
  for (int64_t row = from; row < to; ++row) totals[row - from] = f32x16{};
  UnpackedBlocks<K> blocks;
  BlockReader<K> reader{w};
  configure(kWide, kHalves);
  for (int64_t b = 0; b < x.blocks; b += kBlocksAtOnce) {
    const int64_t count = x.blocks - b < kBlocksAtOnce ? x.blocks - b : kBlocksAtOnce;
    reader.read(count, blocks);
    for (int64_t row = from; row < whole; row += kWide) {
      const int64_t at = row * x.blocks + b * kWide;
      add_blocks<K>(blocks, count, x.values + at * kBlock, x.floats + at * 4, totals + (row - from),
                    row == from ? reader.at : nullptr);
    }
    if (whole == to) continue;
    configure(int(to - whole), kHalves);
    const int64_t at = whole * x.blocks + b * (to - whole);
    add_blocks_of_last<K>(blocks, count, to - whole, x.values + at * kBlock, x.floats + at * 4,
                          totals + (whole - from));
    configure(kWide, kHalves);
  }
  release_tiles();
  over_spans(first, last, [&](int64_t begin, int64_t end) {
    add_remainders<K>(w, x, begin, end, totals + (begin - first) * kRowGroup);
  });
}

using WideProduct = void (*)(const uint8_t* w, const QuantizedRows& x, int64_t first, int64_t last, f32x16* totals);

// Weights that are not packed, where the other part of a gate is.
template <WeightKind K>
void plain_product(const uint8_t* w, const QuantizedRows& x, int64_t first, int64_t last, f32x16* totals) {
  for (int64_t group = first; group < last; ++group, totals += kRowGroup) {
    const float* plain = x.plain + group * kRowGroup * x.inputs;
    f32x16 total[kRowGroup] = {};
    for (int64_t k = 0; k < x.inputs; ++k) {
      const f32x16 column = load_weights<K>(w, k * kTile);
      for (int64_t r = 0; r < x.count(group); ++r) total[r] = fma(column, plain[r * x.inputs + k], total[r]);
    }
    for (int64_t r = 0; r < x.count(group); ++r) totals[r] = total[r];
  }
}

constexpr bool is_packed(WeightKind kind) { return kind > WeightKind::kBfloat16; }

template <WeightKind K>
constexpr WideProduct wide_product_of() {
  if constexpr (is_packed(K)) return wide_product<K>;
  else return plain_product<K>;
}
template <int... K>
constexpr std::array<WideProduct, kWeightKinds> all_wide_products(std::integer_sequence<int, K...>) {
  return {wide_product_of<WeightKind(K)>()...};
}
constexpr std::array<WideProduct, kWeightKinds> kWideProducts =
    all_wide_products(std::make_integer_sequence<int, kWeightKinds>());

inline void run_product(const PackedWeight& w, int64_t tile, const QuantizedRows& x, int64_t first, int64_t last,
                        f32x16* totals) {
  kWideProducts[int(w.kind)](tile_at(w, tile), x, first, last, totals);
}

inline void quantize_wide(const QuantizedRows& x, int64_t group) { quantize_group<kWide>(x, group); }

// Calls work(first, last) for groups that tiles take, and rest(group) for one of eight rows or fewer.
template <typename Work, typename Rest>
inline void over_groups(int64_t first, int64_t last, Work work, Rest rest) {
  const int64_t even = last - (last - first) % 2;
  for (int64_t group = first; group < even; group += kMostGroups)
    work(group, group + kMostGroups < even ? group + kMostGroups : even);
  if (even < last) rest(even);
}

inline void linear_tile(const PackedWeight& w, int64_t tile, const QuantizedRows& x, int64_t first, int64_t last,
                        const LinearOutput& to) {
  const int64_t at = tile * kTile, lanes = w.outputs - at;
  const f32x16 bias = to.bias ? load_lanes(to.bias + at, lanes) : f32x16{};
  const auto wide = [&](int64_t begin, int64_t end) {
    f32x16 totals[kMostRows];
    run_product(w, tile, x, begin, end, totals);
    const f32x16* total = totals;
    for (int64_t row = begin * kRowGroup; row < x.last_row(end); ++row, ++total)
      store_outputs(to, row * w.outputs + at, *total, bias, lanes);
  };
  over_groups(first, last, wide,
              [&](int64_t group) { kAvx512Kernels.linear.linear_tiles(w, tile, tile + 1, x, group, group + 1, to); });
}

inline void linear_tiles(const PackedWeight& w, int64_t tile, int64_t last_tile, const QuantizedRows& x, int64_t first,
                         int64_t last, const LinearOutput& to) {
  if (!is_packed(w.kind)) return kAvx512Kernels.linear.linear_tiles(w, tile, last_tile, x, first, last, to);
  for (; tile < last_tile; ++tile) linear_tile(w, tile, x, first, last, to);
}

inline void gate_up_tile(const PackedWeight& gate, const PackedWeight& up, int64_t tile, const QuantizedRows& x,
                         int64_t first, int64_t last, const float* gate_bias, const float* up_bias,
                         Activation activation, float* out) {
  const int64_t at = tile * kTile;
  const GateOutputs outputs{gate_bias, up_bias, at, gate.outputs - at, activation};
  const auto wide = [&](int64_t begin, int64_t end) {
    f32x16 gates[kMostRows], ups[kMostRows];
    run_product(gate, tile, x, begin, end, gates);
    run_product(up, tile, x, begin, end, ups);
    const f32x16 *a = gates, *b = ups;
    for (int64_t row = begin * kRowGroup; row < x.last_row(end); ++row, ++a, ++b)
      outputs.store_row(out + row * gate.outputs, *a, *b);
  };
  over_groups(first, last, wide, [&](int64_t group) {
    kAvx512Kernels.linear.gate_up_tiles(gate, up, tile, tile + 1, x, group, group + 1, gate_bias, up_bias, activation,
                                        out);
  });
}

inline void gate_up_tiles(const PackedWeight& gate, const PackedWeight& up, int64_t tile, int64_t last_tile,
                          const QuantizedRows& x, int64_t first, int64_t last, const float* gate_bias,
                          const float* up_bias, Activation activation, float* out) {
  if (!is_packed(gate.kind) && !is_packed(up.kind))
    return kAvx512Kernels.linear.gate_up_tiles(gate, up, tile, last_tile, x, first, last, gate_bias, up_bias,
                                               activation, out);
  for (; tile < last_tile; ++tile) gate_up_tile(gate, up, tile, x, first, last, gate_bias, up_bias, activation, out);
}

constexpr TileKernels tile_kernels() {
  constexpr int64_t kTilesAtOnce = 8;
  return {quantize_items,        quantize_wide,  linear_tiles, gate_up_tiles,
          embed<Layout::kLanes>, Layout::kLanes, kTilesAtOnce, kMostGroups};
}

}  // namespace kvilt::KVILT_ISA
