// KV in canonical order, in and out of pages: copies of bytes, whatever they stand for.
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "attention.h"

namespace kvilt {
namespace {

constexpr int64_t kTokensAtOnce = 32;

// Values of 4 bits: neighbours share a byte in canonical order, and those sixteen apart in pages.
inline int64_t nibble_byte(int64_t d) { return d / 32 * 16 + d % 16; }
inline int64_t nibble_shift(int64_t d) { return d % 32 / 16 * 4; }

template <bool kIn>
void move_nibbles(uint8_t* row, int64_t row_bytes, uint8_t* canonical, int64_t dim) {
  if (kIn) std::memset(row, 0, size_t(row_bytes));
  else std::memset(canonical, 0, size_t(dim / 2));
  for (int64_t d = 0; d < dim; ++d) {
    uint8_t &here = row[nibble_byte(d)], &there = canonical[d / 2];
    const int64_t shift = nibble_shift(d), own = d % 2 * 4;
    if (kIn) here = uint8_t(here | ((there >> own) & 15) << shift);
    else there = uint8_t(there | ((here >> shift) & 15) << own);
  }
}

// One token of one layer. Keys are lanes of a page, values rows of it.
template <typename Number, bool kIn>
void move_slot(const SlotsArgs& a, int64_t t) {
  const Pages& pages = a.pages;
  const int64_t page = a.slots[t] / pages.page_tokens, at = a.slots[t] % pages.page_tokens;
  for (int64_t h = 0; h < pages.kv_heads; ++h) {
    const int64_t token = t * pages.kv_heads + h;
    auto* lane = reinterpret_cast<Number*>(pages.keys(page, h)) + at;
    auto* key = static_cast<Number*>(a.keys) + token * pages.dim;
    for (int64_t d = 0; d < pages.dim; ++d)
      if constexpr (kIn) lane[d * pages.lanes] = key[d];
      else key[d] = lane[d * pages.lanes];
    char* row = pages.values(page, h) + at * pages.row_bytes;
    char* value = static_cast<char*>(a.values) + token * pages.canonical_bytes();
    if (has_nibbles(pages.dtype))
      move_nibbles<kIn>(reinterpret_cast<uint8_t*>(row), pages.row_bytes, reinterpret_cast<uint8_t*>(value),
                        pages.value_dim);
    else if (pages.value_dim) std::memcpy(kIn ? row : value, kIn ? value : row, size_t(pages.canonical_bytes()));
    if (!is_scaled(pages.dtype)) continue;
    float *key_scale = pages.key_scales(page, h) + at, *value_scale = pages.value_scales(page, h) + at;
    if constexpr (kIn) *key_scale = a.key_scales[token], *value_scale = a.value_scales[token];
    else a.key_scales[token] = *key_scale, a.value_scales[token] = *value_scale;
  }
}

template <bool kIn>
void move_slots(const SlotsArgs& a, int64_t first, int64_t last) {
  for (int64_t t = first; t < last; ++t) switch (a.pages.dtype) {
      case KVDtype::kFloat32: move_slot<uint32_t, kIn>(a, t); break;
      case KVDtype::kInt8:
      case KVDtype::kK8V4: move_slot<uint8_t, kIn>(a, t); break;
      default: move_slot<uint16_t, kIn>(a, t);
    }
}

template <bool kIn>
void move_layers(ThreadPool& pool, const std::vector<SlotsArgs>& layers) {
  if (layers.empty()) return;
  const int64_t tokens = layers.front().tokens, chunks = (tokens + kTokensAtOnce - 1) / kTokensAtOnce;
  check_slots(layers.front().pages, layers.front().slots, tokens);
  pool.run(chunks * int64_t(layers.size()), [&](int64_t item, int) {
    const int64_t first = item % chunks * kTokensAtOnce;
    move_slots<kIn>(layers[size_t(item / chunks)], first, std::min(tokens, first + kTokensAtOnce));
  });
}

}  // namespace

void check_slots(const Pages& pages, const int64_t* slots, int64_t tokens) {
  for (int64_t t = 0; t < tokens; ++t)
    if (slots[t] < 0 || slots[t] >= pages.pages * pages.page_tokens) throw std::out_of_range("a slot is in no page");
}

void use_huge_pages(void* data, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  const uintptr_t first = (reinterpret_cast<uintptr_t>(data) + 4095) & ~uintptr_t{4095};
  const uintptr_t last = (reinterpret_cast<uintptr_t>(data) + uintptr_t(bytes)) & ~uintptr_t{4095};
  if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)data, (void)bytes;
#endif
}

void Attention::read_slots(const std::vector<SlotsArgs>& layers) { move_layers<false>(pool_, layers); }
void Attention::write_slots(const std::vector<SlotsArgs>& layers) { move_layers<true>(pool_, layers); }

}  // namespace kvilt
