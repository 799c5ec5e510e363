// Integer dot products of a tile: sixteen outputs with one row of activations, over the steps of a block.
//
// A tile is taken in parts of as many outputs as a register has lanes, so that a part's codes stay in registers for all
// rows. Codes of two to six bits are unsigned, those of eight bits and IQ4 are signed. Only here there are intrinsics
// besides vectors.h.
#pragma once
#include "packed.h"
#include "vectors.h"

namespace kvilt::KVILT_ISA {

#if defined(__AVX512VNNI__)

inline __m512i four(const int8_t* x) {
  int32_t word;
  std::memcpy(&word, x, 4);
  return _mm512_set1_epi32(word);
}

constexpr int kParts = 1;
constexpr int kUnrolled = 8;  // rows: their sums stay in registers
using Part = f32x16;

// The eight steps of a block as bytes that dpbusd takes.
template <int Coding>
struct Codes {
  __m512i v[8];

  Codes(const uint8_t* w, int) {
    if constexpr (Coding == 8) {  // as unsigned: 128 more than they are; kByteOffset takes it away again
      for (int j = 0; j < 8; ++j) v[j] = _mm512_xor_si512(_mm512_loadu_si512(w + 64 * j), _mm512_set1_epi8(char(0x80)));
      return;
    }
    if constexpr (Coding == 2 || Coding == 3) {
      const __m512i low = _mm512_set1_epi8(3);
      for (int j = 0; j < 8; ++j)
        v[j] = _mm512_and_si512(_mm512_srli_epi16(_mm512_loadu_si512(w + 64 * (j / 4)), 2 * (j % 4)), low);
      if constexpr (Coding == 3) {
        const __m512i plane = _mm512_loadu_si512(w + 128), bit = _mm512_set1_epi8(4);
        for (int j = 0; j < 2; ++j) v[j] = merge(v[j], _mm512_slli_epi16(plane, 2 - j), bit);
        for (int j = 2; j < 8; ++j) v[j] = merge(v[j], _mm512_srli_epi16(plane, j - 2), bit);
      }
      return;
    }
    const __m512i nibble = _mm512_set1_epi8(15);
    for (int j = 0; j < 4; ++j) {
      const __m512i both = _mm512_loadu_si512(w + 64 * j);
      v[j] = _mm512_and_si512(both, nibble);
      v[4 + j] = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
    }
    if constexpr (Coding == kFp4Coding) {
      const __m512i numbers = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kFp4Numbers)));
      for (int j = 0; j < 8; ++j) v[j] = _mm512_shuffle_epi8(numbers, v[j]);
    }
    if constexpr (Coding == kIq4Coding) {  // as unsigned, like eight bits
      const __m512i numbers =
          _mm512_xor_si512(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kIq4Numbers))),
                           _mm512_set1_epi8(char(0x80)));
      for (int j = 0; j < 8; ++j) v[j] = _mm512_shuffle_epi8(numbers, v[j]);
    }
    if constexpr (Coding == 5) {
      const __m512i plane = _mm512_loadu_si512(w + 256), bit = _mm512_set1_epi8(16);
      for (int j = 0; j < 4; ++j) v[j] = merge(v[j], _mm512_slli_epi16(plane, 4 - j), bit);
      for (int j = 4; j < 8; ++j) v[j] = merge(v[j], _mm512_srli_epi16(plane, j - 4), bit);
    }
    if constexpr (Coding == 6) {
      const __m512i bits = _mm512_set1_epi8(48);
      for (int p = 0; p < 2; ++p) {
        const __m512i plane = _mm512_loadu_si512(w + 256 + 64 * p);
        v[4 * p] = merge(v[4 * p], _mm512_slli_epi16(plane, 4), bits);
        v[4 * p + 1] = merge(v[4 * p + 1], _mm512_slli_epi16(plane, 2), bits);
        v[4 * p + 2] = merge(v[4 * p + 2], plane, bits);
        v[4 * p + 3] = merge(v[4 * p + 3], _mm512_srli_epi16(plane, 2), bits);
      }
    }
  }
  static __m512i merge(__m512i low, __m512i high, __m512i mask) {
    return _mm512_or_si512(low, _mm512_and_si512(high, mask));
  }
};

