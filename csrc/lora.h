// What adapters add to linear maps: for each row its own low-rank product, for all rows of a step in one piece of work.
#pragma once
#include <cstdint>
#include <vector>

#include "kernels.h"
#include "thread_pool.h"

namespace kvilt {

// One adapter's part of one linear map. The owner of a table may change its entries between two calls: a recorded call
// keeps the table's address and reads the entries each time.
struct LowRank {
  const void* down;  // [rank][inputs, padded with zeros to whole lanes]
  const void* up;    // [rank][outputs, padded likewise]
  int64_t rank;      // 0: this adapter leaves the map alone
  int64_t kind;      // a WeightKind: kFloat32, kFloat16 or kBfloat16
  double scale;
};
static_assert(sizeof(LowRank) == 40);

// One linear map of the input: out += scale * up(down(x)), each row by the entry its slot names.
struct LoraMap {
  const LowRank* table;
  int64_t outputs;
  float* out;  // [rows][outputs]
};

struct LoraArgs {
  std::vector<LoraMap> maps;
  const float* x;  // [rows][inputs]
  int64_t rows, inputs;
  const int64_t* slots;  // [rows], -1: none
  const float* scales;   // [rows]
  int64_t slot_count;    // entries of each table
};

// Rows of one adapter that go through its product together.
constexpr int kTogether = 16;
struct LoraChunk {
  const LowRank* product;
  const LoraMap* map;
  const int64_t* rows;  // places in the batch
  int64_t count;
  float* inner;  // [count][rank]
};

struct LoraKernels {
  // inner[:, first:last] of a chunk, and its outputs [first, last). Every element is summed in one order, whatever else
  // is computed beside it.
  void (*shrink)(const LoraChunk& chunk, const LoraArgs& args, int64_t first, int64_t last);
  void (*expand)(const LoraChunk& chunk, const LoraArgs& args, int64_t first, int64_t last);
  // activation(gate) * up; without `up`, activation(gate).
  void (*act_mul)(const float* gate, const float* up, int64_t n, Activation activation, float* out);
};

class Lora {
 public:
  Lora(ThreadPool& pool, const LoraKernels& kernels);
  void add_lora(const LoraArgs& args);
  void act_mul(const float* gate, const float* up, int64_t n, Activation activation, float* out);

 private:
  void gather(const LoraArgs& args);

  ThreadPool& pool_;
  const LoraKernels& kernels_;
  std::vector<int64_t> order_;  // rows with an adapter, those of one adapter beside each other
  std::vector<LoraChunk> chunks_;
  std::vector<float> inner_;
  struct Item {
    const LoraChunk* chunk;
    int64_t first, last;
  };
  std::vector<Item> shrinks_, expands_;
};

}  // namespace kvilt
