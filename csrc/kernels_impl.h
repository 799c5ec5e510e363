// The kernels, written once with the compiler's vectors and compiled for each instruction set.
//
// Each file isa_*.cpp defines KVILT_ISA (a namespace) and includes this one. Only the integer dot products are written
// with intrinsics. Law: the value of an output depends on its own row alone, whatever else is computed beside it, so
// every loop that a row goes through has the same order for one row and for many, and fused products are spelled out.
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace kvilt::KVILT_ISA {

typedef float F16x __attribute__((vector_size(64)));    // sixteen floats
typedef int32_t I16x __attribute__((vector_size(64)));  // sixteen integers

inline F16x load(const float* p) {
  F16x v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, F16x v) { std::memcpy(p, &v, sizeof v); }
inline F16x splat(float x) { return x - F16x{}; }

// a * b + c. Written out wherever a row's result passes: left to itself, a compiler fuses the same expression in one
// instantiation and not in another, and a row alone would round differently from the same row in a batch.
inline F16x fma(F16x a, F16x b, F16x c) {
#if defined(__AVX512F__)
  return (F16x)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  union Halves {
    F16x whole;
    __m256 half[2];
  } x{a}, y{b}, z{c};
  z.half[0] = _mm256_fmadd_ps(x.half[0], y.half[0], z.half[0]);
  z.half[1] = _mm256_fmadd_ps(x.half[1], y.half[1], z.half[1]);
  return z.whole;
#else
  return a * b + c;
#endif
}
inline F16x fma(F16x a, float b, F16x c) { return fma(a, splat(b), c); }

inline float half_to_float(uint16_t h) {
#if defined(__F16C__)
  return _cvtsh_ss(h);
#else
  const uint32_t sign = uint32_t(h & 0x8000u) << 16, mantissa = h & 0x3ffu;
  const uint32_t exponent = (h >> 10) & 0x1fu;
  uint32_t bits;
  if (exponent == 31) {
    bits = sign | 0x7f800000u | (mantissa << 13);
  } else if (exponent) {
    bits = sign | ((exponent + 112) << 23) | (mantissa << 13);
  } else {
    float value = std::ldexp(float(mantissa), -24);
    std::memcpy(&bits, &value, 4);
    bits |= sign;
  }
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
#endif
}

inline F16x load_half(const uint16_t* p) {
#if defined(__AVX512F__)
  return (F16x)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#else
  float out[16];
  for (int i = 0; i < 16; ++i) out[i] = half_to_float(p[i]);
  return load(out);
#endif
}

inline float bfloat_to_float(uint16_t b) {
  const uint32_t bits = uint32_t(b) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

// e^x for x in [-87, 88], a few units in the last place; smaller x give a value that is as good as zero.
inline F16x exp16(F16x x) {
  const F16x low = splat(-87.0f), high = splat(88.0f);
  x = x < low ? low : x;
  x = x > high ? high : x;
  const F16x magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const F16x rounded = fma(x, 1.44269504088896341f, magic);
  const F16x n = rounded - magic;
  F16x r = fma(n, -0.693359375f, x);
  r = fma(n, 2.12194440e-4f, r);
  F16x p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p * r, r, r) + 1.0f;
  I16x bits;
  std::memcpy(&bits, &rounded, sizeof bits);
  bits = (bits << 23) + 0x3f800000;  // the low bits of `rounded` are n; the rest is shifted out
  F16x scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return p * scale;
}

// A sum of sixteen lanes in one fixed order.
inline float total(F16x v) {
  float a[16];
  store(a, v);
  for (int step = 8; step; step /= 2)
    for (int i = 0; i < step; ++i) a[i] += a[i + step];
  return a[0];
}

inline float largest(F16x v) {
  float a[16];
  store(a, v);
  for (int step = 8; step; step /= 2)
    for (int i = 0; i < step; ++i) a[i] = a[i] < a[i + step] ? a[i + step] : a[i];
  return a[0];
}

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
  return (I16x)_mm512_add_epi32(a, b);
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
  return (I16x)_mm512_add_epi32(a, b);
}

#elif defined(__AVX2__)

