// What a kernel is given and what each instruction set provides. No Python and no torch here.
#pragma once
#include <cstddef>
#include <cstdint>

namespace kvilt {

// Outputs are packed in tiles of sixteen; each lane accumulates over the inputs in one fixed order, for one row or
// many.
constexpr int kTile = 16;
constexpr int kBlock = 32;      // inputs that share an activation scale
constexpr int kSuperBlock = 8;  // blocks of a k-format that share a header
constexpr int kRowGroup = 8;    // rows that go through a tile together

// Of a feed-forward gate. kSwigluOai is that of gpt-oss: both inputs clamped, and one added to the second. kRelu2 is
// the square of what is above zero.
enum class Activation : int { kSilu, kGeluTanh, kGelu, kSwigluOai, kTanh, kRelu2, kRelu };

// How weights are packed; the bytes are described in packed.h. `Min` formats have a minimum besides a scale, `K`
// formats are the k-formats of GGML, kFp4 is MXFP4, kIq4K is IQ4_XS.
enum class WeightKind : int {
  kFloat32,
  kFloat16,
  kBfloat16,
  kQ4,
  kQ4Min,
  kQ5,
  kQ5Min,
  kQ8,
  kQ4K,
  kQ5K,
  kQ6K,
  kFp4,
  kQ2K,
  kQ3K,
  kIq4K
};
constexpr int kWeightKinds = 15;

// How the codes of a block are ordered: with outputs as lanes, or with the inputs of an output together, for AMX.
enum class Layout : int { kLanes, kRows };

struct PackedWeight {
  WeightKind kind;
  int64_t outputs;  // real ones; the last tile is padded with zeros
  int64_t inputs;   // real ones; the last block is padded with zeros
  const uint8_t* data;

  int64_t tiles() const { return (outputs + kTile - 1) / kTile; }
  int64_t blocks() const { return (inputs + kBlock - 1) / kBlock; }
};

// Rows of activations, as they are and as int8. Rows stand in groups of eight (the last may be smaller), and inside a
// group of R rows the blocks follow each other: [block][R][32] values, [block][4][R] floats. The floats are the scale,
// the scaled sum of the block, and the scaled sums of its halves. With AMX two groups stand as one of up to sixteen rows.
//
// Few blocks of a row hold its largest activations, and most of the error of eight bits. What eight bits leave of these
// blocks is quantized to eight more: their remainders.
//
// Kernels with weights in the layout of rows take bfloat16 instead, and nothing else. Two groups stand as a wide one of R
// rows, up to sixteen, and two wide groups as a pair. `values` are [chunk of blocks][pair][block][wide group][16][R] pairs
// of neighbouring inputs, so that a thread reads along memory.
struct alignas(64) Remainder {
  int8_t values[kBlock];
  float floats[4];
};
struct QuantizedRows {
  const float* plain;  // [rows][inputs]
  int8_t* values;
  float* floats;
  Remainder* remainders;  // [row][block]; unused where there is none
  uint64_t* blocks_with;  // [group][words]: bits for blocks of which some row has a remainder
  uint8_t* rows_with;     // [group][block]: bits for these rows
  int64_t rows, inputs, blocks;

  int64_t groups() const { return (rows + kRowGroup - 1) / kRowGroup; }
  int64_t words() const { return words_of(blocks); }
  static int64_t words_of(int64_t blocks) { return (blocks + 63) / 64; }
  int64_t count(int64_t group) const {
    return rows - group * kRowGroup < kRowGroup ? rows - group * kRowGroup : kRowGroup;
  }
  // Behind the last of groups up to this one.
  int64_t last_row(int64_t group) const { return rows < group * kRowGroup ? rows : group * kRowGroup; }
};

// Where a tile's results go: out = product + bias + residual.
struct LinearOutput {
  const float* bias;      // [outputs], or null
  const float* residual;  // [rows][outputs], or null
  float* out;             // [rows][outputs]
};

// A token's sum over its experts: out = start + sum of weights[i] * rows[i] + shared_weight * shared, in this order.
struct ExpertSum {
  const float* start;    // [n], or null
  const float* made;     // [rows][n]
  const int32_t* rows;   // [count]: where the token's experts are in `made`
  const float* weights;  // [count]
  int64_t count;
  const float* shared;  // [n], or null
  float shared_weight;
};

struct LinearKernels {
  // Rows are quantized in so many items, which are independent of each other.
  int64_t (*quantize_items)(const QuantizedRows& x);
  void (*quantize)(const QuantizedRows& x, int64_t item);
  // Tiles [tile, last_tile) of outputs for the rows of groups [first, last): an even number, or all up to the last group,
  // from an even one. There are at most `tiles_at_once` tiles and `groups_at_once` groups.
  void (*linear_tiles)(const PackedWeight& w, int64_t tile, int64_t last_tile, const QuantizedRows& x, int64_t first,
                       int64_t last, const LinearOutput& to);
  // activation(gate) * up, both products of the same input.
  void (*gate_up_tiles)(const PackedWeight& gate, const PackedWeight& up, int64_t tile, int64_t last_tile,
                        const QuantizedRows& x, int64_t first, int64_t last, const float* gate_bias,
                        const float* up_bias, Activation activation, float* out);
  void (*embed)(const PackedWeight& w, int64_t row, float scale, float* out);
  void (*rms_norm)(const float* x, const float* weight, float eps, int64_t n, float* out);
  void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int64_t n, float* out);
  void (*add)(const float* a, const float* b, int64_t n, float* out);
  void (*add_scaled)(const float* a, const float* b, float scale, int64_t n, float* out);  // a + scale * b
  void (*expert_sum)(const ExpertSum& sum, int64_t n, float* out);
  int64_t (*argmax)(const float* x, int64_t n);  // the first of the largest; -1 if any is not a number
  Layout layout;
  int64_t tiles_at_once, groups_at_once;

  // Whether activations are multiplied as they are, not quantized.
  bool takes_plain(WeightKind kind) const {
    return kind == WeightKind::kFloat32 || (layout == Layout::kLanes && kind <= WeightKind::kBfloat16);
  }
};

// What AMX replaces of another instruction set's kernels.
struct TileKernels {
  decltype(LinearKernels::quantize_items) quantize_items;
  decltype(LinearKernels::quantize) quantize;
  decltype(LinearKernels::linear_tiles) linear_tiles;
  decltype(LinearKernels::gate_up_tiles) gate_up_tiles;
  decltype(LinearKernels::embed) embed;
  Layout layout;
  int64_t tiles_at_once, groups_at_once;
};

}  // namespace kvilt
