// Low-rank products of rows with their own adapters. Law: an element is one chain of fused products in one order, for
// one row or many, so blocks of rows, ranks and outputs only decide what is computed side by side.
#pragma once
#include "elementwise_impl.h"
#include "lora.h"
#include "vectors.h"

namespace kvilt::KVILT_ISA {

template <WeightKind K>
struct LoraLoader;
template <>
struct LoraLoader<WeightKind::kFloat32> {
  using Type = float;
  static f32x16 at(const float* p) { return load(p); }
};
template <>
struct LoraLoader<WeightKind::kFloat16> {
  using Type = uint16_t;
  static f32x16 at(const uint16_t* p) { return load_half(p); }
};
template <>
struct LoraLoader<WeightKind::kBfloat16> {
  using Type = uint16_t;
  static f32x16 at(const uint16_t* p) { return load_bfloat(p); }
};

inline int64_t padded_to_lanes(int64_t n) { return (n + 15) / 16 * 16; }

inline f32x16 some_lanes(const float* p, int64_t count) {
  float lanes[16] = {};
  std::memcpy(lanes, p, count * sizeof(float));
  return load(lanes);
}

constexpr int kWide = kRegisterBytes >= 64 ? 4 : 2;  // sums that stay in registers: kWide * kWide

// R ranks of T rows: lanes over inputs, summed by `reduce_add` at the end.
template <WeightKind K, int R, int T>
inline void shrink_block(const typename LoraLoader<K>::Type* down, int64_t stride, const float* const* x,
                         int64_t inputs, float* const* out) {
  f32x16 sums[R * T];
  set_zero(sums);
  const int64_t whole = inputs / 16 * 16;
  const auto add = [&](int64_t i, auto read) __attribute__((always_inline)) {
    f32x16 rows[T];
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) rows[t] = read(x[t] + i);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const f32x16 weights = LoraLoader<K>::at(down + r * stride + i);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) sums[r * T + t] = fma(weights, rows[t], sums[r * T + t]);
    }
  };
  for (int64_t i = 0; i < whole; i += 16) add(i, [](const float* p) { return load(p); });
  if (whole < inputs) add(whole, [&](const float* p) { return some_lanes(p, inputs - whole); });
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t) out[t][r] = reduce_add(sums[r * T + t]);
}

template <WeightKind K, int T>
inline void shrink_rows(const LoraChunk& chunk, const LoraArgs& args, int64_t first, int64_t last, int64_t row) {
  constexpr int R = T == 1 ? 2 * kWide : kWide;
  const int64_t stride = padded_to_lanes(args.inputs), rank = chunk.product->rank;
  const auto* down = static_cast<const typename LoraLoader<K>::Type*>(chunk.product->down);
  const float* x[T];
  float* out[T];
  for (int t = 0; t < T; ++t) x[t] = args.x + chunk.rows[row + t] * args.inputs;
  int64_t r = first;
  const auto at = [&] {
    for (int t = 0; t < T; ++t) out[t] = chunk.inner + (row + t) * rank + r;
  };
  for (; r + R <= last; r += R) at(), shrink_block<K, R, T>(down + r * stride, stride, x, args.inputs, out);
  for (; r < last; ++r) at(), shrink_block<K, 1, T>(down + r * stride, stride, x, args.inputs, out);
}

// O times sixteen outputs of T rows: lanes over outputs, ranks in ascending order.
template <WeightKind K, int O, int T>
inline void expand_block(const typename LoraLoader<K>::Type* up, int64_t stride, const float* const* inner,
                         int64_t rank, const float* scales, float* const* out, int64_t lanes) {
  f32x16 sums[O * T];
  set_zero(sums);
  for (int64_t r = 0; r < rank; ++r, up += stride) {
#pragma GCC unroll 8
    for (int o = 0; o < O; ++o) {
      const f32x16 weights = LoraLoader<K>::at(up + o * 16);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) sums[o * T + t] = fma(weights, inner[t][r], sums[o * T + t]);
    }
  }
  for (int o = 0; o < O; ++o)
    for (int t = 0; t < T; ++t) {
      float* to = out[t] + o * 16;
      const int64_t left = lanes - o * 16;
      if (left >= 16) {
        store(to, fma(sums[o * T + t], scales[t], load(to)));
      } else {
        float last[16];
        store(last, fma(sums[o * T + t], scales[t], some_lanes(to, left)));
        std::memcpy(to, last, left * sizeof(float));
      }
    }
}

