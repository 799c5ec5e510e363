// Attention over pages: blocks of queries times tiles of keys, each tile softmaxed by itself and merged in order.
//
// The result of a query does not depend on the block it stands in: a score is one chain of fused products over the
// dims, a sum of values one chain over the tokens that the query sees, and no other token takes part in either.
#pragma once
#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include "pages.h"
#include "tile_impl.h"
#include "vectors.h"

namespace kvilt::KVILT_ISA {

#if defined(__AVX512F__)
constexpr int kRegisters = 31;  // vectors of sixteen that stay in registers, beside the one that is broadcast
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
constexpr float kUnseen = -std::numeric_limits<float>::infinity();
constexpr float kLog2E = 1.44269504088896341f;

// 2^x for x <= 0, to a unit in the last place or two; nothing at all below -126.
inline f32x16 exp2_16(f32x16 x) {
  const f32x16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const f32x16 kept = max(x, splat(-127.0f));
  const f32x16 rounded = kept + magic;
  const f32x16 r = kept - (rounded - magic);
  f32x16 p = fma(splat(0.001327647198936467f), r, splat(0.009675541334398479f));
  p = fma(p, r, splat(0.0555071327350688f));
  p = fma(p, r, splat(0.2402211972384111f));
  p = fma(p, r, splat(0.6931469670647549f));
  p = fma(p, r, splat(1.0f));
  return zero_below(x, splat(-126.0f), p * exp2_bits(rounded));
}

// Prefetches bytes that are needed soon: pages lie too far apart for the hardware prefetcher.
template <int kLevel>
inline void fetch(const char* at, int64_t bytes) {
  __builtin_prefetch(at, 0, kLevel);
  if (bytes > 64) __builtin_prefetch(at + 64, 0, kLevel);
}

// The tokens of a tile that a query sees: [from, to), none if to <= from.
struct VisibleRange {
  int64_t from, to;

  bool any() const { return from < to; }
  bool overlaps(int64_t first, int64_t last) const { return any() && from < last && to > first; }
};

struct PartialAttention {
  float* sums;  // [rows][value_lanes]
  float* peaks;
  float* norms;

  PartialAttention from(int64_t row, const Pages& pages) const {
    return {sums + row * pages.value_lanes, peaks + row, norms + row};
  }
};
inline PartialAttention partial_at(float* record, int64_t rows, const Pages& pages) {
  return {record, record + rows * pages.value_lanes, record + rows * (pages.value_lanes + 1)};
}

// ---- scores ----

// Products of M queries with 16 N keys of a page; queries are [dim][M].
template <typename Loader, int M, int N>
inline void key_products(const typename Loader::Number* keys, int64_t dim, int64_t lanes, const float* queries,
                         float* scores, const char* ahead) {
  constexpr int64_t kBytes = 16 * N * sizeof(*keys);
  f32x16 sum[M][N];
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) sum[m][n] = splat(0.0f);
  for (int64_t d = 0; d < dim; ++d, keys += lanes, queries += M, ahead += kBytes) {
    if constexpr (Loader::kLevel) fetch<Loader::kLevel>(ahead, kBytes);
    f32x16 key[N];
    for (int n = 0; n < N; ++n) key[n] = Loader::at(keys + 16 * n);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const f32x16 query = splat(queries[m]);
      for (int n = 0; n < N; ++n) sum[m][n] = fma(key[n], query, sum[m][n]);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) store(scores + m * kTileLanes + 16 * n, sum[m][n]);
}

template <typename Loader, int M>
inline void page_scores(const Pages& pages, const Tile& tile, int64_t page, const float* queries, float* scores) {
  constexpr int N = vectors_for(M, 2);
  using Number = typename Loader::Number;
  const int64_t dim = pages.query_dim();
  const auto* keys = reinterpret_cast<const Number*>(tile.keys[page]);
  const auto ahead = [&](int64_t lane) { return tile.values[page] + lane * dim * int64_t(sizeof(Number)); };
  scores += page * pages.lanes;
  int64_t lane = 0;
  for (; lane + 16 * N <= pages.lanes; lane += 16 * N)
    key_products<Loader, M, N>(keys + lane, dim, pages.lanes, queries, scores + lane, ahead(lane));
  for (; lane < pages.lanes; lane += 16)
    key_products<Loader, M, 1>(keys + lane, dim, pages.lanes, queries, scores + lane, ahead(lane));
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
    const f32x16 below = splat(2.0f) / (exp16(load(scores + i) * 2.0f) + 1.0f);
    store(scores + i, (splat(1.0f) - below) * (soft_cap * kLog2E));
  }
}

