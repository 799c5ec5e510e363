// The passes over a whole row of logits.
#pragma once
#include <algorithm>
#include <bit>
#include <functional>
#include <limits>

#include "noise.h"
#include "reduce.h"
#include "vectors.h"

namespace kvilt::KVILT_ISA {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Lanes where a is at least b, or larger than it, as bits.
#if defined(__AVX512F__)
inline uint32_t at_least(f32x16 a, f32x16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
inline uint32_t above_of(f32x16 a, f32x16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ); }
#elif defined(__AVX2__)
template <int kCompare>
inline uint32_t lanes_where(f32x16 x, f32x16 y) {
  const uint32_t low = uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, kCompare)));
  return low | uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, kCompare))) << 8;
}
inline uint32_t at_least(f32x16 a, f32x16 b) { return lanes_where<_CMP_GE_OQ>(a, b); }
inline uint32_t above_of(f32x16 a, f32x16 b) { return lanes_where<_CMP_GT_OQ>(a, b); }
#else
template <typename Compare>
inline uint32_t lanes_where(f32x16 a, f32x16 b, Compare compare) {
  float x[16], y[16];
  store(x, a);
  store(y, b);
  uint32_t lanes = 0;
  for (int i = 0; i < 16; ++i) lanes |= uint32_t(compare(x[i], y[i])) << i;
  return lanes;
}
inline uint32_t at_least(f32x16 a, f32x16 b) {
  return lanes_where(a, b, [](float x, float y) { return x >= y; });
}
inline uint32_t above_of(f32x16 a, f32x16 b) {
  return lanes_where(a, b, [](float x, float y) { return x > y; });
}
#endif

// The chosen lanes side by side; a whole vector may be written.
inline void pack_lanes(float* p, f32x16 x, uint32_t lanes) {
#if defined(__AVX512F__)
  _mm512_storeu_ps(p, _mm512_maskz_compress_ps(__mmask16(lanes), x.v));
#else
  float all[16];
  store(all, x);
  for (; lanes; lanes &= lanes - 1) *p++ = all[std::countr_zero(lanes)];
#endif
}
struct Ids {
  int32_t v[16];
};
inline Ids ids_from(int64_t first) {
  Ids ids;
  for (int i = 0; i < 16; ++i) ids.v[i] = int32_t(first) + i;
  return ids;
}
inline Ids load_ids(const int32_t* p) {
  Ids ids;
  std::memcpy(ids.v, p, sizeof ids.v);
  return ids;
}
inline void pack_ids(int32_t* p, const Ids& ids, uint32_t lanes) {
#if defined(__AVX512F__)
  _mm512_storeu_si512(p, _mm512_maskz_compress_epi32(__mmask16(lanes), _mm512_loadu_si512(ids.v)));
#else
  for (; lanes; lanes &= lanes - 1) *p++ = ids.v[std::countr_zero(lanes)];
#endif
}

// Sixteen float64 sums.
#if defined(__AVX512F__)
struct Sums {
  __m512d a = _mm512_setzero_pd(), b = _mm512_setzero_pd();
};
inline void add(Sums& sums, f32x16 x) {
  sums.a = _mm512_add_pd(sums.a, _mm512_cvtps_pd(low_half(x)));
  sums.b = _mm512_add_pd(sums.b, _mm512_cvtps_pd(high_half(x)));
}
inline void spill(const Sums& sums, double* out) {
  _mm512_storeu_pd(out, sums.a);
  _mm512_storeu_pd(out + 8, sums.b);
}
#elif defined(__AVX2__)
struct Sums {
  __m256d a = _mm256_setzero_pd(), b = _mm256_setzero_pd(), c = _mm256_setzero_pd(), d = _mm256_setzero_pd();
};
inline void add(Sums& sums, f32x16 x) {
  sums.a = _mm256_add_pd(sums.a, _mm256_cvtps_pd(_mm256_castps256_ps128(x.a)));
  sums.b = _mm256_add_pd(sums.b, _mm256_cvtps_pd(_mm256_extractf128_ps(x.a, 1)));
  sums.c = _mm256_add_pd(sums.c, _mm256_cvtps_pd(_mm256_castps256_ps128(x.b)));
  sums.d = _mm256_add_pd(sums.d, _mm256_cvtps_pd(_mm256_extractf128_ps(x.b, 1)));
}
inline void spill(const Sums& sums, double* out) {
  _mm256_storeu_pd(out, sums.a);
  _mm256_storeu_pd(out + 4, sums.b);
  _mm256_storeu_pd(out + 8, sums.c);
  _mm256_storeu_pd(out + 12, sums.d);
}
#else
struct Sums {
  double v[16] = {};
};
inline void add(Sums& sums, f32x16 x) {
  float lanes[16];
  store(lanes, x);
  for (int i = 0; i < 16; ++i) sums.v[i] += double(lanes[i]);
}
inline void spill(const Sums& sums, double* out) { std::memcpy(out, sums.v, sizeof sums.v); }
#endif

