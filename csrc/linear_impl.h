// Quantized activations, products with packed weights, embedding rows.
#pragma once
#include <array>
#include <utility>

#include "dots_impl.h"
#include "elementwise_impl.h"
#include "kernels.h"
#include "packed.h"
#include "vectors.h"

namespace kvilt::KVILT_ISA {

inline void quantize(const Rows& x, int64_t row) {
  const int64_t group = row / kGroup, r = row % kGroup, rows = x.count(group);
  int8_t* values = x.values + group * kGroup * x.blocks * kBlock + r * kBlock;
  float* floats = x.floats + group * kGroup * x.blocks * 4 + r;
  const float* from = x.plain + row * x.inputs;
  float last[kBlock] = {};  // the last block, filled up with zeros
  const int64_t whole = x.inputs / kBlock;
  if (whole < x.blocks) std::memcpy(last, from + whole * kBlock, (x.inputs - whole * kBlock) * sizeof(float));
  for (int64_t b = 0; b < x.blocks; ++b, values += rows * kBlock, floats += rows * 4) {
    const float* block = b < whole ? from + b * kBlock : last;
    const F16x low = load(block), high = load(block + 16);
    const float peak = largest(larger(absolute(low), absolute(high)));
    const float scale = peak / 127.0f;
    const float inverse = peak > 0 ? 127.0f / peak : 0.0f;
    const float first = scale * float(store_bytes(values, low * inverse));
    const float second = scale * float(store_bytes(values + 16, high * inverse));
    floats[0] = scale;
    floats[rows] = first + second;
    floats[2 * rows] = first;
    floats[3 * rows] = second;
  }
}

// Calls work<N>(first row) for R rows, as many at a time as the instruction set likes to take.
template <int R, typename Work>
inline __attribute__((always_inline)) void for_rows(Work work) {
  constexpr int N = R < kTogether ? R : kTogether;
#pragma GCC unroll kUnrolled
  for (int r = 0; r + N <= R; r += N) work.template operator()<N>(r);
  if constexpr (R % N != 0) work.template operator()<R % N>(R - R % N);
}

// Bytes of weights to ask for ahead. The machine's own prefetching stops where a page ends, and a block takes many rows
// so long that memory would stand idle meanwhile.
constexpr int kAhead = 2560;

// G groups of R rows each through one tile. The order of a row's operations does not depend on G and R.
template <Kind K, int R, int G>
void packed_rows(const uint8_t* w, const Rows& x, int64_t group, F16x* out) {
  using F = Format<K>;
  const int64_t next = kGroup * x.blocks;  // blocks from one group to the other
  const int8_t* values = x.values + group * next * kBlock;
  const float* floats = x.floats + group * next * 4;
  F16x acc[G * R] = {}, factor = {}, low_factor = {};
  for (int64_t b = 0; b < x.blocks; ++b, w += F::block, values += R * kBlock, floats += R * 4) {
    if constexpr (F::k)
      if (b % kSuper == 0) {
        factor = load_half(reinterpret_cast<const uint16_t*>(w));
        if constexpr (F::minimum) low_factor = load_half(reinterpret_cast<const uint16_t*>(w + 2 * kTile));
        w += F::header;
      }
    if constexpr (R > 1)
      for (int line = 0; line < F::block; line += 64) __builtin_prefetch(w + kAhead + line);
    const Codes<F::bits> codes(w);
    const uint8_t* at = w + F::codes;
    if constexpr (F::halves) {
      const F16x first = load_byte(reinterpret_cast<const int8_t*>(at)) * factor;
      const F16x second = load_byte(reinterpret_cast<const int8_t*>(at + F::scales)) * factor;
      const F16x first_low = first * float(-F::offset), second_low = second * float(-F::offset);
#pragma GCC unroll 2
      for (int g = 0; g < G; ++g) {
        const int8_t* own = values + g * next * kBlock;
        const float* of = floats + g * next * 4;
        F16x* sums = acc + g * R;
        for_rows<R>([&]<int N>(int r) {
          I16x low[N], high[N];
          dots<0, 4, N>(codes, own + r * kBlock, low);
          dots<4, 4, N>(codes, own + r * kBlock, high);
          for (int n = r; n < r + N; ++n) {
            sums[n] = fma(to_float(low[n - r]), first * of[n], sums[n]);
            sums[n] = fma(first_low, of[2 * R + n], sums[n]);
            sums[n] = fma(to_float(high[n - r]), second * of[n], sums[n]);
            sums[n] = fma(second_low, of[3 * R + n], sums[n]);
          }
        });
      }
    } else {
      constexpr int offset = K == Kind::k8 ? kByteOffset : F::offset;
      F16x scale, minimum = {};
      if constexpr (F::k) scale = load_unsigned(at) * factor;
      else scale = load_half(reinterpret_cast<const uint16_t*>(at));
      if constexpr (F::k && F::minimum) minimum = load_unsigned(at + F::scales) * low_factor;
      else if constexpr (F::minimum) minimum = load_half(reinterpret_cast<const uint16_t*>(at + F::scales));
      else minimum = scale * float(-offset);
#pragma GCC unroll 2
      for (int g = 0; g < G; ++g) {
        const int8_t* own = values + g * next * kBlock;
        const float* of = floats + g * next * 4;
        F16x* sums = acc + g * R;
        for_rows<R>([&]<int N>(int r) {
          I16x dot[N];
          dots<0, 8, N>(codes, own + r * kBlock, dot);
          for (int n = r; n < r + N; ++n) {
            sums[n] = fma(to_float(dot[n - r]), scale * of[n], sums[n]);
            if constexpr (F::minimum || offset != 0) sums[n] = fma(minimum, of[R + n], sums[n]);
          }
        });
      }
    }
  }
  for (int r = 0; r < G * R; ++r) out[r] = acc[r];
}

template <Kind K>
inline F16x load_weights(const uint8_t* w, int64_t at) {
  if constexpr (K == Kind::kFloat) return load(reinterpret_cast<const float*>(w) + at);
  else if constexpr (K == Kind::kHalf) return load_half(reinterpret_cast<const uint16_t*>(w) + at);
  else return load_bfloat(reinterpret_cast<const uint16_t*>(w) + at);
}

template <Kind K, int R>
void float_rows(const uint8_t* w, const float* plain, int64_t inputs, F16x* out) {
  F16x acc[R] = {};
  for (int64_t k = 0; k < inputs; ++k) {
    const F16x column = load_weights<K>(w, k * kTile);
    for (int r = 0; r < R; ++r) acc[r] = fma(column, plain[r * inputs + k], acc[r]);
  }
  for (int r = 0; r < R; ++r) out[r] = acc[r];
}

template <Kind K, int R>
void plain_rows(const uint8_t* w, const Rows& x, int64_t group, F16x* out) {
  const float* plain = x.plain + group * kGroup * x.inputs;
  constexpr int most = sizeof(F16x) / kRegisterBytes * 8 > 8 ? 4 : 8;  // rows whose sums stay in registers
  float_rows<K, R < most ? R : most>(w, plain, x.inputs, out);
  if constexpr (R > most) float_rows<K, R - most>(w, plain + most * x.inputs, x.inputs, out + most);
}

// One instantiation for each kind of weight and number of rows.
using Product = void (*)(const uint8_t* w, const Rows& x, int64_t group, F16x* out);
struct Products {
  Product of[kGroup];
  Product two;  // whole groups
};

template <Kind K, int... R>
constexpr Products products(std::integer_sequence<int, R...>) {
  if constexpr (K == Kind::kFloat || K == Kind::kHalf || K == Kind::kBfloat) return {{plain_rows<K, R + 1>...}, nullptr};
  else return {{packed_rows<K, R + 1, 1>...}, packed_rows<K, kGroup, 2>};
}
template <int... K>
constexpr std::array<Products, kKinds> all_products(std::integer_sequence<int, K...>) {
  return {products<Kind(K)>(std::make_integer_sequence<int, kGroup>())...};
}
constexpr std::array<Products, kKinds> kProducts = all_products(std::make_integer_sequence<int, kKinds>());

constexpr int kMost = 2 * kGroup;  // rows that go through a tile together

// How many groups from this one on go through a tile together.
inline int64_t together(const Packed& w, const Rows& x, int64_t group, int64_t last) {
  return kProducts[int(w.kind)].two && group + 2 <= last && x.count(group + 1) == kGroup ? 2 : 1;
}

inline void product(const Packed& w, int64_t tile, const Rows& x, int64_t group, int64_t groups, F16x* out) {
  const Products& products = kProducts[int(w.kind)];
  const Product product = groups == 2 ? products.two : products.of[x.count(group) - 1];
  product(w.data + tile * tile_bytes(w.kind, w.inputs), x, group, out);
}

// Sixteen floats of a row's outputs; the last tile may have fewer.
inline F16x load_lanes(const float* p, int64_t count) {
  if (count >= kTile) return load(p);
  float lanes[kTile] = {};
  std::memcpy(lanes, p, count * sizeof(float));
  return load(lanes);
}
inline void store_lanes(float* p, F16x v, int64_t count) {
  if (count >= kTile) return store(p, v);
  float lanes[kTile];
  store(lanes, v);
  std::memcpy(p, lanes, count * sizeof(float));
}

inline void linear(const Packed& w, int64_t tile, const Rows& x, int64_t first, int64_t last, const Target& to) {
  const int64_t at = tile * kTile, lanes = w.outputs - at;
  const F16x bias = to.bias ? load_lanes(to.bias + at, lanes) : F16x{};
  F16x acc[kMost];
  for (int64_t group = first, groups; group < last; group += groups) {
    groups = together(w, x, group, last);
    product(w, tile, x, group, groups, acc);
    const int64_t rows = groups == 2 ? kMost : x.count(group);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t place = (group * kGroup + r) * w.outputs + at;
      F16x value = to.bias ? acc[r] + bias : acc[r];
      if (to.onto) value = load_lanes(to.onto + place, lanes) + value;
      store_lanes(to.out + place, value, lanes);
    }
  }
}

