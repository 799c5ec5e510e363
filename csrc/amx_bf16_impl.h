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
#include <memory>

#include "amx_tiles.h"
#include "elementwise_impl.h"
#include "embed_impl.h"
#include "kernel_table.h"
#include "row_weights_impl.h"
#include "transpose_impl.h"

namespace kvilt::KVILT_ISA {

constexpr int kWide = 2 * kRowGroup;   // rows of a tile
constexpr int64_t kSlots = 8;          // tiles of outputs of a call
constexpr int64_t kMostGroups = 64;    // groups of rows of a call
constexpr int64_t kBlocksAtOnce = 16;  // whose weights are unpacked at once
constexpr int kSums = kTile * kWide;   // of a tile

using WideSums = float[kMostGroups / 2][kSums];  // of each wide group: [output][row]
struct Room {
  alignas(64) uint16_t weights[2][kBlocksAtOnce][kBlockNumbers];
  alignas(64) WideSums sums[kSlots];
};
inline Room& room_of_thread() {
  static thread_local const std::unique_ptr<Room> room = std::make_unique<Room>();
  return *room;
}

// A tile of outputs of one weight.
struct Slot {
  const PackedWeight* weight;
  int64_t tile;

  const uint8_t* data() const { return weight->data + tile * tile_bytes(weight->kind, weight->inputs); }
  // Blocks [first, first + count) as bfloat16, in `room` unless they are that already.
  const uint16_t* blocks(int64_t first, int64_t count, uint16_t* room) const {
    if (weight->kind == WeightKind::kBfloat16) return reinterpret_cast<const uint16_t*>(data()) + first * kBlockNumbers;
    kUnpacks[int(weight->kind)](data(), first, count, room);
    return room;
  }
};

// Up to sixteen rows, of which the first is a multiple of it.
struct WideGroup {
  const uint16_t* values;
  int64_t rows, step;  // numbers from block to block

