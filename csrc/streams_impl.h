// Streams of one token. Law: a number is one chain over the streams, or over the row, in order.
#pragma once
#include <algorithm>
#include <cmath>

#include "streams.h"
#include "vectors.h"

namespace kvilt::KVILT_ISA {

constexpr float kLeastSquare = 1e-5f;  // the least mean square that a vector is divided by

inline void mix_streams(const StreamArgs& args, int64_t token) {
  const int64_t n = args.n, streams = args.streams;
  const float *x = args.x + token * streams * n, *weights = args.weights + token * streams * streams;
  for (int64_t j = 0; j < streams; ++j, weights += streams) {
    float* out = args.out + (token * streams + j) * n;
    int64_t d = 0;
    for (; d + 16 <= n; d += 16) {
      f32x16 sum = load(x + d) * weights[0];
      for (int64_t i = 1; i < streams; ++i) sum = fma(load(x + i * n + d), weights[i], sum);
      store(out + d, sum);
    }
    for (; d < n; ++d) {
      float sum = x[d] * weights[0];
      for (int64_t i = 1; i < streams; ++i) sum = std::fma(x[i * n + d], weights[i], sum);
      out[d] = sum;
    }
  }
}

inline void add_to_streams(const StreamArgs& args, int64_t token) {
  const int64_t n = args.n, streams = args.streams;
  const float *y = args.y + token * n, *weights = args.weights + token * streams;
  for (int64_t j = 0; j < streams; ++j) {
    const int64_t at = (token * streams + j) * n;
    const float* x = args.x + at;
    float* out = args.out + at;
    int64_t d = 0;
    for (; d + 16 <= n; d += 16) store(out + d, fma(load(y + d), weights[j], load(x + d)));
    for (; d < n; ++d) out[d] = std::fma(y[d], weights[j], x[d]);
  }
}

inline float mean_square(const float* x, float mean, int64_t n) {
  f32x16 sums = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const f32x16 v = load(x + i) - splat(mean);
    sums = fma(v, v, sums);
  }
  float sum = reduce_add(sums);
  for (; i < n; ++i) sum += (x[i] - mean) * (x[i] - mean);
  return sum / float(n);
}

inline void match_rms(const float* x, const float* like, int64_t n, float* out) {
  const float own = std::max(mean_square(x, 0.0f, n), kLeastSquare);
  const float scale = std::sqrt(mean_square(like, 0.0f, n)) / std::sqrt(own);
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) store(out + i, load(x + i) * scale);
  for (; i < n; ++i) out[i] = x[i] * scale;
}

inline void gaussian_relu(const float* x, float cut, int64_t n, float* out) {
  f32x16 sums = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) sums = sums + load(x + i);
  float sum = reduce_add(sums);
  for (; i < n; ++i) sum += x[i];
  const float mean = sum / float(n), floor = mean + std::sqrt(mean_square(x, mean, n)) * cut;
  // The order of the operands of max lets what is not a number through.
  for (i = 0; i + 16 <= n; i += 16) store(out + i, max(f32x16{}, load(x + i) - splat(floor)));
  for (; i < n; ++i) out[i] = x[i] - floor < 0.0f ? 0.0f : x[i] - floor;
}

}  // namespace kvilt::KVILT_ISA