inline __m256i four(const int8_t* x) {
  int32_t word;
  std::memcpy(&word, x, 4);
  return _mm256_set1_epi32(word);
}
inline I16x join(__m256i low, __m256i high) {
  I16x out;
  std::memcpy(&out, &low, 32);
  std::memcpy(reinterpret_cast<char*>(&out) + 32, &high, 32);
  return out;
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
  return join(_mm256_madd_epi16(sums[0], ones), _mm256_madd_epi16(sums[1], ones));
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
  return join(sums[0], sums[1]);
}

#else

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
        acc[r] = fma(__builtin_convertvector(dot, F16x), scale * x.scales[at], acc[r]);
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
          acc[r] = fma(__builtin_convertvector(first, F16x), scale * x.scales[at], acc[r]);
          acc[r] = fma(__builtin_convertvector(last, F16x), second * x.scales[at], acc[r]);
        } else {
          acc[r] = fma(__builtin_convertvector(first + last, F16x), scale * x.scales[at], acc[r]);
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

// ---- norms and gates ----

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
  return x / (exp16(-u) + 1.0f);
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

// ---- attention ----

// Sixteen numbers of a page as floats.
inline F16x load_as(int dtype, const void* base, int64_t at) {
  if (dtype == 0) return load(static_cast<const float*>(base) + at);
  const uint16_t* p = static_cast<const uint16_t*>(base) + at;
  if (dtype == 1) return load_half(p);
  float out[16];
  for (int i = 0; i < 16; ++i) out[i] = bfloat_to_float(p[i]);
  return load(out);
}
inline float load_one(int dtype, const void* base, int64_t at) {
  if (dtype == 0) return static_cast<const float*>(base)[at];
  const uint16_t bits = static_cast<const uint16_t*>(base)[at];
  return dtype == 1 ? half_to_float(bits) : bfloat_to_float(bits);
}

inline F16x larger(F16x a, F16x b) { return a > b ? a : b; }

// What a query has gathered so far.
struct Gathered {
  float peak = -std::numeric_limits<float>::infinity();
  float norm = 0;
};

// Products of G heads with the keys of one page, [G][lanes]; the heads share what is loaded.
template <int G>
inline void page_products(const float* query, const Pages& pages, int64_t keys, float scale, float* scores) {
  for (int64_t lane = 0; lane < pages.lanes; lane += 16) {
    F16x sum[G] = {};
    for (int64_t d = 0; d < pages.dim; ++d) {
      const F16x key = load_as(pages.dtype, pages.keys, keys + d * pages.lanes + lane);
      for (int g = 0; g < G; ++g) sum[g] = fma(key, query[g * pages.dim + d], sum[g]);
    }
    for (int g = 0; g < G; ++g) store(scores + g * pages.lanes + lane, sum[g] * scale);
  }
}

// From scores of one head to weights, in place; returns the factor by which what was gathered before shrinks.
inline float page_weights(float* scores, const Pages& pages, int64_t from, int64_t to, float soft_cap, Gathered& so_far) {
  const float nothing = -std::numeric_limits<float>::infinity();
  const int64_t lanes = pages.lanes;
  const bool whole = from == 0 && to == lanes && soft_cap == 0;
  if (!whole)
    for (int64_t t = 0; t < lanes; ++t) {  // what was never written is never looked at
      const float capped = soft_cap > 0 ? soft_cap * std::tanh(scores[t] / soft_cap) : scores[t];
      scores[t] = t >= from && t < to ? capped : nothing;
    }
  F16x peaks = load(scores);
  for (int64_t lane = 16; lane < lanes; lane += 16) peaks = larger(peaks, load(scores + lane));
  const float best = largest(peaks), next = best > so_far.peak ? best : so_far.peak;
  const float decay = std::isinf(so_far.peak) ? 0.0f : exp16(splat(so_far.peak - next))[0];
  F16x sums = {};
  for (int64_t lane = 0; lane < lanes; lane += 16) {
    const F16x score = load(scores + lane);
    F16x weight = exp16(score - next);
    if (!whole) weight = score == nothing - F16x{} ? F16x{} : weight;
    store(scores + lane, weight);
    sums = sums + weight;
  }
  so_far.norm = so_far.norm * decay + total(sums);
  so_far.peak = next;
  return decay;
}

// Adds the values of tokens [from, to) of one page to what G heads have gathered, V vectors of sixteen dims at a time.
template <int G, int V>
inline void page_values(const Pages& pages, int64_t values, int64_t from, int64_t to, const float* weights,
                        const float* decay, int64_t first, float* acc) {
  F16x sum[G][V];
  for (int g = 0; g < G; ++g)
    for (int v = 0; v < V; ++v) sum[g][v] = load(acc + g * pages.value_dim + first + 16 * v) * decay[g];
  for (int64_t t = from; t < to; ++t)
    for (int v = 0; v < V; ++v) {
      const F16x value = load_as(pages.dtype, pages.values, values + t * pages.value_dim + first + 16 * v);
      for (int g = 0; g < G; ++g) sum[g][v] = fma(value, weights[g * pages.lanes + t], sum[g][v]);
    }
  for (int g = 0; g < G; ++g)
    for (int v = 0; v < V; ++v) store(acc + g * pages.value_dim + first + 16 * v, sum[g][v]);
}

template <int G>
inline void attend_heads(const float* query, const Pages& pages, int64_t kv_head, const int64_t* table,
                         int64_t position, const Mask& mask, float* scratch, float* out) {
  const int64_t size = pages.page_tokens, dims = pages.value_dim;
  const int64_t low = mask.window && position >= mask.window ? position - mask.window + 1 : 0;
  float* scores = scratch;  // [G][lanes]
  Gathered so_far[G];
  float decay[G];
  for (int64_t d = 0; d < G * dims; ++d) out[d] = 0;
  // Tiles are pages: they begin at position 0 and are merged in ascending order, however the prompt was cut.
  for (int64_t page = low / size; page <= position / size; ++page) {
    const int64_t base = table[page] * pages.kv_heads + kv_head;
    const int64_t from = page * size < low ? low - page * size : 0;
    const int64_t to = position + 1 - page * size < size ? position + 1 - page * size : size;
    page_products<G>(query, pages, base * pages.dim * pages.lanes, mask.scale, scores);
    for (int g = 0; g < G; ++g)
      decay[g] = page_weights(scores + g * pages.lanes, pages, from, to, mask.soft_cap, so_far[g]);
    const int64_t values = base * size * dims;
    int64_t d = 0;
    for (; d + 64 <= dims; d += 64) page_values<G, 4>(pages, values, from, to, scores, decay, d, out);
    for (; d + 16 <= dims; d += 16) page_values<G, 1>(pages, values, from, to, scores, decay, d, out);
    for (; d < dims; ++d)
      for (int g = 0; g < G; ++g) {
        float sum = out[g * dims + d] * decay[g];
        for (int64_t t = from; t < to; ++t)
          sum = load_one(pages.dtype, pages.values, values + t * dims + d) * scores[g * pages.lanes + t] + sum;
        out[g * dims + d] = sum;
      }
  }
  for (int g = 0; g < G; ++g)
    for (int64_t d = 0; d < dims; ++d) out[g * dims + d] /= so_far[g].norm;
}

inline void attend(const float* query, int64_t group, const Pages& pages, int64_t kv_head, const int64_t* table,
                   int64_t position, const Mask& mask, float* scratch, float* out) {
  const int64_t in = pages.dim, to = pages.value_dim;
  int64_t g = 0;
  for (; g + 4 <= group; g += 4)
    attend_heads<4>(query + g * in, pages, kv_head, table, position, mask, scratch, out + g * to);
  switch (group - g) {
    case 3: return attend_heads<3>(query + g * in, pages, kv_head, table, position, mask, scratch, out + g * to);
    case 2: return attend_heads<2>(query + g * in, pages, kv_head, table, position, mask, scratch, out + g * to);
    case 1: return attend_heads<1>(query + g * in, pages, kv_head, table, position, mask, scratch, out + g * to);
    default: return;
  }
}

inline const Kernels* kernels(const char* name) {
  static Kernels table;
  table = {name, quantize, linear, linear_float, embed, rms_norm, gate, attend};
  return &table;
}

}  // namespace kvilt::KVILT_ISA
