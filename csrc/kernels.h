// What a kernel is given and what each instruction set provides. No Python and no torch here.
#pragma once
#include <cstddef>
#include <cstdint>

namespace kvilt {

// Outputs are packed in tiles of sixteen; each lane accumulates over the inputs in one fixed order, for one row or many.
constexpr int kTile = 16;
constexpr int kBlock = 32;  // inputs that share an activation scale

// How weights are packed. The numbers are shared with kvilt/ops/native/pack.py.
enum class Kind : int {
  kFloat = 0,        // float32 [tile][input][16]
  kNibble16 = 1,     // 4 bits, float16 scale and minimum
  kNibble32 = 2,     // 4 bits, float32 scale and minimum
  kByte16 = 3,       // signed 8 bits, float16 scale
  kByte32 = 4,       // signed 8 bits, float32 scale and minimum
  kByteHalves = 5,   // signed 8 bits, float32 scale per sixteen inputs
};

struct Packed {
  Kind kind;
  int64_t outputs;  // real ones; the last tile is padded with zeros
  int64_t inputs;   // real ones; the last block is padded with zeros
  const uint8_t* data;

  int64_t tiles() const { return (outputs + kTile - 1) / kTile; }
  int64_t blocks() const { return (inputs + kBlock - 1) / kBlock; }
  int64_t block_bytes() const;  // of one tile and one block
};

// Rows of activations as int8, with a scale and a scaled sum for each block of inputs.
struct Quantized {
  const int8_t* values;  // [rows][blocks * 32]
  const float* scales;   // [rows][blocks]
  const float* sums;     // [rows][blocks], scale times the sum of the block's values
  const int32_t* totals; // [rows][blocks * 2], sums of the values of each half block
  int64_t blocks;
};

// One layer of one layer group of pages.
struct Pages {
  int dtype;              // 0 float32, 1 float16, 2 bfloat16
  int64_t page_tokens;
  int64_t lanes;          // page_tokens rounded up to sixteen
  int64_t kv_heads;
  int64_t dim;
  int64_t value_dim;
  const void* keys;       // [page][kv_head][dim][lanes]
  const void* values;     // [page][kv_head][page_tokens][value_dim]
};

struct Mask {
  float scale;
  int64_t window;  // 0: all
  float soft_cap;  // 0: none
};

struct Kernels {
  const char* name;
  void (*quantize)(const float* x, int64_t inputs, int64_t blocks, int8_t* values, float* scales, float* sums,
                   int32_t* totals);
  // One tile of outputs for rows [first, last).
  void (*linear)(const Packed& w, int64_t tile, const Quantized& x, int64_t first, int64_t last, const float* bias,
                 float* out, int64_t stride);
  void (*linear_float)(const Packed& w, int64_t tile, const float* x, int64_t first, int64_t last, const float* bias,
                       float* out, int64_t stride);
  void (*embed)(const Packed& w, int64_t row, float* out);
  void (*rms_norm)(const float* x, const float* weight, float eps, int64_t n, float* out);
  void (*gate)(const float* gate, const float* up, int64_t n, int activation, float* out);
  // One token: all query heads of one KV head. `scratch` has room for four pages of scores.
  void (*attend)(const float* query, int64_t group, const Pages& pages, int64_t kv_head, const int64_t* table,
                 int64_t position, const Mask& mask, float* scratch, float* out);
};

const Kernels* generic_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();

}  // namespace kvilt
