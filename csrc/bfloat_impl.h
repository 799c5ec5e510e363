// Vectors of bfloat16, for AVX-512.
#pragma once
#include "vectors.h"

namespace kvilt::KVILT_ISA {

#if defined(__AVX512BF16__)
// The numbers of `low` and then those of `high`, to the nearest, ties to even.
inline __m512i to_bfloats(f32x16 low, f32x16 high) { return (__m512i)_mm512_cvtne2ps_pbh(high.v, low.v); }
#elif defined(__AVX512F__)
inline __m256i to_bfloats(f32x16 x) {
  const __m512i bits = _mm512_castps_si512(x.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 none = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, none, _mm512_set1_epi32(-1)), 16));
}
inline __m512i to_bfloats(f32x16 low, f32x16 high) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(to_bfloats(low)), to_bfloats(high), 1);
}
#endif

#if defined(__AVX512F__)
// Pairs of a number of `first` and one of `second`.
inline __m512i to_pairs(f32x16 first, f32x16 second) {
  alignas(64) static constexpr uint16_t kPairs[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(kPairs), to_bfloats(first, second));
}
#endif

}  // namespace kvilt::KVILT_ISA