inline double sum_of(const Sums& sums) {
  double lanes[16], sum = 0;
  spill(sums, lanes);
  for (double lane : lanes) sum += lane;
  return sum;
}

// The complements of sixteen uniforms (noise.h), one after the other along the ids.
#if defined(__AVX512F__)
class Complements {
 public:
  explicit Complements(uint64_t key) {
    uint64_t first[16];
    for (int i = 0; i < 16; ++i) first[i] = key + uint64_t(i + 1) * kGamma;
    a_ = _mm512_loadu_si512(first), b_ = _mm512_loadu_si512(first + 8);
  }
  f32x16 next() {
    const __m512i whole = _mm512_inserti64x4(_mm512_castsi256_si512(mixed(a_)), mixed(b_), 1);
    const __m512i step = _mm512_set1_epi64(int64_t(16 * kGamma));
    a_ = _mm512_add_epi64(a_, step), b_ = _mm512_add_epi64(b_, step);
    return {_mm512_cvtepi32_ps(whole)};
  }

 private:
  static __m256i mixed(__m512i z) {
    z = _mm512_mullo_epi64(_mm512_xor_si512(z, _mm512_srli_epi64(z, 30)), _mm512_set1_epi64(int64_t(kMix1)));
    z = _mm512_mullo_epi64(_mm512_xor_si512(z, _mm512_srli_epi64(z, 27)), _mm512_set1_epi64(int64_t(kMix2)));
    z = _mm512_xor_si512(z, _mm512_srli_epi64(z, 31));
    return _mm512_cvtepi64_epi32(_mm512_srli_epi64(_mm512_xor_si512(z, _mm512_set1_epi64(-1)), 33));
  }
  __m512i a_, b_;
};
#elif defined(__AVX2__)
class Complements {
 public:
  explicit Complements(uint64_t key) {
    uint64_t first[16];
    for (int i = 0; i < 16; ++i) first[i] = key + uint64_t(i + 1) * kGamma;
    for (int i = 0; i < 4; ++i) z_[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(first + 4 * i));
  }
  f32x16 next() {
    __m256i parts[4];
    const __m256i step = _mm256_set1_epi64x(int64_t(16 * kGamma));
    for (int i = 0; i < 4; ++i) {
      parts[i] = mixed(z_[i]);
      z_[i] = _mm256_add_epi64(z_[i], step);
    }
    return {_mm256_cvtepi32_ps(narrow(parts[0], parts[1])), _mm256_cvtepi32_ps(narrow(parts[2], parts[3]))};
  }