template <int First, int Count, int Coding>
inline i32x16 dots(const Codes<Coding>& w, const int8_t* x) {
  __m512i a = _mm512_setzero_si512(), b = _mm512_setzero_si512();
  for (int j = First; j < First + Count; j += 2) {
    a = _mm512_dpbusd_epi32(a, w.v[j], four(x + 4 * j));
    b = _mm512_dpbusd_epi32(b, w.v[j + 1], four(x + 4 * j + 4));
  }
  return {_mm512_add_epi32(a, b)};
}

constexpr int kByteOffset = 128;

#elif defined(__AVX2__)

inline __m256i four(const int8_t* x) {
  int32_t word;
  std::memcpy(&word, x, 4);
  return _mm256_set1_epi32(word);
}

constexpr int kParts = 2;
constexpr int kUnrolled = 1;
struct Part {
  __m256 v;
};
struct Ints {
  __m256i v;
};
inline Part operator*(Part a, float b) { return {_mm256_mul_ps(a.v, _mm256_set1_ps(b))}; }
inline Part fma(Part a, Part b, Part c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Part fma(Part a, float b, Part c) { return {_mm256_fmadd_ps(a.v, _mm256_set1_ps(b), c.v)}; }
inline Part to_float(Ints a) { return {_mm256_cvtepi32_ps(a.v)}; }
inline Part part_of(f32x16 v, int part) { return {part ? v.b : v.a}; }
inline void put_part(f32x16& v, int part, Part p) { (part ? v.b : v.a) = p.v; }
inline f32x16 joined(const Part* parts, int stride) { return {parts[0].v, parts[stride].v}; }

template <int Coding>
struct Codes {
  __m256i v[8];

  Codes(const uint8_t* w, int part) {
    const auto at = [&](int byte) {
      return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + byte + 32 * part));
    };
    if constexpr (Coding == 8) {
      for (int j = 0; j < 8; ++j) v[j] = at(64 * j);
      return;
    }
    if constexpr (Coding == 2 || Coding == 3) {
      const __m256i low = _mm256_set1_epi8(3);
      for (int j = 0; j < 8; ++j) v[j] = _mm256_and_si256(_mm256_srli_epi16(at(64 * (j / 4)), 2 * (j % 4)), low);
      if constexpr (Coding == 3) {
        const __m256i plane = at(128), bit = _mm256_set1_epi8(4);
        for (int j = 0; j < 2; ++j) v[j] = merge(v[j], _mm256_slli_epi16(plane, 2 - j), bit);
        for (int j = 2; j < 8; ++j) v[j] = merge(v[j], _mm256_srli_epi16(plane, j - 2), bit);
      }
      return;
    }
    const __m256i nibble = _mm256_set1_epi8(15);
    for (int j = 0; j < 4; ++j) {
      const __m256i both = at(64 * j);
      v[j] = _mm256_and_si256(both, nibble);
      v[4 + j] = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
    }
    if constexpr (Coding == kFp4Coding) {
      const __m256i numbers =
          _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kFp4Numbers)));
      for (int j = 0; j < 8; ++j) v[j] = _mm256_shuffle_epi8(numbers, v[j]);
    }
    if constexpr (Coding == kIq4Coding) {
      const __m256i numbers =
          _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kIq4Numbers)));
      for (int j = 0; j < 8; ++j) v[j] = _mm256_shuffle_epi8(numbers, v[j]);
    }
    if constexpr (Coding == 5) {
      const __m256i plane = at(256), bit = _mm256_set1_epi8(16);
      for (int j = 0; j < 4; ++j) v[j] = merge(v[j], _mm256_slli_epi16(plane, 4 - j), bit);
      for (int j = 4; j < 8; ++j) v[j] = merge(v[j], _mm256_srli_epi16(plane, j - 4), bit);
    }
    if constexpr (Coding == 6) {
      const __m256i bits = _mm256_set1_epi8(48);
      for (int p = 0; p < 2; ++p) {
        const __m256i plane = at(256 + 64 * p);
        v[4 * p] = merge(v[4 * p], _mm256_slli_epi16(plane, 4), bits);
        v[4 * p + 1] = merge(v[4 * p + 1], _mm256_slli_epi16(plane, 2), bits);
        v[4 * p + 2] = merge(v[4 * p + 2], plane, bits);
        v[4 * p + 3] = merge(v[4 * p + 3], _mm256_srli_epi16(plane, 2), bits);
      }
    }
  }
  static __m256i merge(__m256i low, __m256i high, __m256i mask) {
    return _mm256_or_si256(low, _mm256_and_si256(high, mask));
  }
};

#if defined(__AVXVNNI__)

