// Norms and gates.
#pragma once
#include "kernels.h"
#include "vectors.h"

namespace kvilt::KVILT_ISA {

inline void rms_norm(const float* x, const float* weight, float eps, int64_t n, float* out) {
  F16x sums = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const F16x v = load(x + i);
    sums = fma(v, v, sums);
  }
  float sum = total(sums);
  for (; i < n; ++i) sum += x[i] * x[i];
  const float scale = 1.0f / std::sqrt(sum / float(n) + eps);
  for (i = 0; i + 16 <= n; i += 16) store(out + i, load(x + i) * scale * load(weight + i));
  for (; i < n; ++i) out[i] = x[i] * scale * weight[i];
}

inline F16x activated(F16x x, int activation) {
  F16x u = x;  // silu: x * sigmoid(x)
  if (activation == 1) u = (x + x * x * x * 0.044715f) * 1.5957691216057308f;  // gelu by tanh: x * sigmoid(2u)
  return x / (exp16(F16x{} - u) + 1.0f);
}

inline void gate(const float* gate, const float* up, int64_t n, int activation, float* out) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) store(out + i, activated(load(gate + i), activation) * load(up + i));
  if (i < n) {  // the rest goes through the same vectors, so that an element's place does not change its bits
    float a[16] = {}, b[16] = {}, c[16];
    std::memcpy(a, gate + i, (n - i) * sizeof(float));
    std::memcpy(b, up + i, (n - i) * sizeof(float));
    store(c, activated(load(a), activation) * load(b));
    std::memcpy(out + i, c, (n - i) * sizeof(float));
  }
}

}  // namespace kvilt::KVILT_ISA