// From one query's scores to weights, in place.
inline void softmax_weights(const Pages& pages, const Tile& tile, const Mask& mask, const VisibleRange& visible,
                            float* scores, float* peak, float* norm) {
  *peak = kUnseen;
  *norm = 0;
  if (!visible.any()) return;
  const int64_t first = visible.from / pages.page_tokens, last = (visible.to - 1) / pages.page_tokens;
  const int64_t begin = first * pages.lanes, end = (last + 1) * pages.lanes;
  if (mask.soft_cap > 0) cap(scores, begin, end, mask.soft_cap);
  for (int64_t page = first; page <= last; ++page) {  // what the mask hides, perhaps never written, has no weight
    const int64_t low = page == first ? visible.from - page * pages.page_tokens : 0;
    const int64_t high = page == last ? visible.to - page * pages.page_tokens : pages.page_tokens;
    float* at = scores + page * pages.lanes;
    for (int64_t t = 0; t < low; ++t) at[t] = kUnseen;
    for (int64_t t = high; t < pages.lanes; ++t) at[t] = kUnseen;
  }
  f32x16 best = splat(kUnseen);
  for (int64_t i = begin; i < end; i += 16) best = max(best, load(scores + i));
  *peak = reduce_max(best);
  f32x16 sum = splat(0.0f);
  for (int64_t i = begin; i < end; i += 16) {
    const f32x16 weight = exp2_16(load(scores + i) - *peak);
    store(scores + i, weight);
    sum = sum + weight;
  }
  *norm = reduce_add(sum);
  for (int64_t page = first; page <= last; ++page)
    if (const float* scales = tile.value_scales[page])
      for (int64_t lane = 0; lane < pages.lanes; lane += 16) {
        float* at = scores + page * pages.lanes + lane;
        store(at, load(at) * load(scales + lane));
      }
}

// ---- values ----

// Adds the values of tokens [from, to) to the sums of M queries, V vectors of dims at a time.
template <typename Loader, int M, int V>
inline void weighted_sum_dims(const Pages& pages, const Tile& tile, int64_t from, int64_t to, const float* weights,
                              bool fresh, int64_t dim, float* sums) {
  using Number = typename Loader::Number;
  constexpr int64_t kBytes = 16 * V * sizeof(Number);
  const int64_t row_bytes = ValueRows<Loader>::row_bytes(pages);
  f32x16 sum[M][V];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < V; ++v) sum[m][v] = fresh ? splat(0.0f) : load(sums + m * pages.value_lanes + dim + 16 * v);
  for (int64_t page = from / pages.page_tokens; from < to && page * pages.page_tokens < to; ++page) {
    const int64_t first = page * pages.page_tokens, low = from > first ? from - first : 0;
    const int64_t high = to - first < pages.page_tokens ? to - first : pages.page_tokens;
    const char* row = tile.values[page] + low * row_bytes;
    const float* weight = weights + page * pages.lanes + low;
    const char* ahead = tile.next[page] + dim * pages.page_tokens * int64_t(sizeof(Number)) + low * kBytes;
    for (int64_t t = low; t < high; ++t, row += row_bytes, ++weight, ahead += kBytes) {
      if constexpr (Loader::kLevel) fetch<Loader::kLevel>(ahead, kBytes);
      f32x16 value[V];
      ValueRows<Loader>::template at<V>(row, dim, value);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        const f32x16 w = splat(weight[m * kTileLanes]);
        for (int v = 0; v < V; ++v) sum[m][v] = fma(value[v], w, sum[m][v]);
      }
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < V; ++v) store(sums + m * pages.value_lanes + dim + 16 * v, sum[m][v]);
}

