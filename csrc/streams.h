// Several residual streams of a token, and sparse activations (Gemma 3n). Rows are independent of each other.
#pragma once
#include <cstdint>

namespace kvilt {

struct StreamArgs {
  const float* x;        // [tokens][streams][n]
  const float* y;        // [tokens][n], or null: streams are mixed
  const float* weights;  // [tokens][streams][streams] of a mix, [tokens][streams] of a sum with y
  int64_t tokens, streams, n;
  float* out;  // [tokens][streams][n]
};

struct StreamKernels {
  // One token.
  void (*mix)(const StreamArgs& args, int64_t token);
  void (*add)(const StreamArgs& args, int64_t token);
  // One row of n numbers.
  void (*match_rms)(const float* x, const float* like, int64_t n, float* out);
  void (*gaussian_relu)(const float* x, float cut, int64_t n, float* out);
};

}  // namespace kvilt
