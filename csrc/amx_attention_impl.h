// Attention over pages by tiles of AMX, with numbers in bfloat16 and sums in float32.
//
// A number of a query is taken as the sum of two of bfloat16, and so is a number of a float16 key, which is exact. Three
// of their four products are added; the one left out is smaller than a query's own rounding. Softmax weights and values
// are rounded to bfloat16, as the vector kernels round them.
//
// A tile of scores has sixteen queries and sixteen keys, and a tile of sums sixteen queries and sixteen dims. An element
// gets the same operations in the same order whatever else its tile has: hidden tokens have a weight of zero, and their
// values are finite, so they add nothing.
#pragma once
#include "amx_tiles.h"
#include "attention_impl.h"

namespace kvilt::KVILT_ISA {

constexpr int kTileQueries = 16;
constexpr int kTileDims = 32;                // of queries and keys, in pairs
constexpr int64_t kColumns = 16;             // keys of a tile of scores
constexpr uint32_t kUpperBits = 0xffff0000;  // those that a number of bfloat16 has

inline int64_t padded_dims(const Pages& pages) { return (pages.dim + kTileDims - 1) / kTileDims * kTileDims; }

inline f32x16 upper(f32x16 x) {
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x.v), _mm512_set1_epi32(int32_t(kUpperBits))))};
}
// Pairs of the upper bits of two numbers.
inline __m512i upper_pairs(f32x16 first, f32x16 second) {
  constexpr __mmask32 kSecond = 0xaaaaaaaa;
  return _mm512_mask_mov_epi16(_mm512_srli_epi32(_mm512_castps_si512(first.v), 16), kSecond,
                               _mm512_castps_si512(second.v));
}

// The queries of a block and one tile of its keys and values, as tiles of AMX take them. `lower` numbers are what the
// upper ones leave.
struct AttentionRoom {
  uint16_t *upper_queries, *lower_queries;  // [query][padded dims]
  uint16_t *upper_keys, *lower_keys;        // [tile of keys][pair of dims][16 keys][2]
  uint16_t* values;                         // [pair of lanes][value_lanes][2]
  uint16_t* weights;                        // [16][kTileLanes]
  float *scores, *fresh;                    // [16][kTileLanes]; a record of sixteen queries

  AttentionRoom(const Pages& pages, int64_t rows, float* scratch) {
    const auto start = reinterpret_cast<uintptr_t>(scratch);
    uintptr_t at = (start + 63) / 64 * 64;
    const auto take = [&](auto*& part, int64_t count) {
      part = reinterpret_cast<std::remove_reference_t<decltype(part)>>(at);
      at += (uintptr_t(count) * sizeof(*part) + 63) / 64 * 64;
    };
    const int64_t queries = rows * padded_dims(pages), keys = kTileLanes * padded_dims(pages);
    take(upper_queries, queries);
    take(lower_queries, queries);
    take(upper_keys, keys);
    take(lower_keys, keys);
    take(values, kTileLanes * pages.value_lanes);
    take(weights, kTileQueries * kTileLanes);
    take(scores, kTileQueries * kTileLanes);
    take(fresh, partial_floats(kTileQueries, pages));
    floats = int64_t((at - start) / sizeof(float)) + 16;
  }
  int64_t floats;  // of the scratch, wherever it begins
};

// ---- queries, keys and values as tiles ----

inline void split_queries(const Pages& pages, const Queries& queries, const Mask& mask, const AttentionRoom& room) {
  const float scale = mask.soft_cap > 0 ? mask.scale / mask.soft_cap : mask.scale * kLog2E;
  const int64_t dims = padded_dims(pages);
  for (int64_t row = 0; row < queries.rows(); ++row) {
    const float* query = queries.query + row / queries.group * queries.stride + row % queries.group * pages.dim;
    for (int64_t d = 0; d < dims; d += kTileDims) {
      float numbers[kTileDims] = {};
      for (int64_t i = 0; i < kTileDims && d + i < pages.dim; ++i) numbers[i] = query[d + i] * scale;
      const f32x16 first = load(numbers), second = load(numbers + 16);
      const f32x16 high = upper(first), next = upper(second);
      _mm512_storeu_si512(room.upper_queries + row * dims + d, to_bfloats(high, next));
      _mm512_storeu_si512(room.lower_queries + row * dims + d, to_bfloats(first - high, second - next));
    }
  }
}