#if defined(__AVX512BF16__)
// The same with values and weights in bfloat16, two tokens at a time; weights stand as pairs.
template <typename Loader, int M, int V>
inline void weighted_pair_sum_dims(const Pages& pages, const Tile& tile, int64_t from, int64_t to, const float* weights,
                                   bool fresh, int64_t dim, float* sums) {
  constexpr int64_t kBytes = 32 * V * sizeof(typename Loader::Number);
  constexpr __mmask32 kFirst = 0x55555555, kSecond = 0xaaaaaaaa;
  __m512 sum[M][V];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < V; ++v)
      sum[m][v] = fresh ? _mm512_setzero_ps() : load(sums + m * pages.value_lanes + dim + 16 * v).v;
  for (int64_t page = from / pages.page_tokens; from < to && page * pages.page_tokens < to; ++page) {
    const int64_t first = page * pages.page_tokens, low = from > first ? from - first : 0, even = low / 2 * 2;
    const int64_t high = to - first < pages.page_tokens ? to - first : pages.page_tokens;
    const char* weight = reinterpret_cast<const char*>(weights) + 2 * (page * pages.lanes + even);
    const char* ahead = tile.next[page] + dim * pages.page_tokens * int64_t(sizeof(typename Loader::Number));
    ahead += even / 2 * kBytes;
    for (int64_t t = even; t < high; t += 2, weight += 4, ahead += kBytes) {
      if constexpr (Loader::kLevel) fetch<Loader::kLevel>(ahead, kBytes);
      __m512i value[V];
      ValuePairs<Loader>::template at<V>(pages, tile.values[page], t, dim, value);
      if (t < low || t + 1 >= high)  // what is not seen, perhaps never written, takes no part
        for (int v = 0; v < V; ++v) value[v] = _mm512_maskz_mov_epi16(t < low ? kSecond : kFirst, value[v]);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        int32_t pair;
        std::memcpy(&pair, weight + m * kTileLanes * int64_t(sizeof(float)), sizeof pair);
        const auto w = (__m512bh)_mm512_set1_epi32(pair);
        for (int v = 0; v < V; ++v) sum[m][v] = _mm512_dpbf16_ps(sum[m][v], (__m512bh)value[v], w);
      }
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < V; ++v) store(sums + m * pages.value_lanes + dim + 16 * v, f32x16{sum[m][v]});
}

// One query's weights as bfloat16, in the first half of their place. The weight of a hidden token becomes zero: it
// includes a scale, perhaps one that was never written.
inline void round_weights(const Pages& pages, const VisibleRange& visible, float* weights) {
  if (!visible.any()) return;
  const int64_t first = visible.from / pages.page_tokens, last = (visible.to - 1) / pages.page_tokens;
  for (int64_t page = first; page <= last; ++page) {
    const int64_t low = page == first ? visible.from - page * pages.page_tokens : 0;
    const int64_t high = page == last ? visible.to - page * pages.page_tokens : pages.page_tokens;
    float* at = weights + page * pages.lanes;
    for (int64_t t = 0; t < low; ++t) at[t] = 0;
    for (int64_t t = high; t < pages.lanes; ++t) at[t] = 0;
  }
  auto* to = reinterpret_cast<char*>(weights);
  for (int64_t i = first * pages.lanes / 32 * 32; i < (last + 1) * pages.lanes; i += 32)
    _mm512_storeu_si512(to + 2 * i, to_bfloats(load(weights + i), load(weights + i + 16)));
}

#else
inline void round_weights(const Pages&, const VisibleRange&, float*) {}
#endif

template <typename Loader, int M, int V>
inline void sum_dims(const Pages& pages, const Tile& tile, int64_t from, int64_t to, const float* weights, bool fresh,
                     int64_t dim, float* sums) {
#if defined(__AVX512BF16__)
  if constexpr (Loader::kPairs)
    return weighted_pair_sum_dims<Loader, M, V>(pages, tile, from, to, weights, fresh, dim, sums);
#endif
  weighted_sum_dims<Loader, M, V>(pages, tile, from, to, weights, fresh, dim, sums);
}

// The first token of its pair, and the first token of the next pair unless it is the first of its own.
inline int64_t pair_below(const Pages& pages, int64_t token) { return token - token % pages.page_tokens % 2; }
inline int64_t pair_above(const Pages& pages, int64_t token) { return token + token % pages.page_tokens % 2; }

