// Linear maps of single heads. Law: an output is one chain of fused products over the inputs, for one token or many.
#pragma once
#include "lora_impl.h"
#include "per_head.h"
#include "vectors.h"

namespace kvilt::KVILT_ISA {

// O times sixteen outputs of T tokens: lanes over outputs, inputs in ascending order.
template <WeightKind K, int O, int T>
inline void per_head_block(const typename LoraLoader<K>::Type* weight, int64_t stride, const float* const* x,
                           int64_t inputs, float* const* out, int64_t lanes) {
  f32x16 sums[O * T];
  set_zero(sums);
  for (int64_t i = 0; i < inputs; ++i, weight += stride) {
#pragma GCC unroll 8
    for (int o = 0; o < O; ++o) {
      const f32x16 weights = LoraLoader<K>::at(weight + o * 16);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) sums[o * T + t] = fma(weights, x[t][i], sums[o * T + t]);
    }
  }
  for (int o = 0; o < O; ++o)
    for (int t = 0; t < T; ++t) {
      float last[16];
      store(last, sums[o * T + t]);
      const int64_t left = lanes - o * 16;
      std::memcpy(out[t] + o * 16, last, size_t(left < 16 ? left : 16) * sizeof(float));
    }
}

template <WeightKind K, int T>
inline void per_head_tokens(const PerHeadArgs& a, int64_t head, int64_t token) {
  constexpr int O = T == 1 ? 2 * kWide : kWide;
  const int64_t stride = padded_to_lanes(a.outputs), from = a.inputs + a.moved, to = a.moved + a.outputs;
  const auto* weight = static_cast<const typename LoraLoader<K>::Type*>(a.weight) + head * a.inputs * stride;
  const float* x[T];
  float* rows[T];
  float* out[T];
  for (int t = 0; t < T; ++t) {
    x[t] = a.x + ((token + t) * a.heads + head) * from;
    rows[t] = a.out + ((token + t) * a.heads + head) * to;
    for (int64_t i = 0; i < a.moved; ++i) rows[t][i] = x[t][a.inputs + i];
  }
  int64_t o = 0;
  const auto at = [&] {
    for (int t = 0; t < T; ++t) out[t] = rows[t] + a.moved + o;
  };
  for (; o + O * 16 <= a.outputs; o += O * 16)
    at(), per_head_block<K, O, T>(weight + o, stride, x, a.inputs, out, a.outputs - o);
  for (; o < a.outputs; o += 16) at(), per_head_block<K, 1, T>(weight + o, stride, x, a.inputs, out, a.outputs - o);
}

template <WeightKind K>
inline void per_head_all(const PerHeadArgs& a, int64_t head, int64_t first, int64_t last) {
  for (; first + kWide <= last; first += kWide) per_head_tokens<K, kWide>(a, head, first);
  for (; first < last; ++first) per_head_tokens<K, 1>(a, head, first);
}

inline void per_head_linear(const PerHeadArgs& a, int64_t head, int64_t first, int64_t last) {
  switch (a.kind) {
    case WeightKind::kFloat16: return per_head_all<WeightKind::kFloat16>(a, head, first, last);
    case WeightKind::kBfloat16: return per_head_all<WeightKind::kBfloat16>(a, head, first, last);
    default: return per_head_all<WeightKind::kFloat32>(a, head, first, last);
  }
}

}  // namespace kvilt::KVILT_ISA
