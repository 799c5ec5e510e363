// Gumbel noise as kvilt/sampling/noise.py makes it: SplitMix64 of a row's key and a token's id, 52 bits, float64.
#pragma once
#include <cmath>
#include <cstdint>

namespace kvilt {

constexpr uint64_t kGamma = 0x9E3779B97F4A7C15u, kMix1 = 0xBF58476D1CE4E5B9u, kMix2 = 0x94D049BB133111EBu;

inline uint64_t noise_bits(uint64_t key, int64_t id) {
  uint64_t z = key + uint64_t(id + 1) * kGamma;
  z = (z ^ (z >> 30)) * kMix1;
  z = (z ^ (z >> 27)) * kMix2;
  return z ^ (z >> 31);
}

inline double gumbel(uint64_t bits) {
  const double uniform = (double(bits >> 12) + 0.5) * 0x1p-52;
  return -std::log(-std::log(uniform));
}

// For a uniform u and c = 1 - u the noise -log(-log(u)) is at most -log(c). So a token of score s reaches `best` only
// if c <= exp(s - best), which costs no logarithm; few tokens of a row pass. This is c, rounded down to 31 bits.
inline int32_t complement(uint64_t bits) { return int32_t(~bits >> 33); }
constexpr float kComplement = 0x1p-31f;
constexpr float kSlack = 1.0001f;  // far more than the rounding of what is compared

}  // namespace kvilt