template <typename Loader, int M>
inline void weighted_sum(const Pages& pages, const Tile& tile, int64_t from, int64_t to, const float* weights,
                         bool fresh, float* sums) {
  constexpr int V = vectors_for(M, 2);
  int64_t dim = 0;
  for (; dim + 16 * V <= pages.value_lanes; dim += 16 * V)
    sum_dims<Loader, M, V>(pages, tile, from, to, weights, fresh, dim, sums);
  for (; dim < pages.value_lanes; dim += 16) sum_dims<Loader, M, 1>(pages, tile, from, to, weights, fresh, dim, sums);
}

// Tokens that all queries see go through together; the ragged ends, which only some see, query by query.
template <typename Loader, int M>
inline void weighted_sum_visible(const Pages& pages, const Tile& tile, const VisibleRange* visible,
                                 const float* weights, float* sums) {
  int64_t from = visible[0].from, to = visible[0].to;
  for (int m = 1; m < M; ++m) {
    from = visible[m].from > from ? visible[m].from : from;
    to = visible[m].to < to ? visible[m].to : to;
  }
  if constexpr (Loader::kPairs) {  // no pair is cut: its tokens are added by one instruction
    from = pair_above(pages, from);
    to = pair_below(pages, to);
  }
  bool early = false;
  for (int m = 0; m < M; ++m) early |= visible[m].from != from;
  const int64_t common = to > from ? to : from;
  for (int m = 0; early && m < M; ++m)
    weighted_sum<Loader, 1>(pages, tile, visible[m].from, visible[m].to < from ? visible[m].to : from,
                            weights + m * kTileLanes, true, sums + m * pages.value_lanes);
  if (to > from) weighted_sum<Loader, M>(pages, tile, from, to, weights, !early, sums);
  for (int m = 0; m < M; ++m)
    if (visible[m].to > common)
      weighted_sum<Loader, 1>(pages, tile, common, visible[m].to, weights + m * kTileLanes, !early && to <= from,
                              sums + m * pages.value_lanes);
}

// ---- a tile ----

template <typename Loader, int M>
void panel(const Pages& pages, const Tile& tile, const Mask& mask, const float* queries, const VisibleRange* visible,
           float* scores, const PartialAttention& to) {
  for (int64_t page = 0; page < tile_pages(pages); ++page)
    for (int m = 0; m < M; ++m)
      if (visible[m].overlaps(page * pages.page_tokens, (page + 1) * pages.page_tokens)) {
        page_scores<Loader, M>(pages, tile, page, queries, scores);
        break;
      }
  for (int m = 0; m < M; ++m) {
    softmax_weights(pages, tile, mask, visible[m], scores + m * kTileLanes, to.peaks + m, to.norms + m);
    if constexpr (Loader::kPairs) round_weights(pages, visible[m], scores + m * kTileLanes);
  }
  weighted_sum_visible<Loader, M>(pages, tile, visible, scores, to.sums);
}

using Panel = void (*)(const Pages&, const Tile&, const Mask&, const float*, const VisibleRange*, float*,
                       const PartialAttention&);

template <typename Loader, int... M>
constexpr std::array<Panel, sizeof...(M)> panels(std::integer_sequence<int, M...>) {
  return {panel<Loader, M + 1>...};
}

inline Panel panel_of(const Pages& pages, bool near, int64_t rows) {
  using Sizes = std::make_integer_sequence<int, kPanel>;
  static constexpr auto near_floats = panels<CachedFloat32Loader>(Sizes{}),
                        near_pairs = panels<CachedPairsLoader>(Sizes{}), floats = panels<Float32Loader>(Sizes{}),
                        halves = panels<Float16Loader>(Sizes{}), bfloats = panels<Bfloat16Loader>(Sizes{}),
                        bytes = panels<Int8Loader>(Sizes{}), nibbles = panels<K8V4Loader>(Sizes{});
  if (near) return has_pairs(pages) ? near_pairs[rows - 1] : near_floats[rows - 1];
  switch (pages.dtype) {
    case KVDtype::kFloat16: return halves[rows - 1];
    case KVDtype::kBfloat16: return bfloats[rows - 1];
    case KVDtype::kInt8: return bytes[rows - 1];
    case KVDtype::kK8V4: return nibbles[rows - 1];
    default: return floats[rows - 1];
  }
}

