// Attention over pages: blocks of queries times tiles of keys, each tile softmaxed by itself and merged in order.
//
// What a query gathers does not depend on the block it stands in: a score is one chain of fused products over the dims,
// a sum of values one chain over the tokens that the query sees, and no other token takes part in either.
#pragma once
#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include "paged.h"
#include "vectors.h"

namespace kvilt::KVILT_ISA {

#if defined(__AVX512F__)
constexpr int kRegisters = 31;  // vectors of sixteen that stay in registers, beside the one that goes round
constexpr int kPanel = 12;      // rows of queries that go through a tile together
#else
constexpr int kRegisters = 7;
constexpr int kPanel = 6;
#endif
// How many vectors M rows can be multiplied with at once, sums and vectors all in registers.
constexpr int vectors_for(int rows, int most) {
  while (most > 1 && (rows + 1) * most > kRegisters) most /= 2;
  return most;
}
constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr float kLog2E = 1.44269504088896341f;

struct FloatPages {
  using Number = float;
  static constexpr int kLevel = 2;  // where to fetch what comes next meanwhile: memory is read once and far away
  static F16x at(const Number* p) { return load(p); }
};
struct NearFloats : FloatPages {  // a tile that stays in the cache
  static constexpr int kLevel = 0;
};
struct HalfPages {
  using Number = uint16_t;
  static constexpr int kLevel = 2;
  static F16x at(const Number* p) { return load_half(p); }
};
struct BfloatPages {
  using Number = uint16_t;
  static constexpr int kLevel = 2;
  static F16x at(const Number* p) { return load_bfloat(p); }
};
struct BytePages {
  using Number = int8_t;
  static constexpr int kLevel = 3;  // so small that the nearest cache has room for it
  static F16x at(const Number* p) { return load_byte(p); }
};

// 2^x for x <= 0, to a unit in the last place or two; nothing at all below -126.
inline F16x power_of_two(F16x x) {
  const F16x magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const F16x kept = larger(x, splat(-127.0f));
  const F16x rounded = kept + magic;
  const F16x r = kept - (rounded - magic);
  F16x p = fma(splat(0.001327647198936467f), r, splat(0.009675541334398479f));
  p = fma(p, r, splat(0.0555071327350688f));
  p = fma(p, r, splat(0.2402211972384111f));
  p = fma(p, r, splat(0.6931469670647549f));
  p = fma(p, r, splat(1.0f));
  return zero_below(x, splat(-126.0f), p * power(rounded));
}

// Where the pages of a tile are; only those that a query of the block sees.
struct Tile {
  std::array<const char*, kTileLanes / 16> keys, values;
  std::array<const float*, kTileLanes / 16> key_scales, value_scales;
  std::array<const char*, kTileLanes / 16> next;  // keys of the tile that comes after
};

// Asks for bytes that are needed soon: pages lie too far apart for the machine to guess.
template <int kLevel>
inline void fetch(const char* at, int64_t bytes) {
  __builtin_prefetch(at, 0, kLevel);
  if (bytes > 64) __builtin_prefetch(at + 64, 0, kLevel);
}

// The tokens of a tile that a query sees: [from, to), none if to <= from.
struct Sight {
  int64_t from, to;

  bool any() const { return from < to; }
  bool sees(int64_t first, int64_t last) const { return any() && from < last && to > first; }
};

struct Gathered {
  float* sums;  // [rows][value_lanes]
  float* peaks;
  float* norms;

  Gathered from(int64_t row, const Pages& pages) const {
    return {sums + row * pages.value_lanes, peaks + row, norms + row};
  }
};
inline Gathered gathered(float* record, int64_t rows, const Pages& pages) {
  return {record, record + rows * pages.value_lanes, record + rows * (pages.value_lanes + 1)};
}

// ---- scores ----

// Products of M queries with 16 N keys of a page; queries are [dim][M].
template <typename Kind, int M, int N>
inline void products(const typename Kind::Number* keys, int64_t dim, int64_t lanes, const float* queries, float* scores,
                     const char* ahead) {
  constexpr int64_t kBytes = 16 * N * sizeof(*keys);
  F16x sum[M][N];
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) sum[m][n] = splat(0.0f);
  for (int64_t d = 0; d < dim; ++d, keys += lanes, queries += M, ahead += kBytes) {
    if constexpr (Kind::kLevel) fetch<Kind::kLevel>(ahead, kBytes);
    F16x key[N];
    for (int n = 0; n < N; ++n) key[n] = Kind::at(keys + 16 * n);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const F16x query = splat(queries[m]);
      for (int n = 0; n < N; ++n) sum[m][n] = fma(key[n], query, sum[m][n]);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) store(scores + m * kTileLanes + 16 * n, sum[m][n]);
}