// Signed codes: the magnitude goes in as unsigned and the sign to the activation.
template <int Coding>
inline __m256i add_products(__m256i sum, __m256i code, __m256i act) {
  if constexpr (Coding == 8 || Coding == kIq4Coding)
    return _mm256_dpbusd_avx_epi32(sum, _mm256_abs_epi8(code), _mm256_sign_epi8(act, code));
  return _mm256_dpbusd_avx_epi32(sum, code, act);
}

template <int First, int Count, int Coding>
inline Ints dots(const Codes<Coding>& w, const int8_t* x) {
  __m256i a = _mm256_setzero_si256(), b = _mm256_setzero_si256();
#pragma GCC unroll 8
  for (int j = First; j < First + Count; j += 2) {
    a = add_products<Coding>(a, w.v[j], four(x + 4 * j));
    b = add_products<Coding>(b, w.v[j + 1], four(x + 4 * j + 4));
  }
  return {_mm256_add_epi32(a, b)};
}

#else

// Products of two codes and two activations are at most 2 * 127 * (2^bits - 1), 2 * 127 * 24 for MXFP4, so sixteen bits hold the sum of this
// many steps before it is widened.
template <int Coding>
constexpr int kNarrow = Coding <= 4                           ? 8
                        : Coding == 5 || Coding == kFp4Coding ? 4
                        : Coding == 6                         ? 2
                                                              : 1;

// Signed codes: the magnitude goes in as unsigned and the sign to the activation.
template <int Coding>
inline __m256i pairs(__m256i code, __m256i act) {
  if constexpr (Coding == 8 || Coding == kIq4Coding)
    return _mm256_maddubs_epi16(_mm256_abs_epi8(code), _mm256_sign_epi8(act, code));
  return _mm256_maddubs_epi16(code, act);
}

template <int First, int Count, int Coding>
inline Ints dots(const Codes<Coding>& w, const int8_t* x) {
  constexpr int run = kNarrow<Coding> < Count ? kNarrow<Coding> : Count;
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i sum;
#pragma GCC unroll 8
  for (int start = First; start < First + Count; start += run) {
    __m256i narrow = pairs<Coding>(w.v[start], four(x + 4 * start));
#pragma GCC unroll 8
    for (int j = start + 1; j < start + run; ++j)
      narrow = _mm256_add_epi16(narrow, pairs<Coding>(w.v[j], four(x + 4 * j)));
    const __m256i wide = _mm256_madd_epi16(narrow, ones);
    sum = start == First ? wide : _mm256_add_epi32(sum, wide);
  }
  return {sum};
}

#endif

constexpr int kByteOffset = 0;

#elif defined(KVILT_NEON)

constexpr int kParts = 4;
constexpr int kUnrolled = 8;
struct Part {
  float32x4_t v;
};
struct Ints {
  int32x4_t v;
};
inline Part operator*(Part a, float b) { return {vmulq_n_f32(a.v, b)}; }
inline Part fma(Part a, Part b, Part c) { return {vfmaq_f32(c.v, a.v, b.v)}; }
inline Part fma(Part a, float b, Part c) { return {vfmaq_n_f32(c.v, a.v, b)}; }
inline Part to_float(Ints a) { return {vcvtq_f32_s32(a.v)}; }
inline Part part_of(f32x16 v, int part) { return {v.v[part]}; }
inline void put_part(f32x16& v, int part, Part p) { v.v[part] = p.v; }
inline f32x16 joined(const Part* parts, int stride) {
  return {{parts[0].v, parts[stride].v, parts[2 * stride].v, parts[3 * stride].v}};
}

// The eight steps of a block for four outputs, as signed bytes: all codes fit.
template <int Coding>
struct Codes {
  int8x16_t v[8];