// ---- a block of queries ----

inline VisibleRange visible_of(const Pages& pages, const Mask& mask, int64_t position, int64_t start) {
  const int64_t low = mask.first_seen(position) - start, high = position + 1 - start;
  return {low > 0 ? low : 0, high < tile_tokens(pages) ? high : tile_tokens(pages)};
}

inline Tile find_tile(const Pages& pages, const Queries& queries, const Mask& mask, int64_t index) {
  Tile tile{};
  for (int64_t page = 0; page < tile_pages(pages); ++page) {
    bool seen = false;
    for (int64_t t = 0; t < queries.tokens && !seen; ++t)
      seen = visible_of(pages, mask, queries.positions[t], index * tile_tokens(pages))
                 .overlaps(page * pages.page_tokens, (page + 1) * pages.page_tokens);
    if (!seen) continue;
    const int64_t id = queries.table[index * tile_pages(pages) + page];
    tile.keys[page] = pages.keys(id, queries.kv_head);
    tile.values[page] = pages.values(id, queries.kv_head);
    if (!is_scaled(pages.dtype)) continue;
    tile.key_scales[page] = pages.key_scales(id, queries.kv_head);
    tile.value_scales[page] = pages.value_scales(id, queries.kv_head);
  }
  return tile;
}

inline int64_t panel_rows(int64_t rows, int64_t first) { return rows - first < kPanel ? rows - first : kPanel; }

// Queries as panels of [dim][rows of the panel], scaled so that scores come out in base two.
inline void pack_queries(const Pages& pages, const Queries& queries, const Mask& mask, float* packed) {
  const float scale = mask.soft_cap > 0 ? mask.scale / mask.soft_cap : mask.scale * kLog2E;
  for (int64_t first = 0; first < queries.rows(); first += kPanel) {
    const int64_t count = panel_rows(queries.rows(), first);
    for (int64_t m = 0; m < count; ++m) {
      const int64_t token = (first + m) / queries.group, head = (first + m) % queries.group;
      const float* query = queries.query + token * queries.stride + head * pages.query_dim();
      for (int64_t d = 0; d < pages.query_dim(); ++d) packed[d * count + m] = query[d] * scale;
    }
    packed += count * pages.query_dim();
  }
}

// The factors by which the sums of sixteen rows, and later sums that join them, are rescaled to the larger peak.
struct RescaleFactors {
  float kept[16], added[16];
};
inline RescaleFactors rescale_factors(const float* peaks, const float* later, int64_t rows) {
  float before[16] = {}, after[16] = {};
  std::memcpy(before, peaks, size_t(rows) * sizeof(float));
  std::memcpy(after, later, size_t(rows) * sizeof(float));
  const f32x16 a = load(before), b = load(after), peak = max(a, b);
  RescaleFactors s;
  store(s.kept, exp2_16(a - peak));
  store(s.added, exp2_16(b - peak));
  return s;
}

