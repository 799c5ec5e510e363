// A tile of keys and values: where its pages are, how their numbers are read, and the tile as floats.
#pragma once
#include <array>

#include "bfloat_impl.h"
#include "pages.h"
#include "transpose_impl.h"
#include "vectors.h"

namespace kvilt::KVILT_ISA {

// With AVX-512 BF16 the values of two tokens are multiplied with their weights by one instruction.
#if defined(__AVX512BF16__)
constexpr bool kHasPairs = true;
#else
constexpr bool kHasPairs = false;
#endif

struct Float32Loader {
  using Number = float;
  static constexpr bool kPairs = false;  // values are multiplied as they are, not as pairs of bfloat16
  static constexpr int kLevel = 2;       // the cache level to prefetch the next tile into: memory is read once
  static f32x16 at(const Number* p) { return load(p); }
};
struct CachedFloat32Loader : Float32Loader {  // a tile that stays in the cache
  static constexpr int kLevel = 0;
};
struct CachedPairsLoader : CachedFloat32Loader {  // keys as floats, values as pairs of tokens
  static constexpr bool kPairs = kHasPairs;
};
struct Float16Loader {
  using Number = uint16_t;
  static constexpr bool kPairs = kHasPairs;
  static constexpr int kLevel = 2;
  static f32x16 at(const Number* p) { return load_half(p); }
};
struct Bfloat16Loader {
  using Number = uint16_t;
  static constexpr bool kPairs = kHasPairs;
  static constexpr int kLevel = 2;
  static f32x16 at(const Number* p) { return load_bfloat(p); }
};
struct Int8Loader {
  using Number = int8_t;
  static constexpr bool kPairs = kHasPairs;
  static constexpr int kLevel = 3;  // so small that the nearest cache has room for it
  static f32x16 at(const Number* p) { return load_byte(p); }
};

// Sixteen values of 4 bits, which are whole numbers from -8 to 7, from the low or the high halves of bytes.
template <bool kHigh>
inline f32x16 nibble_values(const char* p) {
#if defined(__AVX512F__)
  const __m512 whole = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return {_mm512_permutexvar_ps(kHigh ? _mm512_srli_epi32(wide, 4) : wide, whole)};  // looks at four bits
#else
  const auto* bytes = reinterpret_cast<const uint8_t*>(p);
  return (kHigh ? load_high_nibbles(bytes) : load_low_nibbles(bytes)) - 8.0f;
#endif
}

// How a tile's values are read: rows of them, and vectors of sixteen beginning at a dim, which is a multiple of that.
template <typename Loader>
struct ValueRows {
  using Number = typename Loader::Number;
  static int64_t row_bytes(const Pages& pages) { return pages.value_lanes * int64_t(sizeof(Number)); }
  template <int V>
  static void at(const char* row, int64_t dim, f32x16* value) {
    const Number* numbers = reinterpret_cast<const Number*>(row) + dim;
    for (int v = 0; v < V; ++v) value[v] = Loader::at(numbers + 16 * v);
  }
};
struct K8V4Loader : Int8Loader {};
template <>
struct ValueRows<K8V4Loader> {
  static int64_t row_bytes(const Pages& pages) { return pages.row_bytes; }
  template <int V>
  static void at(const char* row, int64_t dim, f32x16* value) {
    const char* bytes = row + dim / 32 * 16;
    if constexpr (V == 1) value[0] = dim % 32 ? nibble_values<true>(bytes) : nibble_values<false>(bytes);
    else
      for (int v = 0; v < V; v += 2) {  // such a dim is a multiple of 32
        value[v] = nibble_values<false>(bytes + 8 * v);
        value[v + 1] = nibble_values<true>(bytes + 8 * v);
      }
  }
};

inline bool has_pairs(const Pages& pages) { return kHasPairs && !pages.latent && pages.dtype != KVDtype::kFloat32; }

#if defined(__AVX512BF16__)
// Vectors of sixteen dims of the tokens t and t + 1 of a page, t even, as pairs.
template <typename Loader>
struct ValuePairs {
  template <int V>
  static void at(const Pages& pages, const char* values, int64_t t, int64_t dim, __m512i* pairs) {
    const int64_t row_bytes = ValueRows<Loader>::row_bytes(pages);
    const char *row = values + t * row_bytes, *next = t + 1 < pages.page_tokens ? row + row_bytes : row;
    f32x16 first[V], second[V];
    ValueRows<Loader>::template at<V>(row, dim, first);
    ValueRows<Loader>::template at<V>(next, dim, second);
    for (int v = 0; v < V; ++v) pairs[v] = to_pairs(first[v], second[v]);
  }
};
template <>
struct ValuePairs<CachedPairsLoader> {
  template <int V>
  static void at(const Pages& pages, const char* values, int64_t t, int64_t dim, __m512i* pairs) {
    const char* at = values + (t / 2 * pages.value_lanes + dim) * 4;
    for (int v = 0; v < V; ++v) pairs[v] = _mm512_loadu_si512(at + 64 * v);
  }
};

template <typename Loader>
inline const char* values_to_pairs(const Pages& pages, const char* from, float* to) {
  auto* out = reinterpret_cast<char*>(to);
  for (int64_t t = 0; t < pages.page_tokens; t += 2)
    for (int64_t d = 0; d < pages.value_lanes; d += 16, out += 64) {
      __m512i pair;
      ValuePairs<Loader>::template at<1>(pages, from, t, d, &pair);
      _mm512_storeu_si512(out, pair);
    }
  return reinterpret_cast<const char*>(to);
}
inline const char* values_to_pairs(const Pages& pages, const char* from, float* to) {
  switch (pages.dtype) {
    case KVDtype::kFloat16: return values_to_pairs<Float16Loader>(pages, from, to);
    case KVDtype::kBfloat16: return values_to_pairs<Bfloat16Loader>(pages, from, to);
    case KVDtype::kInt8: return values_to_pairs<Int8Loader>(pages, from, to);
    default: return values_to_pairs<K8V4Loader>(pages, from, to);
  }
}
#else
inline const char* values_to_pairs(const Pages&, const char* from, float*) { return from; }
#endif

// Where the pages of a tile are; only those that a query of the block sees.
struct Tile {
  std::array<const char*, kTileLanes / 16> keys, values;
  std::array<const float*, kTileLanes / 16> key_scales, value_scales;
  std::array<const char*, kTileLanes / 16> next;  // keys of the tile that comes after
};

template <typename Loader>
inline const char* to_floats(const char* from, int64_t count, float* to) {
  const auto* numbers = reinterpret_cast<const typename Loader::Number*>(from);
  for (int64_t i = 0; i < count; i += 16) store(to + i, Loader::at(numbers + i));
  return reinterpret_cast<const char*>(to);
}
inline const char* to_floats(KVDtype dtype, const char* from, int64_t count, float* to) {
  switch (dtype) {
    case KVDtype::kFloat16: return to_floats<Float16Loader>(from, count, to);
    case KVDtype::kBfloat16: return to_floats<Bfloat16Loader>(from, count, to);
    case KVDtype::kInt8:
    case KVDtype::kK8V4: return to_floats<Int8Loader>(from, count, to);
    default: return from;
  }
}

inline const char* values_to_floats(const Pages& pages, const char* from, float* to) {
  if (!has_nibbles(pages.dtype)) return to_floats(pages.dtype, from, pages.page_tokens * pages.value_lanes, to);
  for (int64_t t = 0; t < pages.page_tokens; ++t)
    for (int64_t d = 0; d < pages.value_lanes; d += 16) {
      f32x16 value[1];
      ValueRows<K8V4Loader>::at<1>(from + t * pages.row_bytes, d, value);
      store(to + t * pages.value_lanes + d, value[0]);
    }
  return reinterpret_cast<const char*>(to);
}

// The tile as floats, for blocks that go through it many times.
inline void unpack_tile(const Pages& pages, Tile& tile, float* room) {
  const int64_t keys = pages.dim * pages.lanes, values = pages.page_tokens * pages.value_lanes;
  for (int64_t page = 0; page < tile_pages(pages); ++page, room += keys + values) {
    if (!tile.keys[page]) continue;
    tile.keys[page] = to_floats(pages.dtype, tile.keys[page], keys, room);
    tile.values[page] = has_pairs(pages) ? values_to_pairs(pages, tile.values[page], room + keys)
                                         : values_to_floats(pages, tile.values[page], room + keys);
  }
}

inline void copy_floats(KVDtype dtype, const char* from, int64_t count, float* to) {
  if (dtype == KVDtype::kFloat32) std::memcpy(to, from, size_t(count) * sizeof(float));
  else to_floats(dtype, from, count, to);
}

inline int64_t latent_page_floats(const Pages& pages) { return pages.lanes * (pages.dim + 2 * pages.value_lanes); }

// A page of latent KV as floats: keys that go on in the values' columns [query_dim][lanes], and values with a row for
// each lane. Scales of bytes are multiplied in, since key and value have one each.
inline void unpack_latent_page(const Pages& pages, Tile& tile, int64_t page, float* room) {
  float *keys = room, *columns = keys + pages.dim * pages.lanes, *values = columns + pages.value_lanes * pages.lanes;
  copy_floats(pages.dtype, tile.keys[page], pages.dim * pages.lanes, keys);
  copy_floats(pages.dtype, tile.values[page], pages.page_tokens * pages.value_lanes, values);
  if (const float* scales = tile.key_scales[page]) {
    for (int64_t i = 0; i < pages.dim * pages.lanes; i += 16)
      store(keys + i, load(keys + i) * load(scales + i % pages.lanes));
    for (int64_t t = 0; t < pages.page_tokens; ++t)
      for (int64_t d = 0; d < pages.value_lanes; d += 16) {
        float* at = values + t * pages.value_lanes + d;
        store(at, load(at) * tile.value_scales[page][t]);
      }
    tile.key_scales[page] = tile.value_scales[page] = nullptr;
  }
  for (int64_t t = 0; t < pages.lanes; t += 8)  // lanes past the tokens have no weight, whatever stands there
    for (int64_t d = 0; d < pages.value_lanes; d += 8)
      transpose_8(values + t * pages.value_lanes + d, pages.value_lanes, columns + d * pages.lanes + t, pages.lanes);
  tile.keys[page] = reinterpret_cast<const char*>(keys);
  tile.values[page] = reinterpret_cast<const char*>(values);
}

inline void unpack_latent_tile(const Pages& pages, Tile& tile, float* room) {
  for (int64_t page = 0; page < tile_pages(pages); ++page, room += latent_page_floats(pages))
    if (tile.keys[page]) unpack_latent_page(pages, tile, page, room);
}

}  // namespace kvilt::KVILT_ISA