template <typename Loader, bool kLower>
inline void unpack_keys(const Pages& pages, const Tile& tile, const AttentionRoom& room) {
  using Number = typename Loader::Number;
  const int64_t dims = padded_dims(pages);
  for (int64_t page = 0; page < tile_pages(pages); ++page) {
    if (!tile.keys[page]) continue;
    const auto* keys = reinterpret_cast<const Number*>(tile.keys[page]);
    for (int64_t d = 0; d < dims; d += 2)
      for (int64_t lane = 0; lane < pages.lanes; lane += kColumns) {
        const int64_t at = d * pages.lanes + lane;
        const int64_t to = ((page * pages.lanes + lane) * dims + d * kColumns);
        __builtin_prefetch(tile.next[page] + at * int64_t(sizeof(Number)), 0, 2);
        __builtin_prefetch(tile.next[page] + (at + pages.lanes) * int64_t(sizeof(Number)), 0, 2);
        const f32x16 first = d < pages.dim ? Loader::at(keys + at) : f32x16{};
        const f32x16 second = d + 1 < pages.dim ? Loader::at(keys + at + pages.lanes) : f32x16{};
        _mm512_storeu_si512(room.upper_keys + to, upper_pairs(first, second));
        if constexpr (kLower)
          _mm512_storeu_si512(room.lower_keys + to, upper_pairs(first - upper(first), second - upper(second)));
      }
  }
}

// Values of the visible tokens, zeros for the others. Returns whether all numbers are finite: only then is a weight of
// zero as good as a token that is not there.
template <typename Loader>
inline bool unpack_values(const Pages& pages, const Tile& tile, const VisibleRange& visible,
                          const AttentionRoom& room) {
  constexpr int kNotFinite = 0x01 | 0x08 | 0x10 | 0x80;  // classes of numbers
  __mmask16 broken = 0;
  uint16_t* to = room.values;
  for (int64_t page = 0; page < tile_pages(pages); ++page)
    for (int64_t t = 0; t < pages.lanes; t += 2) {
      const auto read = [&](int64_t token, int64_t dim) {
        f32x16 value[1] = {};
        const int64_t place = page * pages.page_tokens + token;
        if (tile.keys[page] && token < pages.page_tokens && visible.from <= place && place < visible.to)
          ValueRows<Loader>::template at<1>(tile.values[page] + token * ValueRows<Loader>::row_bytes(pages), dim,
                                            value);
        return value[0];
      };
      for (int64_t d = 0; d < pages.value_lanes; d += 16, to += 32) {
        if (tile.keys[page])
          __builtin_prefetch(tile.next[page] + pages.key_bytes + t * pages.row_bytes + d * 2 * int64_t(sizeof(*to)), 0,
                             2);
        const f32x16 first = read(t, d), second = read(t + 1, d);
        if constexpr (!std::is_same_v<typename Loader::Number, int8_t>)
          broken |= _mm512_fpclass_ps_mask(first.v, kNotFinite) | _mm512_fpclass_ps_mask(second.v, kNotFinite);
        _mm512_storeu_si512(to, to_pairs(first, second));
      }
    }
  std::memset(to, 0, size_t(room.values + kTileLanes * pages.value_lanes - to) * sizeof(*to));
  return broken == 0;
}

struct TileUnpacks {
  void (*keys)(const Pages&, const Tile&, const AttentionRoom&);
  bool (*values)(const Pages&, const Tile&, const VisibleRange&, const AttentionRoom&);
  bool lower;  // whether keys have lower numbers
};
inline TileUnpacks unpacks_of(KVDtype dtype) {
  switch (dtype) {
    case KVDtype::kFloat16: return {unpack_keys<Float16Loader, true>, unpack_values<Float16Loader>, true};
    case KVDtype::kBfloat16: return {unpack_keys<Bfloat16Loader, false>, unpack_values<Bfloat16Loader>, false};
    case KVDtype::kInt8: return {unpack_keys<Int8Loader, false>, unpack_values<Int8Loader>, false};
    default: return {unpack_keys<Int8Loader, false>, unpack_values<K8V4Loader>, false};
  }
}

// ---- products ----

// Tiles 0 to 3 hold sums, 4 and 5 queries or their weights, 6 keys or values.
inline void configure_for(int64_t queries) {
  TileShapes shapes;
  for (int tile = 0; tile < 6; ++tile) shapes.set(tile, int(queries), 64);
  shapes.set(6, 16, 64);
  configure_tiles(shapes);
}

