// Quantized activations, products with packed weights, embedding rows.
#pragma once
#include "kernels.h"
#include "vectors.h"

namespace kvilt::KVILT_ISA {

// ---- activations ----

inline void quantize(const float* x, int64_t inputs, int64_t blocks, int8_t* values, float* scales, float* sums,
                     int32_t* totals) {
  for (int64_t b = 0; b < blocks; ++b) {
    float block[kBlock] = {};
    const int64_t count = inputs - b * kBlock < kBlock ? inputs - b * kBlock : kBlock;
    std::memcpy(block, x + b * kBlock, count * sizeof(float));
    float peak = 0;
    for (float value : block) peak = std::fabs(value) > peak ? std::fabs(value) : peak;
    const float scale = peak / 127.0f;
    const float inverse = scale > 0 ? 1.0f / scale : 0.0f;
    int32_t half[2] = {0, 0};
    for (int i = 0; i < kBlock; ++i) {
      // Adding and taking away 1.5 * 2^23 rounds to the nearest integer, ties to even, without a call.
      const float rounded = (block[i] * inverse + 12582912.0f) - 12582912.0f;
      const int32_t q = rounded > 127 ? 127 : rounded < -127 ? -127 : int32_t(rounded);
      values[b * kBlock + i] = int8_t(q);
      half[i / 16] += q;
    }
    scales[b] = scale;
    totals[2 * b] = half[0];
    totals[2 * b + 1] = half[1];
    sums[b] = scale * float(half[0] + half[1]);
  }
}

// ---- integer dot products of a tile: sixteen outputs, four inputs a step ----
//
// A step has 64 bytes of weights (lane o holds the four inputs of output o) and four bytes of activations.

#if defined(__AVX512VNNI__)

inline I16x add(I16x a, I16x b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline __m512i four(const int8_t* x) {
  int32_t word;
  std::memcpy(&word, x, 4);
  return _mm512_set1_epi32(word);
}
struct Nibbles {
  __m512i v[8];
};
inline Nibbles load_nibbles(const uint8_t* p) {
  Nibbles n;
  const __m512i mask = _mm512_set1_epi8(15);
  for (int j = 0; j < 4; ++j) {
    const __m512i w = _mm512_loadu_si512(p + 64 * j);
    n.v[j] = _mm512_and_si512(w, mask);
    n.v[4 + j] = _mm512_and_si512(_mm512_srli_epi16(w, 4), mask);
  }
  return n;
}
inline I16x dot_nibbles(const Nibbles& w, const int8_t* x) {
  __m512i a = _mm512_setzero_si512(), b = _mm512_setzero_si512();
  for (int j = 0; j < 4; ++j) {
    a = _mm512_dpbusd_epi32(a, w.v[2 * j], four(x + 8 * j));
    b = _mm512_dpbusd_epi32(b, w.v[2 * j + 1], four(x + 8 * j + 4));
  }
  return {_mm512_add_epi32(a, b)};
}
struct Bytes {
  __m512i v[4];
};
inline Bytes load_bytes(const uint8_t* p) {  // as unsigned: 128 more than they are
  Bytes n;
  const __m512i flip = _mm512_set1_epi8(char(0x80));
  for (int j = 0; j < 4; ++j) n.v[j] = _mm512_xor_si512(_mm512_loadu_si512(p + 64 * j), flip);
  return n;
}
inline I16x dot_bytes(const Bytes& w, const int8_t* x, int32_t sum) {
  __m512i a = _mm512_set1_epi32(-128 * sum), b = _mm512_setzero_si512();
  for (int j = 0; j < 2; ++j) {
    a = _mm512_dpbusd_epi32(a, w.v[2 * j], four(x + 8 * j));
    b = _mm512_dpbusd_epi32(b, w.v[2 * j + 1], four(x + 8 * j + 4));
  }
  return {_mm512_add_epi32(a, b)};
}

#elif defined(__AVX2__)

inline I16x add(I16x x, I16x y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline __m256i four(const int8_t* x) {
  int32_t word;
  std::memcpy(&word, x, 4);
  return _mm256_set1_epi32(word);
}
struct Nibbles {
  __m256i v[8][2];
};
inline Nibbles load_nibbles(const uint8_t* p) {
  Nibbles n;
  const __m256i mask = _mm256_set1_epi8(15);
  for (int j = 0; j < 4; ++j)
    for (int h = 0; h < 2; ++h) {
      const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 64 * j + 32 * h));
      n.v[j][h] = _mm256_and_si256(w, mask);
      n.v[4 + j][h] = _mm256_and_si256(_mm256_srli_epi16(w, 4), mask);
    }
  return n;
}
inline I16x dot_nibbles(const Nibbles& w, const int8_t* x) {
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i sums[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
  for (int j = 0; j < 8; ++j) {
    const __m256i act = four(x + 4 * j);
    // At most 8 * 2 * 15 * 127: sixteen bits hold all eight steps.
    for (int h = 0; h < 2; ++h) sums[h] = _mm256_add_epi16(sums[h], _mm256_maddubs_epi16(w.v[j][h], act));
  }
  return {_mm256_madd_epi16(sums[0], ones), _mm256_madd_epi16(sums[1], ones)};
}
struct Bytes {
  __m256i v[4][2];
};
inline Bytes load_bytes(const uint8_t* p) {
  Bytes n;
  for (int j = 0; j < 4; ++j)
    for (int h = 0; h < 2; ++h) n.v[j][h] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 64 * j + 32 * h));
  return n;
}
inline I16x dot_bytes(const Bytes& w, const int8_t* x, int32_t) {
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i sums[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
  for (int j = 0; j < 4; ++j) {
    const __m256i act = four(x + 4 * j);
    for (int h = 0; h < 2; ++h) {
      // The product of magnitudes fits sixteen bits; the sign goes to the activation.
      const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w.v[j][h]), _mm256_sign_epi8(act, w.v[j][h]));
      sums[h] = _mm256_add_epi32(sums[h], _mm256_madd_epi16(pairs, ones));
    }
  }
  return {sums[0], sums[1]};
}

