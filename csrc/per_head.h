// Linear maps of single heads: each head of a token times a matrix of its own, as latent attention has them.
#pragma once
#include <cstdint>

#include "kernels.h"

namespace kvilt {

struct PerHeadArgs {
  const float* x;  // [tokens][heads][inputs + moved]
  int64_t tokens, heads, inputs;
  int64_t moved;       // the last numbers of a head, which come first in its result as they are
  const void* weight;  // [heads][inputs][outputs, padded with zeros to whole lanes]
  WeightKind kind;     // kFloat32, kFloat16 or kBfloat16
  int64_t outputs;
  float* out;  // [tokens][heads][moved + outputs]
};

struct PerHeadKernels {
  // One head of the tokens [first, last). Every output is summed in one order, whatever else is computed beside it.
  void (*linear)(const PerHeadArgs& args, int64_t head, int64_t first, int64_t last);
};

}  // namespace kvilt
