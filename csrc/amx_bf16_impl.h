// Products with packed weights by tiles of AMX, in bfloat16.
//
// A tile of weights has sixteen outputs and 32 inputs, a tile of activations those inputs of up to sixteen rows (a wide
// group), and a tile of sums is added to in float32 over all inputs. An element of a sum gets the same operations in the
// same order whatever else its tile has, so a row alone has the bits of a row among others.
//
// Many rows: the weights of some blocks are unpacked once for all of them, and two tiles of outputs are multiplied with two
// of rows together, so that a load serves two products. Few rows: unpacking takes longer than multiplying, so the tiles
// multiply one block while the next one is unpacked.
#pragma once
#include <algorithm>

#include "amx_tiles.h"
#include "elementwise_impl.h"
#include "embed_impl.h"
#include "kernel_table.h"
#include "large_bytes.h"
#include "row_weights_impl.h"
#include "transpose_impl.h"

namespace kvilt::KVILT_ISA {

constexpr int kWide = 2 * kRowGroup;  // rows of a tile
constexpr int64_t kSlots = 8;         // tiles of outputs of a call
constexpr int64_t kMostGroups = 64;   // groups of rows of a call
constexpr int64_t kBlocksAtOnce = 8;  // a chunk: unpacked weights of two tiles fit into the nearest cache
constexpr int kSums = kTile * kWide;  // of a tile

using WideSums = float[kMostGroups / 2][kSums];  // of each wide group: [output][row]
struct Room {
  alignas(64) uint16_t weights[kBlocksAtOnce][2][kBlockNumbers];
  alignas(64) WideSums sums[kSlots];
};
inline Room& room_of_thread() {
  static thread_local LargeBytes bytes;
  bytes.grow(std::max(sizeof(Room), LargeBytes::kPage));
  return *static_cast<Room*>(bytes.memory.get());
}

// A tile of outputs of one weight.
struct Slot {
  const PackedWeight* weight;
  int64_t tile;

  const uint8_t* data() const { return weight->data + tile * tile_bytes(weight->kind, weight->inputs); }
};

// Up to sixteen rows, of which the first is a multiple of it. Two of these groups stand together: see QuantizedRows.
struct WideGroup {
  const QuantizedRows& x;
  int64_t pair, second, rows,
      both;  // the first row of the pair; whether this is its second group; rows of it, and of the pair

  WideGroup(const QuantizedRows& x, int64_t wide)
      : x(x), pair(wide / 2 * 2 * kWide), second(wide % 2), rows(std::min<int64_t>(kWide, x.rows - wide * kWide)),
        both(std::min<int64_t>(2 * kWide, x.rows - pair)) {}
  int64_t step() const { return both * kBlock; }  // numbers from block to block of a chunk
  int64_t stride() const { return 4 * rows; }     // bytes from pair to pair of a block
  uint16_t* block(int64_t b) const {
    const int64_t at = b % kBlocksAtOnce, chunk = b - at, blocks = std::min(kBlocksAtOnce, x.blocks - chunk);
    const int64_t row = chunk * x.rows + pair * blocks + at * both + second * kWide;
    return reinterpret_cast<uint16_t*>(x.values) + row * kBlock;
  }
};

// Tiles 0 and 2 hold sums of the first of two wide groups, 1 and 3 of the second; 4 and 5 weights; 6 and 7 the groups.
inline void configure(const WideGroup& first, const WideGroup& second) {
  TileShapes shapes;
  for (int tile = 0; tile < 4; ++tile) shapes.set(tile, kTile, int(4 * (tile % 2 ? second : first).rows));
  for (int tile = 4; tile < 6; ++tile) shapes.set(tile, kTile, 2 * kBlock);
  for (int tile = 6; tile < 8; ++tile) shapes.set(tile, kBlock / 2, int(4 * (tile % 2 ? second : first).rows));
  configure_tiles(shapes);
}

// The sums that tiles 0 to 3 hold, and where they are stored when the tiles are needed for others. Products take long to
// end, so each tile is exchanged only before its first product of other sums, while the products of the tiles before it run.
struct HeldSums {
  float* of[4] = {};

