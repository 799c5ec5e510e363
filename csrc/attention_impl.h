// Attention over pages, with an online softmax whose tiles are the pages.
#pragma once
#include <limits>

#include "kernels.h"
#include "vectors.h"

namespace kvilt::KVILT_ISA {

// Sixteen numbers of a page as floats.
inline F16x load_as(int dtype, const void* base, int64_t at) {
  if (dtype == 0) return load(static_cast<const float*>(base) + at);
  const uint16_t* p = static_cast<const uint16_t*>(base) + at;
  return dtype == 1 ? load_half(p) : load_bfloat(p);
}
inline float load_one(int dtype, const void* base, int64_t at) {
  if (dtype == 0) return static_cast<const float*>(base)[at];
  const uint16_t bits = static_cast<const uint16_t*>(base)[at];
  return dtype == 1 ? half_to_float(bits) : bfloat_to_float(bits);
}

// What a query has gathered so far.
struct Gathered {
  float peak = -std::numeric_limits<float>::infinity();
  float norm = 0;
};

// Products of G heads with the keys of one page, [G][lanes]; the heads share what is loaded.
template <int G>
inline void page_products(const float* query, const Pages& pages, int64_t keys, float scale, float* scores) {
  for (int64_t lane = 0; lane < pages.lanes; lane += 16) {
    F16x sum[G] = {};
    for (int64_t d = 0; d < pages.dim; ++d) {
      const F16x key = load_as(pages.dtype, pages.keys, keys + d * pages.lanes + lane);
      for (int g = 0; g < G; ++g) sum[g] = fma(key, query[g * pages.dim + d], sum[g]);
    }
    for (int g = 0; g < G; ++g) store(scores + g * pages.lanes + lane, sum[g] * scale);
  }
}

// From scores of one head to weights, in place; returns the factor by which what was gathered before shrinks.
inline float page_weights(float* scores, const Pages& pages, int64_t from, int64_t to, float soft_cap, Gathered& so_far) {
  const float nothing = -std::numeric_limits<float>::infinity();
  const int64_t lanes = pages.lanes;
  const bool whole = from == 0 && to == lanes && soft_cap == 0;
  if (!whole)
    for (int64_t t = 0; t < lanes; ++t) {  // what was never written is never looked at
      const float capped = soft_cap > 0 ? soft_cap * std::tanh(scores[t] / soft_cap) : scores[t];
      scores[t] = t >= from && t < to ? capped : nothing;
    }
  F16x peaks = load(scores);
  for (int64_t lane = 16; lane < lanes; lane += 16) peaks = larger(peaks, load(scores + lane));
  const float best = largest(peaks), next = best > so_far.peak ? best : so_far.peak;
  const float decay = std::isinf(so_far.peak) ? 0.0f : first(exp16(splat(so_far.peak - next)));
  F16x sums = {};
  for (int64_t lane = 0; lane < lanes; lane += 16) {
    const F16x score = load(scores + lane);
    F16x weight = exp16(score - next);
    if (!whole) weight = zero_where_equal(score, splat(nothing), weight);
    store(scores + lane, weight);
    sums = sums + weight;
  }
  so_far.norm = so_far.norm * decay + total(sums);
  so_far.peak = next;
  return decay;
}

// Adds the values of tokens [from, to) of one page to what G heads have gathered, V vectors of sixteen dims at a time.
template <int G, int V>
inline void page_values(const Pages& pages, int64_t values, int64_t from, int64_t to, const float* weights,
                        const float* decay, int64_t first, float* acc) {
  F16x sum[G][V];
  for (int g = 0; g < G; ++g)
    for (int v = 0; v < V; ++v) sum[g][v] = load(acc + g * pages.value_dim + first + 16 * v) * decay[g];
  for (int64_t t = from; t < to; ++t)
    for (int v = 0; v < V; ++v) {
      const F16x value = load_as(pages.dtype, pages.values, values + t * pages.value_dim + first + 16 * v);
      for (int g = 0; g < G; ++g) sum[g][v] = fma(value, weights[g * pages.lanes + t], sum[g][v]);
    }
  for (int g = 0; g < G; ++g)
    for (int v = 0; v < V; ++v) store(acc + g * pages.value_dim + first + 16 * v, sum[g][v]);
}

template <int G>
inline void attend_heads(const float* query, const Pages& pages, int64_t kv_head, const int64_t* table,
                         int64_t position, const Mask& mask, float* scratch, float* out) {
  const int64_t size = pages.page_tokens, dims = pages.value_dim;
  const int64_t low = mask.window && position >= mask.window ? position - mask.window + 1 : 0;
  float* scores = scratch;  // [G][lanes]
  Gathered so_far[G];
  float decay[G];
  for (int64_t d = 0; d < G * dims; ++d) out[d] = 0;
  // Tiles are pages: they begin at position 0 and are merged in ascending order, however the prompt was cut.
  for (int64_t page = low / size; page <= position / size; ++page) {
    const int64_t base = table[page] * pages.kv_heads + kv_head;
    const int64_t from = page * size < low ? low - page * size : 0;
    const int64_t to = position + 1 - page * size < size ? position + 1 - page * size : size;
    page_products<G>(query, pages, base * pages.dim * pages.lanes, mask.scale, scores);
    for (int g = 0; g < G; ++g)
      decay[g] = page_weights(scores + g * pages.lanes, pages, from, to, mask.soft_cap, so_far[g]);
    const int64_t values = base * size * dims;
    int64_t d = 0;
    for (; d + 64 <= dims; d += 64) page_values<G, 4>(pages, values, from, to, scores, decay, d, out);
    for (; d + 16 <= dims; d += 16) page_values<G, 1>(pages, values, from, to, scores, decay, d, out);
    for (; d < dims; ++d)
      for (int g = 0; g < G; ++g) {
        float sum = out[g * dims + d] * decay[g];
        for (int64_t t = from; t < to; ++t)
          sum = load_one(pages.dtype, pages.values, values + t * dims + d) * scores[g * pages.lanes + t] + sum;
        out[g * dims + d] = sum;
      }
  }
  for (int g = 0; g < G; ++g)
    for (int64_t d = 0; d < dims; ++d) out[g * dims + d] /= so_far[g].norm;
}

inline void attend(const float* query, int64_t group, const Pages& pages, int64_t kv_head, const int64_t* table,
                   int64_t position, const Mask& mask, float* scratch, float* out) {
  const int64_t in = pages.dim, to = pages.value_dim;
  int64_t g = 0;
  for (; g + 4 <= group; g += 4)
    attend_heads<4>(query + g * in, pages, kv_head, table, position, mask, scratch, out + g * to);
  switch (group - g) {
    case 3: return attend_heads<3>(query + g * in, pages, kv_head, table, position, mask, scratch, out + g * to);
    case 2: return attend_heads<2>(query + g * in, pages, kv_head, table, position, mask, scratch, out + g * to);
    case 1: return attend_heads<1>(query + g * in, pages, kv_head, table, position, mask, scratch, out + g * to);
    default: return;
  }
}

}  // namespace kvilt::KVILT_ISA
