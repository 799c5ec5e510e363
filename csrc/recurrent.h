// Recurrent state: causal convolutions, and memories into which tokens are folded one after the other.
//
// A row reads one slot and writes others; no slot is read and written by the same step. Rows and heads, or channels, are
// independent of each other, and the tokens of a row are folded in order, so its result has the same bits however its
// prompt was cut.
#pragma once
#include <cstdint>
#include <vector>

#include "thread_pool.h"

namespace kvilt {

// Where the rows of a step find and leave their states.
struct StateRows {
  std::vector<int64_t> starts;  // rows + 1
  const int64_t* reads;         // [rows] slots, -1: zeros
  const int64_t* writes;        // [tokens] slots, -1: not kept
  int64_t slots;                // of the store

  int64_t rows() const { return int64_t(starts.size()) - 1; }
};

struct ConvArgs {
  StateRows rows;
  const float* x;       // [tokens][channels]
  const float* weight;  // [channels][width]
  const float* bias;    // [channels], or null
  float* tails;         // [slots][channels][width - 1]
  float* out;           // [tokens][channels]
  int64_t channels, width;
  bool silu;
};

struct FoldArgs {
  StateRows rows;
  const float* mixed;     // [tokens][channels]: queries, keys and values
  const float* step;      // [tokens][value_heads]
  const float* beta;      // [tokens][value_heads]; null: Mamba-2, whose rate is its step size
  const float* log_rate;  // [value_heads]
  const float* bias;      // [value_heads]
  const float* skip;      // [value_heads], or null
  float* memories;        // [slots][value_heads][key_dim][value_dim]
  float* out;             // [tokens][value_heads][value_dim]
  int64_t key_heads, value_heads, key_dim, value_dim;
  bool tiled;         // value heads take the key heads in turn; else those of one key head follow each other
  float least, most;  // of a step size

  int64_t channels() const { return 2 * key_heads * key_dim + value_heads * value_dim; }
  int64_t key_head(int64_t head) const { return tiled ? head % key_heads : head / (value_heads / key_heads); }
};

struct RecurrentKernels {
  // Sixteen channels (or the last ones) of one row.
  void (*conv)(const ConvArgs& args, int64_t row, int64_t channel);
  // One value head of one row; `scratch` has room for a memory and for 2 * key_dim + value_dim numbers.
  void (*fold)(const FoldArgs& args, int64_t row, int64_t head, float* scratch);
  void (*sigmoid_mul)(const float* x, const float* gate, int64_t n, float* out);
};

class Recurrent {
 public:
  Recurrent(ThreadPool& pool, const RecurrentKernels& kernels);
  void causal_conv(const ConvArgs& args);
  void fold(const FoldArgs& args);
  void sigmoid_mul(const float* x, const float* gate, int64_t n, float* out);

 private:
  ThreadPool& pool_;
  const RecurrentKernels& kernels_;
  std::vector<float> scratch_;  // for each thread
};

}  // namespace kvilt
