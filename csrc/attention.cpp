// Rotary embedding, page writes and attention: checks, scratch memory and threads.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "engine.h"

namespace kvilt {
namespace {

uint16_t to_half(float value) {
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
}

uint16_t to_bfloat(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t((bits >> 16) | 0x40u);
  return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

void put(const Pages& pages, const void* base, int64_t at, float value) {
  switch (pages.dtype) {
    case 0: static_cast<float*>(const_cast<void*>(base))[at] = value; return;
    case 1: static_cast<uint16_t*>(const_cast<void*>(base))[at] = to_half(value); return;
    default: static_cast<uint16_t*>(const_cast<void*>(base))[at] = to_bfloat(value); return;
  }
}

}  // namespace

void Engine::rotate(const float* x, const float* cos, const float* sin, int64_t tokens, int64_t heads, int64_t dim,
                    int64_t pairs, bool interleaved, float* out) {
  for (int64_t t = 0; t < tokens; ++t) {
    const float *c = cos + t * pairs, *s = sin + t * pairs;
    for (int64_t h = 0; h < heads; ++h) {
      const float* from = x + (t * heads + h) * dim;
      float* to = out + (t * heads + h) * dim;
      for (int64_t p = 0; p < pairs; ++p) {
        const int64_t i = interleaved ? 2 * p : p, j = interleaved ? 2 * p + 1 : p + pairs;
        const float a = from[i], b = from[j];
        to[i] = a * c[p] - b * s[p];
        to[j] = b * c[p] + a * s[p];
      }
      for (int64_t d = 2 * pairs; d < dim; ++d) to[d] = from[d];
    }
  }
}

void Engine::write(const Pages& pages, const int64_t* slots, int64_t tokens, const float* keys, const float* values) {
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t page = slots[t] / pages.page_tokens, at = slots[t] % pages.page_tokens;
    for (int64_t h = 0; h < pages.kv_heads; ++h) {
      const int64_t base = page * pages.kv_heads + h, from = t * pages.kv_heads + h;
      for (int64_t d = 0; d < pages.dim; ++d)
        put(pages, pages.keys, (base * pages.dim + d) * pages.lanes + at, keys[from * pages.dim + d]);
      for (int64_t d = 0; d < pages.value_dim; ++d)
        put(pages, pages.values, (base * pages.page_tokens + at) * pages.value_dim + d, values[from * pages.value_dim + d]);
    }
  }
}

void Engine::attend(const float* query, int64_t heads, const Pages& pages, const int64_t* tables, int64_t width,
                    const int64_t* starts, int64_t rows, const int64_t* positions, const Mask& mask, float* out) {
  std::lock_guard<std::mutex> guard(lock_);
  const int64_t group = heads / pages.kv_heads, tokens = starts[rows];
  std::vector<int64_t> row_of(tokens);
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t t = starts[row]; t < starts[row + 1]; ++t) {
      if (positions[t] < 0 || positions[t] / pages.page_tokens >= width)
        throw std::out_of_range("a position is outside its page table");
      row_of[t] = row;
    }
  for (auto& scratch : scratch_) scratch.resize(4 * pages.lanes);
  workers_.run(tokens * pages.kv_heads, [&](int64_t item, int worker) {
    // Long prompts: the last tokens cost most, so they go first.
    const int64_t t = tokens - 1 - item / pages.kv_heads, head = item % pages.kv_heads;
    kernels_->attend(query + (t * heads + head * group) * pages.dim, group, pages, head, tables + row_of[t] * width,
                     positions[t], mask, scratch_[worker].data(), out + (t * heads + head * group) * pages.value_dim);
  });
}

}  // namespace kvilt
