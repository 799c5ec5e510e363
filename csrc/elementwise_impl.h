// Norms, activations, sums and the largest of many.
#pragma once
#include <limits>

#include "kernels.h"
#include "vectors.h"

namespace kvilt::KVILT_ISA {

inline void rms_norm(const float* x, const float* weight, float eps, int64_t n, float* out) {
  f32x16 sums = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const f32x16 v = load(x + i);
    sums = fma(v, v, sums);
  }
  float sum = reduce_add(sums);
  for (; i < n; ++i) sum += x[i] * x[i];
  const float scale = 1.0f / std::sqrt(sum / float(n) + eps);
  for (i = 0; i + 16 <= n; i += 16) store(out + i, load(x + i) * scale * load(weight + i));
  for (; i < n; ++i) out[i] = x[i] * scale * weight[i];
}

// Two passes: the mean first, so that a large mean does not cost the variance its digits.
inline void layer_norm(const float* x, const float* weight, const float* bias, float eps, int64_t n, float* out) {
  f32x16 sums = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) sums = sums + load(x + i);
  float sum = reduce_add(sums);
  for (; i < n; ++i) sum += x[i];
  const float mean = sum / float(n);
  f32x16 squares = {};
  for (i = 0; i + 16 <= n; i += 16) {
    const f32x16 v = load(x + i) - splat(mean);
    squares = fma(v, v, squares);
  }
  float square = reduce_add(squares);
  for (; i < n; ++i) square += (x[i] - mean) * (x[i] - mean);
  const float scale = 1.0f / std::sqrt(square / float(n) + eps);
  for (i = 0; i < n; ++i) out[i] = (x[i] - mean) * scale * weight[i] + (bias ? bias[i] : 0.0f);
}

inline f32x16 activated(f32x16 x, Activation activation) {
  if (activation == Activation::kGelu) {
    float lanes[16];
    store(lanes, x);
    for (float& lane : lanes) lane = 0.5f * lane * (1.0f + std::erf(lane * 0.70710678118654752f));
    return load(lanes);
  }
  if (activation == Activation::kTanh) {
    float lanes[16];
    store(lanes, x);
    for (float& lane : lanes) lane = std::tanh(lane);
    return load(lanes);
  }
  if (activation == Activation::kRelu2 || activation == Activation::kRelu) {
    const f32x16 above = max(f32x16{}, x);  // in this order it lets what is not a number through
    return activation == Activation::kRelu ? above : above * above;
  }
  f32x16 u = x;  // silu: x * sigmoid(x)
  if (activation == Activation::kGeluTanh)
    u = (x + x * x * x * 0.044715f) * 1.5957691216057308f;  // gelu by tanh: x * sigmoid(2u)
  return x / (exp16(f32x16{} - u) + 1.0f);
}

constexpr float kSwigluAlpha = 1.702f, kSwigluLimit = 7.0f;  // of gpt-oss

// activation(gate) * up. The order of the operands of min and max lets what is not a number through.
inline f32x16 gated(f32x16 gate, f32x16 up, Activation activation) {
  if (activation != Activation::kSwigluOai) return activated(gate, activation) * up;
  gate = min(splat(kSwigluLimit), gate);
  up = min(splat(kSwigluLimit), max(splat(-kSwigluLimit), up));
  return gate / (exp16(gate * -kSwigluAlpha) + 1.0f) * (up + 1.0f);
}

inline void add(const float* a, const float* b, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) store(out + i, load(a + i) + load(b + i));
  for (; i < n; ++i) out[i] = a[i] + b[i];
}

inline void add_scaled(const float* a, const float* b, float scale, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) store(out + i, load(a + i) + load(b + i) * scale);
  for (; i < n; ++i) out[i] = a[i] + b[i] * scale;
}

inline int64_t argmax(const float* x, int64_t n) {
  // First the largest value, whole vectors at a time, then where it stands.
  f32x16 peaks = splat(-std::numeric_limits<float>::infinity());
  f32x16 broken = {};  // x - x is 0 for a number, and not a number otherwise (or infinite, which is no logit either)
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const f32x16 v = load(x + i);
    peaks = max(peaks, v);
    broken = broken + (v - v);
  }
  float best = reduce_max(peaks), check = reduce_add(broken);
  for (; i < n; ++i) {
    best = x[i] > best ? x[i] : best;
    check += x[i] - x[i];
  }
  if (check != 0) return -1;
  for (i = 0; i < n; ++i)
    if (x[i] == best) return i;
  return -1;
}

}  // namespace kvilt::KVILT_ISA