template <typename Kind, int M>
inline void page_scores(const Pages& pages, const Tile& tile, int64_t page, const float* queries, float* scores) {
  constexpr int N = vectors_for(M, 2);
  using Number = typename Kind::Number;
  const auto* keys = reinterpret_cast<const Number*>(tile.keys[page]);
  const auto ahead = [&](int64_t lane) { return tile.values[page] + lane * pages.dim * int64_t(sizeof(Number)); };
  scores += page * pages.lanes;
  int64_t lane = 0;
  for (; lane + 16 * N <= pages.lanes; lane += 16 * N)
    products<Kind, M, N>(keys + lane, pages.dim, pages.lanes, queries, scores + lane, ahead(lane));
  for (; lane < pages.lanes; lane += 16)
    products<Kind, M, 1>(keys + lane, pages.dim, pages.lanes, queries, scores + lane, ahead(lane));
  if (const float* scales = tile.key_scales[page])
    for (int m = 0; m < M; ++m)
      for (lane = 0; lane < pages.lanes; lane += 16) {
        float* at = scores + m * kTileLanes + lane;
        store(at, load(at) * load(scales + lane));
      }
}

// ---- weights ----

// cap * tanh(score / cap) in base two; scores were divided by the cap already.
inline void cap(float* scores, int64_t from, int64_t to, float soft_cap) {
  for (int64_t i = from; i < to; i += 16) {
    const F16x below = splat(2.0f) / (exp16(load(scores + i) * 2.0f) + 1.0f);
    store(scores + i, (splat(1.0f) - below) * (soft_cap * kLog2E));
  }
}

// From one query's scores to weights, in place.
inline void weigh(const Pages& pages, const Tile& tile, const Mask& mask, const Sight& sight, float* scores, float* peak,
                  float* norm) {
  *peak = kNothing;
  *norm = 0;
  if (!sight.any()) return;
  const int64_t first = sight.from / pages.page_tokens, last = (sight.to - 1) / pages.page_tokens;
  const int64_t begin = first * pages.lanes, end = (last + 1) * pages.lanes;
  if (mask.soft_cap > 0) cap(scores, begin, end, mask.soft_cap);
  for (int64_t page = first; page <= last; ++page) {  // what may not be seen, perhaps never written, weighs nothing
    const int64_t low = page == first ? sight.from - page * pages.page_tokens : 0;
    const int64_t high = page == last ? sight.to - page * pages.page_tokens : pages.page_tokens;
    float* at = scores + page * pages.lanes;
    for (int64_t t = 0; t < low; ++t) at[t] = kNothing;
    for (int64_t t = high; t < pages.lanes; ++t) at[t] = kNothing;
  }
  F16x best = splat(kNothing);
  for (int64_t i = begin; i < end; i += 16) best = larger(best, load(scores + i));
  *peak = largest(best);
  F16x sum = splat(0.0f);
  for (int64_t i = begin; i < end; i += 16) {
    const F16x weight = power_of_two(load(scores + i) - *peak);
    store(scores + i, weight);
    sum = sum + weight;
  }
  *norm = total(sum);
  for (int64_t page = first; page <= last; ++page)
    if (const float* scales = tile.value_scales[page])
      for (int64_t lane = 0; lane < pages.lanes; lane += 16) {
        float* at = scores + page * pages.lanes + lane;
        store(at, load(at) * load(scales + lane));
      }
}

// ---- values ----