 private:
  static __m256i times(__m256i z, uint64_t by) {
    const __m256i low = _mm256_set1_epi64x(int64_t(by & 0xffffffffu)), high = _mm256_set1_epi64x(int64_t(by >> 32));
    const __m256i crossed =
        _mm256_add_epi64(_mm256_mul_epu32(_mm256_srli_epi64(z, 32), low), _mm256_mul_epu32(z, high));
    return _mm256_add_epi64(_mm256_mul_epu32(z, low), _mm256_slli_epi64(crossed, 32));
  }
  static __m256i mixed(__m256i z) {
    z = times(_mm256_xor_si256(z, _mm256_srli_epi64(z, 30)), kMix1);
    z = times(_mm256_xor_si256(z, _mm256_srli_epi64(z, 27)), kMix2);
    z = _mm256_xor_si256(z, _mm256_srli_epi64(z, 31));
    return _mm256_srli_epi64(_mm256_xor_si256(z, _mm256_set1_epi64x(-1)), 33);
  }
  // The low halves of eight 64-bit lanes, in order.
  static __m256i narrow(__m256i x, __m256i y) {
    const __m256 picked = _mm256_shuffle_ps(_mm256_castsi256_ps(x), _mm256_castsi256_ps(y), 0x88);
    return _mm256_permute4x64_epi64(_mm256_castps_si256(picked), 0xd8);
  }
  __m256i z_[4];
};
#else
class Complements {
 public:
  explicit Complements(uint64_t key) : key_(key) {}
  f32x16 next() {
    const int64_t first = at_;
    at_ += 16;
    float lanes[16];
    for (int i = 0; i < 16; ++i) lanes[i] = float(complement(noise_bits(key_, first + i)));
    return load(lanes);
  }

 private:
  uint64_t key_;
  int64_t at_ = 0;
};
#endif

// A vector that may begin less than sixteen numbers before the end of a row, and what stands beyond it.
inline f32x16 load_some(const float* x, int64_t left, float beyond = -kInfinity) {
  if (left >= 16) return load(x);
  float lanes[16];
  std::fill(std::copy(x, x + left, lanes), lanes + 16, beyond);
  return load(lanes);
}

// The largest of what it is shown. Numbers multiply `good_` by one, what is none by zero.
class Largest {
 public:
  void show(f32x16 v) {
    peaks_ = max(peaks_, v);
    good_ = good_ * zero_below(v, splat(-kInfinity), splat(1.0f));
  }
  void join(const Largest& other) {
    peaks_ = max(peaks_, other.peaks_);
    good_ = good_ * other.good_;
  }
  float value() const {
    return reduce_add(good_) == 16.0f ? reduce_max(peaks_) : std::numeric_limits<float>::quiet_NaN();
  }

 private:
  f32x16 peaks_ = splat(-kInfinity), good_ = splat(1.0f);
};

inline Peak peak(const float* x, int64_t n) {
  Largest found, other;  // two, since one alone would wait for itself
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    found.show(load(x + i));
    other.show(load(x + i + 16));
  }
  for (; i < n; i += 16) found.show(load_some(x + i, n - i));
  found.join(other);
  const float value = found.value();
  int64_t id = 0;
  if (std::isnan(value))
    while (!std::isnan(x[id])) ++id;
  else {
    while (id + 16 < n && !at_least(load(x + id), splat(value))) id += 16;
    while (x[id] != value) ++id;
  }
  return {id, value};
}

inline float scale_logits(const float* x, int64_t n, float divisor, float* scores) {
  Largest found;
  const f32x16 by = splat(divisor);
  for (int64_t i = 0; i < n; i += 16) {
    const f32x16 v = load_some(x + i, n - i) / by;
    store(scores + i, v);
    found.show(v);
  }
  return found.value();
}

inline double exp_sum(const float* scores, int64_t n, float peak) {
  Sums sums;
  for (int64_t i = 0; i < n; i += 16) add(sums, exp16(load(scores + i) - peak));
  return sum_of(sums);
}

inline void exp_weights(const float* scores, int64_t n, float peak, float* weights) {
  for (int64_t i = 0; i < n; i += 16) store(weights + i, exp16(load_some(scores + i, n - i) - peak));
}

