// Sixteen lanes: loads, arithmetic, fused products, exponentials, sums in one fixed order.
//
// A struct of the widest registers there are, since compilers lower vectors wider than a register lane by lane.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(KVILT_NEON)
#include <arm_neon.h>
#endif

namespace kvilt::KVILT_ISA {

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

inline float bfloat_to_float(uint16_t b) {
  const uint32_t bits = uint32_t(b) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

// fma is written out wherever a row's result passes: left to itself, a compiler fuses the same expression in one
// instantiation and not in another, and a row alone would round differently from the same row in a batch.

#if defined(__AVX512F__)

constexpr int kRegisterBytes = 64;
struct f32x16 {
  __m512 v;
};
struct i32x16 {
  __m512i v;
};
inline f32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, f32x16 x) { _mm512_storeu_ps(p, x.v); }
inline f32x16 splat(float x) { return {_mm512_set1_ps(x)}; }
inline f32x16 operator+(f32x16 a, f32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline f32x16 operator-(f32x16 a, f32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline f32x16 operator*(f32x16 a, f32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline f32x16 operator/(f32x16 a, f32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline f32x16 max(f32x16 a, f32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline f32x16 min(f32x16 a, f32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline f32x16 abs(f32x16 a) { return {_mm512_abs_ps(a.v)}; }
// The value where a is at least b, nothing elsewhere.
inline f32x16 zero_below(f32x16 a, f32x16 b, f32x16 value) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ), value.v)};
}
inline f32x16 to_float(i32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
// 2^n of a number whose low bits hold n, as exp16 makes it; the rest is shifted out.
inline f32x16 exp2_bits(f32x16 rounded) {
  const __m512i bits = _mm512_slli_epi32(_mm512_castps_si512(rounded.v), 23);
  return {_mm512_castsi512_ps(_mm512_add_epi32(bits, _mm512_set1_epi32(0x3f800000)))};
}
// Sixteen numbers to the nearest whole ones (ties to even), as bytes; returns their sum.
inline int32_t store_bytes(int8_t* p, f32x16 x) {
  const __m128i bytes = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x.v));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
  // Sums of bytes are taken of unsigned ones, eight at a time: of 128 more than each is.
  const __m128i eights = _mm_sad_epu8(_mm_xor_si128(bytes, _mm_set1_epi8(char(0x80))), _mm_setzero_si128());
  return _mm_cvtsi128_si32(_mm_add_epi32(eights, _mm_unpackhi_epi64(eights, eights))) - 16 * 128;
}
// The largest lane of each of sixteen vectors of no negative numbers; what is not a number counts as the largest.
inline f32x16 largest_of_each(const f32x16* vectors) {
  const auto larger = [](__m512 a, __m512 b) {  // the bits of such numbers are in the order of the numbers
    return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
  };
  __m512 four[4], eight[2];  // with four and two candidates of each vector
  for (int i = 0; i < 4; ++i) {
    const f32x16* v = vectors + 4 * i;
    const __m512 low = larger(_mm512_unpacklo_ps(v[0].v, v[1].v), _mm512_unpackhi_ps(v[0].v, v[1].v));
    const __m512 high = larger(_mm512_unpacklo_ps(v[2].v, v[3].v), _mm512_unpackhi_ps(v[2].v, v[3].v));
    four[i] = larger(_mm512_shuffle_ps(low, high, 0x44), _mm512_shuffle_ps(low, high, 0xee));
  }
  for (int i = 0; i < 2; ++i)
    eight[i] = larger(_mm512_shuffle_f32x4(four[2 * i], four[2 * i + 1], 0x88),
                      _mm512_shuffle_f32x4(four[2 * i], four[2 * i + 1], 0xdd));
  return {larger(_mm512_shuffle_f32x4(eight[0], eight[1], 0x88), _mm512_shuffle_f32x4(eight[0], eight[1], 0xdd))};
}
inline f32x16 load_half(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline f32x16 load_bfloat(const uint16_t* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}
inline f32x16 load_byte(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline f32x16 load_unsigned(const uint8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline f32x16 load_low_nibbles(const uint8_t* p) {
  const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return {_mm512_cvtepi32_ps(_mm512_and_si512(wide, _mm512_set1_epi32(15)))};
}
inline f32x16 load_high_nibbles(const uint8_t* p) {
  const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return {_mm512_cvtepi32_ps(_mm512_srli_epi32(wide, 4))};
}

#elif defined(__AVX2__)

constexpr int kRegisterBytes = 32;
struct f32x16 {
  __m256 a, b;
};
struct i32x16 {
  __m256i a, b;
};
inline f32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, f32x16 x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline f32x16 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline f32x16 operator+(f32x16 x, f32x16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline f32x16 operator-(f32x16 x, f32x16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline f32x16 operator*(f32x16 x, f32x16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline f32x16 operator/(f32x16 x, f32x16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline f32x16 fma(f32x16 x, f32x16 y, f32x16 z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline f32x16 max(f32x16 x, f32x16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline f32x16 min(f32x16 x, f32x16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline f32x16 abs(f32x16 x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline f32x16 zero_below(f32x16 x, f32x16 y, f32x16 value) {
  return {_mm256_and_ps(_mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ), value.a),
          _mm256_and_ps(_mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ), value.b)};
}
inline f32x16 to_float(i32x16 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline f32x16 exp2_bits(f32x16 rounded) {
  const __m256i one = _mm256_set1_epi32(0x3f800000);
  const __m256i low = _mm256_slli_epi32(_mm256_castps_si256(rounded.a), 23);
  const __m256i high = _mm256_slli_epi32(_mm256_castps_si256(rounded.b), 23);
  return {_mm256_castsi256_ps(_mm256_add_epi32(low, one)), _mm256_castsi256_ps(_mm256_add_epi32(high, one))};
}
inline int32_t store_bytes(int8_t* p, f32x16 x) {
  const __m256i low = _mm256_cvtps_epi32(x.a), high = _mm256_cvtps_epi32(x.b);
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
  const __m256i both = _mm256_add_epi32(low, high);
  __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
  sum = _mm_add_epi32(sum, _mm_unpackhi_epi64(sum, sum));
  return _mm_cvtsi128_si32(sum) + _mm_extract_epi32(sum, 1);
}
inline f32x16 load_half(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline f32x16 load_bfloat(const uint16_t* p) {
  const __m256i low = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i high = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))};
}
inline f32x16 load_byte(const int8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8))))};
}
inline f32x16 load_unsigned(const uint8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))),
          _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8))))};
}
inline __m256 low_nibbles_8(const uint8_t* p) {
  const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return _mm256_cvtepi32_ps(_mm256_and_si256(wide, _mm256_set1_epi32(15)));
}
inline __m256 high_nibbles_8(const uint8_t* p) {
  const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return _mm256_cvtepi32_ps(_mm256_srli_epi32(wide, 4));
}
inline f32x16 load_low_nibbles(const uint8_t* p) { return {low_nibbles_8(p), low_nibbles_8(p + 8)}; }
inline f32x16 load_high_nibbles(const uint8_t* p) { return {high_nibbles_8(p), high_nibbles_8(p + 8)}; }

