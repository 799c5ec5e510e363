// Vectors of bfloat16, for AVX-512 BF16.
#pragma once
#include "vectors.h"

#if defined(__AVX512BF16__)
namespace kvilt::KVILT_ISA {

// The numbers of `low` and then those of `high`, to the nearest, ties to even.
inline __m512i to_bfloats(f32x16 low, f32x16 high) { return (__m512i)_mm512_cvtne2ps_pbh(high.v, low.v); }

// Pairs of a number of `first` and one of `second`.
inline __m512i to_pairs(f32x16 first, f32x16 second) {
  alignas(64) static constexpr uint16_t kPairs[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(kPairs), to_bfloats(first, second));
}

}  // namespace kvilt::KVILT_ISA
#endif
