// Rows of numbers of 32 bits as columns. Copies only.
#pragma once
#include "vectors.h"

namespace kvilt::KVILT_ISA {

// Eight rows of eight.
inline void transpose_8(const float* from, int64_t stride, float* to, int64_t to_stride) {
#if defined(__AVX2__)
  __m256 row[8], pair[8], four[8];
  for (int i = 0; i < 8; ++i) row[i] = _mm256_loadu_ps(from + i * stride);
  for (int i = 0; i < 8; i += 2) {
    pair[i] = _mm256_unpacklo_ps(row[i], row[i + 1]);
    pair[i + 1] = _mm256_unpackhi_ps(row[i], row[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    four[i] = _mm256_shuffle_ps(pair[i], pair[i + 2], 0x44);
    four[i + 1] = _mm256_shuffle_ps(pair[i], pair[i + 2], 0xee);
    four[i + 2] = _mm256_shuffle_ps(pair[i + 1], pair[i + 3], 0x44);
    four[i + 3] = _mm256_shuffle_ps(pair[i + 1], pair[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(to + i * to_stride, _mm256_permute2f128_ps(four[i], four[i + 4], 0x20));
    _mm256_storeu_ps(to + (i + 4) * to_stride, _mm256_permute2f128_ps(four[i], four[i + 4], 0x31));
  }
#else
  for (int i = 0; i < 8; ++i)
    for (int j = 0; j < 8; ++j) to[j * to_stride + i] = from[i * stride + j];
#endif
}

#if defined(__AVX512F__)
// Sixteen rows of sixteen.
inline void transpose_16(const float* from, f32x16* to) {
  __m512 a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = _mm512_load_ps(from + 16 * i);
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      a[i + 2 * j] = _mm512_shuffle_ps(b[i + j], b[i + 2 + j], 0x44);
      a[i + 2 * j + 1] = _mm512_shuffle_ps(b[i + j], b[i + 2 + j], 0xee);
    }
  for (int i = 0; i < 4; ++i) {  // a[4 g + i] has columns i, 4 + i, 8 + i and 12 + i of four rows from 4 g on
    b[i] = _mm512_shuffle_f32x4(a[i], a[4 + i], 0x88);
    b[4 + i] = _mm512_shuffle_f32x4(a[i], a[4 + i], 0xdd);
    b[8 + i] = _mm512_shuffle_f32x4(a[8 + i], a[12 + i], 0x88);
    b[12 + i] = _mm512_shuffle_f32x4(a[8 + i], a[12 + i], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    to[i] = {_mm512_shuffle_f32x4(b[i], b[8 + i], 0x88)};
    to[8 + i] = {_mm512_shuffle_f32x4(b[i], b[8 + i], 0xdd)};
    to[4 + i] = {_mm512_shuffle_f32x4(b[4 + i], b[12 + i], 0x88)};
    to[12 + i] = {_mm512_shuffle_f32x4(b[4 + i], b[12 + i], 0xdd)};
  }
}
#endif

}  // namespace kvilt::KVILT_ISA
