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
constexpr int kTileDims = 32;          // of queries and keys, in pairs
constexpr int64_t kColumns = 16;       // keys of a tile of scores
constexpr int64_t kAtOnce = 4;         // tiles of scores or sums that are added to in turn
constexpr int64_t kTileNumbers = 512;  // of bfloat16 in a tile
constexpr int64_t kStreamedNumbers = kAtOnce * kTileNumbers;
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

// The queries of a block, and its keys and values as tiles of AMX take them. `lower` numbers are what the upper ones leave.
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
    take(upper_keys, std::max(keys, 2 * kStreamedNumbers));
    take(lower_keys, std::max(keys, 2 * kStreamedNumbers));
    take(values, std::max(kTileLanes * pages.value_lanes, 2 * kStreamedNumbers));
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

// Keys as tiles: those of a column and 32 dims are one, and the next column's is `stride` numbers further.
struct KeyTiles {
  uint16_t *upper, *lower;
  int64_t stride;
};

// One column of keys, beginning at a lane of a page, with dims [0, `dims`) and zeros up to 32. Fetches as many bytes
// from `ahead` on.
template <typename Loader, bool kLower>
inline void unpack_column(const typename Loader::Number* keys, int64_t lanes, int64_t dims, const char* ahead,
                          uint16_t* upper_to, uint16_t* lower_to) {
#pragma GCC unroll 4
  for (int64_t d = 0; d < kTileDims; d += 2, keys += 2 * lanes, upper_to += 2 * kColumns, lower_to += 2 * kColumns) {
    __builtin_prefetch(ahead + d * kColumns * int64_t(sizeof(*keys)), 0, 2);
    const f32x16 first = d < dims ? Loader::at(keys) : f32x16{};
    const f32x16 second = d + 1 < dims ? Loader::at(keys + lanes) : f32x16{};
    _mm512_storeu_si512(upper_to, upper_pairs(first, second));
    if constexpr (kLower) _mm512_storeu_si512(lower_to, upper_pairs(first - upper(first), second - upper(second)));
  }
}

// `count` columns of keys with dims [dim, dim + 32). Meanwhile the values of these keys are fetched.
template <typename Loader, bool kLower>
inline void unpack_keys(const Pages& pages, const Tile& tile, int64_t column, int64_t count, int64_t dim,
                        const KeyTiles& to) {
  using Number = typename Loader::Number;
  const int64_t dims = pages.dim - dim;
  for (int64_t c = 0; c < count; ++c) {
    const int64_t page = (column + c) * kColumns / pages.lanes, lane = (column + c) * kColumns % pages.lanes;
    if (page >= tile_pages(pages) || !tile.keys[page]) continue;
    const auto* keys = reinterpret_cast<const Number*>(tile.keys[page]) + dim * pages.lanes + lane;
    const char* ahead = tile.values[page] + (dim * pages.lanes + lane * kTileDims) * int64_t(sizeof(Number));
    uint16_t *upper_to = to.upper + c * to.stride, *lower_to = to.lower + c * to.stride;
    if (dims >= kTileDims) unpack_column<Loader, kLower>(keys, pages.lanes, kTileDims, ahead, upper_to, lower_to);
    else unpack_column<Loader, kLower>(keys, pages.lanes, dims, ahead, upper_to, lower_to);
  }
}