// Rows of a tile stand apart in memory, which the operands of its instructions do not say.
inline void order_memory() { __asm__ volatile("" : : : "memory"); }

#define KVILT_FOR_FOUR(step) \
  do {                       \
    step(0);                 \
    if (count > 1) step(1);  \
    if (count > 2) step(2);  \
    if (count > 3) step(3);  \
  } while (false)

// Scores of the queries from `row` on with the keys of columns [first, last). Four columns at a time, so that a product
// does not wait for the one before.
inline void tile_scores(const AttentionRoom& room, int64_t row, int64_t dims, int64_t first, int64_t last, bool lower) {
  order_memory();
  for (int64_t column = first; column < last; column += 4) {
    const int64_t count = last - column < 4 ? last - column : 4;
    const auto at = [&](int i) { return (column + i) * kColumns * dims; };
    KVILT_FOR_FOUR(KVILT_TILE_ZERO);
    for (int64_t d = 0; d < dims; d += kTileDims) {
      KVILT_TILE_LOAD(4, room.upper_queries + row * dims + d, 2 * dims);
      KVILT_TILE_LOAD(5, room.lower_queries + row * dims + d, 2 * dims);
#define KVILT_SCORES(to, queries, keys)                        \
  do {                                                         \
    KVILT_TILE_LOAD(6, room.keys + at(to) + d * kColumns, 64); \
    KVILT_TILE_MULTIPLY_BFLOATS(to, queries, 6);               \
  } while (false)
#define KVILT_UPPER(to) KVILT_SCORES(to, 4, upper_keys)
#define KVILT_LOWER_QUERIES(to) KVILT_SCORES(to, 5, upper_keys)
#define KVILT_LOWER_KEYS(to) KVILT_SCORES(to, 4, lower_keys)
      KVILT_FOR_FOUR(KVILT_UPPER);
      KVILT_FOR_FOUR(KVILT_LOWER_QUERIES);
      if (lower) KVILT_FOR_FOUR(KVILT_LOWER_KEYS);
    }
#define KVILT_STORE(to) KVILT_TILE_STORE(to, room.scores + (column + to) * kColumns, kTileLanes * 4)
    KVILT_FOR_FOUR(KVILT_STORE);
#undef KVILT_STORE
  }
  order_memory();
}

// Sums of the values of lanes [first, last), which are multiples of 32.
inline void tile_sums(const uint16_t* weights, const uint16_t* values, int64_t value_lanes, int64_t first, int64_t last,
                      float* sums) {
  order_memory();
  for (int64_t dim = 0; dim < value_lanes; dim += 64) {
    const int64_t count = (value_lanes - dim < 64 ? value_lanes - dim : 64) / 16;
    KVILT_FOR_FOUR(KVILT_TILE_ZERO);
    for (int64_t lane = first; lane < last; lane += 32) {
      KVILT_TILE_LOAD(4, weights + lane, kTileLanes * 2);
#define KVILT_SUMS(to)                                                                      \
  do {                                                                                      \
    KVILT_TILE_LOAD(6, values + lane * value_lanes + (dim + 16 * to) * 2, value_lanes * 4); \
    KVILT_TILE_MULTIPLY_BFLOATS(to, 4, 6);                                                  \
  } while (false)
      KVILT_FOR_FOUR(KVILT_SUMS);
    }
#define KVILT_STORE(to) KVILT_TILE_STORE(to, sums + dim + 16 * to, value_lanes * 4)
    KVILT_FOR_FOUR(KVILT_STORE);
#undef KVILT_STORE
  }
  order_memory();
}

// ---- a tile of keys with sixteen queries ----

inline int64_t lane_of(const Pages& pages, int64_t token) {
  return token / pages.page_tokens * pages.lanes + token % pages.page_tokens;
}

// A query's softmax weights as bfloat16, with zeros for what it does not see. They are rounded in place.
inline void weights_as_tile(const Pages& pages, const VisibleRange& visible, float* weights, uint16_t* to) {
  std::memset(to, 0, kTileLanes * sizeof(*to));
  if (!visible.any()) return;
  round_weights(pages, visible, weights);
  const int64_t first = visible.from / pages.page_tokens * pages.lanes;
  const int64_t last = ((visible.to - 1) / pages.page_tokens + 1) * pages.lanes;
  const auto* rounded = reinterpret_cast<const char*>(weights) + first * int64_t(sizeof(*to));
  std::memcpy(to + first, rounded, size_t(last - first) * sizeof(*to));
}

