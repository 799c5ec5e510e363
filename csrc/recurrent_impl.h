// Convolutions and memories of one row. Law: each number is one chain of products over tokens in order, whatever else is
// computed beside it.
#pragma once
#include <algorithm>
#include <cmath>

#include "elementwise_impl.h"
#include "lora_impl.h"
#include "recurrent.h"
#include "vectors.h"

namespace kvilt::KVILT_ISA {

constexpr int64_t kMostWidth = 64;  // of a convolution

inline void conv(const ConvArgs& args, int64_t row, int64_t channel) {
  const int64_t count = std::min<int64_t>(16, args.channels - channel), inputs = args.width - 1;
  float weights[kMostWidth][16] = {}, before[kMostWidth][16] = {}, biases[16] = {}, last[16];
  const int64_t read = args.rows.reads[row];
  for (int64_t lane = 0; lane < count; ++lane) {
    for (int64_t k = 0; k < args.width; ++k) weights[k][lane] = args.weight[(channel + lane) * args.width + k];
    if (read >= 0)
      for (int64_t k = 0; k < inputs; ++k)
        before[k][lane] = args.tails[(read * args.channels + channel + lane) * inputs + k];
    if (args.bias) biases[lane] = args.bias[channel + lane];
  }
  for (int64_t token = args.rows.starts[row]; token < args.rows.starts[row + 1]; ++token) {
    const float* x = args.x + token * args.channels + channel;
    store(before[inputs], count == 16 ? load(x) : some_lanes(x, count));
    f32x16 sum = load(before[0]) * load(weights[0]);
    for (int64_t k = 1; k < args.width; ++k) sum = fma(load(before[k]), load(weights[k]), sum);
    sum = sum + load(biases);
    store(last, args.silu ? activated(sum, Activation::kSilu) : sum);
    std::memcpy(args.out + token * args.channels + channel, last, count * sizeof(float));
    for (int64_t k = 0; k < inputs; ++k) std::memcpy(before[k], before[k + 1], sizeof before[k]);
    const int64_t slot = args.rows.writes[token];
    if (slot < 0) continue;
    for (int64_t lane = 0; lane < count; ++lane)
      for (int64_t k = 0; k < inputs; ++k)
        args.tails[(slot * args.channels + channel + lane) * inputs + k] = before[k][lane];
  }
}

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// To length 1, times `scale`.
inline void normalized(const float* x, int64_t n, float scale, float* out) {
  f32x16 sums = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) sums = fma(load(x + i), load(x + i), sums);
  float sum = reduce_add(sums);
  for (; i < n; ++i) sum += x[i] * x[i];
  const float inverse = 1.0f / std::sqrt(sum + 1e-6f);
  for (i = 0; i < n; ++i) out[i] = x[i] * inverse * scale;
}

// read[v] = sum over k of kept * from[k][v] * key[k].
inline void recall(const float* from, float kept, const float* key, int64_t keys, int64_t values, float* read) {
  int64_t v = 0;
  for (; v + 16 <= values; v += 16) {
    f32x16 sum = {};
    for (int64_t k = 0; k < keys; ++k) sum = fma(load(from + k * values + v) * kept, key[k], sum);
    store(read + v, sum);
  }
  for (; v < values; ++v) {
    float sum = 0;
    for (int64_t k = 0; k < keys; ++k) sum = std::fma(from[k * values + v] * kept, key[k], sum);
    read[v] = sum;
  }
}

// to = kept * from + key * change, and out[v] = sum over k of to[k][v] * query[k]. `from` may be `to`; null: zeros.
inline void update(const float* from, float* to, float kept, const float* key, const float* change, const float* query,
                   int64_t keys, int64_t values, float* out) {
  int64_t v = 0;
  for (; v + 16 <= values; v += 16) {
    f32x16 sum = {};
    const f32x16 more = load(change + v);
    for (int64_t k = 0; k < keys; ++k) {
      const f32x16 old = from ? load(from + k * values + v) * kept : f32x16{};
      const f32x16 now = fma(more, key[k], old);
      store(to + k * values + v, now);
      sum = fma(now, query[k], sum);
    }
    store(out + v, sum);
  }
  for (; v < values; ++v) {
    float sum = 0;
    for (int64_t k = 0; k < keys; ++k) {
      const float now = std::fma(change[v], key[k], from ? from[k * values + v] * kept : 0.0f);
      to[k * values + v] = now;
      sum = std::fma(now, query[k], sum);
    }
    out[v] = sum;
  }
}

inline void fold_memory(const FoldArgs& args, int64_t row, int64_t head, float* scratch) {
  const int64_t keys = args.key_dim, values = args.value_dim, size = keys * values;
  const int64_t key_head = args.key_head(head), all_keys = args.key_heads * keys;
  const bool delta = args.beta != nullptr;
  float *own = scratch, *query = own + size, *key = query + keys, *change = key + keys;
  const auto memory_of = [&](int64_t slot) { return args.memories + (slot * args.value_heads + head) * size; };
  const float* from = args.rows.reads[row] < 0 ? nullptr : memory_of(args.rows.reads[row]);
  for (int64_t token = args.rows.starts[row]; token < args.rows.starts[row + 1]; ++token) {
    const float* mixed = args.mixed + token * args.channels();
    const float* value = mixed + (delta ? 2 * all_keys : 0) + head * values;
    const float* first = mixed + (delta ? 0 : args.value_heads * values) + key_head * keys;  // queries, or keys
    const int64_t at = token * args.value_heads + head;
    float rate = softplus(args.step[at] + args.bias[head]);
    rate = std::min(std::max(rate, args.least), args.most);
    const float kept = std::exp(-std::exp(args.log_rate[head]) * rate);
    if (delta) {
      normalized(first, keys, 1.0f / std::sqrt(float(keys)), query);
      normalized(first + all_keys, keys, 1.0f, key);
      rate = 1.0f / (1.0f + std::exp(-args.beta[at]));
    } else {
      std::memcpy(key, first, keys * sizeof(float));
      std::memcpy(query, first + all_keys, keys * sizeof(float));
    }
    if (delta && from) recall(from, kept, key, keys, values, change);
    else std::fill(change, change + values, 0.0f);
    for (int64_t v = 0; v < values; ++v) change[v] = (value[v] - change[v]) * rate;
    float* to = args.rows.writes[token] < 0 ? own : memory_of(args.rows.writes[token]);
    float* out = args.out + at * values;
    update(from, to, kept, key, change, query, keys, values, out);
    if (args.skip)
      for (int64_t v = 0; v < values; ++v) out[v] += value[v] * args.skip[head];
    from = to;
  }
}

inline void sigmoid_mul(const float* x, const float* gate, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += 16) {
    const int64_t count = std::min<int64_t>(16, n - i);
    const f32x16 a = count == 16 ? load(x + i) : some_lanes(x + i, count);
    const f32x16 g = count == 16 ? load(gate + i) : some_lanes(gate + i, count);
    float lanes[16];
    store(lanes, a / (exp16(f32x16{} - g) + 1.0f));
    std::memcpy(out + i, lanes, count * sizeof(float));
  }
}

}  // namespace kvilt::KVILT_ISA