// Adds the values of tokens [from, to) to the sums of M queries, V vectors of dims at a time.
template <typename Kind, int M, int V>
inline void mix_dims(const Pages& pages, const Tile& tile, int64_t from, int64_t to, const float* weights, bool fresh,
                     int64_t dim, float* sums) {
  using Number = typename Kind::Number;
  constexpr int64_t kBytes = 16 * V * sizeof(Number);
  F16x sum[M][V];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < V; ++v) sum[m][v] = fresh ? splat(0.0f) : load(sums + m * pages.value_lanes + dim + 16 * v);
  for (int64_t page = from / pages.page_tokens; from < to && page * pages.page_tokens < to; ++page) {
    const int64_t first = page * pages.page_tokens, low = from > first ? from - first : 0;
    const int64_t high = to - first < pages.page_tokens ? to - first : pages.page_tokens;
    const auto* values = reinterpret_cast<const Number*>(tile.values[page]) + low * pages.value_lanes + dim;
    const float* weight = weights + page * pages.lanes + low;
    const char* ahead = tile.next[page] + dim * pages.page_tokens * int64_t(sizeof(Number)) + low * kBytes;
    for (int64_t t = low; t < high; ++t, values += pages.value_lanes, ++weight, ahead += kBytes) {
      if constexpr (Kind::kLevel) fetch<Kind::kLevel>(ahead, kBytes);
      F16x value[V];
      for (int v = 0; v < V; ++v) value[v] = Kind::at(values + 16 * v);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        const F16x w = splat(weight[m * kTileLanes]);
        for (int v = 0; v < V; ++v) sum[m][v] = fma(value[v], w, sum[m][v]);
      }
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < V; ++v) store(sums + m * pages.value_lanes + dim + 16 * v, sum[m][v]);
}

template <typename Kind, int M>
inline void mix(const Pages& pages, const Tile& tile, int64_t from, int64_t to, const float* weights, bool fresh,
                float* sums) {
  constexpr int V = vectors_for(M, 2);
  int64_t dim = 0;
  for (; dim + 16 * V <= pages.value_lanes; dim += 16 * V)
    mix_dims<Kind, M, V>(pages, tile, from, to, weights, fresh, dim, sums);
  for (; dim < pages.value_lanes; dim += 16)
    mix_dims<Kind, M, 1>(pages, tile, from, to, weights, fresh, dim, sums);
}

// Tokens that all queries see go through together; the ragged ends, which only some see, query by query.
template <typename Kind, int M>
inline void mix_seen(const Pages& pages, const Tile& tile, const Sight* sight, const float* weights, float* sums) {
  int64_t from = sight[0].from, to = sight[0].to;
  bool early = false;
  for (int m = 1; m < M; ++m) {
    early |= sight[m].from != sight[0].from;
    from = sight[m].from > from ? sight[m].from : from;
    to = sight[m].to < to ? sight[m].to : to;
  }
  const int64_t common = to > from ? to : from;
  for (int m = 0; early && m < M; ++m)
    mix<Kind, 1>(pages, tile, sight[m].from, sight[m].to < from ? sight[m].to : from, weights + m * kTileLanes, true,
                 sums + m * pages.value_lanes);
  if (to > from) mix<Kind, M>(pages, tile, from, to, weights, !early, sums);
  for (int m = 0; m < M; ++m)
    if (sight[m].to > common)
      mix<Kind, 1>(pages, tile, common, sight[m].to, weights + m * kTileLanes, !early && to <= from,
                   sums + m * pages.value_lanes);
}

// ---- a tile ----

template <typename Kind, int M>
void panel(const Pages& pages, const Tile& tile, const Mask& mask, const float* queries, const Sight* sight,
           float* scores, const Gathered& to) {
  for (int64_t page = 0; page < tile_pages(pages); ++page)
    for (int m = 0; m < M; ++m)
      if (sight[m].sees(page * pages.page_tokens, (page + 1) * pages.page_tokens)) {
        page_scores<Kind, M>(pages, tile, page, queries, scores);
        break;
      }
  for (int m = 0; m < M; ++m)
    weigh(pages, tile, mask, sight[m], scores + m * kTileLanes, to.peaks + m, to.norms + m);
  mix_seen<Kind, M>(pages, tile, sight, scores, to.sums);
}

using Panel = void (*)(const Pages&, const Tile&, const Mask&, const float*, const Sight*, float*, const Gathered&);

template <typename Kind, int... M>
constexpr std::array<Panel, sizeof...(M)> panels(std::integer_sequence<int, M...>) {
  return {panel<Kind, M + 1>...};
}