#else

inline I16x add(I16x x, I16x y) {
  for (int i = 0; i < 16; ++i) x.v[i] += y.v[i];
  return x;
}
struct Nibbles {
  const uint8_t* p;
};
inline Nibbles load_nibbles(const uint8_t* p) { return {p}; }
inline I16x dot_nibbles(const Nibbles& w, const int8_t* x) {
  int32_t sums[16] = {};
  for (int j = 0; j < 4; ++j)
    for (int o = 0; o < 16; ++o)
      for (int t = 0; t < 4; ++t) {
        const uint8_t byte = w.p[64 * j + 4 * o + t];
        sums[o] += (byte & 15) * x[4 * j + t] + (byte >> 4) * x[16 + 4 * j + t];
      }
  I16x out;
  std::memcpy(&out, sums, sizeof out);
  return out;
}
struct Bytes {
  const uint8_t* p;
};
inline Bytes load_bytes(const uint8_t* p) { return {p}; }
inline I16x dot_bytes(const Bytes& w, const int8_t* x, int32_t) {
  int32_t sums[16] = {};
  for (int j = 0; j < 4; ++j)
    for (int o = 0; o < 16; ++o)
      for (int t = 0; t < 4; ++t) sums[o] += int8_t(w.p[64 * j + 4 * o + t]) * x[4 * j + t];
  I16x out;
  std::memcpy(&out, sums, sizeof out);
  return out;
}

#endif

// ---- linear ----

// A block of one tile: four bits for 32 inputs are 256 bytes, eight bits 512; then the scales of sixteen outputs.
template <Kind K>
struct Layout {
  static constexpr bool nibble = K == Kind::kNibble16 || K == Kind::kNibble32;
  static constexpr bool half = K == Kind::kNibble16 || K == Kind::kByte16;
  static constexpr bool minimum = K != Kind::kByte16 && K != Kind::kByteHalves;
  static constexpr bool halves = K == Kind::kByteHalves;
  static constexpr int weights = nibble ? 256 : 512;
  static constexpr int scale_bytes = kTile * (half ? 2 : 4);
  static constexpr int bytes = weights + scale_bytes * (minimum || halves ? 2 : 1);
};