template <WeightKind K, int T>
inline void expand_rows(const LoraChunk& chunk, const LoraArgs& args, int64_t first, int64_t last, int64_t row) {
  constexpr int O = T == 1 ? 2 * kWide : kWide;
  const int64_t outputs = chunk.map->outputs, stride = padded_to_lanes(outputs), rank = chunk.product->rank;
  const auto* up = static_cast<const typename LoraLoader<K>::Type*>(chunk.product->up);
  const float* inner[T];
  float scales[T];
  float* out[T];
  for (int t = 0; t < T; ++t) {
    inner[t] = chunk.inner + (row + t) * rank;
    scales[t] = float(chunk.product->scale) * args.scales[chunk.rows[row + t]];
  }
  int64_t o = first;
  const auto at = [&] {
    for (int t = 0; t < T; ++t) out[t] = chunk.map->out + chunk.rows[row + t] * outputs + o;
  };
  for (; o + O * 16 <= last; o += O * 16)
    at(), expand_block<K, O, T>(up + o, stride, inner, rank, scales, out, last - o);
  for (; o < last; o += 16) at(), expand_block<K, 1, T>(up + o, stride, inner, rank, scales, out, last - o);
}

template <WeightKind K>
void shrink_all(const LoraChunk& chunk, const LoraArgs& args, int64_t first, int64_t last) {
  int64_t row = 0;
  for (; row + kWide <= chunk.count; row += kWide) shrink_rows<K, kWide>(chunk, args, first, last, row);
  for (; row + 2 <= chunk.count; row += 2) shrink_rows<K, 2>(chunk, args, first, last, row);
  for (; row < chunk.count; ++row) shrink_rows<K, 1>(chunk, args, first, last, row);
}

template <WeightKind K>
void expand_all(const LoraChunk& chunk, const LoraArgs& args, int64_t first, int64_t last) {
  int64_t row = 0;
  for (; row + kWide <= chunk.count; row += kWide) expand_rows<K, kWide>(chunk, args, first, last, row);
  for (; row + 2 <= chunk.count; row += 2) expand_rows<K, 2>(chunk, args, first, last, row);
  for (; row < chunk.count; ++row) expand_rows<K, 1>(chunk, args, first, last, row);
}

inline void shrink(const LoraChunk& chunk, const LoraArgs& args, int64_t first, int64_t last) {
  switch (static_cast<WeightKind>(chunk.product->kind)) {
    case WeightKind::kFloat16: return shrink_all<WeightKind::kFloat16>(chunk, args, first, last);
    case WeightKind::kBfloat16: return shrink_all<WeightKind::kBfloat16>(chunk, args, first, last);
    default: return shrink_all<WeightKind::kFloat32>(chunk, args, first, last);
  }
}

inline void expand(const LoraChunk& chunk, const LoraArgs& args, int64_t first, int64_t last) {
  switch (static_cast<WeightKind>(chunk.product->kind)) {
    case WeightKind::kFloat16: return expand_all<WeightKind::kFloat16>(chunk, args, first, last);
    case WeightKind::kBfloat16: return expand_all<WeightKind::kBfloat16>(chunk, args, first, last);
    default: return expand_all<WeightKind::kFloat32>(chunk, args, first, last);
  }
}

inline void activate(const float* x, int64_t n, Activation activation, float* out) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) store(out + i, activated(load(x + i), activation));
  if (i == n) return;
  float last[16];
  store(last, activated(some_lanes(x + i, n - i), activation));
  std::memcpy(out + i, last, (n - i) * sizeof(float));
}

// activation(gate) * up; without `up`, activation(gate).
inline void act_mul(const float* gate, const float* up, int64_t n, Activation activation, float* out) {
  if (!up) return activate(gate, n, activation, out);
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) store(out + i, gated(load(gate + i), load(up + i), activation));
  if (i == n) return;
  float last[16];
  store(last, gated(some_lanes(gate + i, n - i), some_lanes(up + i, n - i), activation));
  std::memcpy(out + i, last, (n - i) * sizeof(float));
}

}  // namespace kvilt::KVILT_ISA