inline Panel panel_of(Stored dtype, bool near, int64_t rows) {
  using Sizes = std::make_integer_sequence<int, kPanel>;
  static constexpr auto near_floats = panels<NearFloats>(Sizes{}), floats = panels<FloatPages>(Sizes{}),
                        halves = panels<HalfPages>(Sizes{}), bfloats = panels<BfloatPages>(Sizes{}),
                        bytes = panels<BytePages>(Sizes{});
  if (near) return near_floats[rows - 1];
  switch (dtype) {
    case Stored::kHalf: return halves[rows - 1];
    case Stored::kBfloat: return bfloats[rows - 1];
    case Stored::kByte: return bytes[rows - 1];
    default: return floats[rows - 1];
  }
}

// ---- a block of queries ----

inline Sight sight_of(const Pages& pages, const Mask& mask, int64_t position, int64_t start) {
  const int64_t low = mask.first_seen(position) - start, high = position + 1 - start;
  return {low > 0 ? low : 0, high < tile_tokens(pages) ? high : tile_tokens(pages)};
}

inline Tile find_tile(const Pages& pages, const Queries& queries, const Mask& mask, int64_t index) {
  Tile tile{};
  for (int64_t page = 0; page < tile_pages(pages); ++page) {
    bool seen = false;
    for (int64_t t = 0; t < queries.tokens && !seen; ++t)
      seen = sight_of(pages, mask, queries.positions[t], index * tile_tokens(pages))
                 .sees(page * pages.page_tokens, (page + 1) * pages.page_tokens);
    if (!seen) continue;
    const int64_t id = queries.table[index * tile_pages(pages) + page];
    tile.keys[page] = pages.keys(id, queries.kv_head);
    tile.values[page] = pages.values(id, queries.kv_head);
    if (pages.dtype != Stored::kByte) continue;
    tile.key_scales[page] = pages.key_scales(id, queries.kv_head);
    tile.value_scales[page] = pages.value_scales(id, queries.kv_head);
  }
  return tile;
}

template <typename Kind>
inline const char* to_floats(const char* from, int64_t count, float* to) {
  const auto* numbers = reinterpret_cast<const typename Kind::Number*>(from);
  for (int64_t i = 0; i < count; i += 16) store(to + i, Kind::at(numbers + i));
  return reinterpret_cast<const char*>(to);
}
inline const char* to_floats(Stored dtype, const char* from, int64_t count, float* to) {
  switch (dtype) {
    case Stored::kHalf: return to_floats<HalfPages>(from, count, to);
    case Stored::kBfloat: return to_floats<BfloatPages>(from, count, to);
    case Stored::kByte: return to_floats<BytePages>(from, count, to);
    default: return from;
  }
}

// The tile as floats, for blocks that go through it many times.
inline void unpack(const Pages& pages, Tile& tile, float* room) {
  const int64_t keys = pages.dim * pages.lanes, values = pages.page_tokens * pages.value_lanes;
  for (int64_t page = 0; page < tile_pages(pages); ++page, room += keys + values) {
    if (!tile.keys[page]) continue;
    tile.keys[page] = to_floats(pages.dtype, tile.keys[page], keys, room);
    tile.values[page] = to_floats(pages.dtype, tile.values[page], values, room + keys);
  }
}

inline int64_t panel_rows(int64_t rows, int64_t first) { return rows - first < kPanel ? rows - first : kPanel; }

// Queries as panels of [dim][rows of the panel], scaled so that scores come out in base two.
inline void pack(const Pages& pages, const Queries& queries, const Mask& mask, float* packed) {
  const float scale = mask.soft_cap > 0 ? mask.scale / mask.soft_cap : mask.scale * kLog2E;
  for (int64_t first = 0; first < queries.rows(); first += kPanel) {
    const int64_t count = panel_rows(queries.rows(), first);
    for (int64_t m = 0; m < count; ++m) {
      const int64_t token = (first + m) / queries.group, head = (first + m) % queries.group;
      const float* query = queries.query + token * queries.stride + head * pages.dim;
      for (int64_t d = 0; d < pages.dim; ++d) packed[d * count + m] = query[d] * scale;
    }
    packed += count * pages.dim;
  }
}

// By how much sixteen rows' sums shrink when later ones join them, which shrink too, relative to the larger peak.
struct Shares {
  float kept[16], added[16];
};
inline Shares shares(const float* peaks, const float* later, int64_t rows) {
  float before[16] = {}, after[16] = {};
  std::memcpy(before, peaks, size_t(rows) * sizeof(float));
  std::memcpy(after, later, size_t(rows) * sizeof(float));
  const F16x a = load(before), b = load(after), peak = larger(a, b);
  Shares s;
  store(s.kept, power_of_two(a - peak));
  store(s.added, power_of_two(b - peak));
  return s;
}