inline void gated(const Packed& gate, const Packed& up, int64_t tile, const Rows& x, int64_t first, int64_t last,
                  const float* gate_bias, const float* up_bias, int activation, float* out) {
  const int64_t at = tile * kTile, lanes = gate.outputs - at;
  const F16x gate_add = gate_bias ? load_lanes(gate_bias + at, lanes) : F16x{};
  const F16x up_add = up_bias ? load_lanes(up_bias + at, lanes) : F16x{};
  F16x a[kMost], b[kMost];
  for (int64_t group = first, groups; group < last; group += groups) {
    groups = together(gate, x, group, last) == 2 ? together(up, x, group, last) : 1;
    product(gate, tile, x, group, groups, a);
    product(up, tile, x, group, groups, b);
    const int64_t rows = groups == 2 ? kMost : x.count(group);
    for (int64_t r = 0; r < rows; ++r) {
      const F16x opened = activated(gate_bias ? a[r] + gate_add : a[r], activation);
      store_lanes(out + (group * kGroup + r) * gate.outputs + at, opened * (up_bias ? b[r] + up_add : b[r]), lanes);
    }
  }
}

// ---- embedding rows ----

template <Kind K>
void embed_packed(const Packed& w, int64_t row, float grow, float* out) {
  using F = Format<K>;
  const int64_t blocks = w.blocks();
  const int lane = int(row % kTile);
  const uint8_t* at = w.data + row / kTile * F::tile_bytes(blocks);
  const auto half = [&](const uint8_t* p) { return half_to_float(reinterpret_cast<const uint16_t*>(p)[lane]); };
  float factor = 1, low_factor = 1;
  for (int64_t b = 0; b < blocks; ++b, at += F::block) {
    if constexpr (F::k)
      if (b % kSuper == 0) {
        factor = half(at);
        if constexpr (F::minimum) low_factor = half(at + 2 * kTile);
        at += F::header;
      }
    const uint8_t* scales = at + F::codes;
    for (int i = 0; i < kBlock && b * kBlock + i < w.inputs; ++i) {
      const int code = code_at<F::bits>(at, i / 4, 4 * lane + i % 4) - F::offset;
      float value;
      if constexpr (F::halves) {
        value = float(int8_t(scales[i / 16 * F::scales + lane])) * factor * float(code);
      } else {
        const float scale = F::k ? float(scales[lane]) * factor : half(scales);
        value = scale * float(code);
        if constexpr (F::k && F::minimum) value = value + float(scales[F::scales + lane]) * low_factor;
        else if constexpr (F::minimum) value = value + half(scales + F::scales);
      }
      out[b * kBlock + i] = value * grow;
    }
  }
}

