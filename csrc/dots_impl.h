// Integer dot products of a tile: sixteen outputs with R rows of activations, over the steps of a block.
//
// Four, five and six bits are unsigned codes, eight bits are signed. This is the only place with intrinsics of its own.
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

// The eight steps of a block as bytes that dpbusd takes.
template <int Bits>
struct Codes {
  __m512i v[8];

  explicit Codes(const uint8_t* w) {
    if constexpr (Bits == 8) {  // as unsigned: 128 more than they are, which `correction` takes away
      for (int j = 0; j < 8; ++j) v[j] = _mm512_xor_si512(_mm512_loadu_si512(w + 64 * j), _mm512_set1_epi8(char(0x80)));
      return;
    }
    const __m512i nibble = _mm512_set1_epi8(15);
    for (int j = 0; j < 4; ++j) {
      const __m512i both = _mm512_loadu_si512(w + 64 * j);
      v[j] = _mm512_and_si512(both, nibble);
      v[4 + j] = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
    }
    if constexpr (Bits == 5) {
      const __m512i plane = _mm512_loadu_si512(w + 256), bit = _mm512_set1_epi8(16);
      for (int j = 0; j < 4; ++j) v[j] = merge(v[j], _mm512_slli_epi16(plane, 4 - j), bit);
      for (int j = 4; j < 8; ++j) v[j] = merge(v[j], _mm512_srli_epi16(plane, j - 4), bit);
    }
    if constexpr (Bits == 6) {
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

constexpr int kTogether = 1;  // the codes stay in registers
constexpr int kUnrolled = 8;

template <int First, int Count, int N, int Bits>
inline void dots(const Codes<Bits>& w, const int8_t* x, I16x* out) {
  __m512i a = _mm512_setzero_si512(), b = _mm512_setzero_si512();
  for (int j = First; j < First + Count; j += 2) {
    a = _mm512_dpbusd_epi32(a, w.v[j], four(x + 4 * j));
    b = _mm512_dpbusd_epi32(b, w.v[j + 1], four(x + 4 * j + 4));
  }
  out[0] = {_mm512_add_epi32(a, b)};
}

constexpr int kByteOffset = 128;

#elif defined(__AVX2__)

inline __m256i four(const int8_t* x) {
  int32_t word;
  std::memcpy(&word, x, 4);
  return _mm256_set1_epi32(word);
}

// A block's codes, unpacked once for all rows: sixteen registers cannot hold them, but the first cache does.
template <int Bits>
struct Codes {
  __m256i v[8][2];

  explicit Codes(const uint8_t* w) {
    const auto at = [&](int byte) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + byte)); };
    for (int h = 0; h < 2; ++h) {
      if constexpr (Bits == 8) {
        for (int j = 0; j < 8; ++j) v[j][h] = at(64 * j + 32 * h);
        continue;
      }
      const __m256i nibble = _mm256_set1_epi8(15);
      for (int j = 0; j < 4; ++j) {
        const __m256i both = at(64 * j + 32 * h);
        v[j][h] = _mm256_and_si256(both, nibble);
        v[4 + j][h] = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
      }
      if constexpr (Bits == 5) {
        const __m256i plane = at(256 + 32 * h), bit = _mm256_set1_epi8(16);
        for (int j = 0; j < 4; ++j) v[j][h] = merge(v[j][h], _mm256_slli_epi16(plane, 4 - j), bit);
        for (int j = 4; j < 8; ++j) v[j][h] = merge(v[j][h], _mm256_srli_epi16(plane, j - 4), bit);
      }
      if constexpr (Bits == 6) {
        const __m256i bits = _mm256_set1_epi8(48);
        for (int p = 0; p < 2; ++p) {
          const __m256i plane = at(256 + 64 * p + 32 * h);
          v[4 * p][h] = merge(v[4 * p][h], _mm256_slli_epi16(plane, 4), bits);
          v[4 * p + 1][h] = merge(v[4 * p + 1][h], _mm256_slli_epi16(plane, 2), bits);
          v[4 * p + 2][h] = merge(v[4 * p + 2][h], plane, bits);
          v[4 * p + 3][h] = merge(v[4 * p + 3][h], _mm256_srli_epi16(plane, 2), bits);
        }
      }
    }
  }
  static __m256i merge(__m256i low, __m256i high, __m256i mask) {
    return _mm256_or_si256(low, _mm256_and_si256(high, mask));
  }
};

// Products of two codes and two activations are at most 2 * 127 * (2^Bits - 1), so sixteen bits hold the sum of this
// many steps before it is widened.
template <int Bits>
constexpr int kNarrow = Bits == 4 ? 8 : Bits == 5 ? 4 : Bits == 6 ? 2 : 1;

// Eight bits are signed: the magnitude goes in as unsigned and the sign to the activation.
template <int Bits>
inline __m256i pairs(__m256i code, __m256i act) {
  if constexpr (Bits == 8) return _mm256_maddubs_epi16(_mm256_abs_epi8(code), _mm256_sign_epi8(act, code));
  return _mm256_maddubs_epi16(code, act);
}

constexpr int kTogether = 1;  // two and four rows that share a load of codes were no faster on Zen 4
constexpr int kUnrolled = 1;  // more would only spill

// Steps [First, First + Count) with N rows.
template <int First, int Count, int N, int Bits>
inline void dots(const Codes<Bits>& w, const int8_t* x, I16x* out) {
  constexpr int run = kNarrow<Bits> < Count ? kNarrow<Bits> : Count;
  const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 8
  for (int start = First; start < First + Count; start += run) {
    __m256i narrow[N][2];
#pragma GCC unroll 8
    for (int j = start; j < start + run; ++j) {
      const __m256i low = w.v[j][0], high = w.v[j][1];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        const __m256i act = four(x + n * kBlock + 4 * j);
        const __m256i a = pairs<Bits>(low, act), b = pairs<Bits>(high, act);
        narrow[n][0] = j == start ? a : _mm256_add_epi16(narrow[n][0], a);
        narrow[n][1] = j == start ? b : _mm256_add_epi16(narrow[n][1], b);
      }
    }
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      const __m256i a = _mm256_madd_epi16(narrow[n][0], ones), b = _mm256_madd_epi16(narrow[n][1], ones);
      out[n].a = start == First ? a : _mm256_add_epi32(out[n].a, a);
      out[n].b = start == First ? b : _mm256_add_epi32(out[n].b, b);
    }
  }
}

constexpr int kByteOffset = 0;

#else

template <int Bits>
struct Codes {
  const uint8_t* w;
  explicit Codes(const uint8_t* p) : w(p) {}
};

constexpr int kTogether = 1;
constexpr int kUnrolled = 1;

template <int First, int Count, int N, int Bits>
inline void dots(const Codes<Bits>& w, const int8_t* x, I16x* out) {
  out[0] = {};
  for (int j = First; j < First + Count; ++j)
    for (int o = 0; o < kTile; ++o)
      for (int t = 0; t < 4; ++t) out[0].v[o] += code_at<Bits>(w.w, j, 4 * o + t) * x[4 * j + t];
}

constexpr int kByteOffset = 0;

#endif

}  // namespace kvilt::KVILT_ISA