#elif defined(KVILT_NEON)

constexpr int kRegisterBytes = 16;
struct f32x16 {
  float32x4_t v[4];
};
struct i32x16 {
  int32x4_t v[4];
};
template <typename Op>
inline __attribute__((always_inline)) f32x16 each(Op op) {
  return {{op(0), op(1), op(2), op(3)}};
}
inline f32x16 load(const float* p) {
  return each([&](int i) { return vld1q_f32(p + 4 * i); });
}
inline void store(float* p, f32x16 x) {
  for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, x.v[i]);
}
inline f32x16 splat(float x) {
  return each([&](int) { return vdupq_n_f32(x); });
}
inline f32x16 operator+(f32x16 a, f32x16 b) {
  return each([&](int i) { return vaddq_f32(a.v[i], b.v[i]); });
}
inline f32x16 operator-(f32x16 a, f32x16 b) {
  return each([&](int i) { return vsubq_f32(a.v[i], b.v[i]); });
}
inline f32x16 operator*(f32x16 a, f32x16 b) {
  return each([&](int i) { return vmulq_f32(a.v[i], b.v[i]); });
}
inline f32x16 operator/(f32x16 a, f32x16 b) {
  return each([&](int i) { return vdivq_f32(a.v[i], b.v[i]); });
}
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
  return each([&](int i) { return vfmaq_f32(c.v[i], a.v[i], b.v[i]); });
}
inline f32x16 max(f32x16 a, f32x16 b) {
  return each([&](int i) { return vmaxq_f32(a.v[i], b.v[i]); });
}
inline f32x16 min(f32x16 a, f32x16 b) {
  return each([&](int i) { return vminq_f32(a.v[i], b.v[i]); });
}
inline f32x16 abs(f32x16 a) {
  return each([&](int i) { return vabsq_f32(a.v[i]); });
}
inline f32x16 zero_below(f32x16 a, f32x16 b, f32x16 value) {
  return each([&](int i) {
    return vreinterpretq_f32_u32(vandq_u32(vcgeq_f32(a.v[i], b.v[i]), vreinterpretq_u32_f32(value.v[i])));
  });
}
inline f32x16 to_float(i32x16 a) {
  return each([&](int i) { return vcvtq_f32_s32(a.v[i]); });
}
inline f32x16 exp2_bits(f32x16 rounded) {
  return each([&](int i) {
    const uint32x4_t bits = vshlq_n_u32(vreinterpretq_u32_f32(rounded.v[i]), 23);
    return vreinterpretq_f32_u32(vaddq_u32(bits, vdupq_n_u32(0x3f800000u)));
  });
}
inline int32_t store_bytes(int8_t* p, f32x16 x) {
  int32x4_t whole[4], sum = vdupq_n_s32(0);
  for (int i = 0; i < 4; ++i) {
    whole[i] = vcvtnq_s32_f32(x.v[i]);
    sum = vaddq_s32(sum, whole[i]);
  }
  const int16x8_t low = vcombine_s16(vqmovn_s32(whole[0]), vqmovn_s32(whole[1]));
  const int16x8_t high = vcombine_s16(vqmovn_s32(whole[2]), vqmovn_s32(whole[3]));
  vst1q_s8(p, vcombine_s8(vqmovn_s16(low), vqmovn_s16(high)));
  return vaddvq_s32(sum);
}
inline f32x16 load_half(const uint16_t* p) {
  return each([&](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))); });
}
inline f32x16 load_bfloat(const uint16_t* p) {
  return each([&](int i) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)); });
}
inline f32x16 from_bytes(uint8x16_t bytes) {
  const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_u8(vget_high_u8(bytes));
  return {{vcvtq_f32_u32(vmovl_u16(vget_low_u16(low))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(low))),
           vcvtq_f32_u32(vmovl_u16(vget_low_u16(high))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(high)))}};
}
inline f32x16 load_byte(const int8_t* p) {
  const int8x16_t bytes = vld1q_s8(p);
  const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_s8(vget_high_s8(bytes));
  return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))),
           vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)))}};
}
inline f32x16 load_unsigned(const uint8_t* p) { return from_bytes(vld1q_u8(p)); }
inline f32x16 load_low_nibbles(const uint8_t* p) { return from_bytes(vandq_u8(vld1q_u8(p), vdupq_n_u8(15))); }
inline f32x16 load_high_nibbles(const uint8_t* p) { return from_bytes(vshrq_n_u8(vld1q_u8(p), 4)); }

