#include "attention.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>

namespace kvilt {
namespace {

constexpr int64_t kBlockRows = 192;       // queries times heads that share what is loaded of a tile
constexpr int64_t kItemsPerThread = 4;    // so that threads end together
constexpr int64_t kWriteNanoseconds = 2;  // a number of a key or value: mostly cache misses
constexpr int64_t kTokensAtOnce = 32;     // tokens of a piece of elementwise work

template <typename T>
void grow(std::vector<T>& room, int64_t size) {
  if (int64_t(room.size()) < size) room.resize(size_t(size));
}

int64_t pieces(int64_t count, int64_t size) { return (count + size - 1) / size; }

}  // namespace

Attention::Attention(ThreadPool& pool, const PageKernels& kernels)
    : pool_(pool), kernels_(kernels), scratch_(size_t(pool.threads())) {}

void Attention::rotate(const RotateArgs& a) {
  const int64_t size = a.heads * a.dim;
  pool_.run(pieces(a.tokens, kTokensAtOnce), [&](int64_t piece, int) {
    for (int64_t t = piece * kTokensAtOnce; t < std::min(a.tokens, (piece + 1) * kTokensAtOnce); ++t)
      kernels_.rotate(a.x + t * size, a.rotation, t, a.heads, a.dim, a.out + t * size);
  });
}

// Neighbouring tokens of one page are a piece: their keys share cache lines, which two threads would take from each other.
template <typename Write>
void Attention::write_pages(const Pages& pages, const int64_t* slots, int64_t tokens, Write write) {
  page_starts_.clear();
  for (int64_t t = 0; t < tokens; ++t)
    if (t == 0 || slots[t] / pages.page_tokens != slots[t - 1] / pages.page_tokens) page_starts_.push_back(t);
  const int64_t count = int64_t(page_starts_.size());
  page_starts_.push_back(tokens);
  const int64_t numbers = tokens * pages.kv_heads * (pages.dim + pages.value_dim);
  const auto piece = [&](int64_t at, int worker) {
    for (int64_t t = page_starts_[size_t(at)]; t < page_starts_[size_t(at) + 1]; ++t)
      write(t, scratch_[size_t(worker)].data());
  };
  pool_.run(count, piece, pool_.worth(numbers * kWriteNanoseconds));
}

void Attention::write(const WriteArgs& a) {
  check_slots(a.pages, a.slots, a.tokens);
  const int64_t keys = a.pages.kv_heads * a.pages.dim, values = a.pages.kv_heads * a.pages.value_dim;
  for (auto& scratch : scratch_) grow(scratch, keys + a.pages.dim);
  write_pages(a.pages, a.slots, a.tokens, [&](int64_t t, float* scratch) {
    kernels_.write_token(a.pages, a.slots[t], a.keys + t * keys, a.values + t * values,
                         a.rotation.cos ? &a.rotation : nullptr, t, scratch);
  });
}

void Attention::interpolate(const InterpolateArgs& a) {
  const auto inside = [&](const int64_t* which, int64_t count) {
    for (int64_t i = 0; i < count; ++i)
      if (which[i] < 0 || which[i] >= a.document) throw std::out_of_range("a token is not in its document");
  };
  check_slots(a.pages, a.slots, a.tokens);
  inside(a.interpolated, a.tokens);
  inside(a.anchors, a.count);
  const int64_t keys = a.pages.kv_heads * a.pages.dim, values = a.pages.kv_heads * a.pages.value_dim;
  const int64_t size = number_bytes(a.dtype);
  const auto* old_keys = static_cast<const char*>(a.keys);
  const auto* old_values = static_cast<const char*>(a.values);
  for (auto& scratch : scratch_) grow(scratch, 2 * keys + a.pages.dim + values);
  grow(changes_, a.count * (keys + values));
  float *key_changes = changes_.data(), *value_changes = key_changes + a.count * keys;
  const auto change = [&](const char* old, const float* fresh, int64_t numbers, float* to) {
    kernels_.interpolate(a.dtype, old, numbers, nullptr, nullptr, 0, to);
    for (int64_t i = 0; i < numbers; ++i) to[i] = fresh[i] - to[i];
  };
  for (int64_t i = 0; i < a.count; ++i) {
    change(old_keys + a.anchors[i] * keys * size, a.new_keys + i * keys, keys, key_changes + i * keys);
    change(old_values + a.anchors[i] * values * size, a.new_values + i * values, values, value_changes + i * values);
  }
  write_pages(a.pages, a.slots, a.tokens, [&](int64_t t, float* scratch) {
    float *key = scratch + keys + a.pages.dim, *value = key + keys;
    const float* weights = a.weights + t * a.count;
    kernels_.interpolate(a.dtype, old_keys + a.interpolated[t] * keys * size, keys, key_changes, weights, a.count, key);
    kernels_.interpolate(a.dtype, old_values + a.interpolated[t] * values * size, values, value_changes, weights,
                         a.count, value);
    kernels_.write_token(a.pages, a.slots[t], key, value, a.rotation.cos ? &a.rotation : nullptr, t, scratch);
  });
}

// ---- attention ----

void Attention::check(const AttentionArgs& a) const {
  const int64_t size = a.pages.page_tokens;
  for (int64_t row = 0; row < a.rows(); ++row) {
    int64_t checked = -1;  // pages up to this one are there; a window starts anew, it may not see them
    for (int64_t t = a.starts[row]; t < a.starts[row + 1]; ++t) {
      const int64_t position = a.positions[t];
      if (position < 0 || position / size >= a.width) throw std::out_of_range("a position is outside its page table");
      const int64_t low = a.mask.window ? a.mask.first_seen(position) / size : checked + 1;
      for (int64_t page = low; page <= position / size; ++page)
        if (const int64_t id = a.tables[row * a.width + page]; id < 0 || id >= a.pages.pages)
          throw std::out_of_range("a query overlaps a page that its row does not hold");
      checked = std::max(checked, position / size);
    }
  }
}

// Blocks of queries as large as pays, but not so large that threads would have nothing to do.
void Attention::plan(const AttentionArgs& a) {
  const int64_t group = a.group(), tokens = a.starts.back(), tile = tile_tokens(a.pages);
  const int64_t fair = pieces(tokens * a.pages.kv_heads, pool_.threads() * kItemsPerThread);
  const int64_t block = std::max<int64_t>(1, std::min(kBlockRows / group, fair));
  units_.clear();
  int64_t cost = 0;
  for (int64_t row = 0; row < a.rows(); ++row)
    for (int64_t first = a.starts[row]; first < a.starts[row + 1]; first += block) {
      const int64_t count = std::min(block, a.starts[row + 1] - first);
      const auto [low, high] = std::minmax_element(a.positions + first, a.positions + first + count);
      const int64_t begin = a.mask.first_seen(*low) / tile, end = *high / tile + 1;
      for (int64_t head = 0; head < a.pages.kv_heads; ++head)
        units_.push_back({row, first, count, head, begin, end - begin, 0, 1, 1});
      cost += a.pages.kv_heads * count * (end - begin);
    }
  cut(a, std::max<int64_t>(1, cost / (pool_.threads() * kItemsPerThread)));
}

// Units that cost much more than a fair piece are cut into several items; the dearest items go first.
void Attention::cut(const AttentionArgs& a, int64_t piece) {
  const int64_t group = a.group();
  items_.clear();
  int64_t records = 0;
  for (size_t i = 0; i < units_.size(); ++i) {
    Unit& unit = units_[i];
    const int64_t cost = unit.tokens * unit.tiles;
    if (pool_.threads() > 1 && cost > piece) unit.items = std::min(unit.tiles, pieces(cost, piece));
    const int64_t tiles = pieces(unit.tiles, unit.items);
    unit.items = unit.left = pieces(unit.tiles, tiles);
    for (int64_t tile = 0; tile < unit.tiles; tile += tiles)
      items_.push_back({int64_t(i), unit.tile + tile, std::min(tiles, unit.tiles - tile)});
    unit.records = records;
    if (unit.items > 1) records += unit.tiles * partial_floats(unit.tokens * group, a.pages);
  }
  grow(records_, records);
  const auto cost_of = [&](const Item& item) { return item.tiles * units_[size_t(item.unit)].tokens; };
  std::sort(items_.begin(), items_.end(), [&](const Item& x, const Item& y) {
    const int64_t here = cost_of(x), there = cost_of(y);
    return here != there ? here > there : x.unit != y.unit ? x.unit < y.unit : x.tile < y.tile;
  });
  // Of equal ones a thread has those of neighbouring rows, whose newest keys it has just written.
  if (items_.empty() || cost_of(items_.front()) != cost_of(items_.back())) deal();
}

// Each thread begins with a share of neighbouring items: give all of them dear and cheap ones.
void Attention::deal() {
  const size_t threads = size_t(pool_.threads());
  dealt_.clear();
  for (size_t thread = 0; thread < threads; ++thread)
    for (size_t i = thread; i < items_.size(); i += threads) dealt_.push_back(items_[i]);
  items_.swap(dealt_);
}

void Attention::attention_item(const AttentionArgs& a, const Item& item, int worker) {
  Unit& unit = units_[size_t(item.unit)];
  const int64_t group = a.group(), head = unit.head * group;
  const Queries queries{a.query + (unit.first * a.heads + head) * a.pages.query_dim(),
                        a.heads * a.pages.query_dim(),
                        unit.tokens,
                        group,
                        a.positions + unit.first,
                        a.tables + unit.row * a.width,
                        unit.head,
                        a.sinks ? a.sinks + head : nullptr};
  const int64_t record = partial_floats(queries.rows(), a.pages);
  const bool apart = unit.items > 1;
  float* scratch = scratch_[size_t(worker)].data();
  float* records = apart ? records_.data() + unit.records + (item.tile - unit.tile) * record : scratch;
  kernels_.attention_tiles(a.pages, queries, a.mask, item.tile, item.tile + item.tiles, apart, records,
                           scratch + record);
  if (apart) {
    // The thread that ends last merges the tiles, from the first to the last.
    if (std::atomic_ref<int64_t>(unit.left).fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    records = records_.data() + unit.records;
    for (int64_t tile = 1; tile < unit.tiles; ++tile)
      kernels_.merge(a.pages, queries.rows(), records + tile * record, records);
  }
  kernels_.write_means(a.pages, queries, records, a.out + (unit.first * a.heads + head) * a.pages.value_dim,
                       a.heads * a.pages.value_dim);
}

void Attention::attention(const AttentionArgs& a) {
  check(a);
  plan(a);
  int64_t rows = 0;
  for (const Unit& unit : units_) rows = std::max(rows, unit.tokens * a.group());
  for (auto& scratch : scratch_) grow(scratch, partial_floats(rows, a.pages) + kernels_.scratch_floats(a.pages, rows));
  pool_.run(int64_t(items_.size()), [&](int64_t item, int worker) { attention_item(a, items_[size_t(item)], worker); });
}

}  // namespace kvilt
