// Sixteen lanes, written with the compiler's vectors: loads, fused products, exponentials, sums in one fixed order.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

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

}  // namespace kvilt::KVILT_ISA