template <Kind K>
void embed_float(const Packed& w, int64_t row, float grow, float* out) {
  const uint8_t* tile = w.data + row / kTile * tile_bytes(K, w.inputs);
  for (int64_t k = 0; k < w.inputs; ++k) {
    const int64_t at = k * kTile + row % kTile;
    float value;
    if constexpr (K == Kind::kFloat) value = reinterpret_cast<const float*>(tile)[at];
    else if constexpr (K == Kind::kHalf) value = half_to_float(reinterpret_cast<const uint16_t*>(tile)[at]);
    else value = bfloat_to_float(reinterpret_cast<const uint16_t*>(tile)[at]);
    out[k] = value * grow;
  }
}

inline void embed(const Packed& w, int64_t row, float grow, float* out) {
  switch (w.kind) {
    case Kind::kFloat: return embed_float<Kind::kFloat>(w, row, grow, out);
    case Kind::kHalf: return embed_float<Kind::kHalf>(w, row, grow, out);
    case Kind::kBfloat: return embed_float<Kind::kBfloat>(w, row, grow, out);
    case Kind::k4: return embed_packed<Kind::k4>(w, row, grow, out);
    case Kind::k4m: return embed_packed<Kind::k4m>(w, row, grow, out);
    case Kind::k5: return embed_packed<Kind::k5>(w, row, grow, out);
    case Kind::k5m: return embed_packed<Kind::k5m>(w, row, grow, out);
    case Kind::k8: return embed_packed<Kind::k8>(w, row, grow, out);
    case Kind::k4k: return embed_packed<Kind::k4k>(w, row, grow, out);
    case Kind::k5k: return embed_packed<Kind::k5k>(w, row, grow, out);
    case Kind::k6k: return embed_packed<Kind::k6k>(w, row, grow, out);
  }
}

}  // namespace kvilt::KVILT_ISA