inline void merge_rows(const Pages& pages, int64_t rows, const PartialAttention& later, const PartialAttention& to) {
  const int64_t lanes = pages.value_lanes;
  for (int64_t first = 0; first < rows; first += 16) {
    const int64_t last = rows - first < 16 ? rows : first + 16;
    const RescaleFactors share = rescale_factors(to.peaks + first, later.peaks + first, last - first);
    for (int64_t row = first; row < last; ++row) {
      if (later.peaks[row] == kUnseen) continue;
      const float kept = share.kept[row - first], added = share.added[row - first];
      float* sums = to.sums + row * lanes;
      const float* more = later.sums + row * lanes;
      if (to.peaks[row] == kUnseen) {  // the first tile that this row sees
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

inline int64_t attention_scratch(const Pages& pages, int64_t rows) {
  const int64_t page = pages.dim * pages.lanes + pages.page_tokens * pages.value_lanes;
  const int64_t tile = tile_pages(pages) * (pages.latent ? latent_page_floats(pages) : page);
  return rows * pages.query_dim() + kPanel * kTileLanes + partial_floats(kPanel, pages) + tile;
}

// Tiles [first, last), each with kRows rows after the other: unpack(tile, index) makes a tile ready, and panel(tile, row,
// count, visible, to) gives a record of some rows with it. `fresh` is room for such a record.
template <int kRows, typename Unpack, typename UsePanel>
inline void over_tiles(const Pages& pages, const Queries& queries, const Mask& mask, int64_t first, int64_t last,
                       bool apart, float* records, float* fresh, Unpack unpack, UsePanel panel) {
  const int64_t rows = queries.rows();
  Tile next = find_tile(pages, queries, mask, first);
  for (int64_t index = first; index < last; ++index) {
    Tile tile = next;
    if (index + 1 < last) next = find_tile(pages, queries, mask, index + 1);
    for (int64_t page = 0; page < tile_pages(pages); ++page)
      tile.next[page] = next.keys[page] ? next.keys[page] : tile.keys[page];
    unpack(tile, index);
    const bool direct = apart || index == first;
    const int64_t record = apart ? (index - first) * partial_floats(rows, pages) : 0;
    const PartialAttention all = partial_at(records + record, rows, pages);
    for (int64_t row = 0; row < rows; row += kRows) {
      const int64_t count = rows - row < kRows ? rows - row : kRows;
      VisibleRange visible[kRows];
      for (int64_t m = 0; m < count; ++m)
        visible[m] = visible_of(pages, mask, queries.positions[(row + m) / queries.group], index * tile_tokens(pages));
      const PartialAttention own = all.from(row, pages), to = direct ? own : partial_at(fresh, count, pages);
      panel(tile, row, count, visible, to);
      if (!direct) merge_rows(pages, count, to, own);
    }
  }
}

inline void attention_tiles(const Pages& pages, const Queries& queries, const Mask& mask, int64_t first, int64_t last,
                            bool apart, float* records, float* scratch) {
  const int64_t rows = queries.rows();
  float *packed = scratch, *scores = packed + rows * pages.query_dim(), *fresh = scores + kPanel * kTileLanes;
  float* room = fresh + partial_floats(kPanel, pages);
  const bool often = rows > 2 * kPanel || pages.latent;
  pack_queries(pages, queries, mask, packed);
  over_tiles<kPanel>(
      pages, queries, mask, first, last, apart, records, fresh,
      [&](Tile& tile, int64_t) {
        if (pages.latent) unpack_latent_tile(pages, tile, room);
        else if (often) unpack_tile(pages, tile, room);
      },
      [&](const Tile& tile, int64_t row, int64_t count, const VisibleRange* visible, const PartialAttention& to) {
        const Panel with = panel_of(pages, often, count);
        with(pages, tile, mask, packed + row * pages.query_dim(), visible, scores, to);
      });
}

inline void merge_partials(const Pages& pages, int64_t rows, const float* later, float* record) {
  merge_rows(pages, rows, partial_at(const_cast<float*>(later), rows, pages), partial_at(record, rows, pages));
}

// A sink joins the sums of a row when all tiles have, so that it does not matter how they were cut: it rescales the
// sum of values and gives what that is divided by.
struct SinkShare {
  float kept, norm;
};
inline SinkShare sink_share(float sink, float peak, float norm) {
  const float own = sink * kLog2E, highest = own > peak ? own : peak;
  float shares[16] = {peak - highest, own - highest};
  store(shares, exp2_16(load(shares)));
  return {shares[0], norm * shares[0] + shares[1]};
}

inline void write_means(const Pages& pages, const Queries& queries, const float* record, float* out, int64_t stride) {
  const PartialAttention from = partial_at(const_cast<float*>(record), queries.rows(), pages);
  for (int64_t row = 0; row < queries.rows(); ++row) {
    float* to = out + row / queries.group * stride + row % queries.group * pages.value_dim;
    const float* sums = from.sums + row * pages.value_lanes;
    if (!queries.sinks) {
      for (int64_t d = 0; d < pages.value_dim; ++d) to[d] = sums[d] / from.norms[row];
      continue;
    }
    const SinkShare with = sink_share(queries.sinks[row % queries.group], from.peaks[row], from.norms[row]);
    for (int64_t d = 0; d < pages.value_dim; ++d) to[d] = sums[d] * with.kept / with.norm;
  }
}

}  // namespace kvilt::KVILT_ISA