  WideGroup(const QuantizedRows& x, int64_t wide)
      : values(reinterpret_cast<const uint16_t*>(x.values) + wide * kWide * kBlock),
        rows(x.rows - wide * kWide < kWide ? x.rows - wide * kWide : kWide), step(x.rows * kBlock) {}
  const uint16_t* block(int64_t b) const { return values + b * step; }
  int64_t stride() const { return 4 * rows; }  // bytes from pair to pair of a block
};

// Tiles 0 and 2 hold sums of the first of two wide groups, 1 and 3 of the second; 4 and 5 weights; 6 and 7 the groups.
inline void configure(const WideGroup& first, const WideGroup& second) {
  TileShapes shapes;
  for (int tile = 0; tile < 4; ++tile) shapes.set(tile, kTile, int(4 * (tile % 2 ? second : first).rows));
  for (int tile = 4; tile < 6; ++tile) shapes.set(tile, kTile, 2 * kBlock);
  for (int tile = 6; tile < 8; ++tile) shapes.set(tile, kBlock / 2, int(4 * (tile % 2 ? second : first).rows));
  configure_tiles(shapes);
}

inline void prefetch_tile(const uint16_t* p) {
  for (int line = 0; line < 16; ++line) __builtin_prefetch(p + 32 * line);
}

// Some blocks of one or two tiles of outputs with one or two wide groups: adds to sums[output tile][group].
template <int T, int G>
inline void multiply(const uint16_t* const (&weights)[2], const WideGroup& one, const WideGroup& two, int64_t b,
                     int64_t blocks, float* const (&sums)[2][2]) {
  if (b == 0) {
    KVILT_TILE_ZERO(0);
    if constexpr (G == 2) KVILT_TILE_ZERO(1);
    if constexpr (T == 2) KVILT_TILE_ZERO(2);
    if constexpr (T == 2 && G == 2) KVILT_TILE_ZERO(3);
  } else {
    KVILT_TILE_LOAD(0, sums[0][0], 64);
    if constexpr (G == 2) KVILT_TILE_LOAD(1, sums[0][1], 64);
    if constexpr (T == 2) KVILT_TILE_LOAD(2, sums[1][0], 64);
    if constexpr (T == 2 && G == 2) KVILT_TILE_LOAD(3, sums[1][1], 64);
  }
  for (int64_t i = 0; i < blocks; ++i) {
    const uint16_t *first = one.block(b + i), *second = two.block(b + i);
    KVILT_TILE_LOAD(4, weights[0] + i * kBlockNumbers, 64);
    KVILT_TILE_LOAD(6, first, one.stride());
    prefetch_tile(weights[0] + (i + 1) * kBlockNumbers);
    prefetch_tile(first + one.step);
    KVILT_TILE_MULTIPLY_BFLOATS(0, 4, 6);
    if constexpr (G == 2) KVILT_TILE_LOAD(7, second, two.stride());
    if constexpr (G == 2) prefetch_tile(second + two.step);
    if constexpr (G == 2) KVILT_TILE_MULTIPLY_BFLOATS(1, 4, 7);
    if constexpr (T == 2) KVILT_TILE_LOAD(5, weights[1] + i * kBlockNumbers, 64);
    if constexpr (T == 2) prefetch_tile(weights[1] + (i + 1) * kBlockNumbers);
    if constexpr (T == 2) KVILT_TILE_MULTIPLY_BFLOATS(2, 5, 6);
    if constexpr (T == 2 && G == 2) KVILT_TILE_MULTIPLY_BFLOATS(3, 5, 7);
  }
  KVILT_TILE_STORE(0, sums[0][0], 64);
  if constexpr (G == 2) KVILT_TILE_STORE(1, sums[0][1], 64);
  if constexpr (T == 2) KVILT_TILE_STORE(2, sums[1][0], 64);
  if constexpr (T == 2 && G == 2) KVILT_TILE_STORE(3, sums[1][1], 64);
}

// One or two tiles of outputs with all blocks of one or two wide groups: unpacks a block while the one before is
// multiplied.
template <int T, int G>
inline void multiply_few(const Slot* slots, const QuantizedRows& x, const WideGroup& one, const WideGroup& two,
                         Room& room, WideSums* sums) {
  const auto unpack = [&](int64_t b, const uint16_t*(&to)[T]) {
    for (int slot = 0; slot < T; ++slot) to[slot] = slots[slot].blocks(b, 1, room.weights[slot][b % kBlocksAtOnce]);
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

// Up to two tiles of outputs with any number of wide groups.
inline void multiply_many(const Slot* slots, int64_t count, const QuantizedRows& x, int64_t first, int64_t last,
                          int64_t b, Room& room, WideSums* sums) {
  const int64_t blocks = x.blocks - b < kBlocksAtOnce ? x.blocks - b : kBlocksAtOnce, other = count - 1;
  const uint16_t* weights[2] = {};
  for (int64_t slot = 0; slot < count; ++slot) weights[slot] = slots[slot].blocks(b, blocks, room.weights[slot][0]);
  bool whole = true;  // tiles are configured for wide groups of sixteen rows
  configure(WideGroup(x, first), WideGroup(x, first));
  for (int64_t wide = first; wide < last; wide += 2) {
    const int64_t at = wide - first, beside = wide + 1 < last;
    const WideGroup one(x, wide), two(x, wide + beside);
    if (two.rows < kWide && whole) {
      configure(one, two);
      whole = false;
    }
    float* const to[2][2] = {{sums[0][at], sums[0][at + beside]}, {sums[other][at], sums[other][at + beside]}};
    if (count == 2 && beside) multiply<2, 2>(weights, one, two, b, blocks, to);
    else if (count == 2) multiply<2, 1>(weights, one, two, b, blocks, to);
    else if (beside) multiply<1, 2>(weights, one, two, b, blocks, to);
    else multiply<1, 1>(weights, one, two, b, blocks, to);
  }
}

// The sums of some slots and of the wide groups [first, last).
inline void multiply_slots(const Slot* slots, int64_t count, const QuantizedRows& x, int64_t first, int64_t last,
                           WideSums* sums) {
  Room& room = room_of_thread();
  if (last - first <= 2) {
    const WideGroup one(x, first), two(x, last - 1);
    const auto few = last - first == 2 ? multiply_few<2, 2> : multiply_few<2, 1>;
    const auto rest = last - first == 2 ? multiply_few<1, 2> : multiply_few<1, 1>;
    configure(one, two);
    for (int64_t slot = 0; slot < count; slot += 2)
      (slot + 1 < count ? few : rest)(slots + slot, x, one, two, room, sums + slot);
  } else {
    for (int64_t b = 0; b < x.blocks; b += kBlocksAtOnce)
      for (int64_t slot = 0; slot < count; slot += 2)
        multiply_many(slots + slot, count - slot < 2 ? 1 : 2, x, first, last, b, room, sums + slot);
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

// A group of rows as bfloat16; see QuantizedRows.
inline void round_rows(const QuantizedRows& x, int64_t group) {
  constexpr int kPairs = kBlock / 2;
  const int64_t rows = x.count(group), width = WideGroup(x, group / 2).rows;
  auto* out = reinterpret_cast<float*>(x.values) + group / 2 * kWide * kPairs + group % 2 * kRowGroup;
  alignas(64) float pairs[kRowGroup][kPairs];  // bits; they are only moved
  for (int64_t b = 0; b < x.blocks; ++b, out += kPairs * x.rows) {
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t row = group * kRowGroup + r;
      const bool whole = (b + 1) * kBlock <= x.inputs;
      const auto round = [&](const float* from) { return to_bfloats(load(from), load(from + 16)); };
      _mm512_store_si512(pairs[r], round(whole ? x.plain + row * x.inputs + b * kBlock : RowBlocks(x, row).last));
    }
    if (rows == kRowGroup)
      for (int pair = 0; pair < kPairs; pair += 8) transpose_8(pairs[0] + pair, kPairs, out + pair * width, width);
    else
      for (int pair = 0; pair < kPairs; ++pair)
        for (int64_t r = 0; r < rows; ++r) std::memcpy(out + pair * width + r, &pairs[r][pair], sizeof(float));
  }
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
      const int64_t at = (tile + i) * kTile, lanes = gate.outputs - at;
      const f32x16 gate_add = gate_bias ? load_lanes(gate_bias + at, lanes) : f32x16{};
      const f32x16 up_add = up_bias ? load_lanes(up_bias + at, lanes) : f32x16{};
      f32x16 a[kWide], b[kWide];
      transpose_16(sums[2 * i][wide - first_wide], a);
      transpose_16(sums[2 * i + 1][wide - first_wide], b);
      for (int64_t r = 0; r < WideGroup(x, wide).rows; ++r) {
        const f32x16 value = gated(gate_bias ? a[r] + gate_add : a[r], up_bias ? b[r] + up_add : b[r], activation);
        store_lanes(out + (wide * kWide + r) * gate.outputs + at, value, lanes);
      }
    }
}

constexpr TileKernels tile_kernels() {
  return {round_rows, linear_tiles, gate_up_tiles, embed<Layout::kRows>, Layout::kRows, kSlots, kMostGroups};
}

}  // namespace kvilt::KVILT_ISA