  Codes(const uint8_t* w, int part) {
    const auto at = [&](int byte) { return vld1q_u8(w + byte + 16 * part); };
    uint8x16_t code[8];
    if constexpr (Coding == 8) {
      for (int j = 0; j < 8; ++j) code[j] = at(64 * j);
    } else if constexpr (Coding == 2 || Coding == 3) {
      for (int j = 0; j < 8; ++j) code[j] = bits(at(64 * (j / 4)), 2 * (j % 4), 0, 3);
      if constexpr (Coding == 3)
        for (int j = 0; j < 8; ++j) code[j] = vorrq_u8(code[j], bits(at(128), j, 2, 4));
    } else {
      for (int j = 0; j < 4; ++j) {
        code[j] = vandq_u8(at(64 * j), vdupq_n_u8(15));
        code[4 + j] = vshrq_n_u8(at(64 * j), 4);
      }
      if constexpr (Coding == kFp4Coding || Coding == kIq4Coding) {
        const auto* table = Coding == kFp4Coding ? kFp4Numbers : reinterpret_cast<const uint8_t*>(kIq4Numbers);
        const uint8x16_t numbers = vld1q_u8(table);
        for (int j = 0; j < 8; ++j) code[j] = vqtbl1q_u8(numbers, code[j]);
      }
      if constexpr (Coding == 5)
        for (int j = 0; j < 8; ++j) code[j] = vorrq_u8(code[j], bits(at(256), j, 4, 16));
      if constexpr (Coding == 6)
        for (int j = 0; j < 8; ++j) code[j] = vorrq_u8(code[j], bits(at(256 + 64 * (j / 4)), 2 * (j % 4), 4, 48));
    }
    for (int j = 0; j < 8; ++j) v[j] = vreinterpretq_s8_u8(code[j]);
  }
  // Bits from place `from` on, moved to place `to`; the mask says which of them.
  static uint8x16_t bits(uint8x16_t plane, int from, int to, uint8_t mask) {
    return vandq_u8(vshlq_u8(plane, vdupq_n_s8(int8_t(to - from))), vdupq_n_u8(mask));
  }
};

inline int8x16_t four(const int8_t* x) {
  int32_t word;
  std::memcpy(&word, x, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(word));
}

template <int First, int Count, int Coding>
inline Ints dots(const Codes<Coding>& w, const int8_t* x) {
  int32x4_t a = vdupq_n_s32(0), b = vdupq_n_s32(0);
  for (int j = First; j < First + Count; j += 2) {
    a = vdotq_s32(a, w.v[j], four(x + 4 * j));
    b = vdotq_s32(b, w.v[j + 1], four(x + 4 * j + 4));
  }
  return {vaddq_s32(a, b)};
}

#if defined(__ARM_FEATURE_MATMUL_INT8)

// Two rows at once: a product of matrices takes eight inputs of two outputs and of two rows. The sums are those of
// `dots`, since they are whole numbers.
struct IntsOfTwo {
  Ints first, second;
};
template <int First, int Count, int Coding>
inline IntsOfTwo dots_of_two(const Codes<Coding>& w, const int8_t* x, const int8_t* y) {
  int32x4_t low = vdupq_n_s32(0), high = vdupq_n_s32(0);  // of each row, outputs 0 and 1, outputs 2 and 3
  for (int j = First; j < First + Count; j += 2) {
    const int8x16_t rows = vcombine_s8(vld1_s8(x + 4 * j), vld1_s8(y + 4 * j));
    const int32x4_t a = vreinterpretq_s32_s8(w.v[j]), b = vreinterpretq_s32_s8(w.v[j + 1]);
    low = vmmlaq_s32(low, rows, vreinterpretq_s8_s32(vzip1q_s32(a, b)));
    high = vmmlaq_s32(high, rows, vreinterpretq_s8_s32(vzip2q_s32(a, b)));
  }
  return {{vcombine_s32(vget_low_s32(low), vget_low_s32(high))},
          {vcombine_s32(vget_high_s32(low), vget_high_s32(high))}};
}

#endif

constexpr int kByteOffset = 0;

#else

constexpr int kParts = 1;
constexpr int kUnrolled = 1;
using Part = f32x16;

template <int Coding>
struct Codes {
  const uint8_t* w;
  Codes(const uint8_t* p, int) : w(p) {}
};

template <int First, int Count, int Coding>
inline i32x16 dots(const Codes<Coding>& w, const int8_t* x) {
  i32x16 out = {};
  for (int j = First; j < First + Count; ++j)
    for (int o = 0; o < kTile; ++o)
      for (int t = 0; t < 4; ++t) out.v[o] += code_at<Coding>(w.w, j, 4 * o + t) * x[4 * j + t];
  return out;
}

constexpr int kByteOffset = 0;

#endif

#if (!defined(__AVX2__) || defined(__AVX512VNNI__)) && !defined(KVILT_NEON)
inline f32x16 part_of(f32x16 v, int) { return v; }
inline void put_part(f32x16& v, int, f32x16 p) { v = p; }
inline f32x16 joined(const f32x16* parts, int) { return parts[0]; }
#endif

}  // namespace kvilt::KVILT_ISA