#else

constexpr int kRegisterBytes = 16;
struct f32x16 {
  float v[16];
};
struct i32x16 {
  int32_t v[16];
};
template <typename Op>
inline f32x16 each(Op op) {
  f32x16 out;
  for (int i = 0; i < 16; ++i) out.v[i] = op(i);
  return out;
}
inline f32x16 load(const float* p) {
  return each([&](int i) { return p[i]; });
}
inline void store(float* p, f32x16 x) { std::memcpy(p, x.v, sizeof x.v); }
inline f32x16 splat(float x) {
  return each([&](int) { return x; });
}
inline f32x16 operator+(f32x16 a, f32x16 b) {
  return each([&](int i) { return a.v[i] + b.v[i]; });
}
inline f32x16 operator-(f32x16 a, f32x16 b) {
  return each([&](int i) { return a.v[i] - b.v[i]; });
}
inline f32x16 operator*(f32x16 a, f32x16 b) {
  return each([&](int i) { return a.v[i] * b.v[i]; });
}
inline f32x16 operator/(f32x16 a, f32x16 b) {
  return each([&](int i) { return a.v[i] / b.v[i]; });
}
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return a * b + c; }
inline f32x16 max(f32x16 a, f32x16 b) {
  return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline f32x16 min(f32x16 a, f32x16 b) {
  return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
inline f32x16 abs(f32x16 a) {
  return each([&](int i) { return std::fabs(a.v[i]); });
}
inline f32x16 zero_below(f32x16 a, f32x16 b, f32x16 value) {
  return each([&](int i) { return a.v[i] >= b.v[i] ? value.v[i] : 0.0f; });
}
inline f32x16 to_float(i32x16 a) {
  return each([&](int i) { return float(a.v[i]); });
}
inline f32x16 exp2_bits(f32x16 rounded) {
  uint32_t bits[16];
  std::memcpy(bits, rounded.v, sizeof bits);
  for (uint32_t& b : bits) b = (b << 23) + 0x3f800000u;
  f32x16 out;
  std::memcpy(out.v, bits, sizeof bits);
  return out;
}
inline int32_t store_bytes(int8_t* p, f32x16 x) {
  int32_t sum = 0;
  for (int i = 0; i < 16; ++i) {
    p[i] = int8_t((x.v[i] + 12582912.0f) - 12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    sum += p[i];
  }
  return sum;
}
inline f32x16 load_half(const uint16_t* p) {
  return each([&](int i) { return half_to_float(p[i]); });
}
inline f32x16 load_bfloat(const uint16_t* p) {
  return each([&](int i) { return bfloat_to_float(p[i]); });
}
inline f32x16 load_byte(const int8_t* p) {
  return each([&](int i) { return float(p[i]); });
}
inline f32x16 load_unsigned(const uint8_t* p) {
  return each([&](int i) { return float(p[i]); });
}
inline f32x16 load_low_nibbles(const uint8_t* p) {
  return each([&](int i) { return float(p[i] & 15); });
}
inline f32x16 load_high_nibbles(const uint8_t* p) {
  return each([&](int i) { return float(p[i] >> 4); });
}

#endif

inline f32x16 operator+(f32x16 a, float b) { return a + splat(b); }
inline f32x16 operator-(f32x16 a, float b) { return a - splat(b); }
inline f32x16 operator*(f32x16 a, float b) { return a * splat(b); }
inline f32x16 fma(f32x16 a, float b, f32x16 c) { return fma(a, splat(b), c); }

// Sixteen lanes to one, by halves: always the same tree.
#if defined(__AVX2__)
#if defined(__AVX512F__)
inline __m256 low_half(f32x16 x) { return __builtin_shufflevector(x.v, x.v, 0, 1, 2, 3, 4, 5, 6, 7); }
inline __m256 high_half(f32x16 x) { return __builtin_shufflevector(x.v, x.v, 8, 9, 10, 11, 12, 13, 14, 15); }
#else
inline __m256 low_half(f32x16 x) { return x.a; }
inline __m256 high_half(f32x16 x) { return x.b; }
#endif
inline float reduce_add(f32x16 v) {
  const __m256 eight = _mm256_add_ps(low_half(v), high_half(v));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float reduce_max(f32x16 v) {
  const __m256 eight = _mm256_max_ps(low_half(v), high_half(v));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
#elif defined(KVILT_NEON)
inline float reduce_add(f32x16 v) {
  const float32x4_t four = vaddq_f32(vaddq_f32(v.v[0], v.v[2]), vaddq_f32(v.v[1], v.v[3]));
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
inline float reduce_max(f32x16 v) {
  return vmaxvq_f32(vmaxq_f32(vmaxq_f32(v.v[0], v.v[2]), vmaxq_f32(v.v[1], v.v[3])));
}
#else
template <typename Op>
inline float fold(f32x16 v, Op op) {
  for (int step = 8; step; step /= 2)
    for (int i = 0; i < step; ++i) v.v[i] = op(v.v[i], v.v[i + step]);
  return v.v[0];
}
inline float reduce_add(f32x16 v) {
  return fold(v, [](float a, float b) { return a + b; });
}
inline float reduce_max(f32x16 v) {
  return fold(v, [](float a, float b) { return a < b ? b : a; });
}
#endif
#if !defined(__AVX512F__)
inline f32x16 largest_of_each(const f32x16* vectors) {
  float largest[16];
  for (int i = 0; i < 16; ++i) largest[i] = reduce_max(vectors[i]);
  return load(largest);
}
#endif

// Zeros where sums begin. An initializer of many vectors would be written to memory, and read from there.
template <typename Sum, int N>
inline __attribute__((always_inline)) void set_zero(Sum (&sums)[N]) {
#pragma GCC unroll 64
  for (int i = 0; i < N; ++i) sums[i] = Sum{};
}

// e^x for x in [-87, 88], a few units in the last place; smaller x give a value that is as good as zero.
inline f32x16 exp16(f32x16 x) {
  x = min(max(x, splat(-87.0f)), splat(88.0f));
  const f32x16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const f32x16 rounded = fma(x, 1.44269504088896341f, magic);
  const f32x16 n = rounded - magic;
  f32x16 r = fma(n, -0.693359375f, x);
  r = fma(n, 2.12194440e-4f, r);
  f32x16 p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p * r, r, r) + 1.0f;
  return p * exp2_bits(rounded);
}

}  // namespace kvilt::KVILT_ISA