inline float kth_largest(const float* scores, int64_t n, int64_t k, float* room) {
  // A score that is not above the k-th largest so far cannot change it; such scores are dropped whenever room runs out.
  const int64_t full = kth_room(k) - 16;
  float floor = -kInfinity;
  int64_t count = 0;
  const auto prune = [&] {
    std::nth_element(room, room + k - 1, room + count, std::greater<float>());
    count = k;
    floor = room[k - 1];
  };
  for (int64_t i = 0; i < n; i += 16) {
    const f32x16 v = load(scores + i);
    const uint32_t lanes = above_of(v, splat(floor));
    if (!lanes) continue;
    pack_lanes(room + count, v, lanes);
    count += std::popcount(lanes);
    if (count > full - 16) prune();
  }
  if (count < k) return -kInfinity;
  prune();
  return floor;
}

inline int64_t collect_at_least(const float* scores, int64_t n, float floor, int32_t* ids, float* found) {
  const f32x16 least = splat(floor);
  int64_t count = 0;
  for (int64_t i = 0; i < n; i += 16) {
    const f32x16 v = load(scores + i);
    const uint32_t lanes = at_least(v, least);
    if (!lanes) continue;
    pack_lanes(found + count, v, lanes);
    pack_ids(ids + count, ids_from(i), lanes);
    count += std::popcount(lanes);
  }
  return count;
}

inline double weight_below(const float* scores, const float* weights, int64_t n, float score) {
  Sums sums;
  const f32x16 cut = splat(score);
  for (int64_t i = 0; i < n; i += 16) {
    const f32x16 weight = load_some(weights + i, n - i, 0.0f);
    add(sums, weight - zero_below(load_some(scores + i, n - i), cut, weight));
  }
  return sum_of(sums);
}

inline int64_t keep_from(int32_t* ids, float* scores, float* weights, int64_t n, float cut, int64_t place) {
  const f32x16 least = splat(cut);
  int64_t count = 0;
  for (int64_t i = 0; i < n; i += 16) {
    const f32x16 score = load_some(scores + i, n - i), weight = load_some(weights + i, n - i, 0.0f);
    const uint32_t early = place <= i ? 0 : place >= i + 16 ? 0xffff : (1u << (place - i)) - 1;
    const uint32_t lanes = at_least(score, least) & (above_of(score, least) | ~early);
    if (!lanes) continue;
    pack_lanes(scores + count, score, lanes);  // never past what was read
    pack_lanes(weights + count, weight, lanes);
    pack_ids(ids + count, load_ids(ids + i), lanes);
    count += std::popcount(lanes);
  }
  return count;
}

inline int64_t count_ahead(const float* scores, int64_t n, int64_t id) {
  const f32x16 own = splat(scores[id]);
  const int64_t at = id / 16 * 16;
  int64_t count = 0;
  for (int64_t i = 0; i < at; i += 16) count += std::popcount(at_least(load(scores + i), own));
  const f32x16 v = load(scores + at);
  const uint32_t before = (1u << (id - at)) - 1;
  count += std::popcount((at_least(v, own) & before) | (above_of(v, own) & ~before));
  for (int64_t i = at + 16; i < n; i += 16) count += std::popcount(above_of(load(scores + i), own));
  return count;
}

// The best so far: score plus noise in float64, among equals the lower id.
struct Best {
  double value;
  int64_t id;
  f32x16 bound;  // at most the value, in float32

  void raise(double to, int64_t by) {
    value = to, id = by;
    bound = splat(std::nextafter(float(to), -kInfinity));
  }
};

inline int64_t draw(const float* scores, int64_t n, float peak, uint64_t key) {
  int64_t at = 0;
  while (!at_least(load(scores + at), splat(peak))) at += 16;
  while (scores[at] != peak) ++at;
  Best best;
  best.raise(double(peak) + gumbel(noise_bits(key, at)), at);
  Complements complements(key);
  for (int64_t i = 0; i < n; i += 16) {
    const f32x16 reach = exp16(load(scores + i) - best.bound) * (kSlack / kComplement);
    for (uint32_t lanes = at_least(reach, complements.next()); lanes; lanes &= lanes - 1) {
      const int64_t id = i + std::countr_zero(lanes);
      const double value = double(scores[id]) + gumbel(noise_bits(key, id));
      if (value > best.value || (value == best.value && id < best.id)) best.raise(value, id);
    }
  }
  return best.id;
}

}  // namespace kvilt::KVILT_ISA
