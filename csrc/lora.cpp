#include "lora.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

namespace kvilt {
namespace {

constexpr int64_t kRanks = 8, kOutputs = 256;  // of one item
constexpr int64_t kWorthSharing = 1 << 15;     // products: fewer take less time than waking a thread

}  // namespace

Lora::Lora(ThreadPool& pool, const LoraKernels& kernels) : pool_(pool), kernels_(kernels) {}

// Which rows go together: those of one adapter, wherever in the batch they stand.
void Lora::gather(const LoraArgs& args) {
  order_.clear();
  for (int64_t row = 0; row < args.rows; ++row) {
    if (args.slots[row] < -1 || args.slots[row] >= args.slot_count) throw std::out_of_range("there is no such adapter");
    if (args.slots[row] >= 0) order_.push_back(row);
  }
  std::stable_sort(order_.begin(), order_.end(), [&](int64_t a, int64_t b) { return args.slots[a] < args.slots[b]; });
  chunks_.clear(), shrinks_.clear(), expands_.clear();
  int64_t inner = 0;
  for (const LoraMap& map : args.maps) {
    const int64_t total = int64_t(order_.size());
    for (int64_t at = 0, next; at < total; at = next) {
      const int64_t slot = args.slots[order_[at]];
      for (next = at + 1; next < total && next < at + kTogether && args.slots[order_[next]] == slot;) ++next;
      const LowRank& product = map.table[slot];
      if (product.rank == 0) continue;
      chunks_.push_back({&product, &map, order_.data() + at, next - at, nullptr});
      inner += (next - at) * product.rank;
    }
  }
  if (int64_t(inner_.size()) < inner) inner_.resize(inner);
  inner = 0;
  for (LoraChunk& chunk : chunks_) {
    chunk.inner = inner_.data() + inner;
    inner += chunk.count * chunk.product->rank;
    for (int64_t first = 0; first < chunk.product->rank; first += kRanks)
      shrinks_.push_back({&chunk, first, std::min(first + kRanks, chunk.product->rank)});
    for (int64_t first = 0; first < chunk.map->outputs; first += kOutputs)
      expands_.push_back({&chunk, first, std::min(first + kOutputs, chunk.map->outputs)});
  }
}

void Lora::add_lora(const LoraArgs& args) {
  gather(args);
  if (chunks_.empty()) return;
  int64_t work = 0;
  for (const LoraChunk& chunk : chunks_) work += chunk.count * chunk.product->rank * (args.inputs + chunk.map->outputs);
  const auto shrink = [&](int64_t i, int) {
    kernels_.shrink(*shrinks_[i].chunk, args, shrinks_[i].first, shrinks_[i].last);
  };
  const auto expand = [&](int64_t i, int) {
    kernels_.expand(*expands_[i].chunk, args, expands_[i].first, expands_[i].last);
  };
  if (work < kWorthSharing) {
    for (int64_t i = 0; i < int64_t(shrinks_.size()); ++i) shrink(i, 0);
    for (int64_t i = 0; i < int64_t(expands_.size()); ++i) expand(i, 0);
    return;
  }
  pool_.run(int64_t(shrinks_.size()), shrink);
  pool_.run(int64_t(expands_.size()), expand);
}

void Lora::act_mul(const float* gate, const float* up, int64_t n, Activation activation, float* out) {
  constexpr int64_t kPiece = 4096;
  pool_.run((n + kPiece - 1) / kPiece, [&](int64_t item, int) {
    const int64_t at = item * kPiece;
    kernels_.act_mul(gate + at, up ? up + at : nullptr, std::min(kPiece, n - at), activation, out + at);
  });
}

}  // namespace kvilt
