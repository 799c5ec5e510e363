// The loops that find the limits, one pair per instruction set: each reads or multiplies and does nothing else.
//
// They carry their instruction set as an attribute, so that one file has them all; the caller asks the processor
// first. FENCE keeps the compiler from seeing that the same numbers are multiplied again and again.
#pragma once
#include <cstdint>

#if defined(KVILT_X86)
#include <immintrin.h>
#endif

namespace kvilt::limits {

struct Loops {
  uint64_t (*read)(const char* data, int64_t bytes);  // a multiple of 512; returns something that depends on all of it
  int64_t (*multiply)(int64_t rounds);                // returns how many operations it did
};

#define FENCE(x) __asm__ volatile("" : "+v"(x))
#define UNROLL _Pragma("GCC unroll 16")

#if defined(KVILT_X86)

constexpr int kSums = 12;  // independent ones, to hide the latency of a product

__attribute__((target("avx512f"))) inline uint64_t read_avx512(const char* data, int64_t bytes) {
  __m512i sums[8];
  UNROLL for (int i = 0; i < 8; ++i) sums[i] = _mm512_setzero_si512();
  for (int64_t at = 0; at < bytes; at += 512)
    UNROLL for (int i = 0; i < 8; ++i) sums[i] = _mm512_xor_si512(sums[i], _mm512_loadu_si512(data + at + 64 * i));
  UNROLL for (int i = 1; i < 8; ++i) sums[0] = _mm512_xor_si512(sums[0], sums[i]);
  uint64_t out[8];
  _mm512_storeu_si512(out, sums[0]);
  return out[0] ^ out[7];
}

__attribute__((target("avx512f,avx512bw,avx512vnni"))) inline int64_t multiply_avx512(int64_t rounds) {
  __m512i sums[kSums], a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(-5);
  UNROLL for (int i = 0; i < kSums; ++i) sums[i] = _mm512_setzero_si512();
  for (int64_t round = 0; round < rounds; ++round) UNROLL for (int i = 0; i < kSums; ++i) {
      sums[i] = _mm512_dpbusd_epi32(sums[i], a, b);
      FENCE(sums[i]);
    }
  return rounds * kSums * 128;
}

__attribute__((target("avx2"))) inline uint64_t read_avx2(const char* data, int64_t bytes) {
  __m256i sums[8];
  UNROLL for (int i = 0; i < 8; ++i) sums[i] = _mm256_setzero_si256();
  for (int64_t at = 0; at < bytes; at += 256) UNROLL for (int i = 0; i < 8; ++i) {
      const auto* from = reinterpret_cast<const __m256i*>(data + at + 32 * i);
      sums[i] = _mm256_xor_si256(sums[i], _mm256_loadu_si256(from));
    }
  UNROLL for (int i = 1; i < 8; ++i) sums[0] = _mm256_xor_si256(sums[0], sums[i]);
  uint64_t out[4];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), sums[0]);
  return out[0] ^ out[3];
}

// Products of bytes as pairs of sixteen bits, those as sums of thirty-two: three instructions for 32 products.
__attribute__((target("avx2"))) inline int64_t multiply_avx2(int64_t rounds) {
  constexpr int kChains = 6;
  __m256i sums[kChains], a = _mm256_set1_epi8(3), b = _mm256_set1_epi8(-5), ones = _mm256_set1_epi16(1);
  UNROLL for (int i = 0; i < kChains; ++i) sums[i] = _mm256_setzero_si256();
  for (int64_t round = 0; round < rounds; ++round) UNROLL for (int i = 0; i < kChains; ++i) {
      __m256i pairs = _mm256_maddubs_epi16(a, b);
      __asm__ volatile("" : "+x"(pairs));
      sums[i] = _mm256_add_epi32(sums[i], _mm256_madd_epi16(pairs, ones));
      __asm__ volatile("" : "+x"(sums[i]), "+x"(a));
    }
  return rounds * kChains * 64;
}

#endif

inline uint64_t read_generic(const char* data, int64_t bytes) {
  const auto* words = reinterpret_cast<const uint64_t*>(data);
  uint64_t sums[8] = {};
  for (int64_t at = 0; at < bytes / 8; at += 8)
    for (int i = 0; i < 8; ++i) sums[i] ^= words[at + i];
  for (int i = 1; i < 8; ++i) sums[0] ^= sums[i];
  return sums[0];
}

inline int64_t multiply_generic(int64_t rounds) {
  constexpr int kCount = 1024;
  int8_t a[kCount], b[kCount];
  for (int i = 0; i < kCount; ++i) a[i] = int8_t(i), b[i] = int8_t(3 * i);
  volatile int32_t sink = 0;
  for (int64_t round = 0; round < rounds; ++round) {
    __asm__ volatile("" : : "r"(a), "r"(b) : "memory");
    int32_t sum = 0;
    for (int i = 0; i < kCount; ++i) sum += int32_t(a[i]) * b[i];
    sink = sum;
  }
  (void)sink;
  return rounds * kCount * 2;
}

#undef FENCE
#undef UNROLL

}  // namespace kvilt::limits
