// What adapters add to linear maps: for each row its own low-rank product, for all rows of a step in one piece of work.
#pragma once
#include <cstdint>
#include <vector>

#include "kernels.h"
#include "workers.h"

namespace kvilt {

// One adapter's part of one linear map. Whoever owns a table of these may change it between two calls: a recorded call
// knows the table's address and reads it anew.
struct LowRank {
  const void* down;  // [rank][inputs, padded with zeros to whole lanes]
  const void* up;    // [rank][outputs, padded likewise]
  int64_t rank;      // 0: this adapter leaves the map alone
  int64_t kind;      // kFloat, kHalf or kBfloat
  double scale;
};
static_assert(sizeof(LowRank) == 40);

// One linear map of the input: out += scale * up(down(x)), each row by the entry its slot names.
struct Adapted {
  const LowRank* table;
  int64_t outputs;
  float* out;  // [rows][outputs]
};

struct AdaptArgs {
  std::vector<Adapted> maps;
  const float* x;        // [rows][inputs]
  int64_t rows, inputs;
  const int64_t* slots;  // [rows], -1: none
  const float* scales;   // [rows]
  int64_t slot_count;    // entries of each table
};

// Rows of one adapter that go through its product together.
constexpr int kTogether = 16;
struct Chunk {
  const LowRank* product;
  const Adapted* map;
  const int64_t* rows;  // places in the batch
  int64_t count;
  float* inner;         // [count][rank]
};

struct LoraKernels {
  // inner[:, first:last] of a chunk, and its outputs [first, last). Every element is summed in one order, whatever else
  // is computed beside it.
  void (*shrink)(const Chunk& chunk, const AdaptArgs& args, int64_t first, int64_t last);
  void (*expand)(const Chunk& chunk, const AdaptArgs& args, int64_t first, int64_t last);
  // activation(gate) * up.
  void (*open)(const float* gate, const float* up, int64_t n, int activation, float* out);
};

const LoraKernels* generic_lora();
const LoraKernels* avx2_lora();
const LoraKernels* avx512_lora();

class Lora {
 public:
  Lora(Workers& workers, const char* isa);
  void adapt(const AdaptArgs& args);
  void open(const float* gate, const float* up, int64_t n, int activation, float* out);

 private:
  void gather(const AdaptArgs& args);

  Workers& workers_;
  const LoraKernels* kernels_;
  std::vector<int64_t> order_;  // rows with an adapter, those of one adapter beside each other
  std::vector<Chunk> chunks_;
  std::vector<float> inner_;
  struct Item {
    const Chunk* chunk;
    int64_t first, last;
  };
  std::vector<Item> shrinks_, expands_;
};

}  // namespace kvilt