inline void scale_scores(const Pages& pages, const Tile& tile, int64_t rows, int64_t first, int64_t last,
                         float* scores) {
  for (int64_t lane = first * kColumns; lane < last * kColumns; lane += 16)
    if (const float* scales = tile.key_scales[lane / pages.lanes])
      for (int64_t row = 0; row < rows; ++row) {
        float* at = scores + row * kTileLanes + lane;
        store(at, load(at) * load(scales + lane % pages.lanes));
      }
}

// What a block of queries sees of a tile.
inline VisibleRange visible_of_block(const Pages& pages, const Mask& mask, const Queries& queries, int64_t index) {
  VisibleRange all = {kTileLanes, 0};
  for (int64_t t = 0; t < queries.tokens; ++t) {
    const VisibleRange one = visible_of(pages, mask, queries.positions[t], index * tile_tokens(pages));
    if (!one.any()) continue;
    all = {one.from < all.from ? one.from : all.from, one.to > all.to ? one.to : all.to};
  }
  return all;
}

// A tile whose keys and values are unpacked, with one query or sixteen after the other.
struct UnpackedTile {
  const Tile& tile;
  const TileUnpacks& unpacks;
  bool finite;
};

inline void tile_panel(const Pages& pages, const UnpackedTile& unpacked, const Mask& mask, int64_t row, int64_t rows,
                       const VisibleRange* visible, const AttentionRoom& room, const PartialAttention& to) {
  int64_t low = kTileLanes, high = 0;  // lanes
  for (int64_t m = 0; m < rows; ++m) {
    if (!visible[m].any()) continue;
    low = std::min(low, lane_of(pages, visible[m].from));
    high = std::max(high, lane_of(pages, visible[m].to - 1) + 1);
  }
  const int64_t first = low / kColumns, last = (high + kColumns - 1) / kColumns;
  if (first < last) {
    tile_scores(room, row, padded_dims(pages), first, last, unpacked.unpacks.lower);
    scale_scores(pages, unpacked.tile, rows, first, last, room.scores);
  }
  for (int64_t m = 0; m < rows; ++m) {
    float* scores = room.scores + m * kTileLanes;
    softmax_weights(pages, unpacked.tile, mask, visible[m], scores, to.peaks + m, to.norms + m);
    weights_as_tile(pages, visible[m], scores, room.weights + m * kTileLanes);
  }
  const int64_t begin = low / 32 * 32, end = (high + 31) / 32 * 32;
  if (unpacked.finite) return tile_sums(room.weights, room.values, pages.value_lanes, begin, end, to.sums);
  configure_for(1);
  for (int64_t m = 0; m < rows; ++m) {
    unpacked.unpacks.values(pages, unpacked.tile, visible[m], room);
    tile_sums(room.weights + m * kTileLanes, room.values, pages.value_lanes, begin, end,
              to.sums + m * pages.value_lanes);
  }
  configure_for(rows);
}

// ---- a block of queries ----

inline bool tiles_take(const Pages& pages) { return has_pairs(pages); }

inline int64_t attention_room(const Pages& pages, int64_t rows) {
  return tiles_take(pages) ? AttentionRoom(pages, rows, nullptr).floats : attention_scratch(pages, rows);
}

inline void attention_by_tiles(const Pages& pages, const Queries& queries, const Mask& mask, int64_t first,
                               int64_t last, bool apart, float* records, float* scratch) {
  if (!tiles_take(pages)) return attention_tiles(pages, queries, mask, first, last, apart, records, scratch);
  const AttentionRoom room(pages, queries.rows(), scratch);
  const TileUnpacks unpacks = unpacks_of(pages.dtype);
  split_queries(pages, queries, mask, room);
  int64_t configured = 0;
  bool finite = true;
  over_tiles<kTileQueries>(
      pages, queries, mask, first, last, apart, records, room.fresh,
      [&](Tile& tile, int64_t index) {
        unpacks.keys(pages, tile, room);
        finite = unpacks.values(pages, tile, visible_of_block(pages, mask, queries, index), room);
      },
      [&](const Tile& tile, int64_t row, int64_t rows, const VisibleRange* visible, const PartialAttention& to) {
        if (rows != configured) configure_for(configured = rows);
        tile_panel(pages, {tile, unpacks, finite}, mask, row, rows, visible, room, to);
      });
  release_tiles();
}

constexpr AttentionKernels attention_kernels() { return {attention_by_tiles, attention_room}; }

}  // namespace kvilt::KVILT_ISA