// Values of 32 lanes as pairs of tokens, `stride` numbers from a pair to the next: `count` vectors of dims. Zeros stand
// for tokens that are not visible. Meanwhile as many bytes of the next tile's keys are fetched.
template <typename Loader>
inline void unpack_values(const Pages& pages, const Tile& tile, const VisibleRange& visible, int64_t lane, int64_t dim,
                          int64_t count, uint16_t* to, int64_t stride) {
  using Rows = ValueRows<Loader>;
  constexpr int64_t kVectorBytes = 16 * sizeof(typename Loader::Number);
  const int64_t row_bytes = Rows::row_bytes(pages);
  int64_t page = lane / pages.lanes, token = lane % pages.lanes;
  for (int64_t pair = 0; pair < 16; ++pair, to += stride) {
    const int64_t place = page * pages.page_tokens + token;
    const bool here = page < tile_pages(pages) && tile.keys[page];
    const auto seen = [&](int64_t t) {
      return here && token + t < pages.page_tokens && visible.from <= place + t && place + t < visible.to;
    };
    const bool first = seen(0), second = seen(1);
    const char *row = here ? tile.values[page] + token * row_bytes : nullptr, *next = row + row_bytes;
    if (first && second) {
      const char* ahead = tile.next[page] + (dim / 16 * pages.page_tokens + token * count) * kVectorBytes;
#pragma GCC unroll 4
      for (int64_t v = 0; v < count; ++v) {
        __builtin_prefetch(ahead + 2 * v * kVectorBytes, 0, 2);
        f32x16 a[1], b[1];
        Rows::template at<1>(row, dim + 16 * v, a);
        Rows::template at<1>(next, dim + 16 * v, b);
        _mm512_storeu_si512(to + 32 * v, to_pairs(*a, *b));
      }
    } else {
      for (int64_t v = 0; v < count; ++v) {
        f32x16 a[1] = {}, b[1] = {};
        if (first) Rows::template at<1>(row, dim + 16 * v, a);
        if (second) Rows::template at<1>(next, dim + 16 * v, b);
        _mm512_storeu_si512(to + 32 * v, to_pairs(*a, *b));
      }
    }
    if ((token += 2) >= pages.lanes) token = 0, ++page;
  }
}

struct TileUnpacks {
  decltype(&unpack_keys<Float16Loader, true>) keys;
  decltype(&unpack_values<Float16Loader>) values;
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

// A tile of keys and values beside a block of queries.
struct BlockTile {
  const Pages& pages;
  const Tile& tile;
  const TileUnpacks& unpacks;
  const AttentionRoom& room;
  VisibleRange seen;  // by any query of the block

  int64_t dims() const { return padded_dims(pages); }

  // The whole tile, for many queries.
  void unpack_keys() const {
    const int64_t stride = kColumns * dims();
    for (int64_t column = 0; column < kTileLanes / kColumns; column += kAtOnce)
      for (int64_t d = 0; d < dims(); d += kTileDims) {
        const int64_t at = column * stride + d * kColumns;
        unpacks.keys(pages, tile, column, kAtOnce, d, {room.upper_keys + at, room.lower_keys + at, stride});
      }
  }
  void unpack_values(const VisibleRange& visible) const {
    const int64_t stride = 2 * pages.value_lanes, vectors = pages.value_lanes / 16;
    for (int64_t lane = 0; lane < kTileLanes; lane += 32)
      unpacks.values(pages, tile, visible, lane, 0, vectors, room.values + lane / 2 * stride, stride);
  }
};

// Where products find keys and values. `Unpacked` has a whole tile. `Streamed` unpacks a block while the one before it
// is multiplied, so that all stays in the nearest cache: for few queries this takes most of the time.
struct Unpacked {
  const BlockTile& of;

  void begin_keys(int64_t, int64_t) {}
  KeyTiles keys(int64_t column, int64_t d) {
    const int64_t at = column * kColumns * of.dims() + d * kColumns;
    return {of.room.upper_keys + at, of.room.lower_keys + at, kColumns * of.dims()};
  }
  void begin_values(int64_t, int64_t) {}
  const uint16_t* values(int64_t dim, int64_t lane) { return of.room.values + lane * of.pages.value_lanes + 2 * dim; }
  int64_t value_stride() const { return 2 * of.pages.value_lanes; }
};

struct Streamed {
  const BlockTile& of;
  int64_t first = 0, last = 0;  // columns, later lanes
  int turn = 0;                 // which half of the room the next block has