template <Kind K>
inline F16x load_scale(const uint8_t* p) {
  if constexpr (Layout<K>::half) return load_half(reinterpret_cast<const uint16_t*>(p));
  else return load(reinterpret_cast<const float*>(p));
}

// R rows through one tile. The order of a row's operations does not depend on R.
template <Kind K, int R>
inline void linear_rows(const uint8_t* w, const Quantized& x, int64_t row, F16x* acc) {
  using L = Layout<K>;
  for (int r = 0; r < R; ++r) acc[r] = F16x{};
  for (int64_t b = 0; b < x.blocks; ++b, w += L::bytes) {
    const F16x scale = load_scale<K>(w + L::weights);
    if constexpr (L::nibble) {
      const Nibbles n = load_nibbles(w);
      const F16x minimum = load_scale<K>(w + L::weights + L::scale_bytes);
      for (int r = 0; r < R; ++r) {
        const int64_t at = (row + r) * x.blocks + b;
        const I16x dot = dot_nibbles(n, x.values + at * kBlock);
        acc[r] = fma(to_float(dot), scale * x.scales[at], acc[r]);
        acc[r] = fma(minimum, x.sums[at], acc[r]);
      }
    } else {
      const Bytes low = load_bytes(w), high = load_bytes(w + 256);
      const F16x second = L::halves || L::minimum ? load_scale<K>(w + L::weights + L::scale_bytes) : F16x{};
      for (int r = 0; r < R; ++r) {
        const int64_t at = (row + r) * x.blocks + b;
        const int8_t* q = x.values + at * kBlock;
        const I16x first = dot_bytes(low, q, x.totals[2 * at]);
        const I16x last = dot_bytes(high, q + 16, x.totals[2 * at + 1]);
        if constexpr (L::halves) {
          acc[r] = fma(to_float(first), scale * x.scales[at], acc[r]);
          acc[r] = fma(to_float(last), second * x.scales[at], acc[r]);
        } else {
          acc[r] = fma(to_float(add(first, last)), scale * x.scales[at], acc[r]);
          if constexpr (L::minimum) acc[r] = fma(second, x.sums[at], acc[r]);
        }
      }
    }
  }
}

inline void write_tile(const Packed& w, int64_t tile, const float* bias, F16x acc, float* out) {
  const int64_t first = tile * kTile, count = w.outputs - first;
  if (count >= kTile) {
    store(out + first, bias ? acc + load(bias + first) : acc);
    return;
  }
  float values[kTile];
  store(values, acc);
  for (int64_t o = 0; o < count; ++o) out[first + o] = values[o] + (bias ? bias[first + o] : 0.0f);
}

template <Kind K>
void linear_kind(const Packed& w, int64_t tile, const Quantized& x, int64_t first, int64_t last, const float* bias,
                 float* out, int64_t stride) {
  const uint8_t* data = w.data + tile * x.blocks * Layout<K>::bytes;
  constexpr int R = 8;
  F16x acc[R];
  int64_t row = first;
  for (; row + R <= last; row += R) {
    linear_rows<K, R>(data, x, row, acc);
    for (int r = 0; r < R; ++r) write_tile(w, tile, bias, acc[r], out + (row + r) * stride);
  }
  for (; row + 4 <= last; row += 4) {
    linear_rows<K, 4>(data, x, row, acc);
    for (int r = 0; r < 4; ++r) write_tile(w, tile, bias, acc[r], out + (row + r) * stride);
  }
  for (; row < last; ++row) {
    linear_rows<K, 1>(data, x, row, acc);
    write_tile(w, tile, bias, acc[0], out + row * stride);
  }
}

