// What a kernel is given and what each instruction set provides. No Python and no torch here.
#pragma once
#include <cstddef>
#include <cstdint>

namespace kvilt {

// Outputs are packed in tiles of sixteen; each lane accumulates over the inputs in one fixed order, for one row or many.
constexpr int kTile = 16;
constexpr int kBlock = 32;   // inputs that share an activation scale
constexpr int kSuper = 8;    // blocks of a k-format that share a header
constexpr int kGroup = 8;    // rows that go through a tile together

// How weights are packed. The numbers are shared with kvilt/ops/native/pack.py, the bytes are described in packed.h.
enum class Kind : int { kFloat, kHalf, kBfloat, k4, k4m, k5, k5m, k8, k4k, k5k, k6k };
constexpr int kKinds = 11;

struct Packed {
  Kind kind;
  int64_t outputs;  // real ones; the last tile is padded with zeros
  int64_t inputs;   // real ones; the last block is padded with zeros
  const uint8_t* data;

  int64_t tiles() const { return (outputs + kTile - 1) / kTile; }
  int64_t blocks() const { return (inputs + kBlock - 1) / kBlock; }
};

// Rows of activations, as they are and as int8. Rows stand in groups of eight (the last may be smaller), and inside a
// group of R rows the blocks follow each other: [block][R][32] values, [block][4][R] floats. The floats are the scale,
// the scaled sum of the block, and the scaled sums of its halves.
//
// Few blocks of a row hold its largest activations, and most of the error that eight bits make. What eight bits leave of
// those stands in eight more: the rests of a group, [rest][32] values and [rest][4] floats, by block and then by row.
struct Rows {
  const float* plain;  // [rows][inputs]
  int8_t *values, *rest_values;
  float *floats, *rest_floats;
  int32_t* rests;  // [group][1 + 8 * blocks]: how many, and of which block and row: block * 8 + row
  int64_t rows, inputs, blocks;

  int64_t groups() const { return (rows + kGroup - 1) / kGroup; }
  int32_t* rests_of(int64_t group) const { return rests + group * (1 + kGroup * blocks); }
  int64_t count(int64_t group) const { return rows - group * kGroup < kGroup ? rows - group * kGroup : kGroup; }
};

// Where a tile's results go: out = product + bias + onto.
struct Target {
  const float* bias;  // [outputs], or null
  const float* onto;  // [rows][outputs], or null
  float* out;         // [rows][outputs]
};

struct Kernels {
  const char* name;
  void (*quantize)(const Rows& x, int64_t group);
  // One tile of outputs for the rows of groups [first, last).
  void (*linear)(const Packed& w, int64_t tile, const Rows& x, int64_t first, int64_t last, const Target& to);
  // activation(gate) * up, both products of the same input.
  void (*gated)(const Packed& gate, const Packed& up, int64_t tile, const Rows& x, int64_t first, int64_t last,
                const float* gate_bias, const float* up_bias, int activation, float* out);
  void (*embed)(const Packed& w, int64_t row, float scale, float* out);
  void (*rms_norm)(const float* x, const float* weight, float eps, int64_t n, float* out);
  void (*add)(const float* a, const float* b, int64_t n, float* out);
  int64_t (*argmax)(const float* x, int64_t n);  // the first of the largest; -1 if any is not a number
};

const Kernels* generic_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();

}  // namespace kvilt