  void store_all() {
    if (of[0]) KVILT_TILE_STORE(0, of[0], 64);
    if (of[1]) KVILT_TILE_STORE(1, of[1], 64);
    if (of[2]) KVILT_TILE_STORE(2, of[2], 64);
    if (of[3]) KVILT_TILE_STORE(3, of[3], 64);
    *this = {};
  }
};
#define KVILT_EXCHANGE(tile, next, begins)                        \
  do {                                                            \
    if (held.of[tile]) KVILT_TILE_STORE(tile, held.of[tile], 64); \
    if (begins) KVILT_TILE_ZERO(tile);                            \
    else KVILT_TILE_LOAD(tile, next, 64);                         \
    held.of[tile] = next;                                         \
  } while (false)

// Memory that is fetched into the second-level cache, a few lines with each block: the activations of the next chunk.
struct Ahead {
  const char* at;
  int64_t lines;

  void fetch() {
    for (int64_t line = 0; line < lines; ++line, at += 64) __builtin_prefetch(at, 0, 2);
  }
};

// Some blocks of one or two tiles of outputs with one or two wide groups: adds to sums[output tile][group], or begins them.
template <int T, int G>
inline void multiply(const UnpackedBlocks (&weights)[2], const WideGroup& one, const WideGroup& two, int64_t b,
                     int64_t blocks, float* const (&sums)[2][2], HeldSums& held, Ahead& ahead) {
  const uint16_t *rows = one.block(b), *more = two.block(b), *weight = weights[0].first, *other = weights[1].first;
  for (int64_t i = 0; i < blocks; ++i) {
    KVILT_TILE_LOAD(4, weight, 64);
    KVILT_TILE_LOAD(6, rows, one.stride());
    rows += one.step();
    for (int line = 0; line < 16 * G; ++line) __builtin_prefetch(rows + 32 * line);
    if (i == 0) KVILT_EXCHANGE(0, sums[0][0], b == 0);
    KVILT_TILE_MULTIPLY_BFLOATS(0, 4, 6);
    if constexpr (G == 2) {
      KVILT_TILE_LOAD(7, more, two.stride());
      if (i == 0) KVILT_EXCHANGE(1, sums[0][1], b == 0);
      KVILT_TILE_MULTIPLY_BFLOATS(1, 4, 7);
    }
    ahead.fetch();
    if constexpr (T == 2) {
      KVILT_TILE_LOAD(5, other, 64);
      if (i == 0) KVILT_EXCHANGE(2, sums[1][0], b == 0);
      KVILT_TILE_MULTIPLY_BFLOATS(2, 5, 6);
    }
    if constexpr (T == 2 && G == 2) {
      if (i == 0) KVILT_EXCHANGE(3, sums[1][1], b == 0);
      KVILT_TILE_MULTIPLY_BFLOATS(3, 5, 7);
    }
    weight += weights[0].step;
    other += weights[1].step;
    more += two.step();
  }
}

// T tiles of outputs, weights of one kind, with all blocks of one or two wide groups: unpacks a block while the one before
// is multiplied.
template <WeightKind K, int T, int G>
void multiply_few(const Slot* slots, const QuantizedRows& x, const WideGroup& one, const WideGroup& two, Room& room,
                  WideSums* sums) {
  const uint8_t* data[T];
  for (int slot = 0; slot < T; ++slot) data[slot] = slots[slot].data();
  const auto unpack = [&](int64_t b, const uint16_t*(&to)[T]) __attribute__((always_inline)) {
    for (int slot = 0; slot < T; ++slot) to[slot] = block_of<K>(data[slot], b, room.weights[b % 2][slot]);
  };
  const uint16_t *weights[T], *next[T] = {};
  KVILT_TILE_ZERO(0);
  KVILT_TILE_ZERO(1);
  KVILT_TILE_ZERO(2);
  KVILT_TILE_ZERO(3);
  unpack(0, weights);
  for (int64_t b = 0; b < x.blocks; ++b) {
    if (b + 1 < x.blocks) unpack(b + 1, next);
    KVILT_TILE_LOAD(4, weights[0], 64);
    KVILT_TILE_LOAD(6, one.block(b), one.stride());
    KVILT_TILE_MULTIPLY_BFLOATS(0, 4, 6);
    if constexpr (G == 2) KVILT_TILE_LOAD(7, two.block(b), two.stride());
    if constexpr (G == 2) KVILT_TILE_MULTIPLY_BFLOATS(1, 4, 7);
    if constexpr (T == 2) KVILT_TILE_LOAD(5, weights[T - 1], 64);
    if constexpr (T == 2) KVILT_TILE_MULTIPLY_BFLOATS(2, 5, 6);
    if constexpr (T == 2 && G == 2) KVILT_TILE_MULTIPLY_BFLOATS(3, 5, 7);
    for (int slot = 0; slot < T; ++slot) weights[slot] = next[slot];
  }
  KVILT_TILE_STORE(0, sums[0][0], 64);
  if constexpr (G == 2) KVILT_TILE_STORE(1, sums[0][1], 64);
  if constexpr (T == 2) KVILT_TILE_STORE(2, sums[T - 1][0], 64);
  if constexpr (T == 2 && G == 2) KVILT_TILE_STORE(3, sums[T - 1][1], 64);
}

// By the kind of weights: one and two tiles of outputs, with one and two wide groups.
using MultiplyFew = void (*)(const Slot* slots, const QuantizedRows& x, const WideGroup& one, const WideGroup& two,
                             Room& room, WideSums* sums);
struct FewProducts {
  MultiplyFew of[2][2];
};
template <WeightKind K>
constexpr FewProducts few_of() {
  if constexpr (K == WeightKind::kFloat32) return {};
  else return {{{multiply_few<K, 1, 1>, multiply_few<K, 1, 2>}, {multiply_few<K, 2, 1>, multiply_few<K, 2, 2>}}};
}
template <int... K>
constexpr std::array<FewProducts, kWeightKinds> all_few(std::integer_sequence<int, K...>) {
  return {few_of<WeightKind(K)>()...};
}
constexpr std::array<FewProducts, kWeightKinds> kFew = all_few(std::make_integer_sequence<int, kWeightKinds>());

// Up to two tiles of outputs with any number of wide groups.
inline void multiply_many(const Slot* slots, int64_t count, const QuantizedRows& x, int64_t first, int64_t last,
                          int64_t b, Room& room, WideSums* sums, Ahead& ahead) {
  const int64_t blocks = std::min(x.blocks - b, kBlocksAtOnce), other = count - 1;
  UnpackedBlocks weights[2] = {};
  for (int64_t slot = 0; slot < count; ++slot)
    weights[slot] = kUnpacks[int(slots[slot].weight->kind)](slots[slot].data(), b, blocks, room.weights[0][slot]);
  configure(WideGroup(x, first), WideGroup(x, first));
  HeldSums held;
  for (int64_t wide = first; wide < last; wide += 2) {
    const int64_t at = wide - first, beside = wide + 1 < last;
    const WideGroup one(x, wide), two(x, wide + beside);
    if (two.rows < kWide || !beside) {  // the last ones
      held.store_all();
      configure(one, two);
    }
    float* const to[2][2] = {{sums[0][at], sums[0][at + beside]}, {sums[other][at], sums[other][at + beside]}};
    if (count == 2 && beside) multiply<2, 2>(weights, one, two, b, blocks, to, held, ahead);
    else if (count == 2) multiply<2, 1>(weights, one, two, b, blocks, to, held, ahead);
    else if (beside) multiply<1, 2>(weights, one, two, b, blocks, to, held, ahead);
    else multiply<1, 1>(weights, one, two, b, blocks, to, held, ahead);
  }
  held.store_all();
}

// All blocks of some slots with the wide groups [first, last), chunk by chunk.
inline void multiply_chunks(const Slot* slots, int64_t count, const QuantizedRows& x, int64_t first, int64_t last,
                            Room& room, WideSums* sums) {
  const int64_t pairs = (last - first + 1) / 2, fetches = (count + 1) / 2 * pairs;  // for each block of a chunk
  const int64_t rows = std::min(x.rows, last * kWide) - first * kWide;
  for (int64_t b = 0; b < x.blocks; b += kBlocksAtOnce) {
    const int64_t next = b + kBlocksAtOnce;
    Ahead ahead = {nullptr, 0};
    if (next + kBlocksAtOnce <= x.blocks)
      ahead = {reinterpret_cast<const char*>(WideGroup(x, first).block(next)),
               rows / fetches};  // a line a row and block
    for (int64_t slot = 0; slot < count; slot += 2)
      multiply_many(slots + slot, count - slot < 2 ? 1 : 2, x, first, last, b, room, sums + slot, ahead);
  }
}

// The sums of some slots and of the wide groups [first, last).
inline void multiply_slots(const Slot* slots, int64_t count, const QuantizedRows& x, int64_t first, int64_t last,
                           WideSums* sums) {
  Room& room = room_of_thread();
  if (last - first <= 2) {
    const WideGroup one(x, first), two(x, last - 1);
    configure(one, two);
    for (int64_t slot = 0, together; slot < count; slot += together) {
      const WeightKind kind = slots[slot].weight->kind;
      together = slot + 1 < count && slots[slot + 1].weight->kind == kind ? 2 : 1;
      kFew[int(kind)].of[together - 1][last - first - 1](slots + slot, x, one, two, room, sums + slot);
    }
  } else {
    multiply_chunks(slots, count, x, first, last, room, sums);
  }
  release_tiles();
}

// Sums of one slot, also with weights that are multiplied as they are: where the other part of a gate is packed.
inline void multiply_one(const Slot& slot, const QuantizedRows& x, int64_t first, int64_t last, WideSums& sums) {
  if (slot.weight->kind != WeightKind::kFloat32) return multiply_slots(&slot, 1, x, first, last, &sums);
  for (int64_t wide = first; wide < last; ++wide)
    for (int64_t row = 0; row < WideGroup(x, wide).rows; ++row) {
      const float* plain = x.plain + (wide * kWide + row) * x.inputs;
      f32x16 total = {};
      for (int64_t k = 0; k < x.inputs; ++k)
        total = fma(load_weights<WeightKind::kFloat32>(slot.data(), k * kTile), plain[k], total);
      alignas(64) float outputs[kTile];
      store(outputs, total);
      for (int output = 0; output < kTile; ++output) sums[wide - first][output * kWide + row] = outputs[output];
    }
}

// One of the items below: a chunk of a wide group as bfloat16; see QuantizedRows.
inline void round_rows(const QuantizedRows& x, int64_t item) {
  const int64_t wides = (x.rows + kWide - 1) / kWide, first = item / wides * kBlocksAtOnce;
  const WideGroup wide(x, item % wides);
  const float* plain = x.plain + (wide.pair + wide.second * kWide) * x.inputs;
  alignas(64) float pairs[kWide][kWide] = {};  // bits; they are only moved
  f32x16 columns[kWide];
  for (int64_t b = first; b < std::min(x.blocks, first + kBlocksAtOnce); ++b) {
    for (int64_t r = 0; r < wide.rows; ++r) {
      alignas(64) float last[kBlock] = {};
      const float* from = plain + r * x.inputs + b * kBlock;
      if (const int64_t left = x.inputs - b * kBlock; left < kBlock)
        from = static_cast<float*>(std::memcpy(last, from, size_t(left) * sizeof(float)));
      _mm512_store_si512(pairs[r], to_bfloats(load(from), load(from + 16)));
    }
    auto* out = reinterpret_cast<float*>(wide.block(b));
    if (wide.rows == 1) {
      std::memcpy(out, pairs[0], sizeof pairs[0]);
      continue;
    }
    transpose_16(pairs[0], columns);
    const auto lanes = __mmask16((1 << wide.rows) - 1);
    for (int pair = 0; pair < kWide; ++pair) _mm512_mask_storeu_ps(out + pair * wide.rows, lanes, columns[pair].v);
  }
}
inline int64_t rounding_items(const QuantizedRows& x) {
  return (x.rows + kWide - 1) / kWide * ((x.blocks + kBlocksAtOnce - 1) / kBlocksAtOnce);
}

inline void linear_tiles(const PackedWeight& w, int64_t tile, int64_t last_tile, const QuantizedRows& x, int64_t first,
                         int64_t last, const LinearOutput& to) {
  if (w.kind == WeightKind::kFloat32) return kAvx512Kernels.linear.linear_tiles(w, tile, last_tile, x, first, last, to);
  Slot slots[kSlots];
  const int64_t count = last_tile - tile, first_wide = first / 2, last_wide = (last + 1) / 2;
  for (int64_t slot = 0; slot < count; ++slot) slots[slot] = {&w, tile + slot};
  WideSums* sums = room_of_thread().sums;
  multiply_slots(slots, count, x, first_wide, last_wide, sums);
  for (int64_t wide = first_wide; wide < last_wide; ++wide)  // outside: a row's outputs are written one after the other
    for (int64_t slot = 0; slot < count; ++slot) {
      const int64_t at = slots[slot].tile * kTile, lanes = w.outputs - at;
      const f32x16 bias = to.bias ? load_lanes(to.bias + at, lanes) : f32x16{};
      f32x16 total[kWide];
      transpose_16(sums[slot][wide - first_wide], total);
      for (int64_t r = 0; r < WideGroup(x, wide).rows; ++r)
        store_outputs(to, (wide * kWide + r) * w.outputs + at, total[r], bias, lanes);
    }
}

inline void gate_up_tiles(const PackedWeight& gate, const PackedWeight& up, int64_t tile, int64_t last_tile,
                          const QuantizedRows& x, int64_t first, int64_t last, const float* gate_bias,
                          const float* up_bias, Activation activation, float* out) {
  const bool plain_gate = gate.kind == WeightKind::kFloat32, plain_up = up.kind == WeightKind::kFloat32;
  if (plain_gate && plain_up)
    return kAvx512Kernels.linear.gate_up_tiles(gate, up, tile, last_tile, x, first, last, gate_bias, up_bias,
                                               activation, out);
  for (; last_tile - tile > kSlots / 2; tile += kSlots / 2)
    gate_up_tiles(gate, up, tile, tile + kSlots / 2, x, first, last, gate_bias, up_bias, activation, out);
  Slot slots[kSlots];
  const int64_t count = last_tile - tile, first_wide = first / 2, last_wide = (last + 1) / 2;
  for (int64_t i = 0; i < count; ++i) slots[2 * i] = {&gate, tile + i}, slots[2 * i + 1] = {&up, tile + i};
  WideSums* sums = room_of_thread().sums;
  if (plain_gate || plain_up)
    for (int64_t slot = 0; slot < 2 * count; ++slot) multiply_one(slots[slot], x, first_wide, last_wide, sums[slot]);
  else multiply_slots(slots, 2 * count, x, first_wide, last_wide, sums);
  for (int64_t wide = first_wide; wide < last_wide; ++wide)
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = (tile + i) * kTile;
      const GateOutputs outputs{gate_bias, up_bias, at, gate.outputs - at, activation};
      f32x16 a[kWide], b[kWide];
      transpose_16(sums[2 * i][wide - first_wide], a);
      transpose_16(sums[2 * i + 1][wide - first_wide], b);
      for (int64_t r = 0; r < WideGroup(x, wide).rows; ++r)
        outputs.store_row(out + (wide * kWide + r) * gate.outputs, a[r], b[r]);
    }
}

constexpr TileKernels tile_kernels() {
  return {rounding_items,       round_rows,    linear_tiles, gate_up_tiles,
          embed<Layout::kRows>, Layout::kRows, kSlots,       kMostGroups};
}

}  // namespace kvilt::KVILT_ISA