inline void linear(const Packed& w, int64_t tile, const Quantized& x, int64_t first, int64_t last, const float* bias,
                   float* out, int64_t stride) {
  switch (w.kind) {
    case Kind::kNibble16: return linear_kind<Kind::kNibble16>(w, tile, x, first, last, bias, out, stride);
    case Kind::kNibble32: return linear_kind<Kind::kNibble32>(w, tile, x, first, last, bias, out, stride);
    case Kind::kByte16: return linear_kind<Kind::kByte16>(w, tile, x, first, last, bias, out, stride);
    case Kind::kByte32: return linear_kind<Kind::kByte32>(w, tile, x, first, last, bias, out, stride);
    case Kind::kByteHalves: return linear_kind<Kind::kByteHalves>(w, tile, x, first, last, bias, out, stride);
    case Kind::kFloat: return;  // linear_float's
  }
}

template <int R>
inline void float_rows(const float* w, int64_t inputs, const float* x, F16x* acc) {
  for (int r = 0; r < R; ++r) acc[r] = F16x{};
  for (int64_t k = 0; k < inputs; ++k) {
    const F16x column = load(w + k * kTile);
    for (int r = 0; r < R; ++r) acc[r] = fma(column, x[r * inputs + k], acc[r]);
  }
}

inline void linear_float(const Packed& w, int64_t tile, const float* x, int64_t first, int64_t last, const float* bias,
                         float* out, int64_t stride) {
  const float* data = reinterpret_cast<const float*>(w.data) + tile * w.inputs * kTile;
  F16x acc[8];
  int64_t row = first;
  for (; row + 8 <= last; row += 8) {
    float_rows<8>(data, w.inputs, x + row * w.inputs, acc);
    for (int r = 0; r < 8; ++r) write_tile(w, tile, bias, acc[r], out + (row + r) * stride);
  }
  for (; row < last; ++row) {
    float_rows<1>(data, w.inputs, x + row * w.inputs, acc);
    write_tile(w, tile, bias, acc[0], out + row * stride);
  }
}

// ---- embedding rows ----

template <Kind K>
void embed_kind(const Packed& w, int64_t row, float* out) {
  using L = Layout<K>;
  const int64_t blocks = w.blocks();
  const int lane = int(row % kTile);
  const uint8_t* block = w.data + (row / kTile) * blocks * L::bytes;
  for (int64_t b = 0; b < blocks; ++b, block += L::bytes) {
    float scale[kTile], second[kTile] = {};
    store(scale, load_scale<K>(block + L::weights));
    if constexpr (L::minimum || L::halves) store(second, load_scale<K>(block + L::weights + L::scale_bytes));
    for (int i = 0; i < kBlock && b * kBlock + i < w.inputs; ++i) {
      float value;
      if constexpr (L::nibble) {
        const uint8_t byte = block[64 * ((i % 16) / 4) + 4 * lane + i % 4];
        value = float(i < 16 ? byte & 15 : byte >> 4) * scale[lane] + second[lane];
      } else {
        const int8_t q = int8_t(block[64 * (i / 4) + 4 * lane + i % 4]);
        if constexpr (L::halves) value = float(q) * (i < 16 ? scale[lane] : second[lane]);
        else value = float(q) * scale[lane] + second[lane];
      }
      out[b * kBlock + i] = value;
    }
  }
}

inline void embed(const Packed& w, int64_t row, float* out) {
  switch (w.kind) {
    case Kind::kFloat: {
      const float* data = reinterpret_cast<const float*>(w.data) + (row / kTile) * w.inputs * kTile + row % kTile;
      for (int64_t k = 0; k < w.inputs; ++k) out[k] = data[k * kTile];
      return;
    }
    case Kind::kNibble16: return embed_kind<Kind::kNibble16>(w, row, out);
    case Kind::kNibble32: return embed_kind<Kind::kNibble32>(w, row, out);
    case Kind::kByte16: return embed_kind<Kind::kByte16>(w, row, out);
    case Kind::kByte32: return embed_kind<Kind::kByte32>(w, row, out);
    case Kind::kByteHalves: return embed_kind<Kind::kByteHalves>(w, row, out);
  }
}

}  // namespace kvilt::KVILT_ISA