inline void merge_rows(const Pages& pages, int64_t rows, const Gathered& later, const Gathered& to) {
  const int64_t lanes = pages.value_lanes;
  for (int64_t first = 0; first < rows; first += 16) {
    const int64_t last = rows - first < 16 ? rows : first + 16;
    const Shares share = shares(to.peaks + first, later.peaks + first, last - first);
    for (int64_t row = first; row < last; ++row) {
      if (later.peaks[row] == kNothing) continue;
      const float kept = share.kept[row - first], added = share.added[row - first];
      float* sums = to.sums + row * lanes;
      const float* more = later.sums + row * lanes;
      if (to.peaks[row] == kNothing) {  // the first tile that this row sees
        std::memcpy(sums, more, size_t(lanes) * sizeof(float));
        to.norms[row] = later.norms[row];
      } else {
        for (int64_t d = 0; d < lanes; d += 16) store(sums + d, fma(load(sums + d), kept, load(more + d) * added));
        to.norms[row] = to.norms[row] * kept + later.norms[row] * added;
      }
      to.peaks[row] = later.peaks[row] > to.peaks[row] ? later.peaks[row] : to.peaks[row];
    }
  }
}

inline int64_t attend_scratch(const Pages& pages, int64_t rows) {
  const int64_t tile = tile_pages(pages) * (pages.dim * pages.lanes + pages.page_tokens * pages.value_lanes);
  return rows * pages.dim + kPanel * kTileLanes + gathered_floats(kPanel, pages) + tile;
}

inline void attend(const Pages& pages, const Queries& queries, const Mask& mask, int64_t first, int64_t last, bool apart,
                   float* records, float* scratch) {
  const int64_t rows = queries.rows(), tile_size = tile_tokens(pages);
  float *packed = scratch, *scores = packed + rows * pages.dim, *fresh = scores + kPanel * kTileLanes;
  float* room = fresh + gathered_floats(kPanel, pages);
  const bool often = rows > 2 * kPanel;
  pack(pages, queries, mask, packed);
  Tile next = find_tile(pages, queries, mask, first);
  for (int64_t index = first; index < last; ++index) {
    Tile tile = next;
    if (index + 1 < last) next = find_tile(pages, queries, mask, index + 1);
    for (int64_t page = 0; page < tile_pages(pages); ++page)
      tile.next[page] = next.keys[page] ? next.keys[page] : tile.keys[page];
    if (often) unpack(pages, tile, room);
    const bool direct = apart || index == first;
    const int64_t record = apart ? (index - first) * gathered_floats(rows, pages) : 0;
    const Gathered all = gathered(records + record, rows, pages);
    for (int64_t row = 0; row < rows; row += kPanel) {
      const int64_t count = panel_rows(rows, row);
      Sight sight[kPanel];
      for (int64_t m = 0; m < count; ++m)
        sight[m] = sight_of(pages, mask, queries.positions[(row + m) / queries.group], index * tile_size);
      const Gathered own = all.from(row, pages), to = direct ? own : gathered(fresh, count, pages);
      panel_of(pages.dtype, often, count)(pages, tile, mask, packed + row * pages.dim, sight, scores, to);
      if (!direct) merge_rows(pages, count, to, own);
    }
  }
}

inline void merge(const Pages& pages, int64_t rows, const float* later, float* record) {
  merge_rows(pages, rows, gathered(const_cast<float*>(later), rows, pages), gathered(record, rows, pages));
}

inline void finish(const Pages& pages, const Queries& queries, const float* record, float* out, int64_t stride) {
  const Gathered from = gathered(const_cast<float*>(record), queries.rows(), pages);
  for (int64_t row = 0; row < queries.rows(); ++row) {
    float* to = out + row / queries.group * stride + row % queries.group * pages.value_dim;
    const float* sums = from.sums + row * pages.value_lanes;
    for (int64_t d = 0; d < pages.value_dim; ++d) to[d] = sums[d] / from.norms[row];
  }
}

}  // namespace kvilt::KVILT_ISA
