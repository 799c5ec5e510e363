// Rotary embedding, and one token's keys and values on their way into a page.
#pragma once
#include <cfloat>
#include <limits>

#include "pages.h"
#include "vectors.h"

namespace kvilt::KVILT_ISA {

inline void rotate(const float* x, const Rotation& rotation, int64_t token, int64_t heads, int64_t dim, float* out) {
  const int64_t pairs = rotation.pairs;
  const float *c = rotation.cos + token * pairs, *s = rotation.sin + token * pairs;
  for (int64_t h = 0; h < heads; ++h, x += dim, out += dim) {
    if (rotation.interleaved)
      for (int64_t p = 0; p < pairs; ++p) {
        const float a = x[2 * p], b = x[2 * p + 1];
        out[2 * p] = a * c[p] - b * s[p];
        out[2 * p + 1] = b * c[p] + a * s[p];
      }
    else {
      int64_t p = 0;
      for (; p + 16 <= pairs; p += 16) {
        const f32x16 a = load(x + p), b = load(x + pairs + p), cos = load(c + p), sin = load(s + p);
        store(out + p, a * cos - b * sin);
        store(out + pairs + p, b * cos + a * sin);
      }
      for (; p < pairs; ++p) {
        const float a = x[p], b = x[pairs + p];
        out[p] = a * c[p] - b * s[p];
        out[pairs + p] = b * c[p] + a * s[p];
      }
    }
    for (int64_t d = 2 * pairs; d < dim; ++d) out[d] = x[d];
  }
}

inline uint16_t to_half(float value) {
#if defined(__F16C__)
  return uint16_t(_cvtss_sh(value, 0));
#else
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint16_t sign = uint16_t((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return uint16_t(sign | 0x7e00u);
  if (magnitude >= 0x47800000u) return uint16_t(sign | 0x7c00u);  // too large: infinity
  if (magnitude < 0x38800000u) {                                  // subnormal: round at 2^-24
    float absolute;
    std::memcpy(&absolute, &magnitude, 4);
    absolute += 0.5f;  // the unit in the last place of 0.5 is 2^-24
    uint32_t rounded;
    std::memcpy(&rounded, &absolute, 4);
    return uint16_t(sign | (rounded - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return uint16_t(sign | ((rounded - 0x38000000u) >> 13));
#endif
}

inline void to_halves(const float* x, int64_t count, uint16_t* to) {
  int64_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= count; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), 0));
#endif
  for (; i < count; ++i) to[i] = to_half(x[i]);
}

inline uint16_t to_bfloat(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded);
}

// Bytes that stand for x / scale, with scale = max |x| / 127; a NaN among x makes the scale one.
inline float to_bytes(const float* x, int64_t count, int8_t* to) {
  uint32_t largest_bits = 0;
  for (int64_t i = 0; i < count; ++i) {  // as integers, so that a NaN counts as the largest
    uint32_t bits;
    std::memcpy(&bits, x + i, 4);
    bits &= 0x7fffffffu;
    largest_bits = bits > largest_bits ? bits : largest_bits;
  }
  float peak;
  std::memcpy(&peak, &largest_bits, 4);
  const float scale = peak / 127.0f;
  if (scale < FLT_MIN) {  // so small that one over it is no number
    std::memset(to, 0, size_t(count));
    return 0;
  }
  const float inverse = 1.0f / scale;
  for (int64_t i = 0; i < count; ++i) {
    const float y = x[i] * inverse, low = y > -127.0f ? y : -127.0f, kept = low < 127.0f ? low : 127.0f;
    to[i] = int8_t(int32_t((kept + 12582912.0f) - 12582912.0f));  // to the nearest integer, ties to even
  }
  return scale;
}

// Codes 0 to 15 that stand for (code - 8) * scale, where the scale takes the largest of x to -8; a NaN among x makes the
// scale one. `kvilt/ops/packed_values.py` says it in torch.
inline float to_nibbles(const float* x, int64_t count, uint8_t* row, int64_t row_bytes) {
  std::memset(row, 0, size_t(row_bytes));
  float high = 0, low = 0;
  bool is_nan = false;
  for (int64_t i = 0; i < count; ++i) {
    high = x[i] > high ? x[i] : high;
    low = x[i] < low ? x[i] : low;
    is_nan |= x[i] != x[i];
  }
  const float scale = is_nan ? std::numeric_limits<float>::quiet_NaN() : (high >= -low ? high : low) / -8.0f;
  const bool none = scale < FLT_MIN && scale > -FLT_MIN;  // so small that one over it is no number
  const float inverse = none ? 0.0f : 1.0f / scale;
  for (int64_t i = 0; i < count; ++i) {
    const float y = x[i] * inverse, above = y > -8.0f ? y : -8.0f, kept = above < 7.0f ? above : 7.0f;
    const auto code = uint8_t(int32_t((kept + 12582912.0f) - 12582912.0f) + 8);  // to the nearest, ties to even
    row[i / 32 * 16 + i % 16] |= uint8_t(code << i % 32 / 16 * 4);
  }
  return none ? 0 : scale;
}

// One head of one token in the pages' own numbers; returns the scale of bytes.
inline float encode(KVDtype dtype, const float* x, int64_t count, void* to) {
  if (!count) return 0;  // values may have no width, and then there is no address either
  switch (dtype) {
    case KVDtype::kFloat32: std::memcpy(to, x, size_t(count) * 4); return 0;
    case KVDtype::kFloat16: to_halves(x, count, static_cast<uint16_t*>(to)); return 0;
    case KVDtype::kBfloat16: {
      auto* bfloats = static_cast<uint16_t*>(to);
      for (int64_t i = 0; i < count; ++i) bfloats[i] = to_bfloat(x[i]);
      return 0;
    }
    default: return to_bytes(x, count, static_cast<int8_t*>(to));
  }
}

inline float decode(KVDtype dtype, const void* from, int64_t i) {
  if (dtype == KVDtype::kFloat32) return static_cast<const float*>(from)[i];
  const uint16_t bits = static_cast<const uint16_t*>(from)[i];
  return dtype == KVDtype::kFloat16 ? half_to_float(bits) : bfloat_to_float(bits);
}
inline f32x16 decode_16(KVDtype dtype, const void* from, int64_t i) {
  switch (dtype) {
    case KVDtype::kFloat16: return load_half(static_cast<const uint16_t*>(from) + i);
    case KVDtype::kBfloat16: return load_bfloat(static_cast<const uint16_t*>(from) + i);
    default: return load(static_cast<const float*>(from) + i);
  }
}

// Both ways round alike, so that a number does not depend on where in its row it stands.
inline void interpolate(KVDtype dtype, const void* kept, int64_t count, const float* changes, const float* weights,
                        int64_t rows, float* out) {
  constexpr int V = 4;
  int64_t i = 0;
  for (; i + 16 * V <= count; i += 16 * V) {
    f32x16 sum[V];
    for (int v = 0; v < V; ++v) sum[v] = decode_16(dtype, kept, i + 16 * v);
    for (int64_t r = 0; r < rows; ++r) {
      const f32x16 weight = splat(weights[r]);
      for (int v = 0; v < V; ++v) sum[v] = fma(load(changes + r * count + i + 16 * v), weight, sum[v]);
    }
    for (int v = 0; v < V; ++v) store(out + i + 16 * v, sum[v]);
  }
  for (; i < count; ++i) {
    float sum = decode(dtype, kept, i);
    for (int64_t r = 0; r < rows; ++r) sum = __builtin_fmaf(changes[r * count + i], weights[r], sum);
    out[i] = sum;
  }
}

template <typename Number>
inline void scatter(const void* from, int64_t count, int64_t stride, void* to) {
  const auto* numbers = static_cast<const Number*>(from);
  auto* lane = static_cast<Number*>(to);
  for (int64_t i = 0; i < count; ++i) lane[i * stride] = numbers[i];
}

inline void write_token(const Pages& pages, int64_t slot, const float* keys, const float* values,
                        const Rotation* rotation, int64_t token, float* scratch) {
  const int64_t page = slot / pages.page_tokens, at = slot % pages.page_tokens;
  float* encoded = scratch + pages.kv_heads * pages.dim;
  if (rotation) {
    rotate(keys, *rotation, token, pages.kv_heads, pages.dim, scratch);
    keys = scratch;
  }
  for (int64_t h = 0; h < pages.kv_heads; ++h) {
    const float scale = encode(pages.dtype, keys + h * pages.dim, pages.dim, encoded);
    char* lane = pages.keys(page, h) + at * number_bytes(pages.dtype);
    switch (pages.dtype) {
      case KVDtype::kFloat32: scatter<float>(encoded, pages.dim, pages.lanes, lane); break;
      case KVDtype::kInt8:
      case KVDtype::kK8V4: scatter<int8_t>(encoded, pages.dim, pages.lanes, lane); break;
      default: scatter<uint16_t>(encoded, pages.dim, pages.lanes, lane);
    }
    char* row = pages.values(page, h) + at * pages.row_bytes;
    const float* value = values + h * pages.value_dim;
    const float value_scale = has_nibbles(pages.dtype)
                                  ? to_nibbles(value, pages.value_dim, reinterpret_cast<uint8_t*>(row), pages.row_bytes)
                                  : encode(pages.dtype, value, pages.value_dim, row);
    if (!is_scaled(pages.dtype)) continue;
    pages.key_scales(page, h)[at] = scale;
    pages.value_scales(page, h)[at] = value_scale;
  }
}

}  // namespace kvilt::KVILT_ISA