  void begin_keys(int64_t from, int64_t to) {
    first = from, last = to;
    unpack_keys(first, 0);
  }
  KeyTiles keys(int64_t column, int64_t d) {
    const KeyTiles made = key_block();
    turn ^= 1;
    if (d + kTileDims < of.dims()) unpack_keys(column, d + kTileDims);
    else if (column + kAtOnce < last) unpack_keys(column + kAtOnce, 0);
    return made;
  }
  void begin_values(int64_t from, int64_t to) {
    first = from, last = to;
    unpack_values(0, first);
  }
  const uint16_t* values(int64_t dim, int64_t lane) {
    const uint16_t* made = value_block();
    turn ^= 1;
    if (lane + 32 < last) unpack_values(dim, lane + 32);
    else if (dim + 16 * kAtOnce < of.pages.value_lanes) unpack_values(dim + 16 * kAtOnce, first);
    return made;
  }
  int64_t value_stride() const { return 32 * kAtOnce; }

 private:
  KeyTiles key_block() const {
    return {of.room.upper_keys + turn * kStreamedNumbers, of.room.lower_keys + turn * kStreamedNumbers, kTileNumbers};
  }
  uint16_t* value_block() const { return of.room.values + turn * kStreamedNumbers; }
  void unpack_keys(int64_t column, int64_t d) {
    of.unpacks.keys(of.pages, of.tile, column, std::min(kAtOnce, last - column), d, key_block());
  }
  void unpack_values(int64_t dim, int64_t lane) {
    const int64_t vectors = std::min(kAtOnce, (of.pages.value_lanes - dim) / 16);
    of.unpacks.values(of.pages, of.tile, of.seen, lane, dim, vectors, value_block(), value_stride());
  }
};

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
template <typename Source>
inline void tile_scores(const AttentionRoom& room, int64_t row, int64_t dims, int64_t first, int64_t last, bool lower,
                        Source& source) {
  source.begin_keys(first, last);
  for (int64_t column = first; column < last; column += kAtOnce) {
    const int64_t count = std::min(kAtOnce, last - column);
    KVILT_FOR_FOUR(KVILT_TILE_ZERO);
    for (int64_t d = 0; d < dims; d += kTileDims) {
      const KeyTiles keys = source.keys(column, d);
      order_memory();
      KVILT_TILE_LOAD(4, room.upper_queries + row * dims + d, 2 * dims);
      KVILT_TILE_LOAD(5, room.lower_queries + row * dims + d, 2 * dims);
#define KVILT_SCORES(to, queries, part)                   \
  do {                                                    \
    KVILT_TILE_LOAD(6, keys.part + to * keys.stride, 64); \
    KVILT_TILE_MULTIPLY_BFLOATS(to, queries, 6);          \
  } while (false)
#define KVILT_UPPER(to) KVILT_SCORES(to, 4, upper)
#define KVILT_LOWER_QUERIES(to) KVILT_SCORES(to, 5, upper)
#define KVILT_LOWER_KEYS(to) KVILT_SCORES(to, 4, lower)
      KVILT_FOR_FOUR(KVILT_UPPER);
      KVILT_FOR_FOUR(KVILT_LOWER_QUERIES);
      if (lower) KVILT_FOR_FOUR(KVILT_LOWER_KEYS);
      order_memory();
    }
#define KVILT_STORE(to) KVILT_TILE_STORE(to, room.scores + (column + to) * kColumns, kTileLanes * 4)
    KVILT_FOR_FOUR(KVILT_STORE);
#undef KVILT_STORE
  }
  order_memory();
}

// Sums of the values of lanes [first, last), which are multiples of 32.
template <typename Source>
inline void tile_sums(const uint16_t* weights, int64_t value_lanes, int64_t first, int64_t last, float* sums,
                      Source& source) {
  if (first < last) source.begin_values(first, last);
  for (int64_t dim = 0; dim < value_lanes; dim += 16 * kAtOnce) {
    const int64_t count = std::min(kAtOnce, (value_lanes - dim) / 16);
    KVILT_FOR_FOUR(KVILT_TILE_ZERO);
    for (int64_t lane = first; lane < last; lane += 32) {
      const uint16_t* values = source.values(dim, lane);
      order_memory();
      KVILT_TILE_LOAD(4, weights + lane, kTileLanes * 2);
#define KVILT_SUMS(to)                                               \
  do {                                                               \
    KVILT_TILE_LOAD(6, values + 32 * to, 2 * source.value_stride()); \
    KVILT_TILE_MULTIPLY_BFLOATS(to, 4, 6);                           \
  } while (false)
      KVILT_FOR_FOUR(KVILT_SUMS);
      order_memory();
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

inline bool all_finite(const float* numbers, int64_t count) {
  f32x16 sum = {};  // zero times a number that is not finite is no number, and stays in the sum
  for (int64_t i = 0; i < count; i += 16) sum = fma(load(numbers + i), 0.0f, sum);
  return _mm512_cmp_ps_mask(sum.v, sum.v, _CMP_UNORD_Q) == 0;
}

// Up to sixteen queries with a tile.
template <typename Source>
inline void tile_panel(const BlockTile& of, const Mask& mask, int64_t row, int64_t rows, const VisibleRange* visible,
                       const PartialAttention& to) {
  const auto& [pages, tile, unpacks, room, seen] = of;
  int64_t low = kTileLanes, high = 0;  // lanes
  for (int64_t m = 0; m < rows; ++m) {
    if (!visible[m].any()) continue;
    low = std::min(low, lane_of(pages, visible[m].from));
    high = std::max(high, lane_of(pages, visible[m].to - 1) + 1);
  }
  const int64_t first = low / kColumns, last = (high + kColumns - 1) / kColumns;
  Source source{of};
  if (first < last) {
    tile_scores(room, row, of.dims(), first, last, unpacks.lower, source);
    scale_scores(pages, tile, rows, first, last, room.scores);
  }
  for (int64_t m = 0; m < rows; ++m) {
    float* scores = room.scores + m * kTileLanes;
    softmax_weights(pages, tile, mask, visible[m], scores, to.peaks + m, to.norms + m);
    weights_as_tile(pages, visible[m], scores, room.weights + m * kTileLanes);
  }
  const int64_t begin = low / 32 * 32, end = (high + 31) / 32 * 32;
  tile_sums(room.weights, pages.value_lanes, begin, end, to.sums, source);
  if (all_finite(to.sums, rows * pages.value_lanes)) return;
  configure_for(1);  // a hidden token adds zero times its values, which is nothing if they are finite
  for (int64_t m = 0; m < rows; ++m) {
    Unpacked own{of};
    of.unpack_values(visible[m]);
    tile_sums(room.weights + m * kTileLanes, pages.value_lanes, begin, end, to.sums + m * pages.value_lanes, own);
  }
  of.unpack_values(seen);  // for the rows that follow
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
  const bool streamed = queries.rows() <= kTileQueries;
  split_queries(pages, queries, mask, room);
  int64_t configured = 0;
  VisibleRange seen;
  over_tiles<kTileQueries>(
      pages, queries, mask, first, last, apart, records, room.fresh,
      [&](Tile& tile, int64_t index) {
        seen = visible_of_block(pages, mask, queries, index);
        if (streamed) return;
        const BlockTile of{pages, tile, unpacks, room, seen};
        of.unpack_keys();
        of.unpack_values(seen);
      },
      [&](const Tile& tile, int64_t row, int64_t rows, const VisibleRange* visible, const PartialAttention& to) {
        if (rows != configured) configure_for(configured = rows);
        const BlockTile of{pages, tile, unpacks, room, seen};
        (streamed ? tile_panel<Streamed> : tile_panel<Unpacked>)(of, mask, row, rows, visible, to);
      });
  release_tiles();
}

constexpr AttentionKernels attention_kernels() { return {attention_by_tiles, attention_room}; }

}  // namespace kvilt::KVILT_ISA
